"""``termrl sweep``: remove what killed processes left behind."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from termrl.errors import ConfigError

app = App(name="sweep", help="Remove what killed processes left behind.")


@app.default
def sweep(*, state: Path | None = None, sandbox: str = "bubblewrap", host: str | None = None) -> int:
    """Remove sandboxes, processes, folders and cgroups whose owner is dead; a live owner's are never touched.

    Parameters
    ----------
    state
        The state folder; the default one if not given.
    sandbox
        With docker: containers too.
    host
        Where the Docker daemon listens; $DOCKER_HOST, else the usual socket, if not given.
    """
    if sandbox == "docker":
        from termrl.sandboxes.docker.connection import Connection
        from termrl.sandboxes.docker.reaper import sweep as remove_containers

        connection = Connection(host, threads=1)
        try:
            swept = remove_containers(connection.client, state)
        finally:
            connection.close()
    elif sandbox == "bubblewrap":
        from termrl.sandboxes.sweep import sweep as remove

        swept = remove(state)
    else:
        raise ConfigError(f"--sandbox: there is no such backend: {sandbox}", hint="bubblewrap or docker")
    containers = f", {swept.containers} containers" if sandbox == "docker" else ""
    print(
        f"{swept.owners} dead owners: removed {swept.processes} processes, {swept.folders} folders, "
        f"{swept.cgroups} cgroups{containers}; {swept.live_owners} live owners left alone"
    )
    return 0
