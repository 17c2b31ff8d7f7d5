"""Slots, memory, deadlines and ends: what a session holds, and that it always gives it back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.environment.server.admission import Admission
from termrl.environment.server.metrics import CountedProvider, ServerMetrics
from termrl.environment.server.session import Limits, Session, Sessions
from termrl.errors import CapacityError, EnvironmentLostError
from termrl.sandboxes.base import SandboxProvider
from tests.environment.server.served import SECRET, Server, commands_like, served, wait_until, wire, write_task


async def test_slots_are_counted_and_the_one_too_many_is_told_so(tasks: Path) -> None:
    with served(tasks, "--max-sessions", "2") as server:
        async with wire(server) as first, wire(server) as second:
            await first.reset()
            await second.reset()
            async with wire(server) as third:
                answer = await third.ask("reset", {"task_id": "one"})
                assert answer["type"] == "error"
                assert {name: answer["data"][name] for name in ("code", "active_sessions", "max_sessions")} == {
                    "code": "CAPACITY_REACHED",
                    "active_sessions": 2,
                    "max_sessions": 2,
                }
                with pytest.raises(ConnectionClosed) as closed:
                    await third.socket.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
            assert await first.output("echo here") == "here\n"
            assert server.figures()['termrl_server_sessions_refused_total{by="sessions"}'] == 1
        assert wait_until(server.is_empty)
        async with wire(server) as fourth:
            await fourth.reset()


async def test_memory_is_counted_and_a_reset_that_does_not_fit_is_told_so(tmp_path: Path) -> None:
    write_task(tmp_path, "small", memory_mb=128)
    write_task(tmp_path, "large", memory_mb=512)
    with served(tmp_path, "--max-memory-mb", "700") as server:
        async with wire(server) as first, wire(server) as second, wire(server) as third:
            await first.reset("large")
            await second.reset("small")
            assert server.get("/capacity")["memory_mb"] == 640
            answer = await third.ask("reset", {"task_id": "small"})
            assert (answer["data"]["code"], answer["data"]["cause"]) == ("CAPACITY_REACHED", "capacity")
            assert (answer["data"]["active_sessions"], answer["data"]["max_sessions"]) == (3, 64)
            with pytest.raises(ConnectionClosed):
                await third.socket.recv()
            await first.reset("small")  # the same session, another task: what it held counts no more
            assert server.get("/capacity")["memory_mb"] == 256
            assert (await first.ask("reset", {"task_id": "none"}))["type"] == "error"
            assert server.get("/capacity")["memory_mb"] == 128
        assert wait_until(server.is_empty)
        assert server.get("/capacity")["memory_mb"] == 0


async def test_an_idle_session_is_ended_and_the_client_told_why(tasks: Path) -> None:
    with served(tasks, "--idle-s", "1") as server:
        async with wire(server) as client:
            await client.reset()
            # what takes longer than that is not idle
            assert await client.output("sleep 2; echo awake") == "awake\n"
            for _ in range(4):
                await asyncio.sleep(0.4)
                await client.ask("state")
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(client.socket.recv(), 5)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001 and "nothing was asked" in closed.value.rcvd.reason
            assert wait_until(server.is_empty)


async def test_ten_resets_in_one_session_leak_nothing_and_see_nothing_of_each_other(server: Server) -> None:
    """trl#6001: environments that are reused from episode to episode."""
    async with wire(server) as client:
        for number in range(10):
            await client.reset("one" if number % 2 else "two", episode_id=str(number))
            assert await client.output("ls /app /tmp; pgrep -c sleep") == "/app:\nREADME\n\n/tmp:\n0\n"
            await client.step(command=f"echo {number} > /app/mine; echo > /tmp/mine; sleep 821.25 & disown")
            await client.step(command="sleep 821.25", block=False, session_id="s")
            assert (await client.ask("state"))["data"]["step_count"] == 3
        figures = server.figures()
        assert figures["termrl_live_sandboxes"] == 1 and server.active == 1
        assert len(commands_like("sleep 821.25")) == 2
    assert wait_until(server.is_empty)
    assert commands_like("sleep 821.25") == []


async def test_tests_may_take_their_own_budget_and_not_that_of_a_command(tmp_path: Path) -> None:
    """OpenEnv#965: a cap of 20 s on every command made slow tests a false 0."""
    write_task(tmp_path, "slow", test="sleep 2; echo 1 > /logs/verifier/reward.txt\n", verifier_s=30)
    with served(tmp_path, "--command-timeout-s", "0.5") as server:
        async with wire(server) as client:
            info = (await client.reset("slow"))["observation"]["info"]
            assert (info["command_timeout_s"], info["verifier_timeout_sec"]) == (0.5, 30.0)
            assert (await client.step(command="sleep 2"))["observation"]["info"]["timed_out"] is True
            assert (await client.step(action_type="evaluate"))["reward"] == 1.0


