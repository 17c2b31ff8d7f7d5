"""An endpoint of others as the policy: nothing is asked twice that may have been sampled, and it is not flooded."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from termrl.agent.policy import ChatPolicy, chat_client, on_this_machine, redacted
from termrl.agent.types import Message, Policy, Reply
from termrl.errors import ConfigError, PolicyError
from termrl.evaluation.config import EvalConfig
from termrl.evaluation.throttle import Throttle
from termrl.rollout.scheduler import PolicySession

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PREFLIGHT_S = 30.0
_TOO_MANY = 429
_BAD_KEY = 401
_NOT_ALLOWED = frozenset({_BAD_KEY, 403})
_NEVER_RIGHT = frozenset({403, 404})
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_SHORTEST_SECRET = 6


class EndpointPolicy:
    """One episode's policy at an endpoint.

    A call that the endpoint refused before it can have sampled (it is not there, 429, 503) is made again, after as
    long as it asked for; the wait counts as time in a queue. Any other failure is the episode's.

    Args:
        inner: makes one call.
        throttle: shared by all episodes.
        wait_s: how long one turn may be put off.
        echo_reasoning: false leaves reasoning out of what is sent back.
        failed, answered: told of every failure that is not waited out, and of every answer.
    """

    def __init__(
        self,
        inner: Policy,
        throttle: Throttle,
        *,
        wait_s: float,
        echo_reasoning: bool = True,
        failed: Callable[[PolicyError], None] = lambda error: None,
        answered: Callable[[Reply], None] = lambda reply: None,
    ) -> None:
        self._inner = inner
        self._throttle = throttle
        self._wait_s = wait_s
        self._echo_reasoning = echo_reasoning
        self._failed = failed
        self._answered = answered

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """Ask for one turn.

        Raises:
            PolicyError: as :meth:`termrl.agent.policy.ChatPolicy.chat`, and where it was put off for too long.
        """
        asked = time.monotonic()
        if not self._echo_reasoning:
            messages = [{k: v for k, v in message.items() if k not in _REASONING} for message in messages]
        while True:
            async with self._throttle.slot() as began:
                try:
                    reply = await self._inner.chat(messages, max_tokens=max_tokens, seed=seed)
                except PolicyError as error:
                    self._give_up_or_wait(error, asked, began)
                    continue
                self._throttle.answered()
            self._answered(reply)
            return replace(reply, queue_s=reply.queue_s + began - asked)

    def _give_up_or_wait(self, error: PolicyError, asked: float, began: float) -> None:
        if error.unsampled:
            left_s = self._wait_s - (time.monotonic() - asked)
            # one that asks for longer than anybody would wait holds nobody back: each call fails by itself
            if (error.retry_after_s or 0.0) <= left_s:
                too_many = error.status == _TOO_MANY
                if self._throttle.refused(began, retry_after_s=error.retry_after_s, too_many=too_many) <= left_s:
                    return
            asks = f"asks for {error.retry_after_s:g} s, " if error.retry_after_s else ""
            error = PolicyError(
                f"{error.message}; {asks}policy.wait_s is {self._wait_s:g} s", hint=error.hint, status=error.status
            )
        self._failed(error)
        raise error


class EndpointSessions:
    """Gives each episode its policy at one endpoint; there is no record of tokens.

    Args:
        client: shared; not closed here.
        key: never to be seen in a message, even where the endpoint repeats it.
        fatal: told why no further episode can succeed: the endpoint refuses the key, has no such model, or takes no
            prompt with room for so long a reply.
        say: told when the number of calls at once is lowered.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        config: EvalConfig,
        *,
        key: str | None,
        fatal: Callable[[PolicyError], None],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._config = config
        self._key = key
        self._fatal = fatal
        self._any_answer = False
        self._where = redacted(config.policy.base_url or "")
        self._throttle = Throttle(
            config.concurrency, lambda limit: say(f"{self._where} limits the rate: {limit} calls at once from now on")
        )

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float | None) -> AsyncIterator[PolicySession]:
        """A policy for one episode."""
        policy, top_p = self._config.policy, self._config.sampling.top_p
        chat = ChatPolicy(
            self._client,
            model=policy.model or "",
            temperature=temperature,
            top_p=top_p,
            extra_body=policy.extra_body or None,
            max_tokens_field=policy.max_tokens_field,
        )
        inner: Policy = _Discreet(chat, self._key) if self._key else chat
        if not policy.send_seed:
            inner = _Unseeded(inner)
        yield PolicySession(
            EndpointPolicy(
                inner,
                self._throttle,
                wait_s=policy.wait_s,
                echo_reasoning=policy.echo_reasoning,
                failed=self._failed,
                answered=self._answered,
            ),
            segments=tuple,
            counters=dict,
        )

    async def settle(self) -> None:
        """Nothing is kept for closed sessions."""

    def _answered(self, reply: Reply) -> None:
        if reply.finish_reason == "context" and not reply.content and not self._any_answer:
            tokens = self._config.episode.max_tokens
            self._fatal(
                PolicyError(
                    f"{self._where}: refuses the first prompt as too long, with room for {tokens} more tokens",
                    hint="lower episode.max_tokens, or set episode.context_window to the model's",
                )
            )
        self._any_answer = True

    def _failed(self, error: PolicyError) -> None:
        # later ones may be about a single request, such as one that a filter refuses
        if error.status == _BAD_KEY or (error.status in _NEVER_RIGHT and not self._any_answer):
            self._fatal(error)


