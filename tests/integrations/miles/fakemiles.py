"""miles as an integration sees it: what it calls, in which order, and what it makes of what comes back.

Ray, SGLang and Megatron are left out; everything between the prompt row and the batch behaves as in miles, with our
session server in the place of its own. Functions are loaded by import path, as miles loads them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from termrl.capture.segments import Segment

ANSWERED = ("stop", "tool_calls", "fence")
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64}


@dataclass
class Sample:
    """The fields of miles' sample that an integration can meet, and the segments for a trainer."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int
    index: int
    prompt: list[dict[str, str]]
    metadata: dict[str, Any]
    reward: float | None = None
    status: Status = Status.PENDING
    response_length: int = 0
    non_generation_time: float = 0.0
    segments: tuple[Segment, ...] = ()


@dataclass
class Rollout:
    """What a rollout gave: groups that are trained on, every group that ended, and what miles would log."""

    kept: list[list[Sample]] = field(default_factory=list)
    ended: list[list[Sample]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def load_function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def check_no_aborted(args: Any, samples: list[Any], **kwargs: Any) -> tuple[bool, str | None]:
    """miles' own filter: one aborted sample loses its whole group."""
    flat = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
    aborted = any(sample.status is Sample.Status.ABORTED for sample in flat)
    return not aborted, "group_has_aborted" if aborted else None


class FakeMiles:
    """One rollout worker.

    Args:
        server: the session server's URL.
        max_seq_len: ``--max-seq-len``.
        v2: the session server's second version: the agent's dict is posted with the session, samples are lists.
        concurrency: samples at once.
    """

    def __init__(
        self,
        server: str,
        *,
        agent: str = "termrl.integrations.miles.run",
        reward: str = "termrl.integrations.miles.reward_func",
        group_filter: Callable[..., Any] = check_no_aborted,
        max_seq_len: int | None = None,
        sampling: dict[str, Any] | None = None,
        v2: bool = False,
        group_rm: bool = False,
        concurrency: int = 64,
    ) -> None:
        self.args = SimpleNamespace(custom_agent_function_path=agent, custom_rm_path=reward, group_rm=group_rm)
        self._server = server
        self._max_seq_len = max_seq_len
        self._sampling = {**SAMPLING, **(sampling or {})}
        self._v2 = v2
        self._group_filter = group_filter
        self._slots = asyncio.Semaphore(concurrency)
        self._aborted = False
        self.http: aiohttp.ClientSession | None = None
        self.raised: list[Exception] = []

    async def __aenter__(self) -> FakeMiles:
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.http is not None
        await self.http.close()

    async def rollout(self, prompts: Iterator[list[Sample]], *, groups: int, at_once: int) -> Rollout:
        """Play groups until ``groups`` of them can be trained on; surplus ones are aborted."""
        found, dropped = Rollout(), Counter[str]()
        pending: set[asyncio.Task[list[Any]]] = set()
        while len(found.kept) < groups:
            while len(pending) < at_once:
                pending.add(asyncio.ensure_future(self.group(next(prompts))))
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group = task.result()
                found.ended.append(group)
                keep, reason = self._group_filter(self.args, group)
                if not keep:
                    dropped[str(reason)] += 1
                elif len(found.kept) < groups:
                    found.kept.append(group)
        self._aborted = True
        await call_agent_abort_hook(self.args)
        await asyncio.gather(*pending)
        self._aborted = False
        found.metrics = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in dropped.items()}
        return found

    async def group(self, samples: list[Sample]) -> list[Any]:
        """Play the samples of one group, then score them together where that is asked for."""
        if self._aborted:
            return list(samples)
        tasks = [asyncio.ensure_future(self.sample(sample)) for sample in samples]
        try:
            group = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        if self.args.group_rm and not self._aborted:
            await self._score(group)
        return group

    async def sample(self, sample: Sample) -> Any:
        """Play one sample and score it."""
        async with self._slots:
            if self._aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            played = await self._generate(sample)
        if self.args.group_rm:
            return played
        if isinstance(played, list):
            if not any(one.status is Sample.Status.ABORTED for one in played):
                await self._score([one for one in played if one.reward is None])
            return played
        if played.status is not Sample.Status.ABORTED and played.reward is None:
            played.reward = await load_function(self.args.custom_rm_path)(self.args, played)
        return played

    async def _score(self, samples: list[Any]) -> None:
        flat = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
        rewards = await load_function(self.args.custom_rm_path)(self.args, flat)
        for one, reward in zip(flat, rewards, strict=True):
            assert one.reward is None
            one.reward = reward

    async def _generate(self, given: Sample) -> Any:
        session_id = (await self._ask("POST", "/sessions"))["session_id"]
        metadata = {**given.metadata, "session_server_id": self._server.removeprefix("http://")}
        if self._max_seq_len is not None:
            metadata["max_seq_len"] = self._max_seq_len
        returned: dict[str, Any] | None = None
        try:
            returned = await load_function(self.args.custom_agent_function_path)(
                base_url=f"{self._server}/sessions/{session_id}",
                prompt=given.prompt,
                request_kwargs=_request_kwargs(self._sampling, given.index),
                metadata=metadata,
            )
        except Exception as error:
            self.raised.append(error)
        finally:
            session = await self._ask("GET", f"/sessions/{session_id}")
            await self._ask("DELETE", f"/sessions/{session_id}")
        sample = deepcopy(given)
        if not session["turns"]:
            sample.status = Sample.Status.ABORTED
            return [sample] if self._v2 else sample
        sample.segments = tuple(
            Segment(**{**part, **{key: tuple(value) for key, value in part.items() if isinstance(value, list)}})
            for part in session["segments"]
        )
        sample.response_length = sum(segment.sampled for segment in sample.segments)
        sample.status = _status(session["turns"][-1]["finish_reason"])
        # the wire to the worker that trains is JSON
        sample.metadata.update(json.loads(json.dumps(returned or {})))
        waited = ((returned or {}).get("agent_metrics") or {}).get("total_tool_time")
        if waited is not None:
            sample.non_generation_time = waited
        if not self._v2:
            return sample
        sample.reward = (returned or {}).get("reward")
        return [sample]

    async def _ask(self, method: str, path: str) -> Any:
        assert self.http is not None
        async with self.http.request(method, self._server + path, json={} if method == "POST" else None) as reply:
            assert reply.status < 300, await reply.text()
            return await reply.json() if reply.status == 200 else None


async def call_agent_abort_hook(args: Any) -> None:
    """The sibling ``abort`` of the agent function, where there is one."""
    module = args.custom_agent_function_path.rpartition(".")[0]
    try:
        hook = load_function(f"{module}.abort")
    except AttributeError:
        return
    await hook(args)


def prompt_groups(path: Path, *, samples: int) -> Iterator[list[Sample]]:
    """Groups of samples of the rows of a prompt file, again and again."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    index = group = 0
    while True:
        for row in lines:
            yield [
                Sample(group, index + place, deepcopy(row["prompt"]), deepcopy(row["metadata"]))
                for place in range(samples)
            ]
            index, group = index + samples, group + 1


def _request_kwargs(sampling: dict[str, Any], index: int) -> dict[str, Any]:
    if "sampling_seed" in sampling:  # as with deterministic inference, each sample has its own
        sampling = {**sampling, "sampling_seed": sampling["sampling_seed"] + index}
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    return {names.get(name, name): value for name, value in sampling.items() if value is not None}


def _status(finish_reason: str) -> Sample.Status:
    if finish_reason in ANSWERED:
        return Sample.Status.COMPLETED
    return Sample.Status.TRUNCATED if finish_reason in ("length", "context") else Sample.Status.ABORTED
