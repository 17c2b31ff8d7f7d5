"""tbench2's wire: fields, defaults, codes, rewards; and what the environment is to say beyond it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.environment.server.served import SECRET, Server, fetch, wait_until, wire

OBSERVATION = {
    "instruction", "output", "success", "error", "task_id", "task_path", "session_id", "action_type", "info",
    "metadata",
}  # fmt: skip
STATE = {
    "episode_id", "step_count", "task_id", "task_path", "session_id", "terminal_ready", "last_action_type",
    "last_command", "last_output",
}  # fmt: skip


async def test_reset_gives_instruction_budgets_and_a_reward_of_zero(server: Server) -> None:
    async with wire(server) as client:
        data = await client.reset("two", seed=3, episode_id="e-1")
        assert set(data) == {"observation", "reward", "done"}
        assert (data["reward"], data["done"]) == (0.0, False)
        observation = data["observation"]
        assert set(observation) == OBSERVATION
        assert observation["instruction"] == "Write the answer to answer.txt."
        assert (observation["task_id"], observation["action_type"]) == ("two", "reset")
        assert observation["info"] == {
            "command_timeout_s": 20.0,
            "verifier_timeout_sec": 30.0,
            "agent_timeout_sec": 60.0,
            "docker_image": "debian:12-slim",
            "workdir": "/app",
            "backend": "bubblewrap",
        }


async def test_a_task_may_be_named_by_task_name_or_left_to_the_default(server: Server) -> None:
    async with wire(server) as client:
        assert (await client.ask("reset", {"task_name": "two"}))["data"]["observation"]["task_id"] == "two"
        assert (await client.ask("reset", {}))["data"]["observation"]["task_id"] == "one"
        assert (await client.ask("reset"))["data"]["observation"]["task_id"] == "one"


async def test_exec_says_how_the_command_ended_and_never_gives_a_reward(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        data = await client.step(command="pwd; echo out; echo err >&2; exit 3")
        assert (data["reward"], data["done"]) == (0.0, False)
        observation = data["observation"]
        assert observation["output"] == "/app\nout\nerr\n"
        assert (observation["success"], observation["error"]) == (True, "")
        info = observation["info"]
        assert info["exit_code"] == 3 and info["duration_s"] > 0
        assert (info["timed_out"], info["truncated_bytes"], info["background"]) == (False, 0, 0)
        assert observation["instruction"] == "Write the answer to answer.txt."


async def test_the_tests_decide_the_reward_and_the_marker_says_that_they_did(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        await client.step(action_type="write_file", file_path="answer.txt", content=SECRET + "\n")
        data = await client.step(action_type="evaluate")
        info = data["observation"]["info"]
        assert (data["reward"], data["done"], data["observation"]["error"]) == (1.0, True, "")
        assert (info["tests_passed"], info["harness"]) == (True, "tests/test.sh")
        assert (info["outcome"], info["cause"], info["exit_code"], info["tamper_signals"]) == ("passed", None, 0, [])
        assert info["verdict"]["integrity"] == "sealed"

        await client.reset()
        data = await client.step(action_type="evaluate")
        info = data["observation"]["info"]
        assert (data["reward"], data["done"], data["observation"]["error"]) == (0.0, True, "")
        assert (info["tests_passed"], info["outcome"], info["cause"]) == (False, "failed", "tests_failed")


async def test_no_verdict_is_a_null_reward_with_an_error_and_not_done(server: Server) -> None:
    async with wire(server) as client:
        await client.reset("silent")
        data = await client.step(action_type="evaluate")
        assert (data["reward"], data["done"]) == (None, False)
        observation = data["observation"]
        assert observation["success"] is False and "verifier_crash" in observation["error"]
        info = observation["info"]
        assert (info["outcome"], info["cause"], info["exit_code"]) == ("no_verdict", "verifier_crash", 3)
        assert info["tests_passed"] is None


async def test_a_tampered_verdict_names_its_signals(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        await client.step(command=f"echo {SECRET} > answer.txt; mkdir -p /tests; echo 1 > /logs/verifier/reward.txt")
        await client.step(command="sleep 300 & mkdir -p ~/.local/bin; echo exit 0 > ~/.local/bin/pytest")
        info = (await client.step(action_type="evaluate"))["observation"]["info"]
        assert info["tamper_signals"] == sorted(info["verdict"]["signals"]) != []


async def test_a_step_after_done_is_an_error_and_a_second_reset_is_clean(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        await client.output("echo mine > leftover; echo mine > /tmp/leftover")
        await client.step(action_type="evaluate")
        data = await client.step(command="echo still here")
        assert data["done"] is True and data["observation"]["success"] is False
        assert "done" in data["observation"]["error"] and data["observation"]["output"] == ""
        await client.reset()
        assert await client.output("ls; ls /tmp") == "README\n"


async def test_evaluate_after_a_bad_reset_fails_closed(server: Server) -> None:
    """OpenEnv#1012: the sandbox of the episode before must not be scored for the one that never began."""
    async with wire(server) as client:
        await client.reset()
        await client.output(f"echo {SECRET} > answer.txt")
        assert (await client.ask("reset", {"task_id": "no-such-task"}))["data"]["code"] == "EXECUTION_ERROR"
        data = await client.step(action_type="evaluate")
        assert (data["reward"], data["done"]) == (None, False) and data["observation"]["error"]
        assert server.figures()["termrl_live_sandboxes"] == 0


