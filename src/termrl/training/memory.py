"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Hand the C heap's free pages back, which glibc otherwise keeps: gigabytes after many large tensors of many sizes.

    Does nothing where the C library has no ``malloc_trim``.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
