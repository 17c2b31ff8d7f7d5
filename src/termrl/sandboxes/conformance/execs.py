"""How commands run and end."""

from __future__ import annotations

import asyncio
import contextlib
import time

from termrl.errors import CommandError, SandboxLostError
from termrl.sandboxes.base import Sandbox
from termrl.sandboxes.conformance.check import EXEC_S, Section, Subject, Unmet, ask, need, same

section = Section("exec")

_AT_ONCE = 16


async def _command_error(sandbox: Sandbox, command: str, said: str, **options: str | dict[str, str]) -> None:
    """``command`` must raise a :class:`CommandError` that holds ``said``."""
    try:
        result = await sandbox.exec(command, timeout_s=EXEC_S, **options)  # pyright: ignore[reportArgumentType]
    except CommandError as error:
        need(said in error.message, f"the error does not say {said!r}: {error.message}")
        return
    raise Unmet(f"no error but exit code {result.exit_code} and output {result.output[:200]!r}")


async def _sleepers(sandbox: Sandbox) -> list[str]:
    """The arguments of every ``sleep`` that runs."""
    each = 'read -r name < $p/comm && [ "$name" = sleep ] && tr "\\0" "\\n" < $p/cmdline | sed -n 2p'
    return (await ask(sandbox, f"for p in /proc/[0-9]*; do {each}; done 2>/dev/null")).split()


