"""Recognising downloads that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.verifier.bootstrap import bootstrap_failure, downloads_in

FAILURES = [
    "curl: (6) Could not resolve host: astral.sh",
    "wget: unable to resolve host address 'example.org'",
    "Temporary failure in name resolution",
    "Temporary failure resolving 'deb.debian.org'",
    "E: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease",
    "E: Unable to locate package curl",
    "E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?",
    "ERROR: Could not find a version that satisfies the requirement pytest==8.4.1 (from versions: none)",
    "ERROR: No matching distribution found for pytest==8.4.1",
    "error: Failed to fetch: `https://pypi.org/simple/pytest/`",
    "error: Request failed after 3 retries",
    "curl: (22) The requested URL returned error: 429",
    "HTTP/2 429",
    "429 Too Many Requests",
    "toomanyrequests: You have reached your pull rate limit.",
    "connect: Network is unreachable",
    "pip._vendor.urllib3: Failed to establish a new connection: [Errno -3]",
    "curl: (28) Operation timed out after 30001 milliseconds",
]

HONEST = [
    "",
    "FAILED test_outputs.py::test_answer - AssertionError: assert 41 == 42",
    "bash: line 3: answer.txt: No such file or directory",
    "collected 6 items / 1 error",
    "expected 429 rows, got 12",
    "E   ModuleNotFoundError: No module named 'solution'",
    "the curl of the field is 6",
]


@pytest.mark.parametrize("line", FAILURES)
def test_the_line_that_names_a_failed_download_is_the_evidence(line: str) -> None:
    assert bootstrap_failure(f"Reading package lists...\n{line}\nmore\n") == line


@pytest.mark.parametrize("output", HONEST)
def test_a_failed_test_is_no_failed_download(output: str) -> None:
    assert bootstrap_failure(output) is None


@pytest.mark.parametrize(
    ("script", "downloads"),
    [
        ("apt-get update\napt-get install -y curl\n", True),
        ("curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\n", True),
        ("uvx -p 3.13 pytest /tests\n", True),
        ("python3 -m pip install pytest\n", True),
        ("git clone file:///repo\n", True),
        ("[ -f answer.txt ] && echo 1 > /logs/verifier/reward.txt\n", False),
        ("grep -q curl-free field.txt\n", False),
        ("cat /app/uv/pipeline\n", False),
    ],
)
def test_whether_downloads_in_is_read_from_the_tasks_own_files(tmp_path: Path, script: str, downloads: bool) -> None:
    (tmp_path / "test.sh").write_text(script)
    (tmp_path / "blob.bin").write_bytes(b"curl https://")
    assert downloads_in(tmp_path) is downloads
