"""The ``[images]`` table, names of images, and the Dockerfile that is really built."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.config import TrainConfig
from termrl.errors import ConfigError
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.references import Aliases, normalised, split
from termrl.sandboxes.docker.rewrite import rewrite
from termrl.settings import load_settings, to_toml


def test_a_key_that_is_an_images_name_is_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[sandbox]\nbackend = "docker"\n[images]\n"debian:12" = "local/debian:12"\npull_attempts = 2\n'
        '[images.aliases]\nubuntu = "local/ubuntu"\n'
    )
    loaded = load_settings(TrainConfig, files=[file], flags=["--images.build-network", "none"])
    images = loaded.config.images
    assert images.aliases == {"debian:12": "local/debian:12", "ubuntu": "local/ubuntu"}
    assert (images.pull_attempts, images.build_network) == (2, "none")
    assert loaded.config.sandbox_settings() == {"images": images}
    saved = tmp_path / "saved.toml"
    saved.write_text(to_toml(loaded.config))
    assert load_settings(TrainConfig, files=[saved]).config == loaded.config
    assert TrainConfig().sandbox_settings() == {}


def test_bad_keys_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[images]\npull_atempts = 2\nparallel = 0\n"a/b" = 3\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(TrainConfig, files=[file])
    problems = "\n".join(caught.value.problems)
    assert "images.pull_atempts: unknown key; did you mean images.pull_attempts?" in problems
    assert "images.parallel: " in problems
    assert "images.aliases" in problems
    with pytest.raises(ConfigError, match=r"images\.parallel: "):
        ImageSettings.of({"parallel": 0})


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("index.docker.io/library/debian:12", "docker.io/library/debian:12"),
        ("org/tool", "docker.io/org/tool:latest"),
        ("ghcr.io/org/tool:1", "ghcr.io/org/tool:1"),
        ("localhost/tool", "localhost/tool:latest"),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest"),
        ("debian@sha256:0", "docker.io/library/debian@sha256:0"),
    ],
)
def test_names_of_the_same_image_are_the_same(name: str, full: str) -> None:
    assert normalised(name) == full
    assert Aliases({name: "x"}).of(full) == "x"
    assert Aliases({full: "x"}).of("other:1") == "other:1"


def test_a_reference_is_split_as_the_engine_wants_it() -> None:
    assert split("127.0.0.1:5000/a/b") == ("127.0.0.1:5000/a/b", "latest")
    assert split("a/b:1") == ("a/b", "1")
    assert split("a:1@sha256:0") == ("a", "sha256:0")


def test_only_what_names_an_image_is_replaced() -> None:
    text = """\
# FROM debian:12
ARG BASE=debian:12
FROM ${BASE} AS debian
RUN echo FROM debian:12 --from=debian:12 \\
    # FROM debian:12
    --from=debian:12
COPY <<EOF /x
FROM debian:12
EOF
FROM debian
COPY --from=0 /a /b
COPY --from=debian:12 /a /b
FROM --platform=linux/amd64 debian:12
FROM scratch
FROM $UNKNOWN
"""
    new, used = rewrite(text, alias=Aliases({"debian:12": "local:1"}).of, ca=False)
    changed = [(a, b) for a, b in zip(text.split("\n"), new.split("\n"), strict=True) if a != b]
    assert changed == [
        ("FROM ${BASE} AS debian", "FROM local:1 AS debian"),
        ("COPY --from=debian:12 /a /b", "COPY --from=local:1 /a /b"),
        ("FROM --platform=linux/amd64 debian:12", "FROM --platform=linux/amd64 local:1"),
    ]
    assert used == ("local:1",)
    assert rewrite(text, alias=lambda name: name, ca=False) == (text, ())


def test_the_certificates_are_mounted_in_every_step_of_every_stage() -> None:
    text = 'FROM a AS b\nrun true \\\n  && true\nRUN ["x"]\nRUN <<EOF\nRUN in a heredoc\nEOF\nFROM b\nENTRYPOINT RUN\n'
    new, _ = rewrite(text, alias=lambda name: name, ca=True)
    lines = new.split("\n")
    assert [line.startswith(("run --mount=type=secret", "RUN --mount=type=secret")) for line in lines].count(True) == 3
    assert lines.count("ARG SSL_CERT_FILE=/dev/termrl-ca.pem") == 2
    assert "RUN in a heredoc" in lines
    assert "ENTRYPOINT RUN" in lines
