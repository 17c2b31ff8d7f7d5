"""Who may come in, and what may not get out."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from termrl.environment.server.config import ServeConfig
from termrl.environment.server.security import server_token
from termrl.errors import ConfigError
from termrl.settings import load_settings
from tests.environment.server.served import Server, fetch, served, start, wire

TOKEN = "a-token-of-some-length"
PAGES = ["/metrics", "/capacity", "/tasks", "/schema", "/metadata", "/state", "/docs", "/openapi.json", "/nowhere"]


def token_of(environ: dict[str, str] | None = None, **settings: Any) -> str | None:
    return server_token(ServeConfig(tasks=(Path("tasks"),), **settings), environ or {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org"])
def test_a_token_is_needed_where_others_can_reach_the_server(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        token_of(host=host)
    assert host in refused.value.message and "token" in refused.value.message
    assert token_of({"TERMRL_TOKEN": TOKEN}, host=host) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_no_token_is_needed_on_loopback_but_one_that_is_given_holds(host: str) -> None:
    assert token_of(host=host) is None
    assert token_of({"TERMRL_TOKEN": TOKEN}, host=host) == TOKEN


def test_it_does_not_start_without_a_token_and_says_so(tasks: Path, tmp_path: Path) -> None:
    process = start(tasks, "--host", "0.0.0.0", state=tmp_path, stderr=-1)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "") and "token" in err and "Traceback" not in err


@pytest.mark.parametrize("text", ["", "short", "has a space in it, see", "ümlaut-ümlaut-ümlaut"])
def test_a_token_that_is_no_good_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        token_of({"TERMRL_TOKEN": TOKEN}, token_file=file)
    assert "token_file" in refused.value.message and (text == "" or text not in refused.value.message)
    with pytest.raises(ConfigError, match="cannot be read"):
        token_of(token_file=tmp_path / "no")


def test_a_token_is_never_an_argument(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="token: unknown key"):
        load_settings(ServeConfig, flags=[f"--tasks={tasks}", "--token", TOKEN])


async def test_everything_but_health_is_behind_the_token(tasks: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with served(tasks, "--host", "0.0.0.0", "--token-file", str(file), token=TOKEN) as server:
        port = server.url.rsplit(":", 1)[1]
        server.url = f"http://127.0.0.1:{port}"
        assert fetch(server.url + "/health") == (200, '{"status":"healthy"}')
        for page in PAGES:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                assert fetch(server.url + page, headers=headers)[0] == 401, page
        assert fetch(server.url + "/reset", data=b"{}")[0] == 401
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.socket_url)
        assert refused.value.response.status_code == 401
        with pytest.raises(InvalidStatus):
            await connect(server.socket_url, additional_headers={"Authorization": "Bearer wrong"})
        async with wire(server) as client:
            await client.reset()
            # a sandbox does not reach the server, by no address of this machine
            for host in ("127.0.0.1", _address()):
                said = await client.output(f"exec 3<>/dev/tcp/{host}/{port} && echo reached")
                assert "reached" not in said
        assert server.get("/capacity")["max_sessions"] == 64


def _address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


async def test_web_pages_of_other_origins_are_refused(server: Server) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert fetch(server.url + "/reset", headers={"Origin": origin}, data=b"{}")[0] == 403
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.socket_url, additional_headers={"Origin": origin})
        assert refused.value.response.status_code == 403
    async with wire(server, origin=server.url) as client:
        await client.reset()


def test_a_name_that_a_web_page_points_here_is_refused(server: Server) -> None:
    for host, status in (("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200), ("[::1]:5", 200)):
        assert fetch(server.url + "/capacity", headers={"Host": host})[0] == status, host


async def test_an_allowed_origin_may_connect(tasks: Path) -> None:
    with served(tasks, "--allowed-origins", "https://lab.example") as server:
        async with wire(server, origin="https://lab.example") as client:
            await client.reset()


async def test_sessions_see_nothing_of_each_other(server: Server) -> None:
    """OpenEnv#194: as many writers as there are, each sees only its own."""

    async def writer(number: int) -> None:
        async with wire(server) as client:
            await client.reset(episode_id=f"episode-{number}")
            for turn in range(3):
                await client.step(command=f"echo {number} >> /app/mine; echo {number} >> /tmp/mine; export N={number}")
                assert await client.output("cat /app/mine /tmp/mine; echo $N") == f"{number}\n" * 2 * (turn + 1) + "\n"
            assert (await client.ask("state"))["data"]["episode_id"] == f"episode-{number}"
            assert await client.output("ps -e 2>/dev/null | grep -c sleep; ls /app") in ("0\nREADME\nmine\n",)

    await asyncio.gather(*(writer(number) for number in range(12)))


async def test_no_session_is_reached_by_an_id(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        mine = (await client.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}))[
            "data"
        ]["result"]["session_id"]
        async with connect(f"{server.socket_url}?session_id={mine}") as other:
            assert "SESSION_ERROR" in str(await other.recv())
        call: dict[str, Any] = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "openenv/session/close",
            "params": {"session_id": mine},
        }
        async with wire(server) as other_client:
            assert "error" in (await other_client.ask("mcp", call))["data"]
        assert await client.output("echo here") == "here\n"


async def test_other_sockets_are_not_served(server: Server) -> None:
    for path in ("/mcp", "/nowhere"):
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.url.replace("http", "ws", 1) + path)
        assert refused.value.response.status_code == 403
