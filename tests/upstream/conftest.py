"""The servers that these tests drive: ``termrl serve``, always, and one that is given by its URL.

``TERMRL_UPSTREAM_URL`` names the other server. It must have the tasks of ``python -m tests.upstream.tasks FOLDER``.
``TERMRL_UPSTREAM_SETTINGS`` holds settings of :class:`~termrl.environment.remote_config.RemoteSettings` as JSON, such
as ``{"legacy_workdir": ""}``; docs/compatibility.md says which server wants which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from termrl.environment.remote import RemoteEnvironmentFactory
from termrl.environment.remote_config import RemoteSettings
from tests.environment.server.served import served
from tests.upstream.tasks import write_tasks

OURS = "termrl serve"
GIVEN = "the server of TERMRL_UPSTREAM_URL"


@dataclass(frozen=True)
class Upstream:
    """A running server, and how it is talked to."""

    name: str
    url: str
    factory: RemoteEnvironmentFactory

    @property
    def is_ours(self) -> bool:
        return self.name == OURS


@pytest.fixture(scope="session")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv")
    folder = write_tasks(tmp_path_factory.mktemp("upstream") / "tasks")
    with served(folder, "--max-sessions", "8", "--command_timeout_s", "3") as server:
        yield server.url


@pytest.fixture(params=[OURS, GIVEN])
def upstream(request: pytest.FixtureRequest) -> Upstream:
    if request.param == OURS:
        url, settings = request.getfixturevalue("own_url"), {}
    else:
        url = os.environ.get("TERMRL_UPSTREAM_URL", "")
        if not url:
            pytest.skip("TERMRL_UPSTREAM_URL names no server; docs/compatibility.md says how to start one")
        settings = json.loads(os.environ.get("TERMRL_UPSTREAM_SETTINGS", "{}"))
    settings = {"allow_exposed_tests": True, "missing_verdict": "drop", **settings}
    return Upstream(request.param, url, RemoteEnvironmentFactory(url, settings=RemoteSettings(**settings)))
