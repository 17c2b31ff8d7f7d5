"""What a session makes of the conversations that an agent sends: goes on, rolls back, branches or refuses."""

from __future__ import annotations

import asyncio
from typing import Any

from tokenizers import Tokenizer

from termrl.capture.render import ChatMLRenderer
from termrl.errors import PolicyError
from tests.capture.fakes import Client, FakeUpstream, running, user


def counters(client: Client, session_id: str) -> Any:
    return client.server.counters(session_id)


async def two_turns(client: Client, session_id: str) -> list[dict[str, Any]]:
    messages = [user("one")]
    messages += [await client.chat(session_id, messages), user("two")]
    return [*messages, await client.chat(session_id, messages)]


async def test_the_next_prompt_is_the_last_prompt_and_the_sampled_ids_and_only_new_text(
    client: Client, upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    session_id = await client.create()
    await two_turns(client, session_id)
    first, second = upstream.calls
    (segment,) = client.server.segments(session_id)
    sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
    first_reply = sampled[: sampled.index(2) + 1]
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    kept = [*first.prompt_ids, *first_reply]
    assert list(second.prompt_ids[: len(kept)]) == kept
    tail = renderer.render_ids([user("two")], add_generation_prompt=True)
    assert list(second.prompt_ids[len(kept) + 1 :]) == tail
    assert segment.token_ids[: len(second.prompt_ids)] == second.prompt_ids


async def test_the_same_last_turn_again_rolls_one_turn_back_and_keeps_the_record_count(client: Client) -> None:
    session_id = await client.create()
    messages = await two_turns(client, session_id)
    again = await client.chat(session_id, messages[:3], seed=9)
    assert again != messages[3]
    after = counters(client, session_id)
    assert (after.turns, after.branches, after.rollbacks) == (2, 0, 1)
    (segment,) = client.server.segments(session_id)
    assert segment.turns == 2
    assert after.tokens_rolled_back > 0
    third = await client.chat(session_id, [*messages[:3], again, user("three")])
    assert third["role"] == "assistant"
    assert counters(client, session_id).re_rendered_turns == 0


async def test_the_first_turn_retried_starts_from_an_empty_ledger(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    await client.chat(session_id, [user("one")])
    await client.chat(session_id, [user("one")], seed=5)
    assert upstream.calls[0].prompt_ids == upstream.calls[1].prompt_ids
    after = counters(client, session_id)
    assert (after.turns, after.branches, after.rollbacks) == (1, 0, 1)


async def test_history_that_differs_two_turns_back_branches_and_leaves_the_old_branch_whole(client: Client) -> None:
    session_id = await client.create()
    await two_turns(client, session_id)
    before = client.server.segments(session_id)
    await client.chat(session_id, [user("quite another opening")])
    after = counters(client, session_id)
    assert (after.turns, after.branches, after.re_rendered_turns) == (3, 1, 0)
    assert client.server.segments(session_id)[0] == before[0]


async def test_history_that_differs_two_turns_back_is_a_400_where_branches_are_refused(
    upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    async with running(upstream, renderer, on_divergence="reject") as client:
        session_id = await client.create()
        messages = await two_turns(client, session_id)
        before = client.server.segments(session_id)
        reworded = [messages[0], {"role": "assistant", "content": "other words"}, user("two")]
        for history in ([user("another opening")], messages[:1], reworded):
            status, body = await client.post(session_id, history)
            assert status == 400
            assert body["error"]["code"] == "history_rewritten"
        assert len(upstream.calls) == 2
        assert client.server.segments(session_id) == before
        await client.chat(session_id, [*messages, user("three")])
        assert counters(client, session_id).turns == 3


async def test_where_branches_are_refused_one_turn_may_still_be_taken_back(
    upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    async with running(upstream, renderer, on_divergence="reject") as client:
        session_id = await client.create()
        messages = await two_turns(client, session_id)
        reworded = [messages[0], messages[1] | {"content": "other words"}, user("two")]
        assert (await client.post(session_id, reworded))[0] == 400
        await client.chat(session_id, [*messages[:2], user("two, in other words")])
        after = counters(client, session_id)
        assert (after.turns, after.branches, after.rollbacks) == (2, 0, 1)


async def test_after_a_failed_first_turn_any_opening_is_accepted(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    upstream.replies = [PolicyError("the engine is out of memory")]
    status, body = await client.post(session_id, [user("one")])
    assert status == 502
    assert body["error"]["code"] == "engine_error"
    assert "out of memory" in body["error"]["message"]
    assert client.server.segments(session_id) == ()
    await client.chat(session_id, [{"role": "system", "content": "other"}, user("new")])
    after = counters(client, session_id)
    assert (after.turns, after.branches, after.rollbacks) == (1, 0, 0)


async def test_demonstrations_in_the_opening_are_prompt_and_never_trained(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create()
    demo = [user("demo"), {"role": "assistant", "content": "```bash\nls\n```"}, user("task")]
    reply = await client.chat(session_id, demo)
    await client.chat(session_id, [*demo, reply, user("more")])
    (segment,) = client.server.segments(session_id)
    assert set(segment.loss_mask[: len(upstream.calls[0].prompt_ids)]) == {0}
    assert segment.sampled == counters(client, session_id).tokens_captured
    assert counters(client, session_id).re_rendered_turns == 0


async def test_two_concurrent_calls_on_one_parent_make_two_whole_branches_and_train_the_prompt_once(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create()
    messages = [user("one")]
    messages += [await client.chat(session_id, messages), user("two")]
    left, right = await asyncio.gather(
        client.chat(session_id, messages, seed=1), client.chat(session_id, messages, seed=2)
    )
    assert left != right
    after = counters(client, session_id)
    assert (after.turns, after.branches, after.rollbacks) == (3, 1, 0)
    one, two = client.server.segments(session_id)
    assert one.sampled + two.sampled == after.tokens_captured
    shared = len(upstream.calls[1].prompt_ids)
    assert one.token_ids[:shared] == two.token_ids[:shared]
    assert sum(one.loss_mask[:shared]) > 0
    assert sum(two.loss_mask[:shared]) == 0
    for reply in (left, right):
        await client.chat(session_id, [*messages, reply, user("on")])
    assert counters(client, session_id).branches == 1


async def test_history_that_rewrites_a_reply_branches_and_is_counted_as_rendered_again(client: Client) -> None:
    session_id = await client.create()
    messages = await two_turns(client, session_id)
    rewritten = {"role": "assistant", "content": "words that the policy never said"}
    await client.chat(session_id, [messages[0], rewritten, user("two")])
    after = counters(client, session_id)
    assert (after.branches, after.re_rendered_turns) == (1, 1)
    await client.chat(session_id, [*messages, user("three")])
    assert counters(client, session_id).re_rendered_turns == 1


async def test_two_tool_results_in_a_row_are_context_without_a_turn_between(
    client: Client, upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    session_id = await client.create()
    messages = [user("one")]
    messages += [await client.chat(session_id, messages)]
    results = [{"role": "tool", "content": "first"}, {"role": "tool", "content": "second"}]
    await client.chat(session_id, [*messages, *results])
    tail = renderer.render_ids(results, add_generation_prompt=True)
    assert list(upstream.calls[1].prompt_ids[-len(tail) :]) == tail
    assert counters(client, session_id).re_rendered_turns == 0


async def test_a_cut_turn_gets_its_close_as_context_before_the_next_message(
    client: Client, upstream: FakeUpstream, tokenizer: Tokenizer
) -> None:
    session_id = await client.create()
    upstream.replies = ["a reply that goes on and on and on and on"]
    status, body = await client.post(session_id, [user("one")], max_tokens=4)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "length"
    await client.chat(session_id, [user("one"), body["choices"][0]["message"], user("two")])
    (segment,) = client.server.segments(session_id)
    cut = len(upstream.calls[0].prompt_ids) + 4
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    assert list(segment.token_ids[cut : cut + 3]) == [2, *newline, 1]
    assert segment.loss_mask[cut - 4 : cut + 3] == (1, 1, 1, 1, 0, 0, 0)
    assert counters(client, session_id).closes_added == 1


async def test_a_cut_turn_is_a_409_where_the_renderer_cannot_close_it(
    upstream: FakeUpstream, tokenizer: Tokenizer
) -> None:
    class FakeRendererThatCannotClose(ChatMLRenderer):
        def bridge_to_next_turn(self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None):
            return None

    async with running(upstream, FakeRendererThatCannotClose(tokenizer)) as client:
        session_id = await client.create()
        cut = await client.chat(session_id, [user("one")], max_tokens=1)
        before = client.server.segments(session_id)
        status, body = await client.post(session_id, [user("one"), cut, user("two")])
        assert status == 409
        assert body["error"]["code"] == "turn_not_closed"
        assert client.server.segments(session_id) == before


async def test_template_glue_after_the_stop_token_appears_once_with_mask_0(
    client: Client, upstream: FakeUpstream, tokenizer: Tokenizer
) -> None:
    session_id = await client.create()
    await two_turns(client, session_id)
    (segment,) = client.server.segments(session_id)
    close = segment.token_ids.index(2, len(upstream.calls[0].prompt_ids))
    (newline,) = tokenizer.encode("\n", add_special_tokens=False).ids
    assert segment.token_ids[close : close + 3] == (2, newline, 1)
    assert segment.loss_mask[close : close + 3] == (1, 0, 0)
