"""Reading a Dockerfile for its working directory and the sources that it misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.tasks.dockerfile import read_dockerfile


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("FROM debian\n", None),
        ("FROM debian\nWORKDIR /app\nWORKDIR sub\n", "/app/sub"),
        ("FROM debian\nWORKDIR sub\n", "/sub"),
        ("FROM debian AS a\nWORKDIR /a\nFROM debian\n", None),
        ("FROM debian AS base\nWORKDIR /a\nFROM base\n", "/a"),
        ("FROM debian\nENV HOME_DIR=/srv X=1\nWORKDIR ${HOME_DIR}/x\n", "/srv/x"),
        ("FROM debian\nENV P /q\nWORKDIR $P\n", "/q"),
        ("FROM debian\nARG D=/d\nworkdir $D\n", "/d"),
        ("FROM debian\nWORKDIR ${UNKNOWN}\n", None),
        ("FROM debian\nWORKDIR ${UNKNOWN:-/e}\n", "/e"),
        ('FROM debian\nWORKDIR "/with space"\n', "/with space"),
        ("FROM debian\nRUN cat <<EOF > f\nWORKDIR /not\n${{ matrix.x }}\nEOF\nWORKDIR /yes\n", "/yes"),
        ("FROM debian\nRUN <<-'END'\n\techo ${{ a }}\n\tEND\nWORKDIR /yes\n", "/yes"),
        ("FROM debian\nRUN a && \\\n  # WORKDIR /no\n  b \\\n  c\nWORKDIR /yes\n", "/yes"),
        ("# syntax=docker/dockerfile:1\nFROM debian\nWORKDIR /a \\\n", "/a"),
        ("", None),
        ("FROM\nCOPY\nWORKDIR\nENV\n", "/"),
    ],
)
def test_the_last_stages_workdir(tmp_path: Path, text: str, workdir: str | None) -> None:
    assert read_dockerfile(text, tmp_path).workdir == workdir


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("COPY a.txt /x", ()),
        ("COPY gone.txt a.txt /x/", ("gone.txt",)),
        ("COPY --chown=1:1 --chmod=755 gone.txt /x", ("gone.txt",)),
        ('COPY ["a.txt", "gone one.txt", "/x/"]', ("gone one.txt",)),
        ("COPY . /x", ()),
        ("COPY ./sub/ /x", ()),
        ("COPY *.txt /x", ()),
        ("COPY *.csv /x", ("*.csv",)),
        ("COPY --from=base /etc/x /x", ()),
        ("ADD https://example.org/x.tgz /x", ()),
        ("ADD git@example.org:a/b.git /x", ()),
        ("COPY ${WHAT} /x", ()),
        ("COPY <<EOF /x\nbody gone.txt /y\nEOF", ()),
        ("COPY [broken /x", ()),
    ],
)
def test_copy_sources_that_are_not_there(tmp_path: Path, line: str, missing: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "sub").mkdir()
    assert read_dockerfile(f"FROM debian\n{line}\n", tmp_path).missing == missing
