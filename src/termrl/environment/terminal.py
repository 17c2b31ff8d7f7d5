"""The environment in this process: a task's sandbox to act in and its tests to be scored by."""

from __future__ import annotations

import difflib
import posixpath
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.environment.sessions import Sessions, SessionView
from termrl.environment.verdicts import verdict_info
from termrl.errors import CommandError, TaskError
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT, Sandbox, SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.attribution import MissingVerdict, attribute
from termrl.verifier.cleanroom import verify_in_clean_room
from termrl.verifier.rules import VerifyRules, apply_rules
from termrl.verifier.surroundings import verifier_variables
from termrl.verifier.tamper import Baseline, take_baseline
from termrl.verifier.verdict import Cause, Outcome, Verdict
from termrl.verifier.verify import verify

COMMAND_TIMEOUT_S = 20.0
MAX_FILE_BYTES = 16 * 1024 * 1024
DEFAULT_SESSION = "main"

_RULES = VerifyRules()

_BEFORE_RESET = "there is no episode: reset comes first"
_RESET_FAILED = "the last reset failed: there is no episode to act in or to evaluate"
_DONE = "the episode is done: reset starts another"
_CLOSED = "the environment is closed: reset starts another episode"
_RELEASED = "the sandbox was given up while the verdict was looked into: reset starts another episode"


