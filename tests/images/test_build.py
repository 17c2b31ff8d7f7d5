"""Images built from Dockerfiles by a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

from termrl.errors import ImageError, RateLimitError
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker.command import find_command_line
from termrl.sandboxes.docker.images import ImageStore
from tests.images.conftest import BASE
from tests.images.registry import TinyRegistry

Make = Callable[..., ImageStore]
Context = Callable[..., SandboxSpec]


def run(client: docker.DockerClient, image: str, command: str) -> str:
    container = client.containers.create(image, ["bash", "-c", command], network_disabled=True)
    try:
        container.start()
        ended = container.wait()
        said = container.logs().decode()
    finally:
        container.remove(force=True)
    assert ended["StatusCode"] == 0, said
    return said


def running(word: str) -> list[str]:
    """Command lines on this machine that hold ``word``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in text and str(os.getpid()) != entry.parent.name:
            found.append(text)
    return found


def gone(word: str, *, within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while running(word):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_dockerfile_is_built_once_for_many_sandboxes_and_stores(
    store: Make, context: Context, client: docker.DockerClient
) -> None:
    dockerfile = (
        f"FROM {BASE}\nWORKDIR /srv/x\nENV A=b=c\nUSER nobody\nCOPY a.txt .\nRUN date +%N > /tmp/built; sleep 1\n"
    )
    spec = context(dockerfile, **{"a.txt": "hello"})
    two = [store(), store()]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: two[n % 2].ensure(spec), range(8)))
    assert len({image.id for image in found}) == 1
    image = found[0]
    assert (image.workdir, image.env["A"], image.user) == ("/srv/x", "b=c", "nobody")
    assert run(client, image.id, "pwd; cat a.txt; whoami") == "/srv/x\nhellonobody\n"
    started = time.monotonic()
    assert store().ensure(spec).id == image.id
    assert time.monotonic() - started < 1


def test_the_tag_follows_content_modes_and_names(store: Make, context: Context, tmp_path: Path) -> None:
    dockerfile = f"FROM {BASE}\nCOPY . /x\n"
    names = {store().ensure(context(dockerfile, **{"a.txt": "1"})).name}
    names.add(store().ensure(context(dockerfile, **{"a.txt": "2"})).name)
    (tmp_path / "made/environment/a.txt").chmod(0o600)
    names.add(store().ensure(context(dockerfile)).name)
    (tmp_path / "made/environment/a.txt").rename(tmp_path / "made/environment/b.txt")
    names.add(store().ensure(context(dockerfile)).name)
    assert len(names) == 4


def test_dockerignore_counts(store: Make, context: Context, client: docker.DockerClient) -> None:
    spec = context(f"FROM {BASE}\nCOPY . /x/\n", **{".dockerignore": "secret*\n", "secret.txt": "s", "open.txt": "o"})
    assert run(client, store().ensure(spec).id, "ls /x") == "Dockerfile\nopen.txt\n"


def test_base_images_are_aliased_wherever_a_dockerfile_names_one(
    store: Make, context: Context, client: docker.DockerClient
) -> None:
    dockerfile = """\
    ARG TAG=3.20
    FROM public.example/tools:${TAG} AS tools
    RUN echo tool > /tool
    FROM --platform=linux/amd64 public.example/base
    COPY --from=tools /tool /tool
    COPY --from=public.example/data:1 /etc/hostname /copied
    RUN --mount=type=bind,from=public.example/data:1,source=/etc,target=/mnt cp /mnt/debian_version /mounted
    """
    names = ("public.example/tools:3.20", "public.example/base", "public.example/data:1")
    images = store(aliases=dict.fromkeys(names, BASE))
    spec = context(textwrap.dedent(dockerfile))
    original = (spec.build.context / "Dockerfile").read_text() if spec.build else ""
    assert run(client, images.ensure(spec).id, "cat /tool; ls /copied /mounted") == "tool\n/copied\n/mounted\n"
    assert spec.build is not None and (spec.build.context / "Dockerfile").read_text() == original
    with pytest.raises(ImageError, match="its base image cannot be had"):
        store().ensure(spec)