class _Discreet:
    """A policy whose errors do not repeat the key."""

    def __init__(self, inner: Policy, key: str) -> None:
        self._inner = inner
        self._key = key

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """As the policy's own."""
        try:
            return await self._inner.chat(messages, max_tokens=max_tokens, seed=seed)
        except PolicyError as error:
            raise PolicyError(
                without(error.message, self._key),
                hint=error.hint,
                status=error.status,
                unsampled=error.unsampled,
                retry_after_s=error.retry_after_s,
            ) from None


class _Unseeded:
    """A policy that is given no seed."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """As the policy's own."""
        return await self._inner.chat(messages, max_tokens=max_tokens, seed=None)


def without(text: str, key: str | None) -> str:
    """``text`` with the key blotted out."""
    return text.replace(key, "***") if key and len(key) >= _SHORTEST_SECRET else text


@asynccontextmanager
async def open_endpoint(
    config: EvalConfig, key: str | None, *, fatal: Callable[[PolicyError], None], say: Callable[[str], None]
) -> AsyncIterator[EndpointSessions]:
    """Policies at ``config.policy.base_url``; the key goes there and nowhere else: no redirect is followed."""
    from termrl.capture.server import raise_open_file_limit

    raise_open_file_limit()
    async with _client(config, key, config.policy.timeout_s) as client:
        yield EndpointSessions(client, config, key=key, fatal=fatal, say=say)


async def check_endpoint(config: EvalConfig, key: str | None, say: Callable[[str], None]) -> None:
    """Ask the endpoint for its models, before anything is made.

    Args:
        say: told when the list does not have the model.

    Raises:
        PolicyError: nobody is there.
        ConfigError: the key is refused, or one is wanted.
    """
    from openai import APIConnectionError, APIStatusError, OpenAIError

    url = config.policy.base_url or ""
    where = redacted(url)
    if key and url.startswith("http:") and not on_this_machine(url):
        say(f"the key travels to {where} unencrypted: https would be better")
    async with _client(config, key, _PREFLIGHT_S) as client:
        try:
            listed: Any = await client.get("/models", cast_to=object)
        except APIConnectionError as error:
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            reason = " ".join(str(root).split()) or type(root).__name__
            raise PolicyError(f"{where}: {reason}", hint="is the endpoint up? --base-url usually ends in /v1") from None
        except APIStatusError as error:
            if error.status_code in _NOT_ALLOWED:
                hint = "--api-key-env NAME or --api-key-file FILE name the key for this endpoint"
                raise ConfigError(
                    f"{where}: HTTP {error.status_code}: the key is refused or missing", hint=hint
                ) from None
            return
        except (OpenAIError, ValueError):
            return
    data = listed.get("data") if isinstance(listed, dict) else None
    names = [str(item.get("id")) for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    if names and config.policy.model not in names:
        shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
        say(f"{where} does not list a model {config.policy.model}; it has {shown}")


def _client(config: EvalConfig, key: str | None, timeout_s: float) -> Any:
    assert config.policy.base_url is not None
    return chat_client(config.policy.base_url, key or "none", timeout_s=timeout_s, follow_redirects=False)