class TerminalEnvironment(Environment):
    """One session over a sandbox provider and the verifier, with tbench2's actions and observations.

    What the wire's fields mean here, beyond :mod:`termrl.environment.protocol`:

    - ``exec``: ``wait_seconds`` replaces ``command_timeout_s`` for this one command. A command that ran is a
      success whatever its exit code (``info["exit_code"]``); one that timed out or can never run (a NUL byte, a
      missing working directory) is not, and says so in ``error``. ``block=False`` starts a background session.
    - ``write`` sends ``command`` and a newline to a session, ``view`` gives its output since the last look, ``wait``
      the same once it ended or after ``wait_seconds``, ``kill`` ends it; ``info`` has ``running``, ``exit_code``.
    - ``write_file`` writes ``content``; a relative ``file_path`` is below the workdir.
    - ``evaluate``: ``wait_seconds`` replaces the task's verifier budget. A missing verdict is attributed, and a
      verdict whose tamper signals the rules list is zeroed or re-checked; when that takes untouched sandboxes, this
      session's own is released first.
    - A step that cannot be taken (before a reset, after a failed one, after done) is an observation with
      ``success`` false and ``error``, and without a reward if it is an ``evaluate``.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        provider: SandboxProvider,
        *,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        rules: VerifyRules = _RULES,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        fresh: Callable[[str], Awaitable[Environment]] | None = None,
    ) -> None:
        """Make a session; nothing starts before :meth:`reset`.

        Args:
            tasks: the tasks by id; the only names that ``reset`` takes.
            command_timeout_s: seconds for one command.
            rules: what is done about missing verdicts and tamper signals.
            output_limit: bytes of output kept of one command, head and tail.
            fresh: gives an environment reset to the task that nothing has acted in; by default another session
                on the same provider.
        """
        self._tasks = tasks
        self._provider = provider
        self._command_timeout_s = command_timeout_s
        self._rules = rules
        self._output_limit = output_limit
        self._fresh = fresh or self._sibling
        self._task: Task | None = None
        self._sandbox: Sandbox | None = None
        self._sessions: Sessions | None = None
        self._baseline: Baseline | None = None
        self._refusal: str | None = _BEFORE_RESET
        self._done = False
        self._state = State()

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        """Start ``task_id`` in a fresh sandbox; whatever went before is gone, also when this fails.

        Raises:
            TaskError: no such task, it changed on disk since it was loaded, the provider refuses it, or it needs a host
                variable that is not set.
            SandboxStartError: the machine could not start the sandbox.
        """
        await self._release(_RESET_FAILED)
        self._task, self._done, self._state = None, False, State()
        task = self._find(task_id)
        task.check_unchanged()
        verifier_variables(task)
        self._sandbox = await self._provider.create(task.resolved_sandbox())
        self._sessions = Sessions(self._sandbox, output_limit=self._output_limit)
        self._baseline = await take_baseline(self._sandbox, task)
        self._task, self._refusal = task, None
        self._state = State(
            episode_id=episode_id or uuid.uuid4().hex,
            task_id=task.id,
            task_path=str(task.path),
            terminal_ready=True,
        )
        info = {
            "command_timeout_s": self._command_timeout_s,
            "verifier_timeout_sec": task.verifier_timeout_s,
            "agent_timeout_sec": task.agent_timeout_s,
            "docker_image": task.sandbox.image,
            "workdir": self._sandbox.workdir,
        }
        return self._observe("reset", instruction=task.instruction, info=info)

    async def step(self, action: Action) -> Observation:
        """Run one action.

        Raises:
            SandboxError: the sandbox was lost (not from ``evaluate``, which gives a missing verdict then).
            TaskError: from ``evaluate``: the task changed on disk since it was loaded.
        """
        self._state.step_count += 1
        self._state.last_action_type = action.action_type
        self._state.last_command = action.command
        if action.session_id is not None:
            self._state.session_id = action.session_id
        if action.action_type == "close":
            observation = await self._close_action()
        elif self._refusal is not None or self._task is None or self._sandbox is None or self._sessions is None:
            observation = self._refused(action, self._refusal or _BEFORE_RESET)
        elif action.action_type == "evaluate":
            observation = await self._evaluate(action, self._task, self._sandbox)
        else:
            try:
                observation = await self._act(action, self._sandbox, self._sessions)
            except CommandError as error:
                observation = self._failed(action, error.message)
        self._state.last_output = observation.output
        return observation

    def state(self) -> State:
        """A copy of where the session stands."""
        return self._state.model_copy()

    async def close(self) -> None:
        """End the sandbox. Idempotent; a later reset starts anew."""
        await self._release(_CLOSED)

    async def _act(self, action: Action, sandbox: Sandbox, sessions: Sessions) -> Observation:
        session_id = action.session_id or ""
        match action.action_type:
            case "exec" if action.block:
                return await self._exec(action, sandbox)
            case "exec":
                started = await sessions.start(action.session_id or DEFAULT_SESSION, action.command)
                return self._session(action, started, action.session_id or DEFAULT_SESSION)
            case "write":
                return self._session(action, await sessions.write(session_id, action.command), session_id)
            case "view":
                return self._session(action, await sessions.view(session_id), session_id)
            case "wait":
                seconds = max(action.wait_seconds or 0.0, 0.0)
                return self._session(action, await sessions.wait(session_id, seconds), session_id)
            case "kill":
                await sessions.kill(session_id)
                return self._observe("kill", output=f"killed session {session_id}", session_id=session_id)
            case _:
                return await self._write_file(action, sandbox)

    async def _exec(self, action: Action, sandbox: Sandbox) -> Observation:
        timeout_s = self._command_timeout_s if action.wait_seconds is None else max(action.wait_seconds, 0.001)
        result = await sandbox.exec(action.command, timeout_s=timeout_s, output_limit=self._output_limit)
        info = asdict(result)
        output = info.pop("output")
        error = f"the command timed out after {timeout_s:g} s and was killed" if result.timed_out else ""
        return self._observe("exec", output=output, success=not error, error=error, info=info)

    async def _write_file(self, action: Action, sandbox: Sandbox) -> Observation:
        data = action.content.encode("utf-8", "surrogateescape")
        if not action.file_path or "\0" in action.file_path:
            return self._failed(action, "write_file needs a file_path without NUL bytes")
        if len(data) > MAX_FILE_BYTES:
            return self._failed(action, f"content is over {MAX_FILE_BYTES} bytes")
        target = posixpath.join(sandbox.workdir, action.file_path)
        try:
            await sandbox.put_bytes(data, target)
        except (OSError, ValueError) as error:
            return self._failed(action, f"{target} cannot be written: {error}")
        return self._observe("write_file", output=f"wrote {len(data)} bytes to {target}")

    async def _evaluate(self, action: Action, task: Task, sandbox: Sandbox) -> Observation:
        async def verify_here() -> Verdict:
            return await verify(sandbox, task, timeout_s=action.wait_seconds, baseline=self._baseline)

        async def verify_untouched() -> Verdict:
            await self._release(_RELEASED)
            environment = await self._fresh(task.id)
            try:
                observation = await environment.step(action)
            finally:
                await environment.close()
            return Verdict.model_validate(observation.info["verdict"])

        async def another() -> Sandbox:
            await self._release(_RELEASED)
            return await self._provider.create(task.resolved_sandbox())

        async def clean_room() -> Verdict:
            return await verify_in_clean_room(sandbox, task, fresh=another, timeout_s=action.wait_seconds)

        task.check_unchanged()
        mode: MissingVerdict = "drop" if task.tests_use_network else self._rules.missing_verdict
        verdict = await attribute(await verify_here(), again=verify_here, fresh=verify_untouched, mode=mode)
        verdict = await apply_rules(verdict, self._rules, clean_room=clean_room)
        if verdict.outcome is Outcome.NO_VERDICT:
            return self._unscored(action, verdict)
        self._refusal, self._done = _DONE, True
        reward = verdict.reward if verdict.raw_reward is None else verdict.raw_reward
        return self._observe("evaluate", output=verdict.output_tail, info=verdict_info(verdict), reward=reward)

    async def _close_action(self) -> Observation:
        await self._release(_CLOSED)
        self._done = True
        return self._observe("close", output="closed")

    async def _release(self, refusal: str) -> None:
        self._refusal = refusal
        sandbox, self._sandbox, self._sessions = self._sandbox, None, None
        self._state.terminal_ready = False
        if sandbox is not None:
            await sandbox.stop()

    async def _sibling(self, task_id: str) -> Environment:
        environment = TerminalEnvironment(
            self._tasks,
            self._provider,
            command_timeout_s=self._command_timeout_s,
            rules=replace(self._rules, missing_verdict="drop"),
            output_limit=self._output_limit,
        )
        await environment.reset(task_id)
        return environment

    def _find(self, task_id: str) -> Task:
        try:
            return self._tasks[task_id]
        except KeyError:
            near = difflib.get_close_matches(task_id, list(self._tasks), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the set has {len(self._tasks)} tasks; paths are no ids"
            raise TaskError(f"there is no task {task_id[:120]!r}", hint=hint) from None

    def _session(self, action: Action, view: SessionView, session_id: str) -> Observation:
        info = {"running": view.running, "exit_code": view.exit_code, "truncated_bytes": view.truncated_bytes}
        self._state.session_id = session_id
        return self._observe(action.action_type, output=view.output, info=info, session_id=session_id)

    def _refused(self, action: Action, why: str) -> Observation:
        if action.action_type == "evaluate":
            return self._unscored(action, Verdict.missing(Cause.ENVIRONMENT_LOST, why))
        return self._failed(action, why)

    def _failed(self, action: Action, why: str) -> Observation:
        return self._observe(action.action_type, success=False, error=why, session_id=action.session_id)

    def _unscored(self, action: Action, verdict: Verdict) -> Observation:
        error = f"no verdict: {verdict.cause}: {verdict.detail}"
        info, output = verdict_info(verdict), verdict.output_tail
        return self._observe("evaluate", output=output, success=False, error=error, info=info, reward=None)

    def _observe(self, action_type: str, *, reward: float | None = 0.0, **fields: Any) -> Observation:
        fields.setdefault("session_id", self._state.session_id)
        return Observation(
            task_id=self._state.task_id,
            task_path=self._state.task_path,
            action_type=action_type,
            reward=reward,
            done=self._done,
            **fields,
        )


class LocalEnvironmentFactory:
    """Makes the sessions of one task set on one provider. Many may be live at once."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        provider: SandboxProvider,
        *,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        rules: VerifyRules = _RULES,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> None:
        """Arguments as for :class:`TerminalEnvironment`. The provider stays its caller's to close."""
        self._tasks = tasks
        self._provider = provider
        self._command_timeout_s = command_timeout_s
        self._rules = rules
        self._output_limit = output_limit

    def create(self) -> Environment:
        """A new session, not yet reset."""
        return self._make(self._rules)

    async def fresh(self, task_id: str) -> Environment:
        """An untouched session of ``task_id``, already reset, whose own missing verdicts stay missing.

        Raises:
            TaskError: no such task.
            SandboxStartError: the sandbox could not be started.
        """
        environment = self._make(replace(self._rules, missing_verdict="drop"))
        await environment.reset(task_id)
        return environment

    def _make(self, rules: VerifyRules) -> Environment:
        return TerminalEnvironment(
            self._tasks,
            self._provider,
            command_timeout_s=self._command_timeout_s,
            rules=rules,
            output_limit=self._output_limit,
            fresh=self.fresh,
        )