def test_an_extra_authority_is_trusted_in_steps_and_leaves_no_trace(
    store: Make, context: Context, client: docker.DockerClient, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("-----EXTRA AUTHORITY-----\n")
    dockerfile = f"""\
    FROM {BASE} AS one
    RUN grep -c EXTRA "$SSL_CERT_FILE" > /seen
    FROM {BASE}
    USER nobody
    RUN grep -c EXTRA "$PIP_CERT" > /tmp/seen && cat "$APT_CONFIG" > /tmp/apt \\
        && grep -c EXTRA "$CURL_CA_BUNDLE"
    COPY --from=one /seen /seen
    """
    image = store(ca_file=tmp_path / "ca.pem").ensure(context(textwrap.dedent(dockerfile)))
    left = run(client, image.id, "cat /seen /tmp/seen; env | grep -e CERT -e CA_ -e APT_; ls /dev | grep termrl; true")
    assert left == "1\n1\n"
    assert "termrl-ca.pem" in run(client, image.id, "cat /tmp/apt")
    with pytest.raises(ImageError, match=r"images\.ca_file: .*nowhere\.pem: cannot be read"):
        store(ca_file=tmp_path / "nowhere.pem").ensure(context(f"FROM {BASE}\nRUN true\n", name="other"))


def test_curl_and_python_trust_the_extra_authority_within_a_build(
    store: Make, context: Context, tmp_path: Path
) -> None:
    """A server in the build itself, whose certificate the extra authority has signed."""
    environment = tmp_path / "made" / "environment"
    environment.mkdir(parents=True)
    make = """
    openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=authority -keyout ca.key -out ca.pem
    openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr
    printf subjectAltName=DNS:localhost > names
    openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile names -out server.pem
    cp server.pem server.key made/environment/
    """
    subprocess.run(["bash", "-ec", make], cwd=tmp_path, check=True, capture_output=True)
    serve = """\
    import http.server, ssl
    server = http.server.HTTPServer(("localhost", 4443), http.server.SimpleHTTPRequestHandler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain("/server.pem", "/server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
    """
    dockerfile = f"""\
    FROM {BASE}
    COPY serve.py server.pem server.key /
    RUN python3 /serve.py & sleep 1; \\
        curl -sSf -o /dev/null https://localhost:4443/serve.py && \\
        python3 -c 'import urllib.request as u; u.urlopen("https://localhost:4443/serve.py").read()'
    """
    spec = context(textwrap.dedent(dockerfile), **{"serve.py": textwrap.dedent(serve)})
    # What curl says of an unknown authority.
    with pytest.raises(ImageError, match=r"exit code 60 of RUN"):
        store().ensure(spec)
    assert store(ca_file=tmp_path / "ca.pem").ensure(spec).id


def test_a_build_that_hangs_is_stopped_and_its_processes_are_gone(store: Make, context: Context, marker: str) -> None:
    spec = context(f'FROM {BASE}\nSHELL ["/bin/bash","-c"]\nRUN exec -a {marker} sleep 1000\n', timeout_s=3)
    seen: list[str] = []
    threading.Timer(2, lambda: seen.extend(running(marker))).start()
    with pytest.raises(ImageError, match=r"made: .*Dockerfile: not built: it took longer than 3 s and was stopped"):
        store().ensure(spec)
    assert seen
    assert gone(marker)


def test_closing_stops_a_build(store: Make, context: Context, marker: str) -> None:
    images = store()
    spec = context(f'FROM {BASE}\nSHELL ["/bin/bash","-c"]\nRUN exec -a {marker} sleep 1000\n')
    threading.Timer(1.5, images.close).start()
    with pytest.raises(ImageError, match="are being closed"):
        images.ensure(spec)
    assert gone(marker)


def test_a_build_ends_with_the_process_that_wanted_it(
    store: Make, context: Context, marker: str, tmp_path: Path
) -> None:
    spec = context(f'FROM other/base\nSHELL ["/bin/bash","-c"]\nRUN exec -a {marker} sleep 1000\n')
    assert spec.build is not None
    program = f"""
    import docker
    from pathlib import Path
    from termrl.sandboxes.base import ImageBuild, SandboxSpec
    from termrl.sandboxes.docker.images import ImageStore, ImageSettings
    settings = ImageSettings(aliases={{"other/base": "{BASE}"}})
    store = ImageStore(docker.from_env(), settings, state=Path({str(tmp_path / "state")!r}))
    store.ensure(SandboxSpec("x", build=ImageBuild(Path({str(spec.build.context)!r}))))
    """
    src = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(src)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=env)
    deadline = time.monotonic() + 20
    while not any("sleep" not in line or line.startswith(marker) for line in running(marker)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    assert list((tmp_path / "state/images/scratch").iterdir())
    process.kill()
    process.wait()
    assert gone(marker)
    store()  # the next one sweeps what the killed one left
    assert not list((tmp_path / "state/images/scratch").iterdir())


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        (
            f"FROM {BASE}\nRUN <<EOF\necho hi\nEOF\n",
            r"the daemon \([\d.+a-z]+\) cannot parse it: dockerfile parse error",
        ),
        (f"FROM {BASE}\nRUNN true\n", r"cannot parse it: dockerfile parse error.*unknown instruction: RUNN"),
        (f"FROM {BASE}\nCOPY missing.txt /x\n", r"a COPY source is missing: .*missing\.txt"),
        (f"FROM {BASE}\nRUN echo some words; exit 7\n", r"exit code 7 of RUN echo some words; exit 7"),
        (f"FROM {BASE}\nRUN head -c 100000 /dev/zero > /dev/full\n", r"the disk is full"),
        ("FROM 127.0.0.1:9/none:1\nRUN true\n", r"its base image cannot be had"),
        ("", r"cannot parse it|no build stage|it said|cannot be empty"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error_of_that_task(
    store: Make, context: Context, client: docker.DockerClient, dockerfile: str, said: str
) -> None:
    if "<<EOF" in dockerfile and int(client.version()["Version"].split(".")[0]) >= 23:
        pytest.skip("this daemon knows heredocs")
    before = {image.id for image in client.images.list(filters={"dangling": True})}
    images = store()
    with pytest.raises(ImageError, match=said) as caught:
        images.ensure(context(dockerfile))
    message = caught.value.message
    assert message.startswith("made: ") and "environment/Dockerfile: not built: " in message and "\n" not in message
    assert caught.value.cause == "image_unavailable"
    log = Path(message.rsplit("(log: ", 1)[1].removesuffix(")"))
    assert log.is_file() and log.stat().st_mode & 0o077 == 0
    assert images.ensure(context(f"FROM {BASE}\n", name="good")).id
    assert {image.id for image in client.images.list(filters={"dangling": True})} <= before
    assert client.images.list(filters={"label": f"termrl.build={log.stem}"}) == []


def test_a_failed_build_is_not_tried_again_for_a_while(store: Make, context: Context, tmp_path: Path) -> None:
    spec = context(f"FROM {BASE}\nRUN exit 3\n")
    images = store()
    with ThreadPoolExecutor(8) as threads:
        errors = [one.exception() for one in [threads.submit(images.ensure, spec) for _ in range(8)]]
    assert all(isinstance(error, ImageError) for error in errors)
    (log,) = (tmp_path / "state/images/logs").iterdir()
    written = log.stat().st_mtime_ns
    with pytest.raises(ImageError, match="exit code 3"):
        images.ensure(spec)
    assert log.stat().st_mtime_ns == written


def test_the_log_is_kept_bounded_and_without_credentials(store: Make, context: Context, tmp_path: Path) -> None:
    spec = context(f"FROM {BASE}\nRUN echo http://me:secret@proxy.example/x; seq 3000000; exit 1\n")
    with pytest.raises(ImageError, match="exit code 1"):
        store().ensure(spec)
    (log,) = (tmp_path / "state/images/logs").iterdir()
    text = log.read_text()
    assert "http://***@proxy.example/x" in text
    assert "secret" not in text
    assert 1000 < len(text) < 6 << 20


def test_a_rate_limit_on_a_base_image_is_named(store: Make, context: Context, registry: TinyRegistry) -> None:
    registry.limited = 1000
    with pytest.raises(RateLimitError, match=r"made: .*Dockerfile: a base image was not pulled .*rate limit"):
        store().ensure(context(f"FROM 127.0.0.1:{registry.port}/team/base:1\nRUN true\n"))


def test_the_classic_builder_builds_plain_files_and_refuses_the_rest_by_name(
    store: Make, context: Context, client: docker.DockerClient, tmp_path: Path, marker: str
) -> None:
    images = store(builder="classic", aliases={"other/base": BASE})
    spec = context("FROM other/base\nWORKDIR /srv\nCOPY a.txt .\nRUN cat a.txt > b.txt\n", **{"a.txt": "hello"})
    assert run(client, images.ensure(spec).id, "cat b.txt") == "hello"
    refused = {
        "heredocs": "RUN <<EOF\ntrue\nEOF",
        "--mount": "RUN --mount=type=tmpfs,target=/x true",
    }
    for name, (what, line) in enumerate(refused.items()):
        with pytest.raises(ImageError, match=rf"Dockerfile: {what}: not built without BuildKit"):
            images.ensure(context(f"FROM {BASE}\n{line}\n", name=f"t{name}"))
    (tmp_path / "ca.pem").write_text("x")
    with pytest.raises(ImageError, match=r"images\.ca_file: not built without BuildKit"):
        store(builder="classic", ca_file=tmp_path / "ca.pem").ensure(context(f"FROM {BASE}\nRUN true\n", name="ca"))
    for name, line, said in (
        ("step", "RUN echo no; exit 4", "exit code 4 of RUN echo no; exit 4"),
        ("copy", "COPY gone.txt /x", "a COPY source is missing"),
        ("parse", "RUNN true", "cannot parse it"),
    ):
        with pytest.raises(ImageError, match=said):
            images.ensure(context(f"FROM {BASE}\nLABEL termrl.step={marker}\nRUN true\n{line}\n", name=name))
    label = f"termrl.step={marker}"
    assert client.containers.list(all=True, filters={"label": label}) == []
    assert client.images.list(filters={"label": label, "dangling": True}) == []


def test_a_machine_without_a_capable_command_line_says_which_it_looked_at(
    store: Make, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "bin" / "docker"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Docker version 28.2.2, build x" || exit 1\n')
    old.chmod(0o755)
    monkeypatch.setattr("termrl.sandboxes.docker.command._USUAL_FOLDERS", ())
    assert "docker lacks its plugin buildx" in find_command_line({"PATH": str(old.parent)}).why_not
    assert "no docker program on PATH" in find_command_line({"PATH": str(tmp_path)}).why_not
    monkeypatch.setenv("PATH", str(old.parent))
    with pytest.raises(ImageError, match=r"^made: images cannot be built with BuildKit: .*docker lacks its plugin"):
        store(builder="buildkit").ensure(context(f"FROM {BASE}\nRUN true\n"))
    assert store().ensure(context(f"FROM {BASE}\nRUN true\n")).id  # by the classic builder
