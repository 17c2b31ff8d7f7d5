"""The settings of environments behind an OpenEnv server: :class:`RemoteSettings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from termrl.verifier.attribution import MissingVerdict

Fidelity = Literal["auto", "server", "adapter"]
Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]*$", max_length=200)]


class RemoteSettings(BaseModel):
    """How a server is talked to, and what its verdicts are worth. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_file: Path | None = Field(
        default=None, description="file that holds the bearer token; none: $TERMRL_TOKEN, if set"
    )
    fidelity: Fidelity = Field(
        default="auto",
        description="who scores: the server, the adapter for servers without a canonical evaluate, or whichever fits",
    )
    allow_exposed_tests: bool = Field(
        default=False, description="accept servers on which the policy can read the tests while it acts"
    )
    missing_verdict: MissingVerdict = Field(
        default="attribute",
        description="of servers that do not look into it themselves: attribute asks untouched sessions, drop nobody",
    )
    capacity_wait_s: float = Field(default=600.0, ge=0, description="how long a reset waits for a free slot")
    connect_timeout_s: float = Field(default=30.0, gt=0, description="one attempt to connect")
    reset_s: float = Field(default=600.0, gt=0, description="a server that takes longer to reset is lost")
    grace_s: float = Field(default=60.0, gt=0, description="what an answer may take beyond the server's own budget")
    ping_interval_s: float | None = Field(default=20.0, gt=0, description="keepalive pings; none: off")
    ping_timeout_s: float | None = Field(
        default=None, gt=0, description="a ping unanswered for so long ends the connection; none: only deadlines do"
    )
    legacy_workdir: Folder | Literal[""] = Field(
        default="/app", description="adapter: where commands run; empty: where the server runs them"
    )
    legacy_tests_src: Folder = Field(default="/task/tests", description="adapter: where the server keeps the tests")
