"""The embedded engine against transformers' own forward pass, and against itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from termrl.capture.upstreams import GenerateRequest, GenerateResult, SamplingParams
from termrl.engine.transformers import EmbeddedEngine
from termrl.errors import ModelError, PolicyError
from tests.engine.tiny import KINDS, make_model

EXACT = 1e-4


def engine_of(folder: Path, *, threads: int = 1, max_kv_tokens: int | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(folder, threads=threads, max_kv_tokens=max_kv_tokens)


def ids(length: int, salt: int) -> tuple[int, ...]:
    """Some ordinary token ids."""
    return tuple(3 + (salt * 7919 + i * i * 31 + i * 17) % 250 for i in range(length))


SHARED = ids(40, 0)


def request(name: str, prompt: Sequence[int], *, order: int = 0, **sampling: object) -> GenerateRequest:
    settings = {"temperature": 0.8, "max_tokens": 12, "seed": sum(name.encode())} | sampling
    return GenerateRequest(name, tuple(prompt), SamplingParams(**settings), order)  # type: ignore[arg-type]


def a_batch(rows: int = 7, **sampling: object) -> list[GenerateRequest]:
    """Rows that share 40 tokens, with tails of different lengths, some of them equal."""
    return [request(f"s{i}", SHARED + ids(3 + 5 * (i // 2), i // 2), order=i, **sampling) for i in range(rows)]


def next_turn(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> list[GenerateRequest]:
    """The same sessions one turn on, each with an observation of its own length."""
    return [
        replace(r, prompt_ids=r.prompt_ids + done.token_ids + ids(2 + 3 * i, 100 + i))
        for i, (r, done) in enumerate(zip(requests, results, strict=True))
    ]


def reference_logprobs(model: torch.nn.Module, r: GenerateRequest, done: GenerateResult) -> list[float]:
    """Transformers' log-probabilities of what was sampled, at the sampling temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([r.prompt_ids + done.token_ids])).logits[0].double()
    logprobs = (logits / r.sampling.temperature).log_softmax(-1)
    at = len(r.prompt_ids) - 1
    return [float(logprobs[at + i, token]) for i, token in enumerate(done.token_ids)]


def assert_exact(
    model: torch.nn.Module, requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]
) -> None:
    for r, done in zip(requests, results, strict=True):
        assert done.token_ids
        assert done.logprobs == pytest.approx(reference_logprobs(model, r, done), abs=EXACT)


