"""Test doubles: an engine without a model, a tokenizer small enough to train in a test, and an HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from termrl.capture.render import ChatMLRenderer
from termrl.capture.server import SessionServer, serve
from termrl.capture.upstreams import FinishReason, GenerateRequest, GenerateResult

CORPUS = [
    "system user assistant tool You are a helpful assistant that runs commands in a terminal.\n",
    "```bash\nls -la /app && cat notes.txt | grep -n word > out.txt\n```\n",
    "Write the word to the file, then say TASK_COMPLETE.\n  The exit status was 0.\n\n",
]
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{{- messages[0]['content'] if messages[0]['role'] == 'system' else 'Default words.' }}"
    "{{- '\n\nTools at hand:' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\nAnswer with tool_call tags.<|im_end|>\n' }}"
    "{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nDefault words.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] in ('user',) or (message['role'] == 'system' and not loop.first)"
    " or (message['role'] == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- elif message['role'] == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if message['content'] %}{{- '\n' + message['content'] }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message['role'] == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TRIMMING_TEMPLATE = PLAIN_TEMPLATE.replace("message['content'] +", "message['content'] | trim +")


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of the GPT-2 kind with ChatML control tokens, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


class FakeUpstream:
    """An engine that answers from a script, else with tokens drawn from (prompt, seed); holds calls at a gate."""

    model_name = "fake"

    def __init__(self, tokenizer: Tokenizer, *, context_window: int = 4096) -> None:
        self.context_window = context_window
        self.tokenizer = tokenizer
        self.calls: list[GenerateRequest] = []
        self.cancelled: list[GenerateRequest] = []
        self.released: list[str] = []
        self.replies: list[str | Exception | GenerateResult] = []
        self.policy_version = 3
        self.finish: FinishReason | None = None
        self.gate: asyncio.Event | None = None
        self.arrived = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.calls.append(request)
        self.arrived.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            self.was_cancelled.set()
            raise
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, GenerateResult):
            return reply
        return self.sample(request, reply)

    def sample(self, request: GenerateRequest, text: str | None) -> GenerateResult:
        draw = random.Random(f"{request.prompt_ids} {request.sampling.seed}")
        if text is None:
            ids = [draw.randrange(3, self.tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 12))]
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        finish: FinishReason = self.finish or "stop"
        if finish == "stop":
            ids.append(2)
        if len(ids) > request.sampling.max_tokens:
            ids, finish = ids[: request.sampling.max_tokens], "length"
        spread = min(3.0, request.sampling.temperature)
        logprobs = tuple(-draw.random() * spread for _ in ids)
        return GenerateResult(tuple(ids), logprobs, finish, self.policy_version, service_s=0.25, queue_s=0.5)

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)


class Client:
    """A few lines around aiohttp: one session server, real HTTP."""

    def __init__(self, server: SessionServer, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.http = http

    async def create(self, **body: Any) -> str:
        async with self.http.post(f"{self.server.url}/sessions", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["session_id"]

    async def post(self, session_id: str, messages: list[dict[str, Any]], **body: Any) -> tuple[int, Any]:
        url = f"{self.server.url}/sessions/{session_id}/v1/chat/completions"
        async with self.http.post(url, json={"model": "m", "messages": messages, **body}) as response:
            return response.status, await response.json()

    async def chat(self, session_id: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """The assistant message of a call that must succeed."""
        status, reply = await self.post(session_id, messages, **body)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    async def get(self, session_id: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.server.url}/sessions/{session_id}") as response:
            return response.status, await response.json()

    async def delete(self, session_id: str) -> int:
        async with self.http.delete(f"{self.server.url}/sessions/{session_id}") as response:
            return response.status


@contextlib.asynccontextmanager
async def running(upstream: FakeUpstream, renderer: ChatMLRenderer, **options: Any) -> AsyncIterator[Client]:
    """A client of a session server that runs on a free loopback port."""
    async with serve(upstream, renderer, **options) as server, aiohttp.ClientSession() as http:
        yield Client(server, http)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
