"""OpenEnv's own validator, from its wheel, on this repository and on a live server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrl.cli.tasks import generate
from tests.environment.server.served import served

pytest.importorskip("openenv")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served") / "tasks"
    generate(folder, families=["create-empty"], per_family=1)
    with served(folder) as server:
        yield server.url


def openenv(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "openenv.cli", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_the_repository_passes_static_validation() -> None:
    code, said = openenv("validate", ROOT, "--level", "static", "--json")
    report = json.loads(said)
    assert (code, report["verdict"]) == (0, "pass"), said
    assert {result["check_id"]: result["status"] for result in report["results"]} == {"static.manifest": "pass"}


def test_a_live_server_passes_validation_by_url(url: str) -> None:
    code, said = openenv("validate", "--url", url, "--json")
    report = json.loads(said)
    assert (code, report["passed"]) == (0, True), said
    assert (report["mode"], report["standard_profile"]) == ("simulation", "openenv-http/1.x")
    assert len(report["criteria"]) == 6 and all(criterion["passed"] for criterion in report["criteria"])


def test_the_probe_of_the_manifest_passes_every_runtime_check(url: str) -> None:
    from openenv.validation.graders import Subject
    from openenv.validation.graders.runtime.basic import (
        ObservationSchemaGrader,
        RewardWellFormedGrader,
        StateContractGrader,
    )
    from openenv.validation.manifest import NormalizedManifestV2
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import load_runtime_plan

    manifest = OpenEnvYamlParser().parse(ROOT)
    assert isinstance(manifest, NormalizedManifestV2)
    plan = load_runtime_plan(ROOT, manifest.execution)
    evidence = collect_runtime_evidence(url, plan, episode_timeout_s=60.0)
    assert evidence.failure_reason is None, evidence
    steps = [exchange for exchange in evidence.exchanges if exchange.operation == "step"]
    assert len(steps) == len(plan.actions)
    assert json.loads(steps[-1].response_json)["data"]["done"] is True
    subject = Subject(
        root=ROOT,
        manifest=manifest,
        image_ref=None,
        running=None,
        outputs_dir=ROOT / "outputs",
        runtime_evidence=evidence,
    )
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        result = grader.run(subject)
        assert result.status.value == "pass", result.evidence
