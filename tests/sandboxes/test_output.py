"""Bounded capture."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrl.sandboxes.output import BoundedOutput, render


def test_output_within_the_limit_is_whole() -> None:
    output = BoundedOutput(100)
    for piece in (b"one\n", b"two\n"):
        output.feed(piece)
    assert output.text() == ("one\ntwo\n", 0)


def test_head_and_tail_are_kept_around_a_mark_that_says_how_many_bytes_are_gone() -> None:
    output = BoundedOutput(10)
    output.feed(b"abcde" + b"x" * 1000 + b"vwxyz")
    assert output.text() == ("abcde\n[... 1000 bytes of output left out ...]\nvwxyz", 1000)


def test_memory_stays_bounded_over_a_long_stream() -> None:
    output = BoundedOutput(1000)
    for _ in range(3000):
        output.feed(b"y" * 65536)
    head, tail = output.parts()
    assert len(head) + len(tail) == 1000
    assert sys.getsizeof(output._tail) < 200_000
    assert output.text()[1] == 3000 * 65536 - 1000


def test_invalid_utf8_is_replaced() -> None:
    assert render(b"a\xff\xfeb", b"", 4) == ("a\ufffd\ufffdb", 0)


@pytest.mark.parametrize("limit", range(2, 24))
def test_a_character_that_the_cut_splits_leaves_no_damage(limit: int) -> None:
    text = "aé漢🐍" * 10
    output = BoundedOutput(limit)
    output.feed(text.encode())
    shown, missing = output.text()
    assert "\ufffd" not in shown
    assert f"{missing} bytes" in shown


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(min_value=2, max_value=60))
def test_counts_add_up_however_the_stream_is_cut(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.feed(piece)
    whole = b"".join(pieces)
    head, tail = output.parts()
    assert output.total == len(whole)
    assert whole.startswith(head) and whole.endswith(tail)
    assert len(head) + len(tail) == min(len(whole), limit)
