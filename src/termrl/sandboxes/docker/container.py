"""One container, as seen from its provider's process.

Two residents can serve it. The first process takes the agent's commands. From :meth:`DockerSandbox.kill_all` (or the
verify window) on it is asked nothing more: the daemon then runs another one in the container, from files that are
mounted read-only, and that is started anew when something ends it. Where the first process fails, that one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from termrl.errors import SandboxLostError, SandboxStartError
from termrl.sandboxes import archive, layout
from termrl.sandboxes.base import (
    DEFAULT_OUTPUT_LIMIT,
    Census,
    ChangedFiles,
    ExecResult,
    Healthcheck,
    Sandbox,
    SandboxSpec,
)
from termrl.sandboxes.docker import options, pristine, reaper
from termrl.sandboxes.docker.connection import Connection, said_by
from termrl.sandboxes.line import START_S, Line, empty, fill_tests, packed

T = TypeVar("T")

_KILLED = 137
_LOOK_S = 1.0
_ENDING_S = 0.5
_SHOWN = 400
# Kinds of a change as the Engine API numbers them.
_KINDS = ("changed", "added", "deleted")
_OURS = (options.RUN, "/.termrl")
_HOST_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/.dockerenv", options.PRELOAD)


class Keeper(Protocol):
    """What a container asks of its provider."""

    daemon: Connection
    pristine: pristine.Pristine

    def runner_argv(self, socket_path: str) -> list[str]:
        """How a further resident is run in a container."""
        ...

    def forget(self, name: str) -> None:
        """A sandbox has ended."""


class DockerSandbox(Sandbox):
    """One live container. Made by :meth:`termrl.sandboxes.docker.provider.DockerProvider.create` only."""

    system_is_writable = True

    def __init__(self, keeper: Keeper, spec: SandboxSpec, name: str, folder: Path, image: str) -> None:
        self.id = name
        self.spec = spec
        self.image = image
        self._keeper = keeper
        self._folder = folder
        self._numbers = itertools.count(1)
        self._agent = self._new_line()
        self._runner: Line | None = None
        self._runner_lock = asyncio.Lock()
        self._sealed = False
        self._base_env: dict[str, str] = layout.BASE_ENV
        self._pending: set[asyncio.Future[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None
        for path in (folder, self._run, self.tests):
            path.mkdir()
        folder.chmod(0o700)
        for path in (self._run, self.tests):
            path.chmod(0o755)

    # -- the interface -------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        base = layout.BASE_ENV if self._sealed else self._base_env
        variables = {**base, **({} if clean_env else self.spec.env), **(env or {})}
        where = cwd or self.workdir
        number = next(self._numbers)
        line = await self._line()
        try:
            return await line.exec(
                command, variables, where, timeout_s=timeout_s, output_limit=output_limit, number=number
            )
        except SandboxLostError:
            self._check()
            # Something ended who ran the command, perhaps the command itself; the container may well live.
            background = await self._cut(number)
            return ExecResult("", _KILLED, background=background)

    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        await self._asking(lambda line: line.put(source, target, exclude=exclude))

    async def put_bytes(self, data: bytes, target: str, *, mode: int = 0o644) -> None:
        await self._asking(lambda line: line.put_bytes(data, target, mode=mode))

    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        return await self._asking(lambda line: line.get_bytes(source, max_bytes=max_bytes))

    async def get(self, source: str, target: Path) -> None:
        await self._asking(lambda line: line.get(source, target))

    async def kill_all(self) -> int:
        self._check()
        count = 0
        if not self._sealed and not self._agent.lost:
            with contextlib.suppress(SandboxLostError):
                count = await self._agent.kill_all()
        self._sealed = True
        # Whoever the daemon starts now sees for itself that nobody is left.
        return count + await self._asking(lambda line: line.kill_all())

    async def census(self) -> Census:
        return await self._asking(lambda line: line.census())

    async def changes(
        self, since: float, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        return await self._asking(
            lambda line: line.changes(since, self.workdir, folders=folders, trees=trees, names=names)
        )

    async def act_as(self, user: str | None) -> None:
        await self._asking(lambda line: line.act_as(user))

    async def standing_in(self, folders: Sequence[str]) -> tuple[str, ...]:
        return await self._asking(lambda line: line.standing_in(folders))

    async def remove(self, paths: Sequence[str]) -> None:
        await self._asking(lambda line: line.remove(paths))

    async def restore(self, paths: Sequence[str]) -> frozenset[str]:
        self._check()
        found = await self._api(pristine.read, self._keeper.pristine, self.image, paths)
        if found.paths:
            await self._api(pristine.write, self._keeper.daemon.client, self.id, found)
        return found.paths

    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        await self.close_verify_window()
        self._sealed = True
        await fill_tests(tests, self.tests, exclude=exclude)
        await self._asking(lambda line: line.fresh_verify_folder())

    async def close_verify_window(self) -> None:
        self._check()
        empty(self.tests)

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        # A cancelled caller must not leave a container half stopped.
        await asyncio.shield(self._stopping)

    # -- what only containers can do ------------------------------------------------------------------------------

    async def changed_paths(self) -> dict[str, str]:
        """Every path that differs from the image → ``changed``, ``added`` or ``deleted``.

        It is the daemon that compares file systems, and nothing in the container takes part: no program there can
        hide a change or make one up. Left out are this package's mounts, and the files that the daemon itself mounts
        from its host (``/etc/hosts``, ``/etc/hostname``, ``/etc/resolv.conf``), of which it cannot tell.

        Raises:
            SandboxLostError: the container is gone.
        """
        self._check()
        changes = await self._api(self._keeper.daemon.client.api.diff, self.id) or []
        found = {change["Path"]: _KINDS[change["Kind"]] for change in changes}
        return {
            path: kind
            for path, kind in found.items()
            if path not in _HOST_FILES and path != options.TESTS and not path.startswith(_OURS)
        }

    # -- starting ------------------------------------------------------------------------------------------------

    @property
    def tests(self) -> Path:
        """The host folder that the container sees as /tests."""
        return self._folder / "tests"

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    async def start(self, begin: Callable[[str], None]) -> None:
        """Have ``begin`` (in a thread) make and start the container, given where its resident must call; await that.

        Raises:
            SandboxStartError, SandboxLostError: it did not.
        """
        with _Listener(self._run) as listener:
            started = self._background(self._keeper.daemon.call(begin, listener.inside))
            await self._answered(self._agent, listener, started)

    async def furnish(self, bounds: list[bytes]) -> None:
        """Have the resident make the working directory, fill it, and find the user."""
        spec = self.spec
        fields = [os.fsencode(self.workdir), options.user_field(spec.user), *bounds]
        with contextlib.ExitStack() as held:
            fds = []
            if spec.files is not None:
                fds.append(held.enter_context(contextlib.closing(await packed(spec.files, frozenset()))).fileno())
            name, home = map(os.fsdecode, await self._agent.setup(fields, fds))
        self._bounds = bounds
        self._base_env = {**layout.BASE_ENV, "HOME": home, "USER": name, "LOGNAME": name}

    async def become_healthy(self, check: Healthcheck) -> None:
        """Run the task's health check until it succeeds.

        Raises:
            SandboxStartError: it failed once too often.
        """
        clock = asyncio.get_running_loop().time
        begin = clock()
        failures = 0
        while True:
            starting = clock() - begin < check.start_period_s
            await asyncio.sleep(check.start_interval_s if starting else check.interval_s if failures else 0)
            starting = clock() - begin < check.start_period_s
            result = await self.exec(check.command, timeout_s=check.timeout_s)
            if result.exit_code == 0:
                return
            failures += not starting
            if failures >= max(check.retries, 1):
                how = f"took over {check.timeout_s:g} s" if result.timed_out else f"exit status {result.exit_code}"
                said = result.output.strip()[-_SHOWN:]
                raise SandboxStartError(
                    f"{self.spec.task_id}: the health check failed {failures} times ({how}): {said}",
                    hint=f"environment.healthcheck.command is {check.command!r}",
                )

    # -- residents -----------------------------------------------------------------------------------------------

    def _new_line(self) -> Line:
        return Line(f"sandbox {self.id} of task {self.spec.task_id}", self._numbers, parting_s=0)

    async def _line(self) -> Line:
        """The line to ask now."""
        self._check()
        if not self._sealed and not self._agent.lost:
            return self._agent
        async with self._runner_lock:
            self._check()
            if self._runner is None or self._runner.lost:
                self._runner = await self._open_runner()
            return self._runner

    async def _asking(self, ask: Callable[[Line], Awaitable[T]]) -> T:
        """Ask, and once more where the first who was asked ended over it."""
        line = await self._line()
        try:
            return await ask(line)
        except SandboxLostError:
            self._check()
        return await ask(await self._line())

    async def _open_runner(self) -> Line:
        """Have the daemon run a further resident in the container."""
        api = self._keeper.daemon.client.api
        line = self._new_line()
        with _Listener(self._run) as listener:
            argv = self._keeper.runner_argv(listener.inside)

            def begin() -> None:
                made = api.exec_create(self.id, argv, user="0:0", workdir="/", stdout=False, stderr=False)
                api.exec_start(made["Id"], detach=True)

            try:
                await self._answered(line, listener, self._background(self._keeper.daemon.call(begin)))
            except Exception as error:
                self._check()
                why = await self._ended()
                if why is None:
                    # The daemon can be late to see that it is ending.
                    await asyncio.sleep(_ENDING_S)
                    why = await self._ended()
                raise self._lost(why or said_by(error)) from error
        # Root: the files that it takes care of may be anyone's, and so may those of the tests.
        user = b"" if self._sealed else options.user_field(self.spec.user)
        await line.setup([b"", user, *self._bounds], [])
        return line

    async def _answered(self, line: Line, listener: _Listener, started: asyncio.Future[Any]) -> None:
        """Await the call of a resident, whose start is ``started``, and attach it to ``line``."""
        loop = asyncio.get_running_loop()
        calling = loop.create_task(loop.sock_accept(listener.sock))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait({calling, started}, return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():
                    await started
                while not calling.done():
                    await asyncio.wait({calling}, timeout=_LOOK_S)
                    if not calling.done():
                        await self._must_run()
            line.attach(calling.result()[0])
            await asyncio.wait_for(line.started, START_S)
        except TimeoutError:
            raise SandboxStartError(f"no sign of life from it in {START_S:.0f} s") from None
        finally:
            calling.cancel()

    async def _must_run(self) -> None:
        why = await self._ended()
        if why is not None:
            raise self._lost(why)

    async def _ended(self) -> str | None:
        """How the container ended, in the daemon's words; ``None`` if it runs."""
        try:
            state = (await self._keeper.daemon.call(self._keeper.daemon.client.api.inspect_container, self.id))["State"]
            if state["Running"]:
                return None
            logs: Any = await self._keeper.daemon.call(self._keeper.daemon.client.api.logs, self.id, tail=5)
        except Exception as error:
            return said_by(error)
        killed = ", killed for memory" if state.get("OOMKilled") else ""
        said = " ".join(logs.decode("utf-8", "replace").split())[-_SHOWN:]
        return f"its container ended with status {state.get('ExitCode')}{killed}{': ' if said else ''}{said}"

    async def _cut(self, number: int) -> int:
        """Kill what is left of a command whose resident has ended; how many other processes run."""
        line = await self._line()
        (count,), _ = await line.ask(b"cut", [str(number).encode()], [], START_S)
        return int(count)

    async def _api(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await self._keeper.daemon.call(function, *args)
        except Exception as error:
            raise self._lost(said_by(error)) from error

    def _background(self, call: Awaitable[Any]) -> asyncio.Future[Any]:
        """A call that goes on when its caller is cancelled, and that :meth:`stop` awaits."""
        future = asyncio.ensure_future(call)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        # It may be that nobody waits for it.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _check(self) -> None:
        if self._stopping is not None:
            raise self._lost("is stopped")

    def _lost(self, why: str) -> SandboxLostError:
        return SandboxLostError(f"sandbox {self.id} of task {self.spec.task_id}: {why}")

    async def _stop(self) -> None:
        for line in (self._agent, self._runner):
            if line is not None:
                line.lose("is stopped")
        if self._pending:
            await asyncio.wait(set(self._pending))
        # A daemon that is gone leaves the container to the next sweep.
        with contextlib.suppress(Exception):
            await self._keeper.daemon.call(reaper.remove, self._keeper.daemon.client, self.id)
        for line in (self._agent, self._runner):
            if line is not None:
                line.close()
        self._keeper.forget(self.id)
        with contextlib.suppress(OSError):
            archive.remove(os.fsencode(self._folder))


class _Listener:
    """A socket in a folder of the host that a container sees: whoever is told its name can call, once."""

    def __init__(self, folder: Path) -> None:
        name = secrets.token_hex(16)
        self.inside = f"{options.RUN}/{name}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.sock.setblocking(False)
        self._path = folder / name
        held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Short, however long the path of the state folder is.
            self.sock.bind(f"/proc/self/fd/{held}/{name}")
            self._path.chmod(0o666)
            self.sock.listen(1)
        finally:
            os.close(held)

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self._path.unlink(missing_ok=True)
