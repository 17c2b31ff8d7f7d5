"""The agent function and the reward, called as miles calls them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from termrl.errors import PolicyError
from termrl.integrations.miles import reward_func, run
from tests.capture.fakes import FakeUpstream, small_tokenizer
from tests.integrations.miles.conftest import Open
from tests.integrations.miles.fakemiles import Sample
from tests.integrations.miles.scripts import DONE, LOOK, MAKE_APPLE

Make = Callable[..., Sample]
SOURCE = Path(__file__).parents[3] / "src"


def test_importing_it_needs_neither_openenv_nor_torch_and_reads_no_setting() -> None:
    code = textwrap.dedent("""
        import os, sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("openenv", "torch", "miles", "sglang", "ray", "docker", "transformers"):
                    raise AssertionError(f"{name} is imported")
        sys.meta_path.insert(0, Block())
        asked = []
        class Watched(type(os.environ)):
            def __getitem__(self, key):
                asked.append(key)
                return super().__getitem__(key)
        os.environ.__class__ = Watched
        import termrl.integrations.miles as miles
        ours = [name for name in asked if name.startswith(("OPENENV", "TERMRL", "MILES", "AGENT", "WANDB"))]
        assert not ours, ours
        assert "openai" not in sys.modules
        print(miles.run.__name__, os.environ.get("HOME") is not None, "HOME" in asked)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE), "HOME": "/x"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["run", "True", "True"], done.stderr


