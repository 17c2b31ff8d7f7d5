"""Validation on a real daemon: good tasks are sound, and what has no image is said of that task alone."""

from __future__ import annotations

import json
from pathlib import Path

from termrl.tasks.generate import generate
from tests.cli.test_main import termrl
from tests.docker import IMAGE
from tests.validation.tasks import SOLVE, add

WITH_IMAGE = '[environment]\ndocker_image = "{}"\nnetwork_mode = "no-network"\n'
WITH_DOCKERFILE = '[environment]\nnetwork_mode = "no-network"\n'


def test_the_same_study_runs_on_docker(tmp_path: Path, docker_image: str) -> None:
    generate(tmp_path / "tasks", families=["count-lines", "private-dir"], per_family=1)
    add(tmp_path / "tasks", "image", toml=WITH_IMAGE.format(IMAGE))
    add(tmp_path / "tasks", "wrong", toml=WITH_IMAGE.format(IMAGE), solve="touch undone\n")
    add(tmp_path / "tasks", "no-image", toml=WITH_IMAGE.format("localhost:9/nowhere:1"))
    built = add(tmp_path / "tasks", "build-fails", toml=WITH_DOCKERFILE, solve=SOLVE)
    (built / "environment").mkdir()
    (built / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo no such luck && false\n")
    settings = '[sandbox]\nbackend = "docker"\n[images]\npull_attempts = 1\n"debian:12-slim" = "{}"\n'
    (tmp_path / "docker.toml").write_text(settings.format(IMAGE))
    options = ("-c", "docker.toml", "--repeat", "1", "-o", "r.json", "--json")
    done = termrl("validate", "tasks", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["sandbox"] == "docker" and report["complete"]
    assert {name: found["status"] for name, found in report["results"].items()} == {
        "count-lines-train-000": "sound",
        "private-dir-train-000": "sound",
        "image": "sound",
        "wrong": "oracle_fails",
        "no-image": "image_unavailable",
        "build-fails": "image_unavailable",
    }
    assert "no such luck" in report["results"]["build-fails"]["detail"]
