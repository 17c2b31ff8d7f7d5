"""The one episode function: training, evaluation and every other caller run an attempt by :func:`run_episode`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from typing import Literal

from termrl.agent.prompts import first_messages, format_error_text, observation_text
from termrl.agent.reply import FormatError, ParsedReply, parse_reply
from termrl.agent.types import Episode, Limits, Message, Opening, Policy, Reply, Turn
from termrl.environment.budgets import seconds
from termrl.environment.protocol import Action, Environment, Observation
from termrl.environment.verdicts import verdict_of
from termrl.errors import CapacityError, CommandError, ConfigError, PolicyError, SandboxError, TaskError
from termrl.verifier.outcomes import reward_of
from termrl.verifier.verdict import Cause, EndReason, Verdict

_Finish = Literal["whole", "length", "context", "abort", "unknown"]
_FINISH: dict[str, _Finish] = {
    **dict.fromkeys(("stop", "fence", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence"), "whole"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
    "context": "context",
    **dict.fromkeys(("abort", "aborted", "cancelled", "canceled"), "abort"),
}
_GRADED = frozenset(
    {EndReason.TASK_COMPLETE, EndReason.NO_COMMAND, EndReason.MAX_TURNS, EndReason.LENGTH, EndReason.CONTEXT}
)
_MIN_ROOM = 16  # new tokens below which a turn is not worth asking for
_CLOSE_S = 30.0
_WORDY = re.compile(r"[A-Za-z ]+")

_closing: set[asyncio.Task[None]] = set()


async def run_episode(
    environment: Environment, policy: Policy, *, task_id: str, opening: Opening, limits: Limits, seed: int
) -> Episode:
    """Let ``policy`` attempt one task, and score it by the task's own tests.

    The instruction and the task's budgets come from ``environment.reset``. A turn that was cut (by length, the
    context window, or the engine) is never run. What ends an episode is the policy's doing or the infrastructure's:
    the first is graded by the tests, the second has no reward and names its cause. Closing ``environment`` is left
    to the caller who made it, except that a cancelled episode closes it before the cancellation goes on.

    Args:
        seed: the episode's seed; turn k asks with :func:`turn_seed` ``(seed, k)``.

    Raises:
        TaskError, ConfigError: the environment cannot run such a task at all; nothing about this one attempt.
        asyncio.CancelledError: passed on.
    """
    start = time.monotonic()
    attempt = _Attempt(environment, policy, opening, limits, Episode(task_id=task_id, seed=seed))
    try:
        await attempt.run()
    except asyncio.CancelledError:
        await _close(environment)
        raise
    attempt.episode.timings["total_s"] = time.monotonic() - start
    return attempt.episode


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of one turn: 31 bits (what every engine takes) of blake2b over the episode's seed and turn."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def estimated_tokens(messages: list[Message]) -> int:
    """How many tokens new messages come to, on the high side.

    Three letters or spaces a token, one for each other byte (many vocabularies split numbers into digits), and eight
    tokens around each message.
    """
    return sum(_tokens(str(message.get("content", ""))) + 8 for message in messages)


class _Attempt:
    """The state of one running episode."""

    def __init__(
        self, environment: Environment, policy: Policy, opening: Opening, limits: Limits, episode: Episode
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._opening = opening
        self._limits = limits
        self.episode = episode
        self._messages: list[Message] = []
        self._wall_s: float | None = limits.wall_s
        self._command_timeout_s: float | None = limits.command_timeout_s
        self._format_errors = 0
        self._known: tuple[int, int] | None = None  # tokens told by the endpoint, and the messages that they cover
        names = ("admission_s", "reset_s", "generation_s", "queue_s", "exec_s", "verify_s", "total_s")
        episode.timings = dict.fromkeys(names, 0.0)

    async def run(self) -> None:
        episode = self.episode
        if await self._reset():
            episode.end_reason = await self._act()
        if episode.end_reason in _GRADED or (episode.end_reason is EndReason.TIMEOUT and self._limits.grade_cut):
            episode.verdict = await self._grade()
        elif episode.end_reason is EndReason.TIMEOUT:
            episode.verdict = Verdict.zero(Cause.WALL_CAP, f"the wall cap of {self._wall_s:g} s was reached")
        episode.reward = reward_of(episode.end_reason, episode.verdict, graded_cut=self._limits.grade_cut)

    async def _reset(self) -> bool:
        start, waited_s = time.monotonic(), 0.0
        try:
            observation = await self._environment.reset(self.episode.task_id, seed=self.episode.seed)
            waited_s = seconds(observation.info.get("admission_s")) or 0.0
        except (TaskError, ConfigError):
            raise
        except Exception as error:
            self._lost(error, Cause.ENVIRONMENT_LOST if isinstance(error, OSError) else Cause.SANDBOX_START)
            waited_s = error.waited_s if isinstance(error, CapacityError) else 0.0
            return False
        finally:
            self.episode.timings["admission_s"] = waited_s
            self.episode.timings["reset_s"] = max(time.monotonic() - start - waited_s, 0.0)
        if observation.error or not observation.success or not observation.instruction.strip():
            why = observation.error or "reset gave no instruction"
            self._no_verdict(
                EndReason.ENVIRONMENT_ERROR, _cause(observation.info.get("cause"), Cause.SANDBOX_START), why
            )
            return False
        info = observation.info
        self.episode.instruction = observation.instruction
        self.episode.info["reset"] = info
        self._messages = first_messages(self._opening, observation.instruction)
        self._wall_s = _least(self._wall_s, seconds(info.get("agent_timeout_sec")))
        self._command_timeout_s = self._command_timeout_s or seconds(info.get("command_timeout_s"))
        return True

    async def _act(self) -> EndReason:
        for index in range(self._limits.max_turns):
            if self._left_s() <= 0:
                return EndReason.TIMEOUT
            room = self._room()
            if room is not None and room < min(_MIN_ROOM, self._limits.max_tokens):
                return EndReason.CONTEXT
            max_tokens = self._limits.max_tokens if room is None else min(room, self._limits.max_tokens)
            seed = turn_seed(self.episode.seed, index)
            try:
                reply = await self._policy.chat(self._messages, max_tokens=max_tokens, seed=seed)
            except PolicyError as error:
                return self._no_verdict(EndReason.POLICY_ERROR, Cause.ENGINE_ERROR, error.message)
            end = await self._take(
                reply, self._record(reply, index, seed), clamped=max_tokens < self._limits.max_tokens
            )
            if end is not None:
                return end
        return EndReason.MAX_TURNS

    def _record(self, reply: Reply, index: int, seed: int) -> Turn:
        turn = Turn(
            index=index,
            reply=reply.content,
            finish_reason=reply.finish_reason,
            kind="cut",
            generation_s=reply.service_s,
            queue_s=reply.queue_s,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            seed=seed,
        )
        self.episode.turns.append(turn)
        self.episode.timings["generation_s"] += reply.service_s
        self.episode.timings["queue_s"] += reply.queue_s
        return turn

    async def _take(self, reply: Reply, turn: Turn, *, clamped: bool) -> EndReason | None:
        """Do what one reply asks for; returns why the episode is over, if it is."""
        match _FINISH.get(reply.finish_reason, "unknown"):
            case "length":
                return EndReason.CONTEXT if clamped else EndReason.LENGTH
            case "context":
                return EndReason.CONTEXT
            case "abort":
                return self._no_verdict(EndReason.ABORTED, Cause.CANCELLED, "the engine aborted the turn")
            case "unknown":
                why = f"finish reason {reply.finish_reason!r} does not say that the reply is whole"
                return self._no_verdict(EndReason.POLICY_ERROR, Cause.ENGINE_ERROR, why)
            case "whole":
                pass
        self._messages.append(reply.message)
        if reply.prompt_tokens is not None and reply.completion_tokens is not None:
            self._known = (reply.prompt_tokens + reply.completion_tokens, len(self._messages))
            if self._known[0] > (self._limits.context_window or math.inf):
                return EndReason.CONTEXT  # whoever set the window trains on nothing beyond it
        parsed = parse_reply(reply.content, lenient=self._limits.lenient)
        turn.kind = parsed.kind
        if parsed.error is not None:
            return self._feed_back(reply, turn, parsed)
        if parsed.command is None:
            return EndReason.TASK_COMPLETE
        if self._left_s() <= 0:
            turn.kind = "cut"
            return EndReason.TIMEOUT
        turn.command = parsed.command
        end = await self._execute(turn, parsed.command)
        if end is not None:
            return end
        if parsed.complete:
            return EndReason.TASK_COMPLETE
        self._answer(reply, turn.observation)
        return None

    def _feed_back(self, reply: Reply, turn: Turn, parsed: ParsedReply) -> EndReason | None:
        error = FormatError.TOOL_CALL if reply.message.get("tool_calls") else parsed.error or FormatError.NO_COMMAND
        turn.error = error.value
        self._format_errors += 1
        if self._format_errors > self._limits.max_format_errors:
            return EndReason.NO_COMMAND
        turn.observation = format_error_text(error, parsed.detail)
        self._answer(reply, turn.observation)
        return None

    def _answer(self, reply: Reply, text: str) -> None:
        """Append what the policy reads next; each native tool call must get a result of its own."""
        calls = reply.message.get("tool_calls") or ()
        ids = [call.get("id") for call in calls if isinstance(call, dict)]
        if ids:
            self._messages += [{"role": "tool", "tool_call_id": id_ or "", "content": text} for id_ in ids]
        else:
            self._messages.append({"role": "user", "content": text})

    async def _execute(self, turn: Turn, command: str) -> EndReason | None:
        left_s = self._left_s()
        timeout_s = self._command_timeout_s
        cut_by_wall = timeout_s is not None and left_s < timeout_s
        if cut_by_wall:
            timeout_s = left_s
        ask = cut_by_wall or self._limits.command_timeout_s is not None
        action = Action(action_type="exec", command=command, wait_seconds=timeout_s if ask else None)
        start = time.monotonic()
        try:
            observation = await self._environment.step(action)
        except CommandError as error:
            observation = Observation(action_type="exec", success=False, error=error.message)
        except Exception as error:
            return self._lost(error, Cause.ENVIRONMENT_LOST)
        info = observation.info
        turn.exec_s = seconds(info.get("duration_s")) or time.monotonic() - start
        self.episode.timings["exec_s"] += turn.exec_s
        turn.exit_code = _integer(info.get("exit_code"))
        turn.timed_out = bool(info.get("timed_out"))
        turn.truncated_bytes = _integer(info.get("truncated_bytes")) or 0
        turn.background = _integer(info.get("background")) or 0
        turn.error = observation.error
        turn.observation = observation_text(
            observation.output,
            limit=self._limits.output_chars,
            exit_code=turn.exit_code,
            timed_out=turn.timed_out,
            timeout_s=timeout_s,
            background=turn.background,
            oom=bool(info.get("oom")),
            error="" if turn.timed_out else observation.error,
        )
        return EndReason.TIMEOUT if turn.timed_out and cut_by_wall else None

    async def _grade(self) -> Verdict:
        start = time.monotonic()
        action = Action(action_type="evaluate", wait_seconds=self._limits.verify_timeout_s)
        try:
            return verdict_of(await self._environment.step(action))
        except (TaskError, ConfigError):
            raise
        except Exception as error:
            self.episode.error = _line(error)
            return Verdict.missing(_cause(_cause_name(error), Cause.ENVIRONMENT_LOST), self.episode.error)
        finally:
            self.episode.timings["verify_s"] = time.monotonic() - start

    def _left_s(self) -> float:
        """Seconds left of the wall cap, which counts engine service and commands only."""
        if self._wall_s is None:
            return math.inf
        return self._wall_s - self.episode.timings["generation_s"] - self.episode.timings["exec_s"]

    def _room(self) -> int | None:
        """New tokens that still fit, where both the window and the endpoint's own count are known."""
        if self._limits.context_window is None or self._known is None:
            return None
        tokens, covered = self._known
        return self._limits.context_window - tokens - estimated_tokens(self._messages[covered:])

    def _lost(self, error: Exception, cause: Cause) -> EndReason:
        return self._no_verdict(EndReason.ENVIRONMENT_ERROR, _cause(_cause_name(error), cause), _line(error))

    def _no_verdict(self, end_reason: EndReason, cause: Cause, why: str) -> EndReason:
        self.episode.end_reason = end_reason
        self.episode.error = why
        self.episode.verdict = Verdict.missing(cause, why)
        return end_reason


async def _close(environment: Environment) -> None:
    """Close, bounded in time, and to the end even if the cancellation is repeated."""
    task = asyncio.ensure_future(environment.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({task}, timeout=_CLOSE_S)


def _tokens(text: str) -> int:
    whole = len(text.encode("utf-8", "replace"))
    wordy = sum(map(len, _WORDY.findall(text)))
    return math.ceil(wordy / 3) + whole - wordy


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, SandboxError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _cause_name(error: Exception) -> str | None:
    return error.cause if isinstance(error, SandboxError) else None


def _cause(name: object, default: Cause) -> Cause:
    try:
        return Cause(name)
    except ValueError:
        return default


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _least(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)