@pytest.mark.usefixtures("sandboxes")
class TestAnEpisode:
    async def test_a_solved_task_is_1_and_its_metrics_are_complete(self, miles: Open, sample: Make) -> None:
        async with miles(LOOK, MAKE_APPLE, DONE) as worker:
            played = await worker.sample(sample())
        assert (played.reward, played.status) == (1.0, Sample.Status.COMPLETED)
        assert played.metadata["exit_status"] == "completed"
        metrics = played.metadata["agent_metrics"]
        assert (metrics["turns"], metrics["tool_calls"], metrics["end_reason"]) == (3, 2, "task_complete")
        assert (metrics["outcome"], metrics["cause"], metrics["test_exit_code"]) == ("passed", None, 0)
        assert metrics["tamper_signals"] == []
        assert len(metrics["gen_times"]) == 3 and len(metrics["tool_times"]) == 2
        assert metrics["gen_times"] == pytest.approx([0.25] * 3, abs=0.25) and metrics["total_gen_time"] > 0
        parts = sum(metrics["tool_times"]) + metrics["reset_time"] + metrics["eval_time"]
        assert metrics["total_tool_time"] == pytest.approx(parts) == played.non_generation_time
        assert 0 < metrics["reset_time"] < 10 and 0 < metrics["eval_time"] < 10 and metrics["queue_time"] >= 0

    async def test_a_task_that_is_not_solved_is_0(self, miles: Open, sample: Make) -> None:
        async with miles(LOOK, DONE) as worker:
            played = await worker.sample(sample())
        assert (played.reward, played.status) == (0.0, Sample.Status.COMPLETED)
        assert played.metadata["agent_metrics"]["cause"] == "tests_failed"
        assert played.metadata["eval_report"]["outcome"] == "failed"

    async def test_the_trained_tokens_are_those_of_one_unbroken_conversation(self, miles: Open, sample: Make) -> None:
        async with miles(LOOK, MAKE_APPLE, DONE) as worker:
            played = await worker.sample(sample())
        (segment,) = played.segments
        assert segment.turns == 3
        text = small_tokenizer().decode(list(segment.token_ids), skip_special_tokens=False)
        assert text.count("You solve tasks.") == 1
        assert "Make a directory named apple." in text
        assert text.index("Make a directory") < text.index("ls") < text.index("mkdir apple") < text.index(DONE)

    async def test_an_aborted_turn_is_not_run_and_the_sample_is_dropped(self, miles: Open, sample: Make) -> None:
        async with miles(LOOK, (MAKE_APPLE, "abort")) as worker:
            played = await worker.sample(sample())
        assert played.status is Sample.Status.ABORTED and played.reward is None
        assert played.metadata["agent_metrics"]["tool_calls"] == 1
        assert played.metadata["agent_metrics"]["end_reason"] == "aborted"

    async def test_a_turn_cut_by_length_is_not_run_and_what_is_there_is_graded(self, miles: Open, sample: Make) -> None:
        async with miles(MAKE_APPLE, LOOK + " and on and on", sampling={"max_new_tokens": 12}) as worker:
            played = await worker.sample(sample())
        assert played.metadata["agent_metrics"]["end_reason"] == "length"
        assert played.status is Sample.Status.TRUNCATED
        assert played.reward == 0.0

    async def test_the_conversation_stays_within_max_seq_len(self, miles: Open, sample: Make) -> None:
        async with miles("```bash\nseq 60\n```", max_seq_len=700) as worker:
            played = await worker.sample(sample())
        metrics = played.metadata["agent_metrics"]
        assert metrics["end_reason"] == "context" and metrics["tool_calls"] > 1
        assert 400 < max(len(segment.token_ids) for segment in played.segments) <= 700
        assert played.reward == 0.0

    async def test_a_turn_that_ends_beyond_max_seq_len_is_not_run(self, miles: Open, sample: Make) -> None:
        async with miles("```bash\necho -n {a..z}{a..z}{a..z} | head -c 1200\n```", max_seq_len=700) as worker:
            played = await worker.sample(sample())
        metrics = played.metadata["agent_metrics"]
        assert (metrics["end_reason"], metrics["turns"], metrics["tool_calls"]) == ("context", 2, 1)
        assert played.reward == 0.0

    async def test_a_failing_policy_gives_no_reward(self, miles: Open, sample: Make) -> None:
        async with miles(LOOK, PolicyError("the engine is gone")) as worker:
            played = await worker.sample(sample())
        assert played.status is Sample.Status.ABORTED and played.reward is None
        assert played.metadata["agent_metrics"]["cause"] == "engine_error"
        assert played.metadata["exit_status"] == "aborted"

    async def test_a_seed_is_only_sent_where_miles_sends_one(self, miles: Open, sample: Make) -> None:
        tokenizer = small_tokenizer()
        upstream = FakeUpstream(tokenizer)
        upstream.replies = [DONE, LOOK, DONE]
        async with miles(upstream=upstream) as worker:
            await worker.sample(sample())
        assert upstream.calls[0].sampling.seed is None
        async with miles(upstream=upstream, sampling={"sampling_seed": 7}) as worker:
            await worker.sample(sample())
        first, second = (call.sampling.seed for call in upstream.calls[1:])
        assert first is not None and second is not None and first != second

    async def test_every_sampling_parameter_reaches_the_engine(self, miles: Open, sample: Make) -> None:
        upstream = FakeUpstream(small_tokenizer())
        upstream.replies = [DONE]
        async with miles(upstream=upstream, sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 5}) as worker:
            await worker.sample(sample())
        sampling = upstream.calls[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.9, 5, 64)

    async def test_a_sample_without_a_task_has_no_reward(self, miles: Open) -> None:
        async with miles(DONE) as worker:
            played = await worker.sample(Sample(0, 0, [], {}))
        assert played.status is Sample.Status.ABORTED and played.reward is None
        assert not worker.raised

    async def test_an_unknown_task_has_no_reward(self, miles: Open, sample: Make) -> None:
        async with miles(DONE) as worker:
            played = await worker.sample(sample("no-such-task"))
        assert played.status is Sample.Status.ABORTED and played.reward is None
        assert not worker.raised

    async def test_metadata_none_is_no_crash(self, miles: Open) -> None:
        result = await run(base_url="http://127.0.0.1:9/sessions/x", prompt=None, request_kwargs=None, metadata=None)
        assert result["reward"] is None and "task_id" in result["eval_report"]["detail"]

    async def test_a_second_version_server_takes_the_reward_from_the_dict(self, miles: Open, sample: Make) -> None:
        async with miles(MAKE_APPLE, DONE, v2=True) as worker:
            (passed,) = await worker.sample(sample())
            (lost,) = await worker.sample(sample("no-such-task"))
        assert passed.reward == 1.0
        assert lost.reward is None and lost.status is Sample.Status.ABORTED

    async def test_a_group_is_scored_by_one_call(self, miles: Open, sample: Make) -> None:
        async with miles(MAKE_APPLE, DONE, group_rm=True) as worker:
            group = await worker.group([sample(), sample("make-berry"), sample("no-such-task")])
        assert [one.reward for one in group] == [1.0, 0.0, None]
        assert group[2].status is Sample.Status.ABORTED


