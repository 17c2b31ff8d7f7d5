"""What every display has: lines for good, and below them, on a terminal, a live status line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_BAR = 24


class LiveDisplay:
    """Follows work that takes long. Use as a context manager: the live line is taken away however it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._shown, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._take_away()

    def _take_away(self) -> None:
        """No live line from here on. Idempotent."""
        if self._live is not None:
            self._live.stop()

    def _status(self) -> Sequence[str]:
        """The parts of the live line."""
        raise NotImplementedError

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _shown(self) -> Text:
        return Text("  ".join(self._status()), style="cyan", no_wrap=True, overflow="ellipsis")


def progress_bar(done: int, total: int) -> str:
    """How much of ``total`` is done, as a bar."""
    filled = round(_BAR * done / total) if total else _BAR
    return "━" * filled + "╌" * (_BAR - filled)


def clock(seconds: float | None) -> str:
    """Seconds as minutes and seconds."""
    return "–" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