async def test_tests_are_not_there_before_and_after_they_run(server: Server) -> None:
    """OpenEnv#972: the policy read the tests, or put its own where they were looked for."""
    async with wire(server) as client:
        await client.reset()
        places = "/app /tmp /tests /logs /root /home /run /var /etc /opt"
        assert await client.output(f"grep -rls --devices=skip {SECRET} {places}; ls /tests") == ""
        await client.step(command="mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh")
        assert (await client.step(action_type="evaluate"))["reward"] == 0.0


async def test_what_upstreams_local_mode_gets_wrong(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        assert (await client.step(command="exit 7"))["observation"]["info"]["exit_code"] == 7
        assert await client.output("cd /tmp") + await client.output("pwd") == "/app\n"
        assert await client.output(r"printf 'a\377b'") == "a\ufffdb"
        started = time.monotonic()
        data = await client.step(command="sleep 822.25 & echo x")
        assert data["observation"]["output"] == "x\n" and data["observation"]["info"]["background"] == 1
        assert time.monotonic() - started < 3
        started = time.monotonic()
        info = (await client.step(command="head -c 20000000 /dev/zero | tr '\\0' x"))["observation"]["info"]
        assert info["truncated_bytes"] > 19_000_000 and time.monotonic() - started < 10
        info = (await client.step(command="setsid sleep 822.5 & sleep 822.75", wait_seconds=0.3))["observation"]["info"]
        assert info["timed_out"] is True and commands_like("sleep 822.75") == commands_like("sleep 822.5") == []
    assert wait_until(server.is_empty)
    assert commands_like("sleep 822.*") == []


# -- an environment that does not do its part ------------------------------------------------------------------------


class FakeEnvironment(Environment):
    """Hangs where it is told to."""

    def __init__(self) -> None:
        self.hang = asyncio.Event()
        self.heeds = True
        self.close_hangs = asyncio.Event()
        self.close_hangs.set()
        self.closed = 0

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Observation:
        while not self.hang.is_set():
            try:
                await self.hang.wait()
            except asyncio.CancelledError:
                if self.heeds:
                    raise
        return Observation()

    def state(self) -> State:
        return State(terminal_ready=True)

    async def close(self) -> None:
        await self.close_hangs.wait()
        self.closed += 1
        self.hang.set()


@pytest.fixture
async def fakes(provider: SandboxProvider) -> tuple[Sessions, list[FakeEnvironment]]:
    made: list[FakeEnvironment] = []

    def make() -> Environment:
        made.append(FakeEnvironment())
        return made[-1]

    admission = Admission(max_sessions=1, max_memory_mb=1)
    metrics = ServerMetrics(admission, CountedProvider(provider), swept=0)
    limits = Limits(0.1, max_wait_s=10, reset_s=1, grace_s=0.1, close_s=0.2, idle_s=60)
    sessions = Sessions(
        {}, make, admission=admission, limits=limits, metrics=metrics, backend="fake", default_task_id="one"
    )
    return sessions, made


@pytest.mark.parametrize("heeds", [True, False])
async def test_an_operation_that_never_returns_ends_its_session(fakes: Any, heeds: bool) -> None:
    sessions, made = fakes
    session: Session = await sessions.open()
    made[0].heeds = heeds
    started = time.monotonic()
    with pytest.raises(EnvironmentLostError, match="did not come back in"):
        await session.step(Action())
    assert time.monotonic() - started < 1
    with pytest.raises(EnvironmentLostError):
        await session.step(Action())
    await session.close()
    assert made[0].closed and sessions.admission.active == 0 and len(sessions) == 0


async def test_a_slot_is_taken_for_as_long_as_the_sandbox_is_not_gone(fakes: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("termrl.environment.server.session._ENDING_S", 0.3)
    sessions, made = fakes
    session = await sessions.open()
    made[0].close_hangs.clear()
    started = time.monotonic()
    await session.close()
    assert time.monotonic() - started < 1, "the end is not waited for for ever"
    with pytest.raises(CapacityError):
        await sessions.open()
    waiting = asyncio.create_task(sessions.open())
    await asyncio.sleep(0.05)
    made[0].close_hangs.set()
    assert isinstance(await waiting, Session), "whoever waits gets the slot once the sandbox is gone"


async def test_a_cancelled_caller_cancels_the_operation_and_ends_the_session(fakes: Any) -> None:
    sessions, made = fakes
    session = await sessions.open()
    step = asyncio.create_task(session.step(Action()))
    await asyncio.sleep(0.02)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await session.close()
    assert made[0].closed and sessions.admission.active == 0


async def test_nobody_comes_in_once_the_server_ends(fakes: Any) -> None:
    sessions, _ = fakes
    await sessions.open()
    await sessions.close()
    assert sessions.admission.active == 0
    with pytest.raises(CapacityError, match="ending"):
        await sessions.open()
