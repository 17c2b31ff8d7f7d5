"""The ledger alone: what counts as the same message, what a trainer gets, and the invariants that always hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tokenizers import Tokenizer

from termrl.capture.chat import assistant_message
from termrl.capture.ledger import Ledger, PendingTurn, TurnNode, message_key
from termrl.capture.render import ChatMLRenderer, ParsedResponse, ParsedToolCall
from termrl.capture.upstreams import GenerateResult, SamplingParams
from termrl.errors import CaptureError
from tests.capture.fakes import small_tokenizer, user

Messages = list[dict[str, Any]]


def sampled(*ids: int, version: int = 0) -> GenerateResult:
    return GenerateResult(ids, tuple(-0.5 for _ in ids), "stop", version)


def turn(
    ledger: Ledger,
    messages: Messages,
    result: GenerateResult | None = None,
    message: dict[str, Any] | None = None,
    sampling: SamplingParams | None = None,
) -> Messages:
    """Generate one turn; the conversation with its reply."""
    pending = ledger.prepare(messages)
    reply = message or {"role": "assistant", "content": f"reply {len(messages)}"}
    ledger.commit(pending, result or sampled(7, 8, 2), reply, sampling or SamplingParams())
    return [*messages, reply]


@pytest.fixture
def ledger(renderer: ChatMLRenderer) -> Ledger:
    return Ledger("s", renderer)


def call_message(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": arguments}, **more}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_reserialised_tool_arguments_and_a_dropped_index_still_match_and_the_stored_spelling_wins(
    ledger: Ledger,
) -> None:
    stored = call_message('{"b": 1, "a": "é"}', index=0)
    before = turn(ledger, [user("one")], message=stored)
    echoed = call_message('{"a":"\\u00e9","b":1}') | {"content": None}
    turn(ledger, [before[0], echoed, {"role": "tool", "content": "done"}])
    counters = ledger.counters()
    assert (counters.turns, counters.branches, counters.re_rendered_turns) == (2, 0, 0)
    assert next(ledger.turns()).message is stored


def test_other_tool_arguments_do_not_match(ledger: Ledger) -> None:
    before = turn(ledger, [user("one")], message={"role": "assistant", "content": "x"})
    assert message_key(call_message('{"a": 1}')) != message_key(call_message('{"a": 2}'))
    assert message_key(call_message("not json")) == message_key(call_message("not json"))
    assert message_key(call_message('{"a": 1}')) != message_key(before[1])
    assert message_key({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}) == message_key(user("ab"))


def test_stripped_reasoning_branches_and_is_counted_never_matched_in_silence(ledger: Ledger) -> None:
    thought = {"role": "assistant", "content": "answer", "reasoning_content": "because"}
    before = turn(ledger, [user("one")], message=thought)
    kept = turn(ledger, [*before, user("two")])
    assert ledger.counters().branches == 0
    turn(ledger, [user("one"), {"role": "assistant", "content": "answer"}, user("two")])
    counters = ledger.counters()
    assert (counters.turns, counters.branches, counters.re_rendered_turns) == (3, 1, 1)
    turn(ledger, [*kept, user("three")])
    assert ledger.counters().branches == 1


def test_other_tools_make_another_opening(ledger: Ledger, renderer: ChatMLRenderer) -> None:
    turn(ledger, [user("one")])
    with pytest.raises(ValueError, match="tools"):
        ledger.prepare([user("one")], [{"type": "function", "function": {"name": "run"}}])
    assert ledger.counters().turns == 1


def test_turns_at_different_temperatures_go_to_segments_of_their_own(ledger: Ledger) -> None:
    hot, cold = SamplingParams(temperature=1.0), SamplingParams(temperature=0.5)
    messages = turn(ledger, [user("one")], sampled(5, 2), sampling=hot)
    messages = turn(ledger, [*messages, user("two")], sampled(6, 6, 2), sampling=cold)
    turn(ledger, [*messages, user("three")], sampled(7, 2), sampling=hot)
    one, two = ledger.segments()
    assert (one.temperature, one.sampled, one.turns) == (1.0, 4, 3)
    assert (two.temperature, two.sampled, two.turns) == (0.5, 3, 2)
    assert one.token_ids[: len(two.token_ids)] == two.token_ids
    assert all(a * b == 0 for a, b in zip(one.loss_mask, two.loss_mask, strict=False))


def test_a_retry_that_races_the_next_turn_keeps_the_turn_it_would_replace(ledger: Ledger) -> None:
    first = turn(ledger, [user("one")], sampled(5, 2))
    following = ledger.prepare([*first, user("two")])
    retry = ledger.prepare([user("one")])
    ledger.commit(retry, sampled(6, 2), {"role": "assistant", "content": "retried"}, SamplingParams())
    ledger.commit(following, sampled(7, 2), {"role": "assistant", "content": "b"}, SamplingParams())
    counters = ledger.counters()
    assert (counters.turns, counters.branches, counters.rollbacks) == (3, 1, 0)
    assert sorted(segment.sampled for segment in ledger.segments()) == [2, 4]


def test_two_retries_at_once_replace_one_turn_and_keep_both_replies(ledger: Ledger) -> None:
    turn(ledger, [user("one")], sampled(5, 2))
    one, two = ledger.prepare([user("one")]), ledger.prepare([user("one")])
    ledger.commit(one, sampled(6, 2), {"role": "assistant", "content": "a"}, SamplingParams())
    ledger.commit(two, sampled(7, 2), {"role": "assistant", "content": "b"}, SamplingParams())
    counters = ledger.counters()
    assert (counters.turns, counters.branches, counters.rollbacks) == (2, 1, 1)


def test_a_result_of_unequal_lists_is_refused_and_nothing_is_written(ledger: Ledger) -> None:
    pending = ledger.prepare([user("one")])
    with pytest.raises(CaptureError):
        ledger.commit(pending, replace(sampled(5, 2), logprobs=(-0.1,)), {"role": "assistant"}, SamplingParams())
    assert ledger.segments() == ()


def test_a_renderer_that_changes_earlier_tokens_makes_a_counted_branch_never_a_changed_prefix(
    tokenizer: Tokenizer,
) -> None:
    class FakeRendererThatRewrites(ChatMLRenderer):
        def bridge_to_next_turn(self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None):
            bridged = super().bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, new_messages)
            assert bridged is not None
            bridged.token_ids[3] += 1
            return bridged

    ledger = Ledger("s", FakeRendererThatRewrites(tokenizer))
    messages = turn(ledger, [user("one")])
    before = ledger.segments()[0]
    turn(ledger, [*messages, user("two")])
    counters = ledger.counters()
    assert (counters.branches, counters.re_rendered_turns) == (1, 1)
    assert ledger.segments()[0] == before


def test_a_broken_tool_call_stays_in_the_text_that_the_agent_echoes() -> None:
    parsed = ParsedResponse("so", None, (ParsedToolCall("<a>", "run", {"x": 1}), ParsedToolCall("<b>", ok=False)))
    message = assistant_message(parsed)
    assert message["content"] == "so\n<b>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["run"]


RENDERER = ChatMLRenderer(small_tokenizer())


class LedgerMachine(RuleBasedStateMachine):
    """Agents that go on, retry, branch, cut, fail and race, in any order."""

    conversations: Bundle[Messages] = Bundle("conversations")
    requests: Bundle[Messages] = Bundle("requests")
    flying: Bundle[PendingTurn] = Bundle("flying")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("s", RENDERER)
        self.random = random.Random(0)
        self.count = 0
        self.committed: dict[int, tuple[TurnNode, tuple[int, ...], GenerateResult]] = {}

    @rule(target=requests, text=st.sampled_from(["task", "other", "<|im_end|>"]))
    def open(self, text: str) -> Messages:
        return [user("demo"), {"role": "assistant", "content": "shown"}, user(text)]

    @rule(target=requests, messages=conversations, text=st.sampled_from(["out", "err", ""]))
    def observe(self, messages: Messages, text: str) -> Messages:
        return [*messages, user(text)]

    @rule(target=flying, messages=requests)
    def send(self, messages: Messages) -> PendingTurn:
        pending = self.ledger.prepare(messages)
        pending_messages[id(pending)] = messages
        if pending.parent is not None:
            before = full_tokens(pending.parent)
            assert pending.prompt_ids[: len(before)] == before
            assert pending.inherited == len(before)
        return pending

    @rule(
        target=conversations,
        pending=consumes(flying),
        size=st.integers(0, 5),
        closed=st.booleans(),
        temperature=st.sampled_from([1.0, 1.0, 0.7, 0.0]),
    )
    def finish(self, pending: PendingTurn, size: int, closed: bool, temperature: float) -> Messages:
        ids = tuple(self.random.randrange(3, 300) for _ in range(size)) + ((2,) if closed else ())
        result = GenerateResult(ids, tuple(-self.random.random() for _ in ids), "stop" if closed else "length", 1)
        self.count += 1
        reply = {"role": "assistant", "content": f"reply {self.count}"}
        node = self.ledger.commit(pending, result, reply, SamplingParams(temperature=temperature))
        self.committed[id(node)] = (node, pending.prompt_ids, result)
        return [*pending_messages.pop(id(pending)), reply]

    @rule(pending=consumes(flying))
    def cancel(self, pending: PendingTurn) -> None:
        before = self.ledger.segments()
        self.ledger.abandon(pending)
        assert self.ledger.segments() == before

    @invariant()
    def every_turn_has_the_prompt_it_was_given_and_the_tokens_it_sampled(self) -> None:
        for node in self.ledger.turns():
            _, prompt, result = self.committed[id(node)]
            assert full_tokens(node) == prompt + result.token_ids

    @invariant()
    def captured_is_trained_plus_masked_and_each_token_is_trained_once(self) -> None:
        counters, segments = self.ledger.counters(), self.ledger.segments()
        assert counters.tokens_captured == counters.tokens_masked + sum(segment.sampled for segment in segments)
        trained = Counter(
            logprob
            for segment in segments
            for logprob, mask in zip(segment.logprobs, segment.loss_mask, strict=True)
            if mask
        )
        wanted = [self.committed[id(node)] for node in self.ledger.turns() if node.sampling.temperature > 0]
        assert trained == Counter(logprob for _, _, result in wanted for logprob in result.logprobs)
        leaves = [node for node in self.ledger.turns() if not node.children]
        assert len(segments) >= len(leaves)

    @invariant()
    def nothing_is_rendered_again_while_every_reply_is_echoed(self) -> None:
        assert all(not node.re_rendered or node.parent is None for node in self.ledger.turns())
        assert self.ledger.counters().re_rendered_turns == sum(
            lost_parent(node, self.ledger) for node in self.ledger.turns()
        )


pending_messages: dict[int, Messages] = {}


def full_tokens(node: TurnNode) -> tuple[int, ...]:
    return tuple(token for part in node.path() for token in (*part.context_ids, *part.token_ids))


def lost_parent(node: TurnNode, ledger: Ledger) -> bool:
    """A turn whose request echoes a reply that a retry had already taken back is the one that is rendered anew."""
    return node.parent is None and any(key[0] == "assistant" and key[1] != "shown" for key in node.added)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(turns=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_an_agent_that_only_echoes_is_one_segment_whose_prompts_extend_and_is_never_rendered_again(
    turns: int, seed: int
) -> None:
    draw = random.Random(seed)
    ledger = Ledger("s", RENDERER)
    messages: Messages = [user("task")]
    last: tuple[int, ...] = ()
    for index in range(turns):
        pending = ledger.prepare(messages)
        assert pending.prompt_ids[: len(last)] == last
        ids = tuple(draw.randrange(400) for _ in range(draw.randrange(0, 9)))
        last = pending.prompt_ids + ids
        reply = {"role": "assistant", "content": RENDERER.parse_response(list(ids)).content}
        ledger.commit(pending, GenerateResult(ids, (-1.0,) * len(ids), "length", index), reply, SamplingParams())
        messages = [*messages, reply, user(f"out {index}")]
    (segment,) = ledger.segments()
    assert segment.token_ids == last
    assert (segment.turns, ledger.counters().re_rendered_turns, ledger.counters().branches) == (turns, 0, 0)
