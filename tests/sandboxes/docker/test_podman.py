"""What podman answers where Docker answers otherwise, as podman 4.3.1 was seen to.

A whole run of the Docker tests on podman: CONTRIBUTING.md.
"""

from __future__ import annotations

import io
import re
import tarfile
from types import SimpleNamespace
from typing import Any

import pytest

from termrl.errors import ImageError
from termrl.sandboxes.docker import pristine
from termrl.sandboxes.docker.build import BuildFailed, explain
from termrl.sandboxes.docker.connection import is_podman
from termrl.sandboxes.docker.daemon import Daemon
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.images import ImageStore
from termrl.sandboxes.docker.options import Extras

LINK = 0o777 | 1 << 27


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            'building at STEP "RUN echo some words; exit 7": while running runtime: exit status 7',
            "exit code 7 of RUN echo some words; exit 7",
        ),
        (
            'building at STEP "COPY missing.txt /x": checking on sources under "/var/tmp/b/build": copier: stat: '
            '"/missing.txt": no such file or directory',
            "a COPY source is missing: .*missing.txt",
        ),
        ('Unknown instruction: "RUNN" &imagebuilder.Step{}', 'podman cannot parse it: Unknown instruction: "RUNN"'),
        ("no FROM statement found", "podman cannot parse it: no FROM statement found"),
        (
            "creating build container: initializing source docker://127.0.0.1:9/none:1: pinging container registry "
            "127.0.0.1:9: connection refused",
            "its base image cannot be had: .*connection refused",
        ),
    ],
)
def test_a_failed_build_is_explained(said: str, why: str) -> None:
    assert re.match(why, explain(BuildFailed(f"STEP 1/2: FROM x\n{said}\n"), daemon="podman", heredoc=False)[0])


def archive(name: str, data: bytes | None, *, to: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    if data is None:
        member.type, member.linkname = tarfile.SYMTYPE, to
    else:
        member.size = len(data)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        out.addfile(member, io.BytesIO(data or b""))
    return buffer.getvalue()


@pytest.mark.parametrize("made", [archive("sh", b"ELF"), archive("sh", None, to="dash")])
def test_a_link_is_put_back_as_a_link_whoever_archived_it(made: bytes) -> None:
    client: Any = SimpleNamespace(
        api=SimpleNamespace(
            create_container=lambda *_, **__: {"Id": "c"},
            get_archive=lambda *_: ([made], {"mode": LINK, "linkTarget": "/usr/bin/dash"}),
        )
    )
    found = pristine.read(pristine.Pristine(client, {}), "image", ["/usr/bin/sh"])
    with tarfile.open(fileobj=io.BytesIO(found.archive)) as tar:
        (member,) = tar
    assert (member.name, member.issym(), member.linkname.rpartition("/")[2]) == ("usr/bin/sh", True, "dash")


def test_limits_that_it_may_not_give_are_asked_for_lower() -> None:
    extras = Extras(cpus=2, quota=False)
    for said in (
        "crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted",
        "runc create failed: error setting rlimits for ready process: error setting rlimit type 7",
    ):
        less = extras.without(said)
        assert less is not None and not less.own_rlimits
        assert less.without(said) is None, "it is not tried for ever"


def about(*names: str) -> Any:
    return SimpleNamespace(version=lambda: {"Components": [{"Name": name} for name in names]})


def test_it_is_told_from_docker() -> None:
    assert is_podman(about("Podman Engine", "Conmon").version())
    assert not is_podman(about("Engine", "containerd").version()) and not is_podman({})


@pytest.mark.parametrize(
    ("engine", "said", "workdir"),
    [("Podman Engine", "/", None), ("Podman Engine", "/srv", "/srv"), ("Engine", "/", "/"), ("Engine", "", None)],
)
def test_the_root_is_no_workdir_where_podman_says_it_of_every_image(
    engine: str, said: str, workdir: str | None, tmp_path: Any
) -> None:
    store = ImageStore(about(engine), ImageSettings(), state=tmp_path, labels={})
    assert store._workdir({"WorkingDir": said}) == workdir


def test_what_is_no_name_of_an_image_is_an_error_of_one_task() -> None:
    import docker.errors
    import requests

    reply = requests.Response()
    reply.status_code = 500

    def inspect(_: str) -> None:
        raise docker.errors.APIError("500", reply, 'normalizing name "UPPER/case:1": invalid reference format')

    client: Any = SimpleNamespace(api=SimpleNamespace(inspect_image=inspect))
    with pytest.raises(ImageError, match=r"UPPER/case:1: .*invalid reference format"):
        Daemon(client).find("UPPER/case:1")