@pytest.mark.parametrize(
    "task_id", ["../../etc", "/etc", "one/../two", "./one", "one/", "../tasks/one", "one\0", "", "ONE", "%2e%2e", "~"]
)
async def test_task_ids_are_names_and_never_paths(server: Server, task_id: str) -> None:
    async with wire(server) as client:
        answer = await client.ask("reset", {"task_id": task_id})
        if task_id == "":  # as good as none
            assert answer["data"]["observation"]["task_id"] == "one"
        else:
            assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")


@pytest.mark.parametrize("field", ["task_path", "path"])
async def test_a_task_path_is_refused(server: Server, tasks: Any, field: str) -> None:
    async with wire(server) as client:
        answer = await client.ask("reset", {"task_id": "one", field: str(tasks / "one")})
        assert (answer["data"]["code"], answer["data"]["cause"]) == ("EXECUTION_ERROR", None)
        assert "never by a path" in answer["data"]["message"]


async def test_background_sessions_do_all_that_tbench2_names(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        started = await client.step(command="read x; echo got $x; sleep 60", block=False, session_id="s")
        assert started["observation"]["session_id"] == "s" and started["observation"]["info"]["running"] is True
        seen = [
            await client.step(action_type="write", session_id="s", command="hello"),
            await client.step(action_type="wait", session_id="s", wait_seconds=0.2),
            await client.step(action_type="view", session_id="s"),
        ]
        assert "".join(data["observation"]["output"] for data in seen) == "got hello\n"
        assert (await client.step(action_type="kill", session_id="s"))["observation"]["success"] is True
        gone = await client.step(action_type="view", session_id="s")
        assert gone["observation"]["success"] is False and gone["reward"] == 0.0
        assert (await client.ask("state"))["data"]["session_id"] == "s"


async def test_state_echoes_the_episode_and_counts_steps_exactly(server: Server) -> None:
    async with wire(server) as client:
        state = (await client.ask("state"))["data"]
        assert set(state) == STATE
        assert (state["step_count"], state["terminal_ready"], state["session_id"]) == (0, False, "")
        await client.reset(episode_id="mine")
        for count in range(1, 4):
            await client.step(command=f"echo {count}")
            await client.say('{"type": "step", "data": {"nonsense": 1}}')
            state = (await client.ask("state"))["data"]
            assert (state["episode_id"], state["step_count"]) == ("mine", count)
        assert (state["last_action_type"], state["last_command"], state["last_output"]) == ("exec", "echo 3", "3\n")


async def test_close_has_no_reply_and_is_1000(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        await client.socket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed) as closed:
            await client.socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
        # the sandbox was gone before the connection was closed
        assert server.is_empty()


async def test_the_close_action_ends_the_sandbox_and_the_connection_goes_on(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        data = await client.step(action_type="close")
        assert data["done"] is True and server.figures()["termrl_live_sandboxes"] == 0
        assert server.get("/capacity")["memory_mb"] == 0
        assert (await client.reset("two"))["observation"]["task_id"] == "two"


async def test_mcp_is_answered_by_an_error_of_its_own_kind(server: Server) -> None:
    async with wire(server) as client:
        answer = await client.ask("mcp", {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": {}})
        assert answer["type"] == "mcp" and answer["data"]["id"] == 7 and "error" in answer["data"]
        assert (await client.ask("mcp", {"nonsense": 1}))["data"]["error"]["code"] == -32600


async def test_a_wait_that_is_no_number_or_too_long_is_refused(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        assert (await client.ask("step", {"command": "true", "wait_seconds": 1e9}))["data"]["code"] == "EXECUTION_ERROR"
        assert (await client.say('{"type":"step","data":{"wait_seconds":NaN}}'))["data"]["code"] == "INVALID_JSON"
        assert (await client.ask("step", {"wait_seconds": "x"}))["data"]["code"] == "VALIDATION_ERROR"
        timed_out = await client.step(command="sleep 9", wait_seconds=0.1)
        assert timed_out["observation"]["info"]["timed_out"] is True


async def test_a_lost_sandbox_is_an_error_with_its_cause_and_the_session_goes_on(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        for path in (server.state / "owners").glob("*/s*"):
            # bubblewrap's first process in the sandbox carries the sandbox's name on its command line
            name = f"{path.parent.name}/{path.name}"
            _kill_those_that_name(name)
        answer = await client.ask("step", {"command": "true"})
        assert (answer["data"]["code"], answer["data"]["cause"]) == ("EXECUTION_ERROR", "sandbox_lost")
        await client.reset()
        assert await client.output("echo again") == "again\n"


def _kill_those_that_name(name: str) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def test_the_pages_beside_the_socket(server: Server, tasks: Any) -> None:
    assert server.get("/health") == {"status": "healthy"}
    assert {"action", "observation", "state"} <= set(server.get("/schema"))
    assert set(server.get("/schema")["state"]["properties"]) >= STATE
    assert server.get("/metadata")["name"] == "tbench2_env"
    assert set(server.get("/state")) == STATE
    listed = server.get("/tasks")
    assert [task["id"] for task in listed["tasks"]] == ["one", "silent", "two"]
    assert listed["default_task_id"] == "one"
    assert listed["tasks"][0]["family"] == "tiny" and listed["tasks"][0]["level"] == 1
    assert str(tasks) not in json.dumps(listed)
    assert server.get("/capacity")["max_sessions"] == 64


def test_http_reset_and_step_leave_nothing_behind(server: Server) -> None:
    created = server.figures()["termrl_server_sandboxes_created_total"]
    headers = {"Content-Type": "application/json"}
    for _ in range(5):
        status, body = fetch(server.url + "/reset", headers=headers, data=b'{"task_id": "one", "episode_id": "e"}')
        assert status == 200 and json.loads(body)["reward"] == 0.0
    status, body = fetch(server.url + "/step", headers=headers, data=b'{"action": {"command": "true"}}')
    assert status == 200 and json.loads(body)["observation"]["success"] is False
    assert server.figures()["termrl_server_sandboxes_created_total"] == created + 5
    assert wait_until(server.is_empty)
    for path, data, expected in (
        ("/reset", b'{"task_id": "nope"}', 500),
        ("/reset", b'{"seed": "x"}', 422),
        ("/reset", b'{"task_name": 5}', 422),
        ("/reset", b"[", 422),
        ("/step", b'{"action": {"nope": 1}}', 422),
    ):
        assert fetch(server.url + path, headers=headers, data=data)[0] == expected, (path, data[:40])
    assert wait_until(server.is_empty)


@pytest.mark.parametrize(
    ("headers", "status"), [({"Content-Length": str(17 << 20)}, 413), ({"Transfer-Encoding": "chunked"}, 411)]
)
def test_a_request_of_any_length_is_refused_before_it_is_read(
    server: Server, headers: dict[str, str], status: int
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("POST", "/reset")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_mcp_sessions_without_a_connection_are_refused(server: Server) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    status, body = fetch(server.url + "/mcp", data=json.dumps(call).encode())
    assert status == 200 and "error" in json.loads(body) and "result" not in json.loads(body)
    assert server.active == 0


async def test_figures_count_what_happened(server: Server) -> None:
    before = server.figures()
    async with wire(server) as client:
        await client.reset()
        await client.step(command="true")
        await client.step(action_type="evaluate")
        await client.say("nonsense")
        assert server.figures()["termrl_server_sessions"] == 1
    assert wait_until(server.is_empty)
    after = server.figures()
    grown = {name: after[name] - before[name] for name in after if after[name] != before.get(name)}
    for name in (
        'termrl_server_operation_seconds_count{operation="reset"}',
        'termrl_server_operation_seconds_count{operation="exec"}',
        'termrl_server_operation_seconds_count{operation="evaluate"}',
        'termrl_server_verdicts_total{cause="tests_failed",outcome="failed"}',
        'termrl_server_errors_total{code="INVALID_JSON"}',
        "termrl_server_sandboxes_created_total",
        "termrl_server_sandboxes_ended_total",
    ):
        assert grown[name] == 1, (name, grown)


def test_every_figure_stands_in_the_docs(server: Server) -> None:
    page = (Path(__file__).parents[3] / "docs" / "openenv.md").read_text()
    page = re.sub(
        r"(\w+)\{([a-z,]+)\}(_total)", lambda m: " ".join(f"{m[1]}{part}{m[3]}" for part in m[2].split(",")), page
    )
    families = {re.sub(r"_(bucket|count|sum|created)$", "", re.split(r"[{ ]", name)[0]) for name in server.figures()}
    ours = {name for name in families if not name.startswith("termrl_process_")}
    assert {name for name in ours if name not in page} == set()
