"""Programs that run on a staged copy of the interpreter, outside the virtual environment.

``launcher`` starts bubblewrap and lives as long as the provider; ``resident`` is the first process of every
sandbox. They import the standard library's C modules and each other, nothing else, so that they start fast.
"""