def assert_same(got: Sequence[GenerateResult], wanted: Sequence[GenerateResult]) -> None:
    """Equal tokens and reasons; logprobs equal but for the order of sums."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers_over_three_turns(
    kind: str, folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    engine = engine_of(folders[kind])
    requests = a_batch()
    for _ in range(3):
        results = engine.generate(requests)
        assert_exact(references[kind], requests, results)
        requests = next_turn(requests, results)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_generate(
    kind: str, folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    requests = a_batch(5, temperature=0.0)
    results = engine_of(folders[kind]).generate(requests)
    for r, done in zip(requests, results, strict=True):
        prompt = torch.tensor([r.prompt_ids])
        whole = references[kind].generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=-1
        )
        assert done.token_ids == tuple(whole[0, len(r.prompt_ids) :].tolist())
        assert done.logprobs == (0.0,) * 12  # all the mass is on that token


def test_a_later_turn_from_cached_keys_equals_the_turn_from_scratch(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    first = a_batch()
    second = next_turn(first, engine.generate(first))
    before = replace(engine.stats)
    results = engine.generate(second)
    spent = engine.stats.since(before)
    # the last sampled token of each row, and its observation, are all that is new
    assert spent.prefill_tokens == sum(1 + 2 + 3 * i for i in range(7))
    assert spent.reused_tokens == spent.prompt_tokens - spent.prefill_tokens
    assert_same(results, engine_of(folders["llama"]).generate(second))


def test_shared_and_equal_prompts_are_computed_once(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    requests = [request(f"{g}-{i}", SHARED + ids(5 + g, g + 1), order=4 * g + i) for g in range(3) for i in range(4)]
    engine.generate(requests)
    assert engine.stats.prefill_tokens == 40 + 5 + 6 + 7
    assert engine.stats.prompt_tokens == 4 * (45 + 46 + 47)


def test_a_row_does_not_depend_on_its_neighbours(folders: dict[str, Path]) -> None:
    together = engine_of(folders["qwen3"]).generate(a_batch())
    alone = [engine_of(folders["qwen3"]).generate([r])[0] for r in a_batch()]
    assert_same(together, alone)


def test_the_same_batch_repeats_bit_for_bit_whatever_order_it_is_given_in(folders: dict[str, Path]) -> None:
    requests = a_batch()
    first = engine_of(folders["llama"]).generate(requests)
    again = engine_of(folders["llama"]).generate(requests[::-1])[::-1]
    assert first == again


def test_threads_share_the_rows_and_change_no_token_nor_torchs_own_setting(
    folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    before = torch.get_num_threads()
    one, two, again = (engine_of(folders["llama"], threads=threads) for threads in (1, 2, 2))
    first = a_batch(17, max_tokens=5)
    results = two.generate(first)
    assert again.generate(first) == results  # bit for bit
    assert_same(results, one.generate(first))
    second = next_turn(first, results)
    results = two.generate(second)
    assert again.generate(second) == results
    assert_exact(references["llama"], second, results)
    assert two.stats.decoded_tokens == 2 * 17 * 5
    assert two.stats.batches == 4
    assert torch.get_num_threads() == before


def test_seeds_make_the_difference_between_equal_prompts(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    results = engine.generate([request(f"s{i}", SHARED, seed=i % 3, temperature=1.5) for i in range(6)])
    assert [r.token_ids for r in results[:3]] == [r.token_ids for r in results[3:]]
    assert len({r.token_ids for r in results}) == 3
    unseeded = engine.generate([request(f"u{i}", SHARED, seed=None, temperature=1.5) for i in range(2)])
    assert unseeded[0].token_ids != unseeded[1].token_ids


def test_rows_end_at_their_own_time_and_the_others_go_on(
    folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    engine = engine_of(folders["llama"])
    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=n))
        for r, n in zip(a_batch(), (3, 12, 1, 7, 20, 2, 5), strict=True)
    ]
    results = engine.generate(requests)
    assert [len(r.token_ids) for r in results] == [3, 12, 1, 7, 20, 2, 5]
    assert {r.finish_reason for r in results} == {"length"}
    assert_exact(references["llama"], requests, results)
    # the keys that were moved when rows left are right: the next turn builds on them
    requests = next_turn(requests, results)
    assert_exact(references["llama"], requests, engine.generate(requests))


def test_a_stop_token_ends_the_turn_and_is_kept(folders: dict[str, Path]) -> None:
    free = engine_of(folders["llama"]).generate([request("s", SHARED, max_tokens=30)])[0]
    token = free.token_ids[5]
    end = free.token_ids.index(token) + 1
    stopped = engine_of(folders["llama"]).generate([request("s", SHARED, max_tokens=30, stop_token_ids=(token,))])
    assert_same(
        stopped, [replace(free, token_ids=free.token_ids[:end], logprobs=free.logprobs[:end], finish_reason="stop")]
    )


def test_the_window_clamps_the_turn_and_a_full_window_gives_an_empty_one(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    assert engine.context_window == 256
    clamped, full, fits = engine.generate(
        [
            request("a", ids(250, 1), max_tokens=40),
            request("b", ids(256, 2), max_tokens=40),
            request("c", ids(250, 3), max_tokens=6),
        ]
    )
    assert (len(clamped.token_ids), clamped.finish_reason) == (6, "context")
    assert (full.token_ids, full.finish_reason) == ((), "context")
    assert (len(fits.token_ids), fits.finish_reason) == (6, "length")


def test_a_cancelled_row_aborts_and_its_neighbours_finish(folders: dict[str, Path]) -> None:
    asked: list[str] = []

    def cancelled(r: GenerateRequest) -> bool:
        asked.append(r.session_id)
        return r.session_id == "s1" and asked.count("s1") > 4

    results = engine_of(folders["llama"]).generate(a_batch(3), cancelled=cancelled)
    undisturbed = engine_of(folders["llama"]).generate(a_batch(3))
    assert (results[1].finish_reason, results[1].token_ids) == ("abort", undisturbed[1].token_ids[:4])
    assert_same([results[0], results[2]], [undisturbed[0], undisturbed[2]])


def test_an_evicted_session_gives_the_same_tokens_and_memory_stays_bounded(folders: dict[str, Path]) -> None:
    roomy, tight = engine_of(folders["llama"]), engine_of(folders["llama"], max_kv_tokens=100)
    requests = a_batch()
    for _ in range(3):
        results = roomy.generate(requests)
        assert_same(tight.generate(requests), results)
        assert tight.cached_tokens <= 100
        requests = next_turn(requests, results)
    assert tight.stats.batches > roomy.stats.batches
    assert tight.stats.prefill_tokens > roomy.stats.prefill_tokens


def test_a_session_that_rolls_back_or_branches_is_exact(
    folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    engine = engine_of(folders["qwen2"])
    first = a_batch(4)
    second = next_turn(first, engine.generate(first))
    engine.generate(second)
    for again in (first, [replace(r, prompt_ids=r.prompt_ids[:-4] + ids(9, 55)) for r in second]):
        assert_exact(references["qwen2"], again, engine.generate(again))
    elsewhere = [replace(first[0], prompt_ids=ids(30, 77)), first[1], second[2]]
    assert_exact(references["qwen2"], elsewhere, engine.generate(elsewhere))


def test_two_calls_on_one_session_in_one_batch_are_two_rows(
    folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    engine = engine_of(folders["llama"])
    first = [request("s", SHARED)]
    parent = next_turn(first, engine.generate(first))[0]
    pair = [parent, replace(parent, prompt_ids=(*parent.prompt_ids, 9), sampling=replace(parent.sampling, seed=5))]
    assert_exact(references["llama"], pair, engine.generate(pair))


def test_a_released_session_is_computed_anew(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    first = [request("s", ids(20, 1))]
    engine.generate(first)
    engine.release("s")
    engine.release("s")
    assert engine.cached_tokens == 0
    engine.generate(first)
    assert engine.stats.prefill_tokens == 40


def test_a_long_prompt_is_computed_in_pieces(
    folders: dict[str, Path], references: dict[str, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termrl.engine.planning.PASS_TOKENS", 24)
    monkeypatch.setattr("termrl.engine.runner.PASS_TOKENS", 24)
    engine = engine_of(folders["llama"])
    requests = [request(f"s{i}", SHARED + ids(20 + 60 * i, i + 1), order=i) for i in range(3)]
    assert_exact(references["llama"], requests, engine.generate(requests))


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_take_effect_and_forget_the_caches(kind: str, folders: dict[str, Path]) -> None:
    engine = engine_of(folders[kind])
    model = make_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.0" not in name}
    requests = a_batch(3)
    first = engine.generate(requests)
    assert {r.policy_version for r in first} == {0}
    engine.set_weights(state, 4)
    assert engine.cached_tokens == 0
    results = engine.generate(requests)
    assert {r.policy_version for r in results} == {4}
    model.load_state_dict({k: v for k, v in make_model(kind).state_dict().items() if "layers.0" in k}, strict=False)
    assert_exact(model, requests, results)
    # one projection of a fused matrix alone
    q = {
        "model.layers.1.self_attn.q_proj.weight": torch.zeros_like(
            model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
        )
    }
    model.load_state_dict(q, strict=False)
    engine.set_weights(q, 5)
    assert_exact(model, requests, engine.generate(requests))


def test_unknown_or_misshapen_weights_are_refused_by_name(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    with pytest.raises(ModelError, match=r"model\.layers\.0\.nothing\.weight"):
        engine.set_weights({"model.layers.0.nothing.weight": torch.zeros(1)}, 1)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(3,\)"):
        engine.set_weights({"model.norm.weight": torch.zeros(3)}, 1)
    assert engine.policy_version == 0


@pytest.mark.parametrize(
    "bad",
    [
        request("s", ()),
        request("s", (1, 512)),
        request("s", (-1,)),
        request("s", (1,), temperature=-1.0),
        request("s", (1,), top_p=0.0),
    ],
)
def test_a_malformed_request_is_refused(bad: GenerateRequest, folders: dict[str, Path]) -> None:
    with pytest.raises(PolicyError):
        engine_of(folders["llama"]).generate([bad])


def test_top_k_and_top_p_are_sampled_with_renormalised_logprobs(
    folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    requests = [
        request("k", SHARED, top_k=3, temperature=2.0, max_tokens=30),
        request("p", SHARED, top_p=0.6, temperature=2.0, max_tokens=30),
        request("plain", SHARED, temperature=2.0, max_tokens=30),
    ]
    k, p, plain = engine_of(folders["llama"]).generate(requests)
    assert_exact(references["llama"], requests[2:], [plain])
    for r, done, kept in ((requests[0], k, lambda q: q.topk(3).values), (requests[1], p, nucleus)):
        with torch.no_grad():
            logits = references["llama"](torch.tensor([r.prompt_ids + done.token_ids])).logits[0].double() / 2.0
        for i, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
            q = logits[len(r.prompt_ids) - 1 + i].softmax(-1)
            mass = kept(q)
            assert q[token] >= mass.min() - 1e-6
            assert logprob == pytest.approx(math.log(q[token] / mass.sum()), abs=EXACT)


def nucleus(q: torch.Tensor) -> torch.Tensor:
    """The fewest most probable entries that reach 0.6."""
    ranked = q.sort(descending=True).values
    return ranked[: int((ranked.cumsum(-1) < 0.6).sum()) + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_fused_matrix_can_be_renewed_alone(kind: str, folders: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    engine = engine_of(folders[kind])
    changed = make_model(kind)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.self_attn.k_proj.weight.mul_(-0.5)
            layer.mlp.up_proj.weight.mul_(1.5)
    state = changed.state_dict()
    parts = {name: w for name, w in state.items() if name.endswith(("k_proj.weight", "up_proj.weight"))}
    engine.set_weights(parts, 1)
    assert_exact(changed, a_batch(), engine.generate(a_batch()))
    engine.set_weights(load_file(folders[kind] / "model.safetensors"), 2)
    back, untouched = engine.generate(a_batch()), engine_of(folders[kind]).generate(a_batch())
    assert [(r.token_ids, r.logprobs) for r in back] == [(r.token_ids, r.logprobs) for r in untouched]


def test_memory_of_batches_is_given_back_with_the_last_session(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"], threads=2)
    requests = a_batch(12)
    first = engine.generate(requests)
    for r in requests[:-1]:
        engine.release(r.session_id)
    assert any(runner._space.k.numel() for runner in engine._runners)
    engine.release(requests[-1].session_id)
    assert not any(runner._space.k.numel() for runner in engine._runners)
    assert_same(engine.generate(requests), first)
