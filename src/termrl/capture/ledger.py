"""The token ledger of one policy session: a tree of generated turns, without any I/O.

A turn keeps only what it adds: the context that was rendered before it (mask 0) and what the policy sampled (mask 1).
The prompt of the next turn is the tokens of its parent plus new context, so nothing sampled is ever re-made. A session
that is never rewritten is one path; rewritten history and concurrent calls make branches that share their prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson

from termrl.capture.render import RenderedTokens, Renderer, content_text
from termrl.capture.segments import Segment
from termrl.capture.upstreams import GenerateResult, SamplingParams
from termrl.errors import CaptureError, TermrlError

Message = dict[str, Any]
MessageKey = tuple[str, str, str, tuple[tuple[str, bytes], ...]]
OnDivergence = Literal["branch", "reject"]


class HistoryError(TermrlError):
    """The conversation does not continue the session; ``status`` and ``code`` are those of the HTTP reply."""

    def __init__(self, message: str, *, status: int, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Counters:
    """The fidelity of one session (or, added up, of many).

    ``tokens_captured == tokens_masked + Σ segment.sampled`` holds at every moment.

    Attributes:
        turns: generated turns that stand in the ledger.
        branches: paths beyond the first.
        rollbacks: turns that were taken back because the same request came again (or policy ``reject`` allowed it).
        re_rendered_turns: turns whose prompt had to be rendered from text although it holds replies of the session.
        closes_added: turns that ended without their close token and got it as context.
        context_stops: calls that had no room left in the context window.
        tokens_captured: sampled tokens that stand in the ledger.
        tokens_masked: those of them that cannot be trained on (greedy, top-p or top-k sampling).
        tokens_rolled_back: sampled tokens of the turns taken back.
    """

    turns: int = 0
    branches: int = 0
    rollbacks: int = 0
    re_rendered_turns: int = 0
    closes_added: int = 0
    context_stops: int = 0
    tokens_captured: int = 0
    tokens_masked: int = 0
    tokens_rolled_back: int = 0

    def __add__(self, other: Counters) -> Counters:
        mine, theirs = asdict(self), asdict(other)
        return Counters(**{name: mine[name] + theirs[name] for name in mine})


def message_key(message: Message) -> MessageKey:
    """What two spellings of one message have in common: role, text, reasoning and tool calls (name and arguments).

    Ids, ``index``, unknown fields, the spelling of the arguments' JSON and ``None`` against ``""`` do not count.
    """
    calls: list[tuple[str, bytes]] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        calls.append((str(function.get("name") or ""), _canonical_arguments(function.get("arguments"))))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return str(message.get("role")), content_text(message.get("content")), str(reasoning), tuple(calls)


def _canonical_arguments(arguments: Any) -> bytes:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return b"text:" + arguments.encode()
    return orjson.dumps(arguments or {}, option=orjson.OPT_SORT_KEYS)


@dataclass(eq=False)
class TurnNode:
    """One generated turn. ``added`` are the messages since the parent, ``context_ids`` their tokens (with glue)."""

    parent: TurnNode | None
    added: list[MessageKey]
    tools_key: bytes
    context_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    policy_version: int
    finish_reason: str
    sampling: SamplingParams
    message: Message
    key: MessageKey
    close_added: bool
    re_rendered: bool
    prompt_tokens: int
    children: list[TurnNode] = field(default_factory=list)
    pending: int = 0

    @property
    def trainable(self) -> bool:
        """Whether the captured logprobs are those of a plain softmax at a temperature."""
        return self.sampling.temperature > 0 and self.sampling.top_p >= 1.0 and self.sampling.top_k == 0

    def path(self) -> list[TurnNode]:
        """The turns from the first to this one."""
        nodes: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def record(self) -> dict[str, Any]:
        """The turn as JSON, without its tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "policy_version": self.policy_version,
            "sampling": asdict(self.sampling),
            "close_added": self.close_added,
            "re_rendered": self.re_rendered,
            "message": self.message,
        }


@dataclass(eq=False)
class PendingTurn:
    """A turn that is being generated: its exact prompt, and where it will stand."""

    parent: TurnNode | None
    added: list[MessageKey]
    tools_key: bytes
    prompt_ids: tuple[int, ...]
    inherited: int
    close_added: bool
    re_rendered: bool
    replaces: TurnNode | None
    done: bool = False


