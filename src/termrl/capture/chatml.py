"""What differs between ChatML chat templates, found out by rendering probes with the template itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
ToolSpec = dict[str, Any]
Template = Callable[[list[Message], "list[ToolSpec] | None", bool], str]

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class ChatMLStyle:
    """What differs between ChatML templates.

    Attributes:
        default_system: the system prompt that the template puts first where the conversation has none.
        tool_results: how tool messages are written: as a turn of role ``tool``, in a ``user`` turn inside
            ``<tool_response>`` tags (results in a row share it), or not at all.
        tools: whether the template can declare tools.
    """

    default_system: str | None = None
    tool_results: Literal["role", "user", "none"] = "role"
    tools: bool = False


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """A transformers tokenizer's own chat template as a function of (messages, tools, add_generation_prompt)."""

    def render(messages: list[Message], tools: list[ToolSpec] | None, add_generation_prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    return render


def probe_chatml(template: Template) -> ChatMLStyle | None:
    """The style of a ChatML template, found by rendering probes; ``None`` where it is not plain ChatML."""
    try:
        alone = template([{"role": "user", "content": "u"}], None, False)
        default = between(alone, f"{IM_START}system\n", f"{IM_END}\n{IM_START}user\nu{IM_END}\n")
        for messages in _PROBES:
            first = [] if default is None or messages[0]["role"] == "system" else [("system", default)]
            turns = first + [(message["role"], message["content"]) for message in messages]
            plain = "".join(f"{IM_START}{role}\n{body}{IM_END}\n" for role, body in turns)
            if template(messages, None, False) != plain:
                return None
            if template(messages, None, True) != f"{plain}{IM_START}assistant\n":
                return None
    except Exception:  # a template may raise whatever it likes on a probe; then it is not plain
        return None
    return ChatMLStyle(default, _probe_tool_results(template), _probe_tools(template))


_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "  u \n"}],
    [
        {"role": "system", "content": " s\n"},
        {"role": "user", "content": "\nu"},
        {"role": "assistant", "content": "a\n"},
    ],
    [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": " <think>\nt\n</think>\n\na"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": ""},
    ],
)


def _probe_tool_results(template: Template) -> Literal["role", "user", "none"]:
    opening: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    results: list[Message] = [{"role": "tool", "content": "r"}, {"role": "tool", "content": "q"}]
    try:
        text = template(opening + results, None, False).removeprefix(template(opening, None, False))
    except Exception:  # as above
        return "none"
    if text == f"{IM_START}tool\nr{IM_END}\n{IM_START}tool\nq{IM_END}\n":
        return "role"
    responses = "<tool_response>\nr\n</tool_response>\n<tool_response>\nq\n</tool_response>"
    return "user" if text == f"{IM_START}user\n{responses}{IM_END}\n" else "none"


def _probe_tools(template: Template) -> bool:
    messages: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tool = {"type": "function", "function": {"name": "probe_name", "description": "d", "parameters": {}}}
    try:
        return "probe_name" in template(messages, [tool], False)
    except Exception:  # as above
        return False


def between(text: str, head: str, tail: str) -> str | None:
    """What stands between a known head and a known tail; ``None`` where they are not there."""
    if len(text) < len(head) + len(tail) or not (text.startswith(head) and text.endswith(tail)):
        return None
    return text[len(head) : len(text) - len(tail)]
