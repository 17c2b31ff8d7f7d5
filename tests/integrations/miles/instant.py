"""A session server in a process of its own whose policy answers at once.

Run it as ``python -m tests.integrations.miles.instant SECONDS REPLY...``.
Turn k of any session gets reply k, later turns the last. It prints its URL, and ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def instant(*replies: str, delay_s: float = 0.0) -> Iterator[str]:
    """Run it; gives its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.miles.instant", str(delay_s), *replies],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


async def main(delay_s: float, replies: list[str]) -> None:
    """Serve until stdin closes."""
    import orjson
    from aiohttp import web

    from termrl.capture.server import raise_open_file_limit

    raise_open_file_limit()

    async def chat(request: web.Request) -> web.Response:
        messages = orjson.loads(await request.read())["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        if delay_s:
            await asyncio.sleep(delay_s)
        message = {"role": "assistant", "content": replies[min(turn, len(replies) - 1)]}
        body = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100 + 50 * turn, "completion_tokens": 10},
        }
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    app = web.Application()
    app.router.add_post("/sessions/{id}/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2:]))