class Ledger:
    """All tokens of one session. Not thread-safe; calls may interleave between ``prepare`` and ``commit``."""

    def __init__(self, session_id: str, renderer: Renderer, *, on_divergence: OnDivergence = "branch") -> None:
        """``on_divergence`` says what a history that differs more than one turn back does: branch, or a 400."""
        self.session_id = session_id
        self.on_divergence: OnDivergence = on_divergence
        self._renderer = renderer
        self._stops = frozenset(renderer.get_stop_token_ids())
        self._roots: list[TurnNode] = []
        self._rollbacks = 0
        self._tokens_rolled_back = 0
        self._context_stops = 0

    def prepare(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> PendingTurn:
        """Find where a conversation continues the session, and make the exact prompt of its next turn.

        The ledger itself changes only in :meth:`commit`. Each pending turn must be committed or abandoned.

        Raises:
            HistoryError: 400 for a rewritten history under ``reject``, 409 where an unclosed turn cannot be closed.
            ValueError: the renderer cannot render the messages.
        """
        keys = [message_key(message) for message in messages]
        tools_key = orjson.dumps(tools or [], option=orjson.OPT_SORT_KEYS)
        parent, used = self._match(keys, tools_key)
        added, new_messages = keys[used:], list(messages[used:])
        if parent is not None and all(key[0] != "assistant" for key in added):
            replaces = self._replaced_by(added, tools_key, parent)
            bridged = self._bridge(parent, new_messages, tools)
            if bridged is not None:
                parent.pending += 1
                inherited = parent.prompt_tokens + len(parent.token_ids)
                prompt = tuple(bridged.token_ids)
                return PendingTurn(parent, added, tools_key, prompt, inherited, bridged.close_added, False, replaces)
        elif self._holds_a_reply(keys):
            self._refuse_rewrite()
        # Either a new opening, or a template that cannot go on from sampled tokens: the session branches.
        replaces = self._same_request(keys, tools_key, self._roots) if parent else self._replaced_by(keys, tools_key)
        prompt = tuple(self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True))
        return PendingTurn(None, keys, tools_key, prompt, 0, False, self._holds_a_reply(keys), replaces)

    def commit(
        self, pending: PendingTurn, result: GenerateResult, message: Message, sampling: SamplingParams
    ) -> TurnNode:
        """Write a generated turn down. It takes the place of the turn that it repeats, where that is still a leaf.

        Raises:
            CaptureError: the result's lists differ in length.
        """
        if len(result.token_ids) != len(result.logprobs):
            raise CaptureError(f"{len(result.token_ids)} token ids but {len(result.logprobs)} logprobs")
        node = TurnNode(
            parent=pending.parent,
            added=pending.added,
            tools_key=pending.tools_key,
            context_ids=array("q", pending.prompt_ids[pending.inherited :]),
            token_ids=array("q", result.token_ids),
            logprobs=array("d", result.logprobs),
            policy_version=result.policy_version,
            finish_reason=result.finish_reason,
            sampling=sampling,
            message=message,
            key=message_key(message),
            close_added=pending.close_added,
            re_rendered=pending.re_rendered,
            prompt_tokens=len(pending.prompt_ids),
        )
        siblings = self._roots if pending.parent is None else pending.parent.children
        old = pending.replaces
        if old is not None and old in siblings and not old.children and not old.pending:
            siblings.remove(old)
            self._rollbacks += 1
            self._tokens_rolled_back += len(old.token_ids)
        siblings.append(node)
        self.abandon(pending)
        return node

    def abandon(self, pending: PendingTurn) -> None:
        """Forget a pending turn; the ledger stays as it is. Idempotent, and harmless after ``commit``."""
        if not pending.done:
            pending.done = True
            if pending.parent is not None:
                pending.parent.pending -= 1

    def count_context_stop(self) -> None:
        """Note a call that found the context window full."""
        self._context_stops += 1

    def turns(self) -> Iterator[TurnNode]:
        """All turns, parents before children, branches in the order in which they came."""
        stack = self._roots[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def segments(self) -> tuple[Segment, ...]:
        """One segment a path (and temperature). Each trainable sampled token has mask 1 in exactly one of them."""
        claimed: set[TurnNode] = set()
        segments: list[Segment] = []
        for leaf in self.turns():
            if leaf.children:
                continue
            path = leaf.path()
            own = [node for node in path if node.trainable and node not in claimed]
            claimed.update(own)
            for temperature in dict.fromkeys(node.sampling.temperature for node in own):
                train = {node for node in own if node.sampling.temperature == temperature}
                last = max(index for index, node in enumerate(path) if node in train)
                segments.append(self._segment(path[: last + 1], train, temperature))
            if not own:
                segments.append(self._segment(path, set(), leaf.sampling.temperature))
        return tuple(segments)

    def counters(self) -> Counters:
        """The session's fidelity as it stands."""
        nodes = list(self.turns())
        return Counters(
            turns=len(nodes),
            branches=max(0, sum(not node.children for node in nodes) - 1),
            rollbacks=self._rollbacks,
            re_rendered_turns=sum(node.re_rendered for node in nodes),
            closes_added=sum(node.close_added for node in nodes),
            context_stops=self._context_stops,
            tokens_captured=sum(len(node.token_ids) for node in nodes),
            tokens_masked=sum(len(node.token_ids) for node in nodes if not node.trainable),
            tokens_rolled_back=self._tokens_rolled_back,
        )

    def _segment(self, path: list[TurnNode], train: set[TurnNode], temperature: float) -> Segment:
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for node in path:
            context, sampled = len(node.context_ids), len(node.token_ids)
            ids += node.context_ids
            ids += node.token_ids
            mine = node in train
            mask += [0] * context + [int(mine)] * sampled
            logprobs += [0.0] * context
            logprobs += node.logprobs if mine else [0.0] * sampled
            versions += [-1] * context + [node.policy_version if mine else -1] * sampled
        return Segment(
            session_id=self.session_id,
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
            temperature=temperature,
            turns=len(path),
        )

    def _match(self, keys: list[MessageKey], tools_key: bytes) -> tuple[TurnNode | None, int]:
        """The turn after which ``keys`` go on (the deepest, then the newest), and how many messages it covers."""
        best: tuple[TurnNode | None, int] = (None, 0)
        stack = [(node, 0) for node in self._roots if node.tools_key == tools_key]
        while stack:
            node, start = stack.pop()
            reply = start + len(node.added)
            if len(keys) <= reply + 1 or keys[reply] != node.key or keys[start:reply] != node.added:
                continue
            if reply + 1 > best[1]:
                best = (node, reply + 1)
            stack.extend((child, reply + 1) for child in node.children)
        return best

    def _same_request(self, added: list[MessageKey], tools_key: bytes, siblings: list[TurnNode]) -> TurnNode | None:
        """The newest last turn that came of the same request."""
        for node in reversed(siblings):
            if node.added == added and node.tools_key == tools_key and not node.children:
                return node
        return None

    def _replaced_by(
        self, added: list[MessageKey], tools_key: bytes, parent: TurnNode | None = None
    ) -> TurnNode | None:
        """The last turn that the same request (or, under ``reject``, any request one turn back) takes back."""
        siblings = self._roots if parent is None else parent.children
        same = self._same_request(added, tools_key, siblings)
        if same is None and siblings and self.on_divergence == "reject":
            if len(siblings) == 1 and not siblings[0].children:
                return siblings[0]
            self._refuse_rewrite()
        return same

    def _refuse_rewrite(self) -> None:
        if self.on_divergence == "reject":
            raise HistoryError(
                "the history differs from the session's, and more than its last turn",
                status=400,
                code="history_rewritten",
                hint="echo each assistant message verbatim, or let the session branch",
            )

    def _bridge(
        self, parent: TurnNode, new_messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> RenderedTokens | None:
        before: list[int] = []
        for node in parent.path()[:-1]:
            before += node.context_ids
            before += node.token_ids
        before += parent.context_ids
        bridged = self._renderer.bridge_to_next_turn(before, list(parent.token_ids), new_messages, tools=tools)
        before += parent.token_ids
        if bridged is not None and bridged.token_ids[: len(before)] == before:
            return bridged
        if not self._closed(parent):
            raise HistoryError(
                f"the last turn ended without its close token ({parent.finish_reason}) and this model's renderer "
                "cannot add it",
                status=409,
                code="turn_not_closed",
                hint="end the episode at a cut turn, or send the same request again",
            )
        return None

    def _closed(self, node: TurnNode) -> bool:
        return bool(node.token_ids) and node.token_ids[-1] in self._stops

    def _holds_a_reply(self, keys: list[MessageKey]) -> bool:
        """Whether a conversation that starts anew holds, as text, what the session generated (or a rewritten form)."""
        if any(key[0] == "assistant" for root in self._roots for key in self._after(root.added, keys)):
            return True
        openings = {key for root in self._roots for key in root.added}
        replies = {node.key for node in self.turns()} - openings
        return any(key in replies for key in keys)

    @staticmethod
    def _after(opening: list[MessageKey], keys: list[MessageKey]) -> list[MessageKey]:
        return keys[len(opening) :] if keys[: len(opening)] == opening else []