@section.check("exit code, stdout and stderr in order, and duration are reported", alone=True)
async def exit_code(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; sleep 0.2; exit 3", timeout_s=EXEC_S)
        same((result.output, result.exit_code), ("out\nerr\n", 3), "output and exit code")
        same((result.timed_out, result.truncated_bytes, result.oom), (False, 0, False), "timed out, truncated, oom")
        need(0.2 <= result.duration_s < 5, f"a command of 0.2 s is said to last {result.duration_s} s")


@section.check("a shell that a signal killed gives 128 + the signal")
async def signal_status(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        for name, number in (("TERM", 15), ("KILL", 9), ("SEGV", 11)):
            same((await sandbox.exec(f"kill -{name} $$", timeout_s=EXEC_S)).exit_code, 128 + number, f"SIG{name}")


@section.check("directory, variables and functions do not persist; files and background processes do")
async def fresh_shell(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "cd /tmp; export x=1; f() { :; }; echo kept > file; sleep 300 >/dev/null 2>&1 &")
        found = await ask(sandbox, "pwd; echo [$x]; type -t f; cat /tmp/file")
        same(found, f"{sandbox.workdir}\n[]\nkept\n", "directory, variable, function, file")
        same(await _sleepers(sandbox), ["300"], "background processes")


@section.check("the shell is bash, not a login shell, not interactive, without job control")
async def kind_of_shell(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "echo 'echo profile' > ~/.profile; cp ~/.profile ~/.bashrc; cp ~/.profile ~/.bash_profile")
        found = await ask(sandbox, "echo ${BASH_VERSION:+bash}; shopt -q login_shell; echo $?; echo $-")
        name, login, flags = found.split()
        same((name, login), ("bash", "1"), "shell and login_shell")
        need("i" not in flags and "m" not in flags, f"its flags are {flags}")


@section.check("PAGER and GIT_PAGER are cat, TERM is dumb, HOME and PATH are set")
async def environment(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        found = await ask(sandbox, 'echo $PAGER $GIT_PAGER $TERM; [ -d "$HOME" ] && [ -n "$PATH" ] && echo set')
        same(found, "cat cat dumb\nset\n", "PAGER, GIT_PAGER, TERM; HOME and PATH")


@section.check("env of a call goes over the spec's; with clean_env the spec's is left out")
async def env_layers(subject: Subject) -> None:
    async with subject.sandbox(env={**subject.spec.env, "A": "spec", "B": "spec"}) as sandbox:
        show = 'echo "$A $B $C"'
        over = await sandbox.exec(show, timeout_s=EXEC_S, env={"B": "call"})
        same(over.output, "spec call \n", "A B C with B from the call")
        clean = await sandbox.exec(show, timeout_s=EXEC_S, env={"C": "call"}, clean_env=True)
        same(clean.output, "  call\n", "A B C with clean_env")


@section.check("stdin is /dev/null")
async def stdin(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        same(await ask(sandbox, "cat; readlink /proc/self/fd/0"), "/dev/null\n", "stdin")


@section.check("a command holds no descriptor but its three")
async def descriptors(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        found = await ask(sandbox, "exec ls /proc/self/fd")
        # The fourth is the folder that ls reads.
        same(found.split(), ["0", "1", "2", "3"], "open descriptors of ls")


@section.check("/dev/null, zero, urandom, stdout and stderr work, and so does process substitution")
async def devices(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        found = await ask(sandbox, "echo a > /dev/stdout; echo b > /dev/stderr; echo c > /dev/null; cat <(echo d)")
        same(found, "a\nb\nd\n", "stdout, stderr and process substitution")
        found = await ask(
            sandbox, "head -c 9 /dev/zero | wc -c; head -c 9 /dev/urandom | wc -c; echo e | tee /dev/fd/2"
        )
        same(found.split(), ["9", "9", "e", "e"], "bytes of zero and urandom; /dev/fd")


@section.check("cwd is where the command runs")
async def cwd(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        same((await sandbox.exec("pwd", timeout_s=EXEC_S, cwd="/tmp")).output, "/tmp\n", "pwd")


@section.check("a working directory that is missing, or no directory, is an error, not output")
async def bad_cwd(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        for folder in ("/no/such", "/etc/passwd"):
            await _command_error(sandbox, "true", folder, cwd=folder)
        await sandbox.exec(f"rm -r {sandbox.workdir}", timeout_s=EXEC_S, cwd="/")
        await _command_error(sandbox, "true", sandbox.workdir)
        same((await sandbox.exec("pwd", timeout_s=EXEC_S, cwd="/")).output, "/\n", "the next command")


@section.check("a shell that is missing or cannot be started is an error, not output")
async def shell_cannot_start(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        # More than the kernel takes in one string of the environment, then more than most transports take.
        for size in (131_073, 400_000):
            await _command_error(sandbox, "true", "", env={"LARGE": "x" * size})
        same(await ask(sandbox, "echo ok"), "ok\n", "the next command")
        if (await sandbox.exec("mv /bin/bash /bin/bash.gone", timeout_s=EXEC_S)).exit_code == 0:
            await _command_error(sandbox, "true", "bash")


@section.check("a NUL byte in command or environment is a clear error")
async def nul_byte(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await _command_error(sandbox, "echo \0", "NUL")
        await _command_error(sandbox, "true", "NUL", env={"A": "\0"})
        same(await ask(sandbox, "echo ok"), "ok\n", "the next command")


@section.check("a command of 200 kB runs whole, also beside a large environment")
async def long_command(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        text = "x" * 200_000
        result = await sandbox.exec(f"cat <<'EOF' | wc -c\n{text}\nEOF\n", timeout_s=EXEC_S)
        same((result.output.strip(), result.exit_code), ("200001", 0), "bytes that arrive")
        same((await sandbox.exec(f": {text}; exit 7", timeout_s=EXEC_S)).exit_code, 7, "exit code")
        fds = await sandbox.exec(f": {text}\nexec ls /proc/self/fd", timeout_s=EXEC_S)
        same(fds.output.split(), ["0", "1", "2", "3"], "descriptors of a long command")
        both = await sandbox.exec(f": {text[:50_000]}; echo ${{#E}}", timeout_s=EXEC_S, env={"E": text[:100_000]})
        same(both.output, "100000\n", "length of a variable of 100 kB beside a command of 50 kB")


@section.check("a timeout kills the whole tree, setsid daemons included, and returns what had come", alone=True)
async def timeout_kills_the_tree(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        command = (
            "echo before; (setsid env -i setsid sleep 301 &) ; setsid bash -c 'sleep 302 & disown; wait' & sleep 303"
        )
        begin = time.monotonic()
        result = await sandbox.exec(command, timeout_s=0.7)
        took = time.monotonic() - begin
        found = (result.output, result.exit_code, result.timed_out)
        same(found, ("before\n", None, True), "output, exit code, timed out")
        need(took < 4, f"a timeout of 0.7 s took {took:.1f} s")
        same(await sandbox.kill_all(), 0, "processes left running")
        same(await _sleepers(sandbox), [], "left running")


@section.check("a timeout ends a program that ignores signals and spins")
async def timeout_ends_a_spinner(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("trap '' TERM INT HUP; echo on; while :; do :; done", timeout_s=0.4)
        same((result.output, result.timed_out), ("on\n", True), "output and timed out")


@section.check("a timeout spares the background processes of earlier commands")
async def timeout_spares_earlier(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "setsid sleep 304 >/dev/null 2>&1 &")
        result = await sandbox.exec("sleep 305 & sleep 306", timeout_s=0.4)
        need(result.timed_out, "it did not time out")
        same(await _sleepers(sandbox), ["304"], "left running")


@section.check("a timeout among commands at once cuts only its own", alone=True)
async def timeout_among_others(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        slow, quick = await asyncio.gather(
            sandbox.exec("sleep 30", timeout_s=0.3), sandbox.exec("sleep 0.8; echo done", timeout_s=EXEC_S)
        )
        found = (slow.timed_out, quick.timed_out, quick.output)
        same(found, (True, False, "done\n"), "timed out, the other timed out, its output")


@section.check("a background child that holds stdout does not hold the call, and is counted", alone=True)
async def background_holds_stdout(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        begin = time.monotonic()
        result = await sandbox.exec("sleep 1000 & echo started", timeout_s=EXEC_S)
        took = time.monotonic() - begin
        need(took < 3, f"the call took {took:.1f} s")
        found = (result.output, result.exit_code, result.background)
        same(found, ("started\n", 0, 1), "output, exit code, background")
        same((await sandbox.exec("sleep 1000 & true", timeout_s=EXEC_S)).background, 2, "background after another")


@section.check("what a background child says within 0.1 s of the shell's exit is kept", alone=True)
async def late_output(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        same(await ask(sandbox, "(sleep 0.02; echo late) & true"), "late\n", "output")


@section.check("a service that goes on writing to the output of its command lives on", alone=True)
async def service_lives_on(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "(while sleep 0.05; do echo beat; date +%N > /tmp/b && mv /tmp/b /tmp/beat; done) &")
        first = await ask(sandbox, "sleep 0.4; cat /tmp/beat")
        second = await ask(sandbox, "sleep 0.4; cat /tmp/beat")
        need(first and second and first != second, f"its beat goes from {first!r} to {second!r}")


@section.check("zombies are reaped")
async def zombies(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "for i in $(seq 20); do (setsid true &) ; done; sleep 0.2")
        same(await ask(sandbox, "grep -l '^State:.Z' /proc/[0-9]*/status"), "", "zombies")


@section.check("16 commands at once run side by side, each with its own output and exit code", alone=True)
async def sixteen_at_once(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        begin = time.monotonic()
        calls = [
            sandbox.exec(f"echo {number}; sleep 0.5; echo {number}; exit {number}", timeout_s=EXEC_S)
            for number in range(_AT_ONCE)
        ]
        results = await asyncio.gather(*calls)
        took = time.monotonic() - begin
        for number, result in enumerate(results):
            found = (result.output, result.exit_code)
            same(found, (f"{number}\n{number}\n", number), f"output and exit code of command {number}")
        need(took < 0.5 * _AT_ONCE / 2, f"16 commands of 0.5 s took {took:.1f} s: they wait for each other")


@section.check("a cancelled call is killed in the sandbox")
async def cancelled(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        call = asyncio.create_task(sandbox.exec("sleep 307", timeout_s=100))
        await asyncio.sleep(0.3)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.3)
        same(await _sleepers(sandbox), [], "left running")


@section.check("kill_all counts and kills everything, a daemon that forks without end included")
async def kill_all(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "for i in 1 2 3; do setsid sleep 308 & done")
        same(await sandbox.kill_all(), 3, "killed")
        await ask(sandbox, "(while :; do sleep 0.001 & done) >/dev/null 2>&1 &")
        need(await sandbox.kill_all() >= 1, "nothing of a forking daemon was counted")
        same(await sandbox.kill_all(), 0, "killed the second time")


@section.check("a stopped sandbox says that it is gone, also to the call that waits; stop can be called again")
async def stopped(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        waiting = asyncio.create_task(sandbox.exec("sleep 100", timeout_s=100))
        await asyncio.sleep(0.2)
        await sandbox.stop()
        await sandbox.stop()
        for call in (waiting, sandbox.exec("true", timeout_s=EXEC_S)):
            try:
                await call
            except SandboxLostError:
                continue
            raise Unmet("a command in a stopped sandbox gives an answer")
