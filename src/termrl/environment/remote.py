"""Environments on other machines: sessions on an OpenEnv server, with verdicts that can be relied on."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from typing import Literal

from termrl.environment.address import Address, read_token
from termrl.environment.budgets import Budgets, seconds
from termrl.environment.client import ClientOptions, EnvClient
from termrl.environment.legacy import CHECK_S, COMMAND_TIMEOUT_S, TESTS_FOUND, LegacyShell, read
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.environment.remote_config import RemoteSettings
from termrl.environment.verdicts import verdict_info, verdict_of
from termrl.errors import (
    CapacityError,
    CommandError,
    ConfigError,
    EnvironmentLostError,
    SandboxStartError,
    ServerError,
    TaskError,
    TermrlError,
)
from termrl.verifier.attribution import attribute
from termrl.verifier.verdict import INFRASTRUCTURE_CAUSES, Cause, Outcome, Verdict

ServerKind = Literal["termrl", "canonical", "legacy"]
"""What a server does: sends whole verdicts; scores by test.sh; neither, so that the adapter scores."""

_VERIFY_S = 900.0
_BEFORE_RESET = "there is no episode: reset comes first"
_RESET_FAILED = "the last reset failed: there is no episode to act in or to evaluate"
_DONE = "the episode is done: reset starts another"
_CLOSED = "the environment is closed: reset starts another episode"
_RELEASED = "the session was given up while the verdict was looked into: reset starts another episode"
_PLAIN_PATH = re.compile(r"/[\w./-]*", re.ASCII)


def server_kind(observation: Observation, settings: RemoteSettings) -> ServerKind:
    """What the server of a reset's ``observation`` is, by the budgets that it names.

    Servers of ours name ``agent_timeout_sec``, those with a canonical ``evaluate`` ``verifier_timeout_sec``, older
    ones neither. ``fidelity`` overrides the last step.
    """
    if settings.fidelity == "adapter":
        return "legacy"
    if "agent_timeout_sec" in observation.info:
        return "termrl"
    if settings.fidelity == "server" or "verifier_timeout_sec" in observation.info:
        return "canonical"
    return "legacy"


class RemoteEnvironment(Environment):
    """One session on a server. ``reset`` takes a slot, waiting for one if need be, and keeps it until ``close``.

    A lost connection raises :class:`~termrl.errors.EnvironmentLostError` from the call that it is lost in and from
    every later one, until the next ``reset``, which opens a new session. Verdicts are in ``info["verdict"]``, whoever
    scored; a missing one that the server did not look into is attributed here, in sessions of its own.
    """

    def __init__(self, url: str, settings: RemoteSettings, *, token: str | None, attributes: bool = True) -> None:
        """Make a session; nothing is opened before :meth:`reset`.

        Args:
            attributes: look into missing verdicts; sessions that do so for others leave theirs missing.
        """
        self.admission_s = settings.capacity_wait_s
        self._url = url
        self._settings = settings
        self._token = token
        self._attributes = attributes
        self._options = ClientOptions(
            token=token,
            budgets=Budgets(reset_s=settings.reset_s, grace_s=settings.grace_s),
            connect_timeout_s=settings.connect_timeout_s,
            capacity_wait_s=settings.capacity_wait_s,
            ping_interval_s=settings.ping_interval_s,
            ping_timeout_s=settings.ping_timeout_s,
        )
        self._shell = LegacyShell()
        self._client: EnvClient | None = None
        self._kind: ServerKind = "canonical"
        self._exposed = False
        self._refusal: str | None = _BEFORE_RESET
        self._state = State()

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        """Start ``task_id``; the session before it is used again if it is still there.

        Raises:
            CapacityError: no slot came free in time.
            SandboxStartError: the server could not start the task.
            EnvironmentLostError: the server is not there, or does not keep to the protocol.
            ConfigError: the server refuses the token; or the policy could read its tests, which is not allowed; or
                its tests or its workdir are not where the settings say.
        """
        self._refusal, self._state = _RESET_FAILED, State()
        try:
            observation = await self._begun(task_id, seed, episode_id or uuid.uuid4().hex)
        except BaseException:
            # a server whose reset failed may still hold the sandbox of the episode before
            await self._release(_RESET_FAILED)
            raise
        if self._refusal is not None:
            await self._release(_RESET_FAILED)
        return observation

    async def step(self, action: Action) -> Observation:
        """Run one action.

        Raises:
            EnvironmentLostError: the session is lost.
            CommandError: the server cannot take such an action; the session goes on.
        """
        self._state.step_count += 1
        self._state.last_action_type = action.action_type
        self._state.last_command = action.command
        if action.action_type == "close":
            await self._release(_CLOSED)
            observation = self._observe(action, output="closed", done=True)
        elif self._refusal is not None or self._client is None:
            observation = self._refused(action, self._refusal or _BEFORE_RESET)
        elif action.action_type == "evaluate":
            observation = await self._evaluate(action, self._client)
        else:
            observation = await self._act(action, self._client)
        self._state.session_id = observation.session_id
        self._state.last_output = observation.output
        return observation

    def state(self) -> State:
        """A copy of where the session stands, as far as its own calls tell."""
        return self._state.model_copy()

    async def close(self) -> None:
        """End the session. Idempotent, and within seconds whatever the server does."""
        await self._release(_CLOSED)

    async def _begun(self, task_id: str, seed: int | None, episode_id: str) -> Observation:
        client, observation = await self._reset_somewhere(task_id, seed, episode_id)
        if observation.error or not observation.success:
            return observation
        self._kind = server_kind(observation, self._settings)
        self._exposed = await self._tests_exposed(observation, client)
        if self._exposed and not self._settings.allow_exposed_tests:
            raise ConfigError(
                f"{client.address.http}: the policy can read this server's tests while it acts",
                hint="--allow-exposed-tests (environment.allow_exposed_tests = true) takes its verdicts all the same",
            )
        if self._kind != "termrl":
            observation.info.setdefault("command_timeout_s", COMMAND_TIMEOUT_S)
            observation.info.setdefault("verifier_timeout_sec", _VERIFY_S)
        if client.waited_s:
            observation.info["admission_s"] = client.waited_s
        self._refusal = None
        self._state = State(
            episode_id=episode_id,
            task_id=observation.task_id or task_id,
            task_path=observation.task_path,
            terminal_ready=True,
        )
        return observation

    async def _reset_somewhere(self, task_id: str, seed: int | None, episode_id: str) -> tuple[EnvClient, Observation]:
        """Reset in the session that there is, if it can take the task, else in a new one."""
        try:
            if self._client is not None and self._client.connected:
                try:
                    self._client.waited_s = 0.0
                    return self._client, await self._client.reset(task_id, seed=seed, episode_id=episode_id)
                except CapacityError:
                    pass
            await self._release(_RESET_FAILED)
            client = self._client = EnvClient(self._url, self._options)
            await client.connect()
            return client, await client.reset(task_id, seed=seed, episode_id=episode_id)
        except ServerError as error:
            raise _reset_error(task_id, error) from None

    async def _tests_exposed(self, observation: Observation, client: EnvClient) -> bool:
        """Whether the policy could read the tests. Servers of ours say so themselves, verdict by verdict."""
        if self._kind == "termrl":
            return False
        # a server in the policy's own file system keeps them in the task's folder
        beside = observation.task_path.rstrip("/") + "/tests"
        places = [self._settings.legacy_tests_src, *([beside] if _PLAIN_PATH.fullmatch(beside) else [])]
        if self._kind == "legacy":
            if self._settings.allow_exposed_tests:
                self._shell = await self._legacy_shell(client, places)
            return True
        # it runs commands where it should, but with the faults of the older ones
        self._shell = LegacyShell()
        paths = ["/tests/test.sh", *places]
        found = " || ".join(f"[ -e {path} ]" for path in paths)
        mark = secrets.token_hex(8)
        answer = await client.step(Action(command=f"if {found}; then echo {mark}-1; else echo {mark}-0; fi"))
        return f"{mark}-0" not in answer.output

    async def _legacy_shell(self, client: EnvClient, places: list[str]) -> LegacyShell:
        """The shell that runs commands in the workdir and has its tests in the first of ``places`` with a test.sh."""
        settings = self._settings
        for place in places:
            shell = LegacyShell(workdir=settings.legacy_workdir, tests_src=place)
            action, marker = shell.check()
            answer = await client.step(action)
            ran = read(answer.output, marker=marker, timeout_s=CHECK_S, duration_s=0.0)
            if answer.error:
                raise EnvironmentLostError(f"no command can be run: {answer.error}")
            if ran.exit_code is None:
                raise ConfigError(
                    f"{client.address.http}: no command can be run in {settings.legacy_workdir or 'its folder'}: "
                    f"{' '.join(ran.output.split())[:200] or 'no answer'}",
                    hint="environment.legacy_workdir names the folder; empty: the server's own",
                )
            if ran.output == TESTS_FOUND:
                return shell
        raise ConfigError(
            f"{client.address.http}: there is no test.sh in {' or '.join(places)}, so the adapter cannot score",
            hint="environment.legacy_tests_src names the folder; fidelity = server leaves scoring to the server",
        )

    async def _act(self, action: Action, client: EnvClient) -> Observation:
        try:
            if self._kind == "termrl" or action.action_type != "exec":
                return await client.step(action)
            if not action.block:
                return await client.step(self._shell.background(action))
            timeout_s = seconds(action.wait_seconds) or client.budgets.command_s or COMMAND_TIMEOUT_S
            sent, marker = self._shell.command(action, timeout_s)
            started = time.monotonic()
            answer = await client.step(sent)
            ran = read(answer.output, marker=marker, timeout_s=timeout_s, duration_s=time.monotonic() - started)
            return self._shell.observed(answer, ran, timeout_s)
        except ServerError as error:
            if error.code == "VALIDATION_ERROR":
                raise CommandError(f"the environment server does not take it: {error.reason}") from None
            error.cause = _told_cause(error, error.cause)
            raise

    async def _evaluate(self, action: Action, client: EnvClient) -> Observation:
        answer, first = await self._scored(action, client)

        async def again() -> Verdict:
            # what answers no command is lost, and nobody's fault
            alive = await client.step(Action(command="echo"))
            if alive.error:
                return Verdict.missing(Cause.SANDBOX_LOST, f"the sandbox answers no command: {alive.error}")
            return (await self._scored(action, client))[1]

        async def fresh() -> Verdict:
            await self._release(_RELEASED)
            other = RemoteEnvironment(self._url, self._settings, token=self._token, attributes=False)
            try:
                await other.reset(self._state.task_id)
                return verdict_of(await other.step(action))
            finally:
                await other.close()

        verdict = first
        if self._attributes and verdict.attribution is None:
            verdict = await attribute(verdict, again=again, fresh=fresh, mode=self._settings.missing_verdict)
        if verdict.outcome is not Outcome.NO_VERDICT:
            self._refusal = _DONE
        if self._kind == "termrl" and verdict is first and answer.info.get("verdict") is not None:
            trusted = verdict.outcome is not Outcome.NO_VERDICT or answer.reward is None
            if trusted:
                return answer
        return self._verdict(action, verdict, answer)

    async def _scored(self, action: Action, client: EnvClient) -> tuple[Observation, Verdict]:
        """One run of the tests: the server's answer, and what it is worth."""
        if self._kind == "legacy":
            budget_s = seconds(action.wait_seconds) or client.budgets.verify_s or _VERIFY_S
            sent, outer, inner = self._shell.scoring(budget_s)
            started = time.monotonic()
            answer = await client.step(sent)
            ran = read(
                answer.output, marker=outer, timeout_s=sent.wait_seconds or 0.0, duration_s=time.monotonic() - started
            )
            return answer, self._shell.verdict(ran, inner, budget_s)
        budgets = client.budgets
        deadline_s = budgets.of(action) if self._kind == "termrl" else budgets.once(action)
        try:
            answer = await client.step(action, deadline_s=deadline_s)
        except ServerError as error:
            if error.code != "EXECUTION_ERROR" or self._kind == "termrl":
                raise
            answer = self._observe(action, success=False, error=error.reason, reward=None)
        if self._kind == "termrl" and answer.info.get("verdict") is None:
            return answer, Verdict.missing(Cause.ENVIRONMENT_LOST, answer.error or "the server sent no verdict")
        verdict = verdict_of(answer)
        return answer, verdict.model_copy(update={"integrity": "exposed"}) if self._exposed else verdict

    def _verdict(self, action: Action, verdict: Verdict, answer: Observation) -> Observation:
        scored = verdict.outcome is not Outcome.NO_VERDICT
        info = {**answer.info, **verdict_info(verdict)}
        return self._observe(
            action,
            output=verdict.output_tail,
            success=scored,
            error="" if scored else f"no verdict: {verdict.cause}: {verdict.detail}",
            info=info,
            reward=verdict.reward if verdict.raw_reward is None else verdict.raw_reward,
            done=scored,
        )

    def _refused(self, action: Action, why: str) -> Observation:
        if action.action_type == "evaluate":
            return self._verdict(action, Verdict.missing(Cause.ENVIRONMENT_LOST, why), Observation())
        return self._observe(action, success=False, error=why, done=self._refusal == _DONE)

    def _observe(self, action: Action, *, reward: float | None = 0.0, **fields: object) -> Observation:
        base = Observation(
            task_id=self._state.task_id,
            task_path=self._state.task_path,
            action_type=action.action_type,
            session_id=action.session_id,
            reward=reward,
        )
        return base.model_copy(update=fields)

    async def _release(self, refusal: str) -> None:
        self._refusal = refusal
        self._state.terminal_ready = False
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class RemoteEnvironmentFactory:
    """Makes the sessions on one server. Many may be live at once, as many as the server admits."""

    def __init__(self, url: str, *, settings: RemoteSettings | None = None) -> None:
        """Read URL and token; nothing is opened.

        Raises:
            ConfigError: the URL is none, holds credentials, or the token file cannot be read.
        """
        self.address = Address.of(url)
        self.settings = settings or RemoteSettings()
        self._token = read_token(self.settings.token_file)
        self._url = url

    def create(self) -> RemoteEnvironment:
        """A new session, not yet reset."""
        return RemoteEnvironment(self._url, self.settings, token=self._token)

    async def fresh(self, task_id: str) -> RemoteEnvironment:
        """An untouched session of ``task_id``, already reset, whose own missing verdicts stay missing.

        Raises as :meth:`RemoteEnvironment.reset`.
        """
        environment = RemoteEnvironment(self._url, self.settings, token=self._token, attributes=False)
        await environment.reset(task_id)
        return environment


def _reset_error(task_id: str, error: ServerError) -> TermrlError:
    """What a coded answer to a reset means. Servers of ours add cause and hint; errors of the task have no cause."""
    hint = error.details.get("hint")
    hint = hint if isinstance(hint, str) else None
    if error.code == "EXECUTION_ERROR" and "cause" in error.details and error.details["cause"] is None:
        return TaskError(error.reason, hint=hint)
    if error.code in ("EXECUTION_ERROR", "FACTORY_ERROR", "SESSION_ERROR"):
        reason = error.reason or error.code
        failed = SandboxStartError(f"{task_id}: the environment server could not start it: {reason}", hint=hint)
        failed.cause = _told_cause(error, failed.cause)
        return failed
    return error


def _told_cause(error: ServerError, default: str) -> str:
    """The infrastructure's cause that a server of ours names."""
    told = error.details.get("cause")
    return told if isinstance(told, str) and told in INFRASTRUCTURE_CAUSES else default
