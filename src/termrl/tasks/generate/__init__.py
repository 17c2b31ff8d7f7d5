"""The bundled suite first-steps: small shell tasks, generated from a vocabulary and a seed.

``words`` is the vocabulary and its split, ``family`` what a family is, ``level1`` to ``level3`` hold them, ``families``
lists them, ``checks`` and ``archives`` render their files, ``suite`` writes them to disk.
"""

from termrl.tasks.generate.families import FAMILIES, LEVELS
from termrl.tasks.generate.family import Archive, Draw, Family, File, Folder, Gzip, Instance
from termrl.tasks.generate.suite import SUITE, choose_families, generate, instances
from termrl.tasks.generate.words import DEMONSTRATION_WORDS, VOCABULARY, Split, split_of, words_of

__all__ = [
    "DEMONSTRATION_WORDS",
    "FAMILIES",
    "LEVELS",
    "SUITE",
    "VOCABULARY",
    "Archive",
    "Draw",
    "Family",
    "File",
    "Folder",
    "Gzip",
    "Instance",
    "Split",
    "choose_families",
    "generate",
    "instances",
    "split_of",
    "words_of",
]
