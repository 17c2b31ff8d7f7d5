"""The wire format of the session server: OpenAI chat completions in and out, and OpenAI-shaped errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from termrl.capture.render import ParsedResponse, Renderer
from termrl.capture.upstreams import GenerateResult, SamplingParams
from termrl.errors import TermrlError

Message = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


class ApiError(TermrlError):
    """An error of the HTTP interface: status, OpenAI's error ``type`` and a stable ``code``."""

    def __init__(self, status: int, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "code"}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": message, "type": kind, "code": self.code, "param": None}}


class SamplingDefaults(BaseModel):
    """The ``sampling`` of ``POST /sessions``: what a chat call takes where it does not say itself."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop_at_fence: bool = False


class SessionRequest(BaseModel):
    """The body of ``POST /sessions``. ``order`` fixes the session's row in lock-step batches."""

    model_config = ConfigDict(extra="forbid")

    order: int = 0
    sampling: SamplingDefaults = Field(default_factory=lambda: SamplingDefaults())


class ChatMessage(BaseModel):
    """One message as far as it is checked; unknown fields are kept, and never compared."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any] | str] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(BaseModel):
    """A chat completion call. What would change the sampling distribution in a way not captured is refused."""

    model_config = ConfigDict(extra="ignore")

    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_at_fence: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: Any) -> ChatRequest:
        """Check a decoded body.

        Raises:
            ApiError: 400 that names each bad field, or the option that is refused.
        """
        request = validated(cls, body)
        refused = {
            "n": request.n not in (None, 1),
            "frequency_penalty": bool(request.frequency_penalty),
            "presence_penalty": bool(request.presence_penalty),
            "repetition_penalty": request.repetition_penalty not in (None, 1.0),
            "min_p": bool(request.min_p),
            "logit_bias": bool(request.logit_bias),
            "response_format": (request.response_format or {}).get("type", "text") != "text",
        }
        names = [name for name, is_refused in refused.items() if is_refused]
        if names:
            raise ApiError(
                400,
                f"{', '.join(names)}: not supported, as captured logprobs would not be those of the sampling",
                code="unsupported_sampling",
            )
        if request.messages[-1].role == "assistant":
            raise ApiError(400, "the last message must not be an assistant's", code="invalid_messages")
        return request

    def plain_messages(self) -> list[Message]:
        """The messages as dicts, without fields that were not given."""
        return [message.model_dump(exclude_unset=True) for message in self.messages]

    def sampling(self, defaults: SamplingDefaults, renderer: Renderer, room: int) -> SamplingParams:
        """The sampling of this turn, clamped to ``room`` tokens.

        Raises:
            ApiError: 400 for a stop string that is no control token.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        tokens = [renderer.control_token(text) for text in stops]
        if None in tokens:
            raise ApiError(
                400,
                f"stop {stops[tokens.index(None)]!r} is not a control token of this model",
                code="unsupported_stop",
                hint="a stop string cannot be matched exactly on tokens; stop_at_fence ends at a closed bash block",
            )
        asked = self.max_completion_tokens or self.max_tokens or defaults.max_tokens or room
        ids = [*renderer.get_stop_token_ids(), *(token for token in tokens if token is not None)]
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature),
            top_p=_first(self.top_p, defaults.top_p),
            top_k=max(0, _first(self.top_k, defaults.top_k)),
            max_tokens=min(asked, room),
            seed=self.seed if self.seed is not None else defaults.seed,
            stop_token_ids=tuple(dict.fromkeys(ids)),
            stop_at_fence=_first(self.stop_at_fence, defaults.stop_at_fence),
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


def validated(model: type[Model], body: Any) -> Model:
    """Validate a decoded body.

    Raises:
        ApiError: 400 with every bad field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
        raise ApiError(400, "; ".join(problems), code="invalid_request") from error


def assistant_message(parsed: ParsedResponse) -> Message:
    """The message that the client gets, and must echo. A tool call that cannot be parsed stays text."""
    good = [call for call in parsed.tool_calls if call.ok]
    broken = [call.raw for call in parsed.tool_calls if not call.ok]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if good:
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "index": index,
                "type": "function",
                "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
            }
            for index, call in enumerate(good)
        ]
    return message


def completion(
    request: ChatRequest,
    message: Message,
    result: GenerateResult,
    *,
    model: str,
    prompt_tokens: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The body of a chat completion. ``extra`` goes into its ``termrl`` field."""
    finish: str = result.finish_reason
    if finish == "stop" and message.get("tool_calls"):
        finish = "tool_calls"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(result.token_ids, result.logprobs, strict=True)
            ]
        }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "total_tokens": prompt_tokens + len(result.token_ids),
        },
        "termrl": {"policy_version": result.policy_version, **extra},
    }


def as_stream(body: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """A finished completion as server-sent events: the message, the finish reason, usage if asked for, ``[DONE]``."""
    choice = body["choices"][0]
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def event(delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
        entry = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": more.pop("logprobs", None)}
        return b"data: " + orjson.dumps({**head, "choices": [entry], **more}) + b"\n\n"

    yield event(choice["message"], None, logprobs=choice["logprobs"])
    yield event({}, choice["finish_reason"], termrl=body["termrl"])
    if include_usage:
        yield b"data: " + orjson.dumps({**head, "choices": [], "usage": body["usage"]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _first(given: Value | None, default: Value) -> Value:
    return default if given is None else given