class TestTheReward:
    async def _of(self, metadata: Any) -> tuple[float | None, Sample.Status]:
        sample = Sample(0, 0, [], metadata, status=Sample.Status.COMPLETED)
        one = await reward_func(None, sample)
        assert not isinstance(one, list)
        assert await reward_func(None, [sample, sample]) == [one, one]
        return one, sample.status

    @pytest.mark.parametrize("reward", [0.0, 1.0, 1, 0.5])
    async def test_a_verdict_is_passed_on(self, reward: float) -> None:
        assert await self._of({"reward": reward}) == (reward, Sample.Status.COMPLETED)

    @pytest.mark.parametrize(
        "metadata",
        [None, {}, {"reward": None}, {"reward": "1"}, {"reward": float("nan")}, {"reward": 7}, {"reward": True}, "x"],
    )
    async def test_all_else_is_dropped_and_never_0(self, metadata: Any) -> None:
        assert await self._of(metadata) == (None, Sample.Status.ABORTED)


@pytest.mark.usefixtures("sandboxes")
async def test_a_message_is_echoed_verbatim(monkeypatch: pytest.MonkeyPatch, sample: Make) -> None:
    """Reasoning, tool calls and fields that nobody knows come back as they were; nothing is retried."""
    said = [
        {"role": "assistant", "content": "", "tool_calls": [_call("bash")], "reasoning_content": "hm", "odd": {"a": 1}},
        {"role": "assistant", "content": DONE, "reasoning_content": "done"},
    ]
    asked, base_url, stop = await _endpoint([{"choices": [{"message": one, "finish_reason": "stop"}]} for one in said])
    result = await run(base_url=base_url, prompt=[], request_kwargs={}, metadata={"task_id": "make-apple"})
    await stop()
    assert result["agent_metrics"]["end_reason"] == "task_complete"
    assert asked[1]["messages"][1] == said[0]
    assert asked[1]["messages"][2]["tool_call_id"] == "c1" and asked[1]["messages"][2]["content"]


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize(
    "reply",
    [{"choices": []}, {"choices": None}, {"choices": [{"message": None, "finish_reason": "stop"}]}, {}, 500, 400],
)
async def test_a_reply_that_is_none_drops_the_sample_and_is_not_asked_for_again(reply: Any) -> None:
    asked, base_url, stop = await _endpoint([reply])
    result = await run(base_url=base_url, prompt=[], request_kwargs={}, metadata={"task_id": "make-apple"})
    await stop()
    assert len(asked) == 1
    assert result["reward"] is None and result["agent_metrics"]["cause"] == "engine_error"


@pytest.mark.usefixtures("sandboxes")
async def test_the_session_server_is_reached_by_its_external_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, base_url, stop = await _endpoint([{"choices": [{"message": {"content": DONE}, "finish_reason": "stop"}]}])
    monkeypatch.setenv("MILES_ROUTER_EXTERNAL_HOST", "localhost")
    elsewhere = base_url.replace("127.0.0.1", "10.255.255.1")
    result = await run(base_url=elsewhere, prompt=[], request_kwargs={}, metadata={"task_id": "make-apple"})
    await stop()
    assert len(asked) == 1 and result["reward"] == 0.0


def _call(name: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"x":  1}'}}


async def _endpoint(replies: list[Any]) -> tuple[list[dict[str, Any]], str, Callable[[], Any]]:
    """A chat endpoint that answers from a list: bodies, or statuses."""
    from aiohttp import web

    asked: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append(json.loads(await request.read()))
        reply = replies[len(asked) - 1]
        if isinstance(reply, int):
            return web.json_response({"error": "no"}, status=reply)
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/sessions/x/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    await asyncio.sleep(0)
    return asked, f"http://127.0.0.1:{port}/sessions/x", runner.cleanup
