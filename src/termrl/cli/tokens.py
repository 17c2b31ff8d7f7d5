"""What a verb is given beside its own flags: places, and settings as ``--section.key VALUE``."""

from __future__ import annotations

from collections.abc import Sequence


def split_tokens(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Places (folders, names), and the settings among them that have no flag of their own, each with its value."""
    places: list[str] = []
    settings: list[str] = []
    value_next = False
    for token in tokens:
        if token.startswith("--"):
            settings.append(token)
            value_next = "=" not in token
        elif value_next:
            settings.append(token)
            value_next = False
        else:
            places.append(token)
    return places, settings


def parts(given: Sequence[str] | None) -> list[str]:
    """What is given once with commas between, or several times, as one list."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]
