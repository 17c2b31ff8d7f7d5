"""A loopback proxy before an environment server that loses sockets and says that there is no slot, by chance."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

FULL = '{"type":"error","data":{"message":"full","code":"CAPACITY_REACHED","active_sessions":1,"max_sessions":1}}'


class Lossy:
    """Where it listens, and what it did, by the cause that each must be counted under."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.url = ""
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._rate = rate

    async def handle(self, target: str, client: ServerConnection) -> None:
        """Carry one connection, or do one wrong thing to it."""
        draw = self._rng.random()
        if draw < self._rate / 2:
            self.injected["capacity"] += 1
            await client.recv()
            await client.send(FULL)
            return
        fails_at = self._rng.randrange(2, 5) if draw < self._rate else None
        async with connect(target, max_size=None, compression=None) as server:
            for number in range(1, 1 << 30):
                frame = await client.recv()
                if number == fails_at:
                    self.injected["environment_lost"] += 1
                    client.transport.abort()
                    return
                await server.send(frame)
                await client.send(await server.recv())


@contextlib.asynccontextmanager
async def lossy(url: str, *, rate: float, rng: random.Random) -> AsyncIterator[Lossy]:
    """Run it before the server at ``url``."""
    proxy = Lossy(rng, rate)
    target = url.replace("http", "ws", 1) + "/ws"

    async def handle(client: ServerConnection) -> None:
        with contextlib.suppress(Exception):
            await proxy.handle(target, client)

    async with serve(handle, "127.0.0.1", 0, max_size=None, compression=None) as listening:
        proxy.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield proxy
