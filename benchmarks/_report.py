"""How every benchmark prints its figures: a table, or with ``--json`` one object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured figure. ``ratio`` is against ``peer`` (the peer's value), both measured in the same run."""

    name: str
    value: float
    unit: str
    bar: str
    holds: bool
    peer: float | None = None
    ratio: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints for it."""
        keys = ("value", "unit", "peer", "ratio", "bar", "holds")
        return {key: getattr(self, key) for key in keys}


def report(title: str, figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print figures as a table, or as one JSON object by name."""
    if as_json:
        print(json.dumps({figure.name: figure.as_json() for figure in figures}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("figure", no_wrap=True)
    for column in ("value", "peer", "ratio", "bar", "holds"):
        table.add_column(column, justify="right")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.4g} {figure.unit}",
            "" if figure.peer is None else f"{figure.peer:.4g}",
            "" if figure.ratio is None else f"{figure.ratio:.2f} ×",
            figure.bar,
            "yes" if figure.holds else "NO",
        )
    Console().print(table)
