"""``termrl sweep``: remove what killed processes left behind."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(name="sweep", help="Remove what killed processes left behind.")


@app.default
def sweep(*, state: Path | None = None) -> int:
    """Remove sandboxes, processes, folders and cgroups whose owner is dead; a live owner's are never touched.

    Parameters
    ----------
    state
        The state folder; the default one if not given.
    """
    from termrl.sandboxes.sweep import sweep as remove

    swept = remove(state)
    print(
        f"{swept.owners} dead owners: removed {swept.processes} processes, {swept.folders} folders, "
        f"{swept.cgroups} cgroups; {swept.live_owners} live owners left alone"
    )
    return 0
