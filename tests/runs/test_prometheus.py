"""The Prometheus endpoint over real sockets, and what it says about a run."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrl.agent.types import Episode
from termrl.config import TrackConfig
from termrl.errors import ConfigError
from termrl.runs.metrics import EvalScores, FamilyScore
from termrl.runs.prometheus import RunCollector, gauge_name, serving
from termrl.verifier.verdict import INFRASTRUCTURE_CAUSES, Cause, EndReason, Verdict

INSTALLED = importlib.util.find_spec("prometheus_client") is not None
LABELS = ("phase", "end_reason", "cause", "family")
Samples = dict[tuple[str, tuple[str, ...]], float]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def collector(port: int) -> Iterator[RunCollector | None]:
    """A served collector; ``None`` where the package is missing, which must have been refused."""
    if not INSTALLED:
        with pytest.raises(ConfigError, match="needs the package prometheus-client"), serving(track(port)):
            pytest.fail("served")
        yield None
        return
    with serving(track(port)) as (collector,):
        yield collector


def track(port: int) -> TrackConfig:
    return TrackConfig(prometheus_port=port)


def scrape(port: int) -> Samples:
    from prometheus_client.parser import (  # pyright: ignore[reportMissingImports]
        text_string_to_metric_families,
    )

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, tuple(sample.labels[label] for label in LABELS if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def episode(reward: float | None, reason: EndReason = EndReason.TASK_COMPLETE, cause: Cause | None = None) -> Episode:
    verdict = None if cause is None else Verdict.missing(cause)
    return Episode("task", 0, reward=reward, end_reason=reason, verdict=verdict)


def test_gauges_are_the_last_steps_figures_and_none_older(collector: RunCollector | None, port: int) -> None:
    if collector is None:
        return
    collector.started(Path("run"), steps=9, first_step=4)
    assert scrape(port)["termrl_step", ()] == 3
    collector.step(4, {"rollout/raw_reward": 0.25, "train/grad_norm": 1.5, "rollout/end_reason/length": 3})
    collector.evaluated("at step 4", EvalScores({"make-dir": FamilyScore(3, 4), "x": FamilyScore(0, 0, 2)}))
    samples = scrape(port)
    assert samples["termrl_rollout_raw_reward", ()] == 0.25
    assert samples["termrl_train_grad_norm", ()] == 1.5
    assert samples["termrl_eval_pass_rate", ()] == 0.75
    assert samples["termrl_eval_family_pass_rate", ("make-dir",)] == 0.75
    assert ("termrl_eval_family_pass_rate", ("x",)) not in samples
    assert not any("end_reason" in name for name, labels in samples if not labels)
    collector.step(5, {"train/grad_norm": 0.5})
    samples = scrape(port)
    assert (samples["termrl_step", ()], samples["termrl_steps", ()]) == (5, 9)
    assert ("termrl_rollout_raw_reward", ()) not in samples
    assert samples["termrl_train_grad_norm", ()] == 0.5


def test_episodes_and_missing_verdicts_are_counted_by_phase_and_cause(
    collector: RunCollector | None, port: int
) -> None:
    if collector is None:
        return
    empty = scrape(port)
    assert len([1 for name, _ in empty if name == "termrl_episodes_total"]) == 2 * len(EndReason)
    assert len([1 for name, _ in empty if name == "termrl_missing_verdicts_total"]) == 2 * len(INFRASTRUCTURE_CAUSES)
    collector.phase("evaluate", step=0, total=2)
    collector.episode(episode(1.0))
    collector.phase("rollout", step=1, total=3)
    collector.episode(episode(0.0, EndReason.LENGTH))
    collector.episode(episode(None, EndReason.ENVIRONMENT_ERROR, Cause.SANDBOX_LOST))
    collector.episode(episode(None, EndReason.ABORTED))
    collector.phase("update", step=1, total=0)
    collector.episode(episode(None, EndReason.ENVIRONMENT_ERROR, Cause.SANDBOX_LOST))
    changed = {key: value for key, value in scrape(port).items() if "_total" in key[0] and value}
    assert {key: value for key, value in changed.items() if "process" not in key[0]} == {
        ("termrl_episodes_total", ("eval", "task_complete")): 1,
        ("termrl_episodes_total", ("train", "length")): 1,
        ("termrl_episodes_total", ("train", "environment_error")): 2,
        ("termrl_episodes_total", ("train", "aborted")): 1,
        ("termrl_missing_verdicts_total", ("train", "sandbox_lost")): 2,
        ("termrl_missing_verdicts_total", ("train", "unknown")): 1,
    }


def test_live_sandboxes_are_counted_at_the_scrape(collector: RunCollector | None, port: int) -> None:
    if collector is None:
        return
    assert scrape(port)["termrl_live_sandboxes", ()] == 0
    up: list[str] = []
    collector.sandboxes(lambda: len(up))
    up += ["a", "b"]
    assert scrape(port)["termrl_live_sandboxes", ()] == 2
    up.clear()
    assert scrape(port)["termrl_live_sandboxes", ()] == 0


def test_every_series_is_ours_and_the_process_is_among_them(collector: RunCollector | None, port: int) -> None:
    if collector is None:
        return
    names = {name for name, _ in scrape(port)}
    assert all(name.startswith("termrl_") for name in names)
    assert "termrl_process_resident_memory_bytes" in names


def test_scrapes_during_changes_neither_fail_nor_lose_an_episode(collector: RunCollector | None, port: int) -> None:
    if collector is None:
        return
    done = threading.Event()
    failures: list[BaseException] = []

    def scraping() -> None:
        try:
            while not done.is_set():
                scrape(port)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=scraping) for _ in range(3)]
    for thread in threads:
        thread.start()
    for index in range(5000):
        collector.episode(episode(1.0))
        if index % 100 == 0:
            collector.step(index, {f"train/{index}": 1.0, "train/lr": 1.0})
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert scrape(port)["termrl_episodes_total", ("train", "task_complete")] == 5000


def test_only_this_machine_can_reach_it_and_the_port_is_free_again_after(port: int) -> None:
    if not INSTALLED:
        with pytest.raises(ConfigError), serving(track(port)):
            pytest.fail("served")
        return
    with serving(track(port)):
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = {fields[1] for fields in listening if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"}
        assert ours == {f"0100007F:{port:04X}"}
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_refused_by_number(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        expected = rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use" if INSTALLED else "needs the"
        with pytest.raises(ConfigError, match=expected) as caught, serving(track(port)):
            pytest.fail("served")
    assert caught.value.hint


def test_an_address_that_is_not_ours_is_refused(port: int) -> None:
    config = TrackConfig(prometheus_port=port, prometheus_host="192.0.2.1")
    expected = r"cannot listen on 192\.0\.2\.1" if INSTALLED else "needs the package"
    with pytest.raises(ConfigError, match=expected), serving(config):
        pytest.fail("served")


def test_a_missing_package_is_refused_with_what_to_install(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="needs the package prometheus-client") as caught, serving(track(port)):
        pytest.fail("served")
    assert caught.value.hint == "pip install 'termrl[prometheus]'"


def test_without_a_port_nothing_is_served() -> None:
    with serving(TrackConfig()) as watchers:
        assert watchers == []


def test_names_keep_to_prometheus_rules() -> None:
    assert gauge_name("rollout/logprob_diff") == "termrl_rollout_logprob_diff"
    assert gauge_name("eval/family/make-dir") == "termrl_eval_family_make_dir"
