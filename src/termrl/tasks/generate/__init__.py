"""The bundled suite first-steps: small shell tasks, generated from a vocabulary and a seed.

``words`` is the vocabulary and its split, ``family`` what a family is, ``families`` the list of them, ``suite``
writes them to disk.
"""

from termrl.tasks.generate.families import FAMILIES
from termrl.tasks.generate.family import Draw, Family, File, Folder, Instance
from termrl.tasks.generate.suite import SUITE, generate
from termrl.tasks.generate.words import DEMONSTRATION_WORDS, VOCABULARY, Split, split_of, words_of

__all__ = [
    "DEMONSTRATION_WORDS",
    "FAMILIES",
    "SUITE",
    "VOCABULARY",
    "Draw",
    "Family",
    "File",
    "Folder",
    "Instance",
    "Split",
    "generate",
    "split_of",
    "words_of",
]
