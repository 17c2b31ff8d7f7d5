"""Variables filled from the host when they are used."""

from __future__ import annotations

import pytest

from termrl.errors import TaskError
from termrl.tasks import resolve_env


def test_whole_values_are_filled_and_embedded_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_A", "from host")
    monkeypatch.setenv("HOST_EMPTY", "")
    monkeypatch.delenv("HOST_B", raising=False)
    env = {
        "plain": "1",
        "whole": "${HOST_A}",
        "empty": "${HOST_EMPTY:-default}",
        "default": "${HOST_B:-a b:-c}",
        "nothing": "${HOST_B:-}",
        "embedded": "x${HOST_A}",
        "two": "${HOST_A}${HOST_A}",
        "bare": "$HOST_A",
    }
    assert resolve_env(env, "t") == {
        "plain": "1",
        "whole": "from host",
        "empty": "",
        "default": "a b:-c",
        "nothing": "",
        "embedded": "x${HOST_A}",
        "two": "${HOST_A}${HOST_A}",
        "bare": "$HOST_A",
    }


def test_missing_variables_are_all_named_with_file_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOST_B", raising=False)
    monkeypatch.delenv("HOST_C", raising=False)
    with pytest.raises(TaskError) as caught:
        resolve_env({"B": "${HOST_B}", "C": "${HOST_C}", "D": "x"}, "x/task.toml: verifier.env")
    assert caught.value.message.splitlines() == [
        "x/task.toml: verifier.env.B: the host variable HOST_B is not set",
        "x/task.toml: verifier.env.C: the host variable HOST_C is not set",
    ]
    assert caught.value.hint is not None
    assert "export HOST_B=" in caught.value.hint
