"""What the client's tests share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.verifier.tiny import tiny_task

Script = Callable[[ServerConnection], Awaitable[None]]


@contextlib.asynccontextmanager
async def misbehaving(script: Script, **options: Any) -> AsyncIterator[str]:
    """A WebSocket server that does to each connection what ``script`` says."""

    async def handle(connection: ServerConnection) -> None:
        with contextlib.suppress(Exception):
            await script(connection)

    async with serve(handle, "127.0.0.1", 0, **options) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def observation(**fields: Any) -> str:
    """A frame with an observation."""
    reward, done = fields.pop("reward", 0.0), fields.pop("done", False)
    return json.dumps({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})


def error(code: str, message: str = "no", **more: Any) -> str:
    """A frame with a coded error."""
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


async def answering(connection: ServerConnection, answer: Callable[[dict[str, Any]], Awaitable[str | None]]) -> None:
    """Answer each message by ``answer`` of it; ``None`` says nothing."""
    async for frame in connection:
        said = await answer(json.loads(frame))
        if said is not None:
            await connection.send(said)


async def polite(message: dict[str, Any]) -> str | None:
    """What a terminal environment would say that does nothing."""
    match message["type"]:
        case "reset":
            return observation(instruction="Do it.", action_type="reset", info={"command_timeout_s": 20})
        case "step":
            return observation(output=message["data"]["command"], action_type=message["data"]["action_type"])
        case "state":
            return json.dumps({"type": "state", "data": {"step_count": 1}})
    return None


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of Harbor tasks: one to solve, and some whose tests give no verdict."""
    folder = tmp_path / "tasks"
    fragile = "set -e\n. ./settings.sh\n[ -e answer.txt ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    tests = {"tiny": None, "crash": "exit 1", "fragile": fragile, "bad": "echo 7 > /logs/verifier/reward.txt"}
    for name, test in tests.items():
        kind = {} if test is None else {"test": test}
        task = tiny_task(folder, id=name, files={"settings.sh": "x=1\n"}, **kind)
        (task.path / "instruction.md").write_text(task.instruction)
        (task.path / "task.toml").write_text(TOML)
    return folder


TOML = """\
version = "1.0"
[metadata]
termrl_userland = "host"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
memory_mb = 256
storage_mb = 64
network_mode = "no-network"
"""


async def settled(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether ``condition`` comes true in time."""
    for _ in range(int(seconds / 0.02)):
        if condition():
            return True
        await asyncio.sleep(0.02)
    return condition()
