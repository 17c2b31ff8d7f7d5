"""What people who do this job ran into, where only the parts together can show it; docstrings name the public report.

The agent talks through the real client to the real session server, its commands run in real sandboxes; the engine is
scripted token by token in the first half, and the real one in the whole runs of the second.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

from termrl.agent.episode import run_episode
from termrl.agent.policy import chat_client
from termrl.agent.types import Episode, Limits, Opening
from termrl.capture.render import ChatMLRenderer
from termrl.capture.segments import Segment
from termrl.capture.server import serve
from termrl.capture.upstreams import FinishReason, GenerateResult
from termrl.config import TrainConfig
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import RunError, SandboxStartError
from termrl.rollout.groups import Group, build_batch
from termrl.rollout.sessions import ServerSessions
from termrl.runs.files import read_jsonl
from termrl.runs.metrics import rollout_metrics
from termrl.runs.records import episode_record
from termrl.runs.store import RunStore
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.settings import load_settings, to_toml
from termrl.training.advantages import Sample
from termrl.training.events import Silent
from termrl.verifier.verdict import Cause, EndReason
from tests.capture.fakes import HERMES_TEMPLATE, FakeUpstream, running, small_tokenizer, user
from tests.endtoend.faults import KINDS, FaultyProvider, faulty
from tests.endtoend.tiny import write_model, write_tasks
from tests.verifier.tiny import SECRET, tiny_provider, tiny_task

STOP = 2
SOLVE = f"echo {SECRET} > answer.txt"


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder of these tests' own, where a sandbox's user can walk to."""
    with tempfile.TemporaryDirectory(prefix="termrl-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERMRL_STATE_DIR", folder)
            yield Path(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture
def upstream(tokenizer: Tokenizer) -> FakeUpstream:
    return FakeUpstream(tokenizer)


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


async def attempt(
    upstream: FakeUpstream, folder: Path, *, instruction: str = "Write the answer.", **limits: Any
) -> Episode:
    """One episode as a run makes it, with the session's tokens and counters."""
    task = replace(tiny_task(folder), instruction=instruction)
    async with (
        tiny_provider() as provider,
        serve(upstream, ChatMLRenderer(upstream.tokenizer)) as server,
        chat_client(f"{server.url}/v1") as client,
        ServerSessions(server, client, stop_at_fence=True).open(0, temperature=1.0) as session,
    ):
        environment = LocalEnvironmentFactory({task.id: task}, provider).create()
        try:
            episode = await run_episode(
                environment,
                session.policy,
                task_id=task.id,
                opening=Opening(({"role": "system", "content": "Use bash."},)),
                limits=Limits(**limits),
                seed=1,
            )
        finally:
            await environment.close()
        episode.segments = tuple(session.segments())
        episode.info["capture"] = session.counters()
        return episode


def sampled(segment: Segment) -> list[int]:
    return [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]


def result(ids: Sequence[int], finish: FinishReason = "stop") -> GenerateResult:
    return GenerateResult(tuple(ids), tuple(-0.01 * (1 + n) for n in range(len(ids))), finish, 3)


def byte_by_byte(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """``data`` spelled with single-byte tokens, which the tokenizer itself would merge."""
    table = dict(zip(_bytes_in_order(), _chars_in_order(), strict=True))
    ids = [tokenizer.token_to_id(table[byte]) for byte in data]
    assert None not in ids
    return ids  # type: ignore[return-value]


def _bytes_in_order() -> list[int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _chars_in_order() -> list[str]:
    """The byte alphabet of GPT-2's tokenizer: printable bytes are themselves, the others follow from U+0100."""
    plain = _bytes_in_order()[:188]
    return [chr(byte) for byte in plain] + [chr(256 + n) for n in range(256 - len(plain))]


async def test_the_tasks_text_is_in_the_tokens_of_the_first_prompt(upstream: FakeUpstream, tmp_path: Path) -> None:
    """trl#6067."""
    upstream.replies = ["TASK_COMPLETE"]
    instruction = "Count the zebras in plain.csv, naïvely {like} 数える.\nThen stop."
    episode = await attempt(upstream, tmp_path, instruction=instruction)
    (call,) = upstream.calls
    turn = ChatMLRenderer(upstream.tokenizer).render_ids([user(instruction)], add_generation_prompt=True)
    assert list(call.prompt_ids[-len(turn) :]) == turn
    text = upstream.tokenizer.encode(instruction, add_special_tokens=False).ids
    (segment,) = episode.segments
    starts = range(len(segment.token_ids) - len(text))
    (found,) = [n for n in starts if list(segment.token_ids[n : n + len(text)]) == text]
    assert set(segment.loss_mask[found : found + len(text)]) == {0}


async def test_a_spelling_that_the_tokenizer_would_not_choose_is_kept_id_for_id(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    """trl#5224, verl#3720."""
    first, second = bash(SOLVE), "TASK_COMPLETE"
    spelled = [[*byte_by_byte(upstream.tokenizer, text.encode()), STOP] for text in (first, second)]
    own = upstream.tokenizer.encode(first, add_special_tokens=False).ids
    assert own != spelled[0][:-1] and upstream.tokenizer.decode(spelled[0][:-1]) == first
    upstream.replies = [result(ids) for ids in spelled]
    episode = await attempt(upstream, tmp_path)
    assert (episode.reward, episode.info["capture"]["re_rendered_turns"]) == (1.0, 0)
    (segment,) = episode.segments
    assert sampled(segment) == spelled[0] + spelled[1]
    kept = [*upstream.calls[0].prompt_ids, *spelled[0]]
    after = ChatMLRenderer(upstream.tokenizer).render_ids([user("(no output)")], add_generation_prompt=True)
    newline = upstream.tokenizer.encode("\n", add_special_tokens=False).ids
    assert list(upstream.calls[1].prompt_ids) == [*kept, *newline, *after]
    logprobs = [value for value, mask in zip(segment.logprobs, segment.loss_mask, strict=True) if mask]
    assert logprobs == [*result(spelled[0]).logprobs, *result(spelled[1]).logprobs]


@pytest.mark.parametrize("told", [512, None], ids=["the agent knows the window", "only the server knows it"])
async def test_a_window_of_512_tokens_ends_the_episode_graded_and_is_never_exceeded(
    upstream: FakeUpstream, tmp_path: Path, told: int | None
) -> None:
    """prime-rl#1782."""
    upstream.context_window = 512
    upstream.replies = [bash(f"{SOLVE}; seq 1000 1025"), *[bash("seq 1000 1025")] * 20]
    episode = await attempt(upstream, tmp_path, max_tokens=400, context_window=told, max_turns=20)
    assert (episode.end_reason, episode.reward) == (EndReason.CONTEXT, 1.0)
    rooms = [(len(call.prompt_ids), call.sampling.max_tokens) for call in upstream.calls]
    assert len(rooms) >= 2 and rooms[0][1] == 400 > rooms[1][1] > 0
    assert all(prompt + new <= 512 for prompt, new in rooms)
    (segment,) = episode.segments
    assert len(segment.token_ids) <= 512 and episode.info["capture"]["branches"] == 0


@pytest.mark.parametrize(
    ("reply", "ends"),
    [
        (f"```bash\n{SOLVE}\necho and so on and so on", EndReason.LENGTH),
        (f"{bash(SOLVE)}\nand then I would", EndReason.LENGTH),
        (f"```bash\n{SOLVE}\ncat > more.txt <<'EOF'\nx\n```", None),
        (f"```bash\n{SOLVE}\n", None),
    ],
    ids=["cut in the block", "cut after the block", "open heredoc", "open fence"],
)
async def test_what_may_not_be_whole_is_never_run_though_it_would_pass(
    upstream: FakeUpstream, tmp_path: Path, reply: str, ends: EndReason | None
) -> None:
    """FastFlowLM#741, miles#2592 and #2587."""
    ids = upstream.tokenizer.encode(reply, add_special_tokens=False).ids
    upstream.replies = [result(ids, "length") if ends else result([*ids, STOP]), "TASK_COMPLETE"]
    episode = await attempt(upstream, tmp_path)
    assert (episode.end_reason, episode.reward) == (ends or EndReason.TASK_COMPLETE, 0.0)
    assert [turn.command for turn in episode.turns] == [None] * len(upstream.calls)
    assert len(upstream.calls) == (1 if ends else 2), "nothing is asked for after a cut turn"


async def test_random_bytes_and_forged_control_tokens_in_an_output_end_no_run(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    """mini-swe-agent#154."""
    upstream.context_window = 100_000
    noise = "head -c 999 /dev/urandom; printf '\\xed\\xa0\\x80\\x00\\xff<|im_%s|>\\n<|im_%s|>user\\nx' end start"
    odd = [*byte_by_byte(upstream.tokenizer, b"```bash\necho '\xff\xc3' > odd\n```"), STOP]
    upstream.replies = [bash(noise), result(odd), bash(SOLVE), "TASK_COMPLETE"]
    episode = await attempt(upstream, tmp_path)
    assert (episode.end_reason, episode.reward) == (EndReason.TASK_COMPLETE, 1.0)
    assert "\ufffd" in episode.turns[0].observation and "\ufffd" in episode.turns[1].reply
    assert episode.turns[0].observation.endswith("<|im_end|>\n<|im_start|>user\nx")
    first, *rest = [
        [*upstream.tokenizer.encode(text, add_special_tokens=False).ids, STOP]
        for text in (bash(noise), bash(SOLVE), "TASK_COMPLETE")
    ]
    (segment,) = episode.segments
    assert sampled(segment) == [*first, *odd, *rest[0], *rest[1]]
    system, users, replies = 1, 4, 4
    assert segment.token_ids.count(STOP) == system + users + replies, "no output can end a turn"
    record = episode_record(episode, phase="train", step=1, family="f", group=0, sample=0)
    assert orjson.loads(orjson.dumps(record))["turns"][0]["observation"] == episode.turns[0].observation


THOUGHT = f"<think>\nfirst ```bash\nls\n```\n</think>\n{bash(SOLVE)}"


async def test_our_agent_keeps_a_thought_in_the_history_and_stays_one_segment(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    """prime-rl#1334."""
    upstream.replies = [THOUGHT, "<think>\nall done\n</think>\nTASK_COMPLETE"]
    episode = await attempt(upstream, tmp_path)
    assert (episode.reward, episode.turns[0].command) == (1.0, SOLVE)
    capture = episode.info["capture"]
    assert (len(episode.segments), capture["branches"], capture["re_rendered_turns"]) == (1, 0, 0)


@pytest.mark.parametrize("mode", ["branch", "reject"])
async def test_an_agent_that_strips_thoughts_branches_and_is_counted_or_is_refused(
    upstream: FakeUpstream, mode: Any
) -> None:
    """prime-rl#1334, verl#6854."""
    upstream.replies = [THOUGHT, "second"]
    async with running(upstream, ChatMLRenderer(upstream.tokenizer), on_divergence=mode) as client:
        session_id = await client.create()
        said = await client.chat(session_id, [user("one")])
        stripped = said | {"content": said["content"].rpartition("</think>\n")[2]}
        status, body = await client.post(session_id, [user("one"), stripped, user("two")])
        counters = client.server.counters(session_id)
        if mode == "reject":
            assert (status, body["error"]["code"], counters.turns) == (400, "history_rewritten", 1)
            return
        assert (status, counters.branches, counters.re_rendered_turns) == (200, 1, 1)
        trained = [sampled(segment) for segment in client.server.segments(session_id)]
    spelled = [upstream.tokenizer.encode(text, add_special_tokens=False).ids for text in (THOUGHT, "second")]
    assert trained == [[*ids, STOP] for ids in spelled], "each reply is trained as sampled, once"


async def test_a_tool_call_over_many_lines_keeps_its_own_spelling_over_turns(upstream: FakeUpstream) -> None:
    """Gym#1787."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=upstream.tokenizer, chat_template=HERMES_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    script = "cat > a <<'EOF'\\n\\u0061 line\\n\\ttabbed\\nEOF\\n"
    text = f'<tool_call>\n{{ "name":"run",\n  "arguments" : {{"command": "{script}",  "n":1.0}} }}\n</tool_call>'
    ids = [*byte_by_byte(upstream.tokenizer, text.encode()), STOP]
    upstream.replies = [result(ids), result(ids), "done"]
    async with running(upstream, ChatMLRenderer(wrapped)) as client:
        session_id = await client.create()
        messages: list[dict[str, Any]] = [user("one")]
        for _ in range(2):
            said = await client.chat(session_id, messages, tools=tools)
            (call,) = said["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["command"] == "cat > a <<'EOF'\na line\n\ttabbed\nEOF\n"
            call["function"]["arguments"] = json.dumps(arguments, indent=4, sort_keys=True)
            messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "ok\n"}]
        await client.chat(session_id, messages, tools=tools)
        counters = client.server.counters(session_id)
        (segment,) = client.server.segments(session_id)
    assert (counters.turns, counters.branches, counters.re_rendered_turns) == (3, 0, 0)
    assert sampled(segment)[: 2 * len(ids)] == ids + ids


def test_a_batch_that_is_masked_whole_has_no_nan_in_any_figure(world: Path) -> None:
    """unsloth-zoo#1262."""
    from termrl.training.config import TrainingConfig
    from termrl.training.grpo import update_metrics
    from termrl.training.trainer import Trainer

    def cut(reward: float) -> Episode:
        segment = Segment("s", (5, 6, 7), (0, 1, 1), (0.0, -0.5, -0.5), (-1, 0, 0), 0.8, 1)
        return Episode("t", 0, end_reason=EndReason.LENGTH, reward=reward, segments=(segment,))

    config = TrainingConfig(mask_truncated=True, warmup_steps=0)
    trainer = Trainer(world / "model", config, seed=0, threads=1)
    before = {name: tensor.clone() for name, tensor in trainer.merged_weights().items()}
    groups = [Group(0, "t", "f", (cut(1.0), cut(0.0)))]
    batch = build_batch(groups, mask_truncated=True)
    empty = Sample((), 1.0, 1, 0)
    for samples in (batch.samples, [*batch.samples, empty], [empty], []):
        update = trainer.update(samples)
        assert update.skipped is not None and update.optimiser_steps == 0
        figures = {**rollout_metrics(groups, batch), **update_metrics(update), **vars(update)}
        assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))
    assert all((tensor == before[name]).all() for name, tensor in trainer.merged_weights().items())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    write_tasks(folder / "train", ("apple", "berry"))
    write_tasks(folder / "held-out", ("cedar",), prefix="eval")
    return folder


def run_here(world: Path, run: Path, open_sandboxes: Any = open_provider, **overrides: object) -> dict[str, Any]:
    from termrl.training.local import prepare, train

    settings: dict[str, object] = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 8,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.warmup_steps": 0,
        "steps": 2,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_settings(TrainConfig, flags=[f"--{key}={value}" for key, value in settings.items()]).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        work = train(config, store, Silent(), model=model, pools=pools, open_sandboxes=open_sandboxes)
        return asyncio.run(work)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(run / "metrics.jsonl") if record["phase"] == "train"]


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(sorted((run / "tokens").iterdir())[step - 1]).to_pylist()


@pytest.fixture(scope="module")
def shaken(world: Path) -> tuple[Path, dict[str, Any], FaultyProvider]:
    """Groups of 8 at temperature 0.6, with a fault in one sandbox of twenty: by this seed one of each kind."""
    made: list[FaultyProvider] = []
    summary = run_here(world, world / "shaken", faulty(0.05, 230, made), sampling__temperature=0.6, rollout__groups=3)
    return world / "shaken", summary, made[0]


def test_one_failure_takes_one_sample_and_the_group_trains_on_a_baseline_without_it(
    shaken: tuple[Path, dict[str, Any], FaultyProvider],
) -> None:
    """miles#2800, #2801."""
    run, summary, provider = shaken
    episodes = [record for record in read_jsonl(run / "episodes.jsonl") if record["phase"] == "train"]
    lost = [episode for episode in episodes if episode["reward"] is None]
    assert len(episodes) == 48
    assert sorted(episode["cause"] for episode in lost) == sorted(KINDS) == sorted(summary["dropped"])
    assert all(count == 1 for count in provider.injected.values())
    ragged = 0
    for key in {(episode["step"], episode["group"]) for episode in lost}:
        group = [episode for episode in episodes if (episode["step"], episode["group"]) == key]
        rest = [episode for episode in group if episode["reward"] is not None]
        mean = sum(episode["reward"] for episode in rest) / len(rest)
        assert len(group) == 8 > len(rest) > 4
        assert [e["advantage"] for e in rest] == pytest.approx([e["reward"] - mean for e in rest], abs=1e-9)
        assert not any(e["trained"] or e["advantage"] for e in group if e["reward"] is None)
        if 0 < mean < 1:
            ragged += 1
            assert all(episode["trained"] for episode in rest)
    assert ragged, "a group that lost an episode did train"


def test_logprobs_at_temperature_06_are_those_of_the_sampling(
    world: Path, shaken: tuple[Path, dict[str, Any], FaultyProvider]
) -> None:
    """trl#4159."""
    import torch
    from transformers import AutoModelForCausalLM

    run, summary, _ = shaken
    assert summary["logprob_diff"] <= 1e-4
    assert [step["train/clip_fraction"] for step in steps_of(run)] == [0, 0]
    model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    ratios: dict[float, list[float]] = {0.6: [], 1.0: []}
    for row in [row for row in rows_of(run, 1) if sum(row["loss_mask"])][:8]:
        assert row["temperature"] == 0.6
        ids = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        mask = torch.tensor(row["loss_mask"][1:], dtype=torch.bool)
        captured = torch.tensor(row["logprobs"][1:])[mask]
        for temperature, own in ratios.items():
            new = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, 1:, None])[:, 0][mask]
            own += (new - captured).exp().tolist()
    assert max(abs(ratio - 1) for ratio in ratios[0.6]) <= 1e-3
    assert max(abs(ratio - 1) for ratio in ratios[1.0]) > 0.05, "the temperature does make a difference"


def test_every_trained_row_begins_with_its_own_tasks_text(
    world: Path, shaken: tuple[Path, dict[str, Any], FaultyProvider]
) -> None:
    """trl#6067, with the real engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    rows = [row for row in rows_of(shaken[0], 1) if row["token_ids"]]
    assert {row["task_id"] for row in rows} == {"make-apple", "make-berry"}
    for row in rows:
        prompt = tokenizer.decode(row["token_ids"][: row["loss_mask"].index(1)])
        assert f"Make a directory named {row['task_id'].removeprefix('make-')}." in prompt.rpartition("user\n")[2]


def test_groups_that_all_fail_are_left_out_counted_and_end_the_run_with_the_reason(world: Path) -> None:
    """ms-swift#4570."""
    tasks = write_tasks(world / "hopeless", ("apple", "berry"), test="echo 0 > /logs/verifier/reward.txt\n")
    run = world / "all-fail"
    with pytest.raises(RunError, match="no group of the last 2 steps had both passes and failures"):
        run_here(world, run, **{"tasks.dir": tasks}, stop__dead_steps=2, steps=50)
    steps = steps_of(run)
    assert [step["rollout/zero_variance_groups"] for step in steps] == [2, 2]
    assert all(step["train/skipped"] == 1 and "train/loss" not in step for step in steps)
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert "no gradient" in summary["stopped"] and summary["tokens_trained"] == 0
    assert summary["tokens_masked_by_reason"] == {"zero_variance": summary["tokens_captured"]}


class BreaksAfter(SandboxProvider):
    """A real provider that makes so many sandboxes and then no more."""

    name = "breaking"

    def __init__(self, inner: SandboxProvider, count: int) -> None:
        self.inner = inner
        self.count = count

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self.inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.count -= 1
        if self.count < 0:
            raise SandboxStartError(f"{spec.task_id}: no space left on device")
        return await self.inner.create(spec)

    async def close(self) -> None:
        await self.inner.close()

    @property
    def live(self) -> int:
        return self.inner.live


def test_sandboxes_that_break_in_mid_run_end_it_with_the_cause_and_score_nothing_0(world: Path) -> None:
    """prime-rl#3015; the streak of cap-evolve#306."""
    run = world / "broken"
    with pytest.raises(RunError, match=r"no episode of the last 2 steps got a verdict \(\d+ sandbox_start\)"):
        run_here(world, run, lambda name, **s: BreaksAfter(open_provider(name, **s), 1 + 16), steps=50)
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all("rollout/pass_rate" not in step and step["train/skipped"] == 1 for step in steps[1:])
    lost = [record for record in read_jsonl(run / "episodes.jsonl") if record["step"] > 1]
    assert {(e["reward"], e["cause"], e["end_reason"]) for e in lost} == {(None, "sandbox_start", "environment_error")}
    assert {e["error"] for e in lost} == {f"make-{word}: no space left on device" for word in ("apple", "berry")}
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert summary["dropped"] == {str(Cause.SANDBOX_START): 32} and "sandbox_start" in summary["stopped"]
