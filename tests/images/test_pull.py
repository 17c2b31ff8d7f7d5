"""Images from a registry: a real daemon pulls from a real registry on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

from termrl.errors import ImageError, RateLimitError, SandboxStartError, TaskError
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.images import ImageStore
from tests.images.conftest import BASE
from tests.images.registry import TinyRegistry, files_of_bash

Make = Callable[..., ImageStore]


def test_an_image_is_pulled_once_for_many_sandboxes_at_once(
    store: Make, registry: TinyRegistry, client: docker.DockerClient
) -> None:
    reference = registry.add("team/small", files_of_bash(), workdir="/srv")
    images = store()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(images.ensure, [SandboxSpec(f"t{n}", image=reference) for n in range(16)]))
    assert len({image.id for image in found}) == 1
    one = found[0]
    assert (one.name, one.workdir, one.user, one.architecture) == (reference, "/srv", "7:7", "amd64")
    assert one.env == {"PATH": "/bin", "FROM_IMAGE": "yes"}
    assert registry.asked["team/small"] <= 2  # the daemon asks by HEAD and by GET
    said = client.containers.run(one.id, ["bash", "-c", "echo from $FROM_IMAGE in $PWD"], remove=True)
    assert said == b"from yes in /srv\n"


def test_an_image_that_is_here_is_not_asked_for(store: Make, registry: TinyRegistry) -> None:
    reference = registry.add("team/here", files_of_bash())
    first = store().ensure(SandboxSpec("one", image=reference))
    asked = registry.asked.copy()
    assert store().ensure(SandboxSpec("two", image=reference)) == first
    by_digest = f"127.0.0.1:{registry.port}/team/here@{registry.digest_of('team/here')}"
    assert store().ensure(SandboxSpec("three", image=by_digest)).id == first.id
    assert registry.asked == asked


def test_an_image_can_be_pulled_by_its_digest(store: Make, registry: TinyRegistry) -> None:
    registry.add("team/pinned", files_of_bash())
    by_digest = f"127.0.0.1:{registry.port}/team/pinned:1@{registry.digest_of('team/pinned')}"
    assert store().ensure(SandboxSpec("pinned", image=by_digest)).env["FROM_IMAGE"] == "yes"


def test_a_rate_limit_that_passes_costs_only_time(store: Make, registry: TinyRegistry) -> None:
    reference = registry.add("team/later", files_of_bash())
    registry.limited = 2
    assert store(pull_attempts=4).ensure(SandboxSpec("later", image=reference)).name == reference


def test_a_rate_limit_is_named_and_its_registry_is_left_alone_for_a_while(store: Make, registry: TinyRegistry) -> None:
    registry.limited = 1000
    reference = registry.add("team/limited", files_of_bash())
    images = store(pull_attempts=3)
    with pytest.raises(RateLimitError, match=r"^many: image .*limited:1 was not pulled in 3 tries: .*rate limit") as e:
        images.ensure(SandboxSpec("many", image=reference))
    assert e.value.cause == "image_unavailable"
    assert e.value.hint is not None and "docker login" in e.value.hint
    asked = registry.asked.copy()
    for n in range(20):
        with pytest.raises(RateLimitError, match=rf"^t{n}: .*rate limit"):
            images.ensure(SandboxSpec(f"t{n}", image=reference))
    with pytest.raises(RateLimitError, match=r"^other: .*other:1 was not pulled: .*reached its rate limit"):
        images.ensure(SandboxSpec("other", image=registry.add("team/other", files_of_bash())))
    assert registry.asked == asked
    registry.limited = 0
    again = store(retry_after_s=0)
    assert again.ensure(SandboxSpec("later", image=reference)).name == reference


def test_a_failure_is_forgotten_after_a_while(store: Make, registry: TinyRegistry) -> None:
    reference = f"127.0.0.1:{registry.port}/team/coming:1"
    images = store(retry_after_s=0.2)
    with pytest.raises(ImageError):
        images.ensure(SandboxSpec("early", image=reference))
    registry.add("team/coming", files_of_bash())
    time.sleep(0.25)
    assert images.ensure(SandboxSpec("late", image=reference)).name == reference


def test_what_another_try_cannot_change_is_not_tried_again(store: Make, registry: TinyRegistry) -> None:
    with pytest.raises(ImageError, match=r"^gone: image .*nothing:1 was not pulled: .*(unknown|not found)") as caught:
        store().ensure(SandboxSpec("gone", image=f"127.0.0.1:{registry.port}/team/nothing:1"))
    assert not isinstance(caught.value, RateLimitError)
    assert registry.asked["team/nothing"] <= 2


def test_a_registry_that_is_not_there_is_tried_a_bounded_number_of_times(store: Make) -> None:
    with pytest.raises(ImageError, match=r"not pulled in 2 tries: .*refused") as caught:
        store(pull_attempts=2).ensure(SandboxSpec("gone", image="127.0.0.1:9/team/none:1"))
    assert caught.value.cause == "image_unavailable"


def test_a_pull_that_stands_still_ends(store: Make, registry: TinyRegistry) -> None:
    reference = registry.add("team/slow", files_of_bash())
    registry.stalls = True
    with pytest.raises(ImageError, match=r"not pulled: the daemon gave no sign for 1 s"):
        store(pull_attempts=1, pull_stall_s=1).ensure(SandboxSpec("slow", image=reference))


def test_closing_ends_a_pull_that_waits_for_its_next_try(store: Make, registry: TinyRegistry) -> None:
    registry.limited = 1000
    images = store(pull_backoff_s=30)
    reference = registry.add("team/closing", files_of_bash())
    threading.Timer(0.5, images.close).start()
    started = time.monotonic()
    with pytest.raises(ImageError, match="are being closed"):
        images.ensure(SandboxSpec("closing", image=reference))
    assert time.monotonic() - started < 10


def test_an_image_of_another_architecture_is_refused_by_name(store: Make, registry: TinyRegistry) -> None:
    reference = registry.add("team/arm", files_of_bash(), architecture="arm64")
    with pytest.raises(ImageError, match=r"^foreign: .*(for arm64, and this is amd64|no matching manifest)") as caught:
        store().ensure(SandboxSpec("foreign", image=reference))
    assert caught.value.hint is not None and "platform" in caught.value.hint


def test_an_image_without_bash_is_refused_by_name(store: Make, registry: TinyRegistry) -> None:
    reference = registry.add("team/bare", {"/bin/busybox": b"x"})
    with pytest.raises(ImageError, match=r"^bare: image .*bare:1 has no bash"):
        store().ensure(SandboxSpec("bare", image=reference))


def test_an_alias_stands_for_every_spelling_of_a_name(store: Make) -> None:
    images = store(**{"debian:bookworm-slim": BASE})
    for n, name in enumerate(("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim")):
        assert images.ensure(SandboxSpec(f"t{n}", image=name)).name == BASE


def test_what_is_no_name_of_an_image_is_an_error_of_one_task(store: Make) -> None:
    images = store(pull_attempts=1)
    for name in ("UPPER/case:1", "a b", "-x", "x://y"):
        with pytest.raises(ImageError, match=r"^odd: "):
            images.ensure(SandboxSpec("odd", image=name))
    assert images.ensure(SandboxSpec("good", image=BASE)).name == BASE


def test_a_daemon_that_is_not_there_and_a_spec_without_an_image_are_clear(store: Make, tmp_path: Path) -> None:
    gone = docker.DockerClient(base_url="tcp://127.0.0.1:9", version="1.41")
    with pytest.raises(SandboxStartError, match=r"^lost: the Docker daemon"):
        ImageStore(gone, ImageSettings(), state=tmp_path).ensure(SandboxSpec("lost", image=BASE))
    with pytest.raises(TaskError, match=r"^bare: names neither an image nor a Dockerfile"):
        store().ensure(SandboxSpec("bare"))
