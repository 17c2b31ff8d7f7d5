"""The agent function: one episode per sample, in miles' policy session, and what ends those that are not wanted."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from termrl.agent.episode import run_episode
from termrl.agent.policy import ChatPolicy
from termrl.agent.types import Episode, Message, Policy, Reply
from termrl.errors import SandboxError, TermrlError
from termrl.integrations.miles.call import Call
from termrl.integrations.miles.outcome import metadata_of, nothing
from termrl.integrations.miles.parts import Parts, shared_parts
from termrl.integrations.miles.report import TALLY
from termrl.integrations.miles.settings import AgentSettings, read_settings
from termrl.rollout.bounded import BoundedEnvironment, Bounds, Pulse, closing
from termrl.verifier.causes import REPLAYED_CAUSES
from termrl.verifier.verdict import Cause, EndReason

log = logging.getLogger(__name__)

_ABORT_S = 30.0
# the wait for a slot was long enough by itself
_RETRIED = REPLAYED_CAUSES - {Cause.CAPACITY}

_running: dict[asyncio.Task[dict[str, Any]], asyncio.AbstractEventLoop] = {}


async def run(
    base_url: str,
    prompt: Any,
    request_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Play one episode in the policy session at ``base_url``.

    Never raises for what befalls one episode: miles keeps the sample of an agent function that raised. What has no
    verdict comes back with ``reward`` ``None``, and :func:`~termrl.integrations.miles.reward.reward_func` then marks
    the sample as aborted.

    Args:
        base_url: ``http://ip:port/sessions/<id>``.
        prompt: the messages before the task's instruction.
        request_kwargs: sampling parameters, named as chat completions name them.
        metadata: the sample's; ``task_id`` names the task, ``max_seq_len`` the context window.
        kwargs: whatever later versions of miles may add.

    Returns:
        What is merged into the sample's metadata (:mod:`termrl.integrations.miles.outcome`).
    """
    task = asyncio.ensure_future(_episode(base_url, prompt, request_kwargs, metadata))
    _running[task] = asyncio.get_running_loop()
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    finally:
        del _running[task]
    if task.cancelled():
        result = nothing(EndReason.ABORTED, Cause.CANCELLED, "aborted by miles")
    elif error := task.exception():
        result = _failed(error)
    else:
        result = task.result()
    TALLY.ended(result)
    return result


async def abort(args: Any = None) -> None:
    """End every running episode of this process; return once their sandboxes are gone, or after a bounded time."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Task[dict[str, Any]]]] = {}
    for task, loop in list(_running.items()):
        by_loop.setdefault(loop, []).append(task)
    if by_loop:
        log.info("aborting %d running episodes", sum(map(len, by_loop.values())))
    here = asyncio.get_running_loop()
    await asyncio.gather(
        *(
            _end(tasks) if loop is here else asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end(tasks), loop))
            for loop, tasks in by_loop.items()
        )
    )


async def _end(tasks: list[asyncio.Task[dict[str, Any]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_ABORT_S)


async def _episode(
    base_url: str, prompt: Any, request_kwargs: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    settings = read_settings(os.environ)
    call = Call.of(base_url, prompt, request_kwargs, metadata, external_host=settings.external_host)
    async with shared_parts() as parts:
        client = await parts.client(call.policy_url, timeout_s=settings.message_timeout_s)
        policy = _SessionPolicy(
            ChatPolicy(
                client,
                model=settings.model_name,
                temperature=call.temperature,
                top_p=call.top_p,
                base_url=call.policy_url,
                extra_body=call.extra_body,
            ),
            seeded=call.seeded,
        )
        lost: list[str] = []
        while True:
            episode = await _try(parts, policy, call, settings)
            cause = None if episode.verdict is None else episode.verdict.cause
            # one policy session a sample: once a turn was asked for, another try would begin in its midst
            if policy.asked or cause not in _RETRIED or len(lost) >= settings.retries:
                return metadata_of(episode, lost=lost)
            log.warning("%s: trying again: %s", call.task_id, episode.error)
            lost.append(str(cause))
            await asyncio.sleep(settings.retry_wait_s * 2 ** (len(lost) - 1))


async def _try(parts: Parts, policy: Policy, call: Call, settings: AgentSettings) -> Episode:
    """One episode in an environment of its own, which is closed on every path."""
    bounds = Bounds(reset_s=settings.remote.reset_s, grace_s=settings.remote.grace_s)
    limits = settings.limits(max_tokens=call.max_tokens, context_window=call.context_window)
    inner = (await parts.environments(settings)).create()
    environment = BoundedEnvironment(inner, Pulse(bounds), command_timeout_s=settings.command_timeout_s)
    async with closing(environment):
        return await run_episode(
            environment, policy, task_id=call.task_id, opening=call.opening, limits=limits, seed=call.seed
        )


class _SessionPolicy:
    """A policy that is seeded only if miles asked for it, and knows whether it was asked for a turn."""

    def __init__(self, inner: Policy, *, seeded: bool) -> None:
        self._inner = inner
        self._seeded = seeded
        self.asked = False

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """As the policy's own."""
        self.asked = True
        return await self._inner.chat(messages, max_tokens=max_tokens, seed=seed if self._seeded else None)


def _failed(error: BaseException) -> dict[str, Any]:
    """An episode that could not be played at all; nothing of it is the policy's doing."""
    cause = Cause(error.cause) if isinstance(error, SandboxError) else Cause.ENVIRONMENT_LOST
    if isinstance(error, TermrlError):
        hint = f" ({error.hint})" if error.hint else ""
        log.error("no episode: %s%s", error.message, hint)
        return nothing(EndReason.ENVIRONMENT_ERROR, cause, error.message)
    log.error("no episode", exc_info=error)
    return nothing(EndReason.ENVIRONMENT_ERROR, cause, f"{type(error).__name__}: {error}")
