"""Whole tasks on a real daemon: built, solved by their own solution, and not solved by doing nothing."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import ImageError, TermrlError
from termrl.sandboxes.docker.builds import REPOSITORY
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.provider import DockerProvider
from termrl.tasks import TaskSet, load_task
from termrl.verifier.oracle import golden_check
from termrl.verifier.verdict import Cause
from tests.images.conftest import BASE
from tests.images.dockertasks import ALIAS, FOLDER, write_heredoc_task, write_made_tasks
from tests.images.registry import TinyRegistry, files_of_bash
from tests.tasks.helpers import PASSING, write_task

AT_ONCE = 4


@pytest.fixture
def cleaned(client: docker.DockerClient) -> Iterator[None]:
    """Removes the images that the test builds."""
    before = {tag for image in client.images.list(name=REPOSITORY) for tag in image.tags}
    yield
    for tag in {tag for image in client.images.list(name=REPOSITORY) for tag in image.tags} - before:
        # One that another program has a container of stays.
        with contextlib.suppress(docker.errors.APIError):
            client.images.remove(tag)


@pytest.fixture
async def provider(cleaned: None, state: Path) -> AsyncIterator[DockerProvider]:
    images = ImageSettings(aliases={ALIAS: BASE}, pull_attempts=1)
    async with DockerProvider(state=state, images=images) as provider:
        yield provider
        assert provider.live == 0


async def test_every_dockerfile_task_is_sound(provider: DockerProvider, tmp_path: Path) -> None:
    """Oracle 1 and nop 0: directories, users, variables, services, packages, names, limits are as authors meant."""
    write_made_tasks(tmp_path)
    tasks = [*TaskSet.load(FOLDER).values(), *TaskSet.load(tmp_path).values()]
    assert len(tasks) >= 18
    turns = asyncio.Semaphore(AT_ONCE)
    unsound: dict[str, str] = {}

    async def prove(task_id: str) -> None:
        task = next(task for task in tasks if task.id == task_id)
        async with turns:
            try:
                golden = await golden_check(provider, task)
            except TermrlError as error:
                unsound[task_id] = error.message
                return
        if not golden.sound:
            unsound[task_id] = f"{golden.oracle} {golden.nop} {golden.solution.output}"

    await asyncio.gather(*(prove(task.id) for task in tasks))
    assert unsound == {}


async def test_heredocs_are_built_or_the_daemon_is_named_that_cannot(
    provider: DockerProvider, client: docker.DockerClient, tmp_path: Path
) -> None:
    task = load_task(write_heredoc_task(tmp_path / "heredoc"))
    if int(client.version()["Version"].split(".")[0]) >= 23:
        assert (await golden_check(provider, task)).sound
        return
    with pytest.raises(
        ImageError, match=r"heredoc/environment/Dockerfile: not built: the daemon .* cannot parse it"
    ) as e:
        await provider.create(task.resolved_sandbox())
    assert e.value.hint == "its heredocs need Docker 23 or later"


def write_tasks(folder: Path, dockerfiles: dict[str, str], tests: dict[str, str | bytes] | None = None) -> Path:
    """Tasks of the given Dockerfiles, and one more that is good."""
    for name, dockerfile in {**dockerfiles, "good": f"FROM {BASE}\nWORKDIR /app\n"}.items():
        write_task(
            folder / name,
            toml='[environment]\nnetwork_mode = "no-network"\nbuild_timeout_sec = 30\n[verifier]\ntimeout_sec = 3\n',
            test=(tests or {}).get(name, PASSING),
            files={"environment/Dockerfile": dockerfile, "solution/solve.sh": "true\n"},
        )
    return folder


async def test_images_that_cannot_be_had_cost_their_own_tasks_only(
    cleaned: None, state: Path, tmp_path: Path, registry: TinyRegistry
) -> None:
    dockerfiles = {
        "copies-nothing": f'FROM {BASE}\nCOPY ["gone", "/x"]\n',
        "full": f"FROM {BASE}\nRUN head -c 1 /dev/zero > /dev/full\n",
        "no-shell": "FROM scratch\nCOPY Dockerfile /\n",
        "garbled": "FROM\n",
        "limited": f"FROM 127.0.0.1:{registry.port}/limited:1\n",
    }
    registry.limited = 1000
    foreign = registry.add("team/foreign", files_of_bash(), architecture="riscv64")
    folder = write_tasks(tmp_path, {name: text for name, text in dockerfiles.items() if name != "copies-nothing"})
    write_task(tmp_path / "foreign", toml=f'[environment]\ndocker_image = "{foreign}"\n')
    tasks = TaskSet.load(folder)
    said: dict[str, str] = {}
    scratch_before = set(Path(tempfile.gettempdir()).iterdir())
    async with DockerProvider(state=state, images={"pull_attempts": 2, "pull_backoff_s": 0.01}) as provider:
        factory = LocalEnvironmentFactory(tasks, provider)

        async def play(task_id: str) -> None:
            environment = factory.create()
            try:
                await environment.reset(task_id)
                observation = await environment.step(Action(action_type="evaluate"))
                said[task_id] = f"reward {observation.reward}"
            except ImageError as error:
                assert error.cause == "image_unavailable"
                said[task_id] = error.message
            finally:
                await environment.close()

        for names in (["limited", "full", "no-shell", "garbled", "good"], ["foreign"]):
            await asyncio.gather(*(play(name) for name in names))
            registry.limited = 0
        assert provider.live == 0
        assert provider.remains() == []
    assert said.pop("good") == "reward 1.0"
    expected = {
        "full": "the disk is full",
        "no-shell": "has no bash",
        "garbled": "cannot parse it",
        "limited": "rate limit",
        "foreign": "riscv64",
    }
    assert {name for name, words in expected.items() if words in said[name]} == set(expected), said
    assert all("\n" not in message and name in message for name, message in said.items())
    new = {path.name for path in set(Path(tempfile.gettempdir()).iterdir()) - scratch_before}
    assert not {name for name in new if "build" in name}
    assert not list((state / "images" / "scratch").glob("*"))


async def test_tests_that_hang_and_an_oracle_that_removes_them_cost_their_own_tasks_only(
    provider: DockerProvider, tmp_path: Path
) -> None:
    base = f"FROM {BASE}\nWORKDIR /app\n"
    folder = write_tasks(
        tmp_path, {"hangs": base, "removes": base, "windows": base}, {"hangs": "sleep 1000\n", "windows": b"true\r\n"}
    )
    (folder / "removes" / "solution" / "solve.sh").write_text("rm -rf /tests /tests/* /logs; touch /app/done\n")
    (folder / "removes" / "tests" / "test.sh").write_text(
        "[ -e /app/done ]; echo $((!$?)) > /logs/verifier/reward.txt\n"
    )
    tasks = TaskSet.load(folder, skip_broken=True)
    assert set(tasks.broken) == {"windows"}
    assert "CRLF" in tasks.broken["windows"]
    removes, hangs = await asyncio.gather(
        golden_check(provider, tasks["removes"]), golden_check(provider, tasks["hangs"])
    )
    assert removes.sound
    assert (hangs.oracle.cause, hangs.nop.cause) == (Cause.VERIFIER_TIMEOUT, Cause.VERIFIER_TIMEOUT)
    assert provider.live == 0
