"""Reading reward files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrl.verifier.reward import RewardFormatError, parse_reward_json, parse_reward_txt


@pytest.mark.parametrize(
    ("data", "reward"),
    [
        (b"1", 1.0),
        (b"0\n", 0.0),
        (b" 1.0 \r\n", 1.0),
        (b"0.25", 0.25),
        (b".5", 0.5),
        (b"1.", 1.0),
        (b"5e-1", 0.5),
        (b"+1", 1.0),
        (b"-0", 0.0),
    ],
)
def test_reward_txt_is_one_decimal_number(data: bytes, reward: float) -> None:
    assert parse_reward_txt(data) == reward


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" \n",
        b"nan",
        b"NaN",
        b"inf",
        b"-inf",
        b"1e999",
        b"1_0",
        b"0_1",
        b"1 0",
        b"1\n1",
        b"true",
        b"0x1",
        b"\xd9\xa1",
        b"1\x00",
        b"\xff",
        b"1.0000001",
        b"2",
        b"-0.1",
        b"1,0",
    ],
)
def test_reward_txt_that_says_no_usable_number_is_refused(data: bytes) -> None:
    with pytest.raises(RewardFormatError):
        parse_reward_txt(data)


@pytest.mark.parametrize(
    ("data", "reward"),
    [
        (b'{"reward": 1}', 1.0),
        (b'{"reward": 0.5, "speed": 30}', 0.5),
        (b'{"accuracy": 0.75}', 0.75),
        (b'{"reward": 0}', 0.0),
    ],
)
def test_reward_json_gives_its_key_reward_else_its_only_key(data: bytes, reward: float) -> None:
    assert parse_reward_json(data) == reward


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"1",
        b"[1]",
        b"null",
        b'{"a": 1, "b": 1}',
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1, "other": NaN}',
        b'{"reward": 1, "note": "x"}',
        b'{"reward": 1e999}',
        b'{"reward": 1.5}',
        b'{"reward": -1}',
        b'{"reward": 0, "reward": 1}',
        b'{"reward": 1',
        b'{"reward": 9' + b"9" * 3000 + b"}",
        b"[" * 4000,
        b"\xff\xfe",
    ],
)
def test_reward_json_that_says_no_usable_number_is_refused(data: bytes) -> None:
    with pytest.raises(RewardFormatError):
        parse_reward_json(data)


@given(st.binary(max_size=64) | st.text(alphabet='0123456789.eE+-_ \nnaifNI{}":reward,', max_size=40).map(str.encode))
def test_whatever_stands_in_a_reward_file_it_is_a_number_in_range_or_refused(data: bytes) -> None:
    for parse in (parse_reward_txt, parse_reward_json):
        try:
            reward = parse(data)
        except RewardFormatError:
            continue
        assert 0.0 <= reward <= 1.0


@given(st.floats(0, 1))
def test_a_reward_written_by_a_program_comes_back_exactly(reward: float) -> None:
    assert parse_reward_txt(repr(reward).encode()) == reward
    assert parse_reward_json(json.dumps({"reward": reward}).encode()) == reward
