"""A process that owns sandboxes with daemons in them, until it is killed or its stdin ends: ``python -m … JSON``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from termrl.sandboxes import SandboxSpec, open_provider


async def _own(facts: dict[str, Any]) -> None:
    provider = open_provider(facts["backend"], **facts["settings"])
    spec = SandboxSpec(**facts["spec"])
    sandboxes = await asyncio.gather(*(provider.create(spec) for _ in range(facts["sandboxes"])))
    daemons = f"for i in $(seq {facts['daemons']}); do setsid sleep {facts['seconds']} >/dev/null 2>&1 & done"
    await asyncio.gather(*(sandbox.exec(daemons, timeout_s=20) for sandbox in sandboxes))
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_own(json.loads(sys.argv[1])))
