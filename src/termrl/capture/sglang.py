"""SGLang as the engine: token ids in, token ids and logprobs out, over its native ``/generate``.

SGLang's logprobs are those of softmax(logits / temperature), and never those of top-p or top-k. Those of a server that
was started with ``SGLANG_RETURN_ORIGINAL_LOGPROB`` are useless; :func:`~termrl.capture.upstreams.preflight` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import aiohttp
import orjson

from termrl.capture.upstreams import FinishReason, GenerateRequest, GenerateResult
from termrl.errors import CaptureError, PolicyError

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangUpstream:
    """An SGLang server or router behind the session server. One connection pool, made on first use."""

    def __init__(self, url: str, *, model_name: str, context_window: int, timeout_s: float = 3600.0) -> None:
        """Point at ``url`` (``http://host:port``).

        Args:
            url: base address of the server or its router.
            model_name: what ``/v1/models`` tells.
            context_window: tokens of prompt and reply together.
            timeout_s: bound on one generation.
        """
        self.model_name = model_name
        self.context_window = context_window
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._http: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See :class:`~termrl.capture.upstreams.Upstream`. Cancelling aborts the request in the engine.

        Raises:
            CaptureError: ids or logprobs are missing, or an option that the engine cannot honour.
            PolicyError: the engine cannot be reached or answers with an error.
        """
        sampling = request.sampling
        if sampling.stop_at_fence:
            raise CaptureError("SGLang cannot stop at a closed fence", hint="set stop_at_fence = false")
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed & 0x7FFF_FFFF
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": list(request.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }
        try:
            return _result(await self._post("/generate", body), request)
        except asyncio.CancelledError:
            self._abort(rid)
            raise

    async def release(self, session_id: str) -> None:
        """Nothing to do: the engine's prefix cache is its own."""

    async def aclose(self) -> None:
        """Close the connections, after the aborts in flight. Idempotent."""
        if self._aborts:
            await asyncio.wait(set(self._aborts), timeout=5)
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _abort(self, rid: str) -> None:
        async def abort() -> None:
            with contextlib.suppress(PolicyError, CaptureError):
                await self._post("/abort_request", {"rid": rid}, answer=False)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post(self, path: str, body: dict[str, Any], *, answer: bool = True) -> Any:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(self._url + path, data=orjson.dumps(body), headers=headers) as response:
                text = await response.read()
                if response.status != 200:
                    said = text[:500].decode(errors="replace")
                    raise PolicyError(f"{self._url}{path} answered {response.status}: {said}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PolicyError(f"{self._url}{path}: {type(error).__name__}: {error}") from error
        if not answer:
            return None
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise CaptureError(f"{self._url}{path} answered something that is not JSON: {error}") from error


def _result(answer: Any, request: GenerateRequest) -> GenerateResult:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise CaptureError("the engine's answer has no meta_info", hint="point at SGLang itself, or at its own router")
    kind = (meta.get("finish_reason") or {}).get("type")
    finish = _FINISH.get(str(kind))
    if finish is None:
        raise CaptureError(f"the engine finished with {kind!r}, which is unknown")
    pairs = meta.get("output_token_logprobs")
    if pairs is None and finish != "abort":
        raise CaptureError(
            "the engine's answer has no output_token_logprobs, so neither ids nor logprobs",
            hint="a router between may strip them; point at SGLang itself, or at its own router",
        )
    try:
        ids = tuple(int(pair[1]) for pair in pairs or ())
        logprobs = tuple(float(pair[0]) for pair in pairs or ())
    except (TypeError, ValueError, IndexError) as error:
        raise CaptureError(f"the engine's output_token_logprobs are malformed: {error}") from error
    completion = meta.get("completion_tokens")
    if isinstance(completion, int) and completion != len(ids):
        raise CaptureError(f"the engine says {completion} tokens but gave the logprobs of {len(ids)}")
    if len(ids) > request.sampling.max_tokens:
        raise CaptureError(f"the engine gave {len(ids)} tokens where {request.sampling.max_tokens} were allowed")
    version = str(meta.get("weight_version", ""))
    total, queue = _seconds(meta.get("e2e_latency")), _seconds(meta.get("queue_time"))
    return GenerateResult(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=finish,
        policy_version=int(version) if version.isdecimal() else 0,
        service_s=None if total is None or queue is None else total - queue,
        queue_s=queue,
    )


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
