"""What miles hands to an agent function, read: policy, prompt, sampling and the task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from termrl.agent.types import Message, Opening
from termrl.errors import ConfigError

# what the agent decides itself, or what the session server forces
_OURS = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "seed", "temperature", "top_p", "stream", "n"}
)


@dataclass(frozen=True)
class Call:
    """One call of the agent function.

    Attributes:
        policy_url: the policy session's OpenAI endpoint, ending in ``/v1``.
        task_id: names the task to the environment.
        opening: the conversation before the task's instruction, as the prompt row has it.
        seed: what miles asked to sample with, and whether it did: turns are only seeded if so.
        max_tokens: new tokens in one turn; ``None`` where miles does not say.
        context_window: tokens of the whole conversation (``--max-seq-len``); ``None`` where miles does not say.
        extra_body: all other sampling parameters.
    """

    policy_url: str
    task_id: str
    opening: Opening
    seed: int
    seeded: bool
    max_tokens: int | None = None
    context_window: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        base_url: str,
        prompt: Any,
        request_kwargs: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        *,
        external_host: str | None,
    ) -> Call:
        """Read the arguments of the agent function.

        Raises:
            ConfigError: the sample names no task.
        """
        sampling, metadata = dict(request_kwargs or {}), dict(metadata or {})
        task_id = metadata.get("task_id") or metadata.get("task_name")
        if not isinstance(task_id, str) or not task_id:
            raise ConfigError(
                "the sample's metadata has no task_id",
                hint="termrl tasks rows writes prompt data; miles needs --metadata-key metadata to read it",
            )
        seed = _whole(sampling.get("seed"))
        return cls(
            policy_url=policy_url(base_url, external_host),
            task_id=task_id,
            opening=_opening(prompt),
            seed=_drawn(base_url) if seed is None else seed,
            seeded=seed is not None,
            max_tokens=_whole(sampling.get("max_tokens")) or _whole(sampling.get("max_completion_tokens")),
            context_window=_whole(metadata.get("max_seq_len")),
            temperature=sampling.get("temperature"),
            top_p=sampling.get("top_p"),
            extra_body={name: value for name, value in sampling.items() if name not in _OURS and value is not None},
        )


def policy_url(base_url: str, external_host: str | None) -> str:
    """The session's endpoint, reached by ``external_host`` where the session server's own name does not lead to it."""
    parts = urlsplit(f"{base_url.rstrip('/')}/v1")
    if not external_host:
        return urlunsplit(parts)
    host = f"[{external_host}]" if ":" in external_host and not external_host.startswith("[") else external_host
    return urlunsplit(parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}"))


def _opening(prompt: Any) -> Opening:
    if isinstance(prompt, str):
        return Opening(({"role": "user", "content": prompt},) if prompt.strip() else ())
    messages: list[Message] = [dict(message) for message in prompt or ()]
    return Opening(tuple(messages))


def _drawn(base_url: str) -> int:
    return int.from_bytes(hashlib.blake2b(base_url.encode(), digest_size=4).digest(), "big") >> 1


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
