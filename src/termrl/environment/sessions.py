"""Background sessions of one sandbox: commands that run on while the policy does something else.

A session is a process group in the sandbox with a FIFO as its stdin and a file as its output. All of it lives in
the sandbox, where the policy can reach it: nothing here is trusted, and nothing here is scored.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from dataclasses import dataclass

from termrl.errors import CommandError
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT, Sandbox

MAX_SESSIONS = 16

_ROOT = "/tmp/.termrl-sessions"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_CALL_S = 10.0
_SETTLE_S = 0.1
_POLL_S = 0.05


@dataclass(frozen=True)
class SessionView:
    """What came since the last look. ``exit_code`` is ``None`` while it runs."""

    output: str
    truncated_bytes: int
    exit_code: int | None

    @property
    def running(self) -> bool:
        """Whether the command has not ended."""
        return self.exit_code is None


class Sessions:
    """The background sessions of one sandbox, by the id that the policy gave them.

    Every method raises :class:`~termrl.errors.CommandError` for an id that is malformed or not there (an answer to
    the policy) and :class:`~termrl.errors.SandboxLostError` when the sandbox died.
    """

    def __init__(self, sandbox: Sandbox, *, output_limit: int = DEFAULT_OUTPUT_LIMIT) -> None:
        self._sandbox = sandbox
        self._output_limit = output_limit
        self._seen: dict[str, int] = {}

    async def start(self, session_id: str, command: str) -> SessionView:
        """Run ``command`` in the background; a session of that id must have ended before."""
        if not _ID.fullmatch(session_id):
            raise CommandError(f"bad session id {session_id[:80]!r}", hint="letters, digits, '_', '.', '-'; 64 at most")
        if "\0" in command:
            raise CommandError("the command holds a NUL byte")
        if session_id in self._seen:
            if await self._exit_code(session_id) is None:
                raise CommandError(f"session {session_id!r} is still running", hint="kill it, or use another id")
        elif len(self._seen) >= MAX_SESSIONS:
            raise CommandError(f"there are already {MAX_SESSIONS} sessions", hint="use the id of one that has ended")
        folder = f"{_ROOT}/{session_id}"
        # Job control gives the background job a process group of its own, which is what kill ends.
        script = f"""\
rm -rf -- {folder} && mkdir -p -m 700 -- {folder} && mkfifo -- {folder}/in && : >{folder}/out || exit
cat >{folder}/run <<'TERMRL_END_OF_RUN'
"$BASH" {folder}/command <>{folder}/in >>{folder}/out 2>&1
echo "$?" >{folder}/ended && mv -- {folder}/ended {folder}/status
TERMRL_END_OF_RUN
"""
        await self._checked(script)
        try:
            await self._sandbox.put_bytes(command.encode("utf-8", "surrogateescape") + b"\n", f"{folder}/command")
        except (OSError, ValueError) as error:
            raise CommandError(f"the session could not be started: {error}") from None
        await self._checked(f'set -m; "$BASH" {folder}/run </dev/null >/dev/null 2>&1 & echo "$!" >{folder}/pid')
        self._seen[session_id] = 0
        return await self._settled(session_id)

    async def write(self, session_id: str, text: str) -> SessionView:
        """Send ``text`` and a newline to the command's stdin; what it answers at once comes back."""
        folder = self._folder(session_id)
        if await self._exit_code(session_id) is not None:
            raise CommandError(f"session {session_id!r} has ended")
        line = text if text.endswith("\n") else text + "\n"
        await self._sandbox.put_bytes(line.encode("utf-8", "surrogateescape"), f"{folder}/message")
        await self._checked(f"cat -- {folder}/message 1<>{folder}/in", "nothing reads the session's input")
        return await self._settled(session_id)

    async def view(self, session_id: str) -> SessionView:
        """The output since the last look."""
        folder, seen = self._folder(session_id), self._seen[session_id]
        exit_code = await self._exit_code(session_id)
        script = f"""\
size=$(stat -c %s -- {folder}/out) || exit
echo "$size"
tail -c +{seen + 1} -- {folder}/out | head -c "$((size - {seen}))"
"""
        result = await self._sandbox.exec(
            script, timeout_s=_CALL_S, cwd="/", clean_env=True, output_limit=self._output_limit
        )
        first, _, output = result.output.partition("\n")
        if result.exit_code != 0 or not first.isdecimal():
            raise CommandError(f"the output of session {session_id!r} cannot be read: {result.output[:200]}")
        self._seen[session_id] = max(int(first), seen)
        return SessionView(output, result.truncated_bytes, exit_code)

    async def wait(self, session_id: str, seconds: float) -> SessionView:
        """Wait until the command ends, at most ``seconds``; then the output since the last look."""
        self._folder(session_id)
        deadline = time.monotonic() + seconds
        while await self._exit_code(session_id) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(_POLL_S, left))
        return await self.view(session_id)

    async def kill(self, session_id: str) -> None:
        """End the session's whole process group and forget it."""
        folder = self._folder(session_id)
        await self._checked(
            f'read -r pid <{folder}/pid && [[ $pid =~ ^[1-9][0-9]*$ ]] && kill -KILL -- "-$pid" 2>/dev/null\n'
            f"rm -rf -- {folder}"
        )
        del self._seen[session_id]

    def _folder(self, session_id: str) -> str:
        if session_id not in self._seen:
            raise CommandError(
                f"there is no session {session_id[:80]!r}", hint="exec with block=false and a session_id starts one"
            )
        return shlex.quote(f"{_ROOT}/{session_id}")

    async def _exit_code(self, session_id: str) -> int | None:
        try:
            data = await self._sandbox.get_bytes(f"{_ROOT}/{session_id}/status", max_bytes=16)
        except (FileNotFoundError, ValueError):
            return None
        text = data.decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else None

    async def _settled(self, session_id: str) -> SessionView:
        return await self.wait(session_id, _SETTLE_S)

    async def _checked(self, script: str, complaint: str = "the session cannot be reached") -> None:
        result = await self._sandbox.exec(script, timeout_s=_CALL_S, cwd="/", clean_env=True)
        if result.exit_code != 0:
            raise CommandError(f"{complaint}: {result.output[:200].strip() or 'no answer'}")
