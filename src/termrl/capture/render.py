"""Text to tokens and back: the renderer interface, and the renderer of ChatML models.

The interface (method names and meanings) is that of the PyPI package ``renderers``, so that its renderers serve the
models that this module has none for. ``ChatMLRenderer`` gives token for token what the model's own chat template gives,
with one difference: message text is encoded apart from control tokens, so text cannot forge a turn.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from termrl.capture.chatml import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    ChatMLStyle,
    Message,
    Template,
    ToolSpec,
    between,
    probe_chatml,
    template_of,
)
from termrl.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class RenderedTokens:
    """A prompt. ``close_added``: the previous turn had no close token and got one as context."""

    token_ids: list[int]
    close_added: bool = False


@dataclass(frozen=True)
class ParsedToolCall:
    """One tool call that the policy wrote. ``ok`` is false where it could not be parsed; ``raw`` is its text."""

    raw: str
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    ok: bool = True


@dataclass(frozen=True)
class ParsedResponse:
    """A completion as a message."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()


class Renderer(Protocol):
    """Owns the conversion of messages to tokens and back for one family of models."""

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """A whole conversation as tokens.

        Raises:
            ValueError: a message that this model's template cannot express.
        """
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt: previous prompt + completion, verbatim, + glue + new messages + the assistant's header.

        ``None`` where the template makes that impossible.
        """
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """A completion as a message; its stop token is not part of the text."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """The tokens that end a turn."""
        ...

    def control_token(self, text: str) -> int | None:
        """The id of a control token, ``None`` for any other text."""
        ...


class ChatMLRenderer:
    """Renderer of models whose chat template is plain ChatML (SmolLM2, Qwen2.5 and their kin)."""

    def __init__(
        self,
        tokenizer: Tokenizer | PreTrainedTokenizerBase,
        style: ChatMLStyle | None = None,
        *,
        template: Template | None = None,
    ) -> None:
        """Build from a ``tokenizers`` tokenizer, or from a transformers fast tokenizer (its template is probed).

        Args:
            tokenizer: the model's tokenizer; a private copy is kept.
            style: ``None`` probes the template, or is plain ChatML where there is none.
            template: renders messages and tools to text; needed for tools only.

        Raises:
            ModelError: no ChatML control tokens, or a template that is not plain ChatML.
        """
        from tokenizers import Tokenizer as FastTokenizer

        backend = tokenizer if isinstance(tokenizer, FastTokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, FastTokenizer):
            raise ModelError("the model has no fast tokenizer", hint="save it with a tokenizer.json")
        if template is None and not isinstance(tokenizer, FastTokenizer) and tokenizer.chat_template:
            template = template_of(tokenizer)
        self._tokenizer = FastTokenizer.from_str(backend.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = template
        self._start, self._end = self._required(IM_START), self._required(IM_END)
        end_of_text = self.control_token(END_OF_TEXT)
        self._stops = [self._end] if end_of_text is None else [self._end, end_of_text]
        if style is None:
            style = ChatMLStyle() if template is None else probe_chatml(template)
            if style is None:
                raise ModelError("the model's chat template is not plain ChatML")
        self.style = style

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """See :meth:`Renderer.render_ids`."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        ids: list[int] = []
        for role, body in self._turns(self._with_system(messages, tools)):
            ids += self._turn(role, body)
        return ids + self._header() if add_generation_prompt else ids

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """As :meth:`render_ids`, in the interface's record."""
        return RenderedTokens(self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """See :meth:`Renderer.bridge_to_next_turn`. ``None`` for new assistant messages only."""
        if not new_messages or any(message.get("role") == "assistant" for message in new_messages):
            return None
        closed = bool(previous_completion_ids) and previous_completion_ids[-1] == self._end
        ids = previous_prompt_ids + previous_completion_ids + ([] if closed else [self._end]) + self._encode("\n")
        for role, body in self._turns(new_messages):
            ids += self._turn(role, body)
        return RenderedTokens(ids + self._header(), close_added=not closed)

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """See :meth:`Renderer.parse_response`. Tool calls are looked for only where tools were declared."""
        body = token_ids[:-1] if token_ids and token_ids[-1] in self._stops else token_ids
        text = self._tokenizer.decode(body, skip_special_tokens=False)
        if not tools:
            return ParsedResponse(text)
        calls = tuple(_parse_call(match) for match in _TOOL_CALL.finditer(text))
        return ParsedResponse(_TOOL_CALL.sub("", text).strip() if calls else text, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        """See :meth:`Renderer.get_stop_token_ids`."""
        return list(self._stops)

    def control_token(self, text: str) -> int | None:
        """See :meth:`Renderer.control_token`."""
        token = self._tokenizer.token_to_id(text)
        added = self._tokenizer.get_added_tokens_decoder()
        return token if token is not None and token in added and added[token].special else None

    def _required(self, token: str) -> int:
        found = self.control_token(token)
        if found is None:
            raise ModelError(f"the tokenizer has no control token {token}, so the model is not a ChatML one")
        return found

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _turn(self, role: str, body: str) -> list[int]:
        return [self._start, *self._encode(f"{role}\n{body}"), self._end, *self._encode("\n")]

    def _header(self) -> list[int]:
        return [self._start, *self._encode("assistant\n")]

    def _with_system(self, messages: list[Message], tools: list[ToolSpec] | None) -> list[Message]:
        if messages[0].get("role") != "system" and self.style.default_system is not None:
            messages = [{"role": "system", "content": self.style.default_system}, *messages]
        if not tools:
            return messages
        if not self.style.tools or self._template is None:
            raise ValueError("this model's chat template cannot declare tools")
        # The wording of the declaration is the template's own: it is what follows a known system text.
        mark = "system-text"
        probe: list[Message] = [{"role": "system", "content": mark}, {"role": "user", "content": "u"}]
        text = self._template(probe, tools, False)
        declaration = between(text, f"{IM_START}system\n{mark}", f"{IM_END}\n{IM_START}user\nu{IM_END}\n")
        if declaration is None:
            raise ValueError("this model's chat template declares tools in a way that is not supported")
        first = messages[0] if messages[0].get("role") == "system" else None
        system = content_text(first.get("content")) if first else ""
        return [{"role": "system", "content": system + declaration}, *messages[1 if first else 0 :]]

    def _turns(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        turns: list[tuple[str, str]] = []
        previous = ""
        for message in messages:
            role, body = str(message.get("role")), content_text(message.get("content"))
            if role == "tool" and self.style.tool_results == "none":
                raise ValueError("this model's chat template has no tool messages")
            if role == "tool" and self.style.tool_results == "user":
                body = f"<tool_response>\n{body}\n</tool_response>"
                if previous == "tool":
                    body = f"{turns.pop()[1]}\n{body}"
                turns.append(("user", body))
            elif message.get("tool_calls"):
                turns.append((role, self._calls_text(message)))
            else:
                turns.append((role, body))
            previous = role
        return turns

    def _calls_text(self, message: Message) -> str:
        if self._template is None or not self.style.tools:
            raise ValueError("this model's chat template has no tool calls")
        calls = [_template_call(call) for call in message["tool_calls"]]
        plain = {"role": "assistant", "content": content_text(message.get("content")), "tool_calls": calls}
        text = self._template(
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, plain], None, False
        )
        opening = f"{IM_START}system\ns{IM_END}\n{IM_START}user\nu{IM_END}\n{IM_START}assistant\n"
        body = between(text, opening, f"{IM_END}\n")
        if body is None:
            raise ValueError("this model's chat template writes tool calls in a way that is not supported")
        return body


def renderer_for(model_dir: Path | str) -> Renderer:
    """The renderer of a model folder (or hub id): ours for plain ChatML, else that of the package ``renderers``.

    Raises:
        ModelError: no tokenizer, no chat template, or a template that needs the package, which is not installed or
            has no renderer for the model.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{model_dir}: the model has no chat template", hint="use an instruction-tuned model")
    style = probe_chatml(template_of(tokenizer))
    if style is not None:
        return ChatMLRenderer(tokenizer, style)
    return PackageRenderer(tokenizer, str(model_dir))


class PackageRenderer:
    """A renderer of the package ``renderers`` (extra ``capture``) behind our interface."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        """Raises :class:`ModelError` where the package is absent or has none for the model."""
        try:
            package: Any = importlib.import_module("renderers")
        except ImportError as error:
            raise ModelError(
                f"{model}: its chat template is not plain ChatML",
                hint="install termrl[capture], which brings renderers for GLM, DeepSeek, Qwen3 and others",
            ) from error
        self._tokenizer = tokenizer
        try:
            self._renderer = package.create_renderer(tokenizer)
        except Exception as error:  # the package raises whatever its model-specific code raises
            raise ModelError(f"{model}: the package renderers cannot render it: {error}") from error
        if type(self._renderer).__name__ == "DefaultRenderer":
            raise ModelError(
                f"{model}: the package renderers has no renderer of its own for this model, and its default one "
                "re-renders sampled text",
                hint="use a model of a family that it lists",
            )

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """See :meth:`Renderer.render_ids`."""
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """See :meth:`Renderer.bridge_to_next_turn`."""
        bridged = self._renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, tools=tools
        )
        if bridged is None:
            return None
        closed = bool(previous_completion_ids) and previous_completion_ids[-1] in self.get_stop_token_ids()
        return RenderedTokens(list(bridged.token_ids), close_added=not closed)

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """See :meth:`Renderer.parse_response`."""
        parsed = self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        calls = tuple(
            ParsedToolCall(call.raw, str(call.name), call.arguments)
            if str(call.status) == "ok" and isinstance(call.arguments, dict)
            else ParsedToolCall(call.raw, ok=False)
            for call in parsed.tool_calls
        )
        return ParsedResponse(parsed.content, parsed.reasoning_content, calls)

    def get_stop_token_ids(self) -> list[int]:
        """See :meth:`Renderer.get_stop_token_ids`."""
        return list(self._renderer.get_stop_token_ids())

    def control_token(self, text: str) -> int | None:
        """See :meth:`Renderer.control_token`."""
        for token, added in self._tokenizer.added_tokens_decoder.items():
            if added.special and str(added) == text:
                return int(token)
        return None


def content_text(content: Any) -> str:
    """The text of a message's content: a string, a list of text parts, or ``None`` (empty).

    Raises:
        ValueError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"content must be a string or a list of text parts, not {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise ValueError("only text parts are supported in message content")
        texts.append(text)
    return "".join(texts)


def _parse_call(match: re.Match[str]) -> ParsedToolCall:
    try:
        call = json.loads(match[1])
        return ParsedToolCall(match[0], str(call["name"]), dict(call.get("arguments") or {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ParsedToolCall(match[0], ok=False)


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": function}
