"""Fixtures: tiny model folders, and transformers' own models over the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.tiny import KINDS, make_model, save_tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model folder for each kind."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("models") / kind
        make_model(kind).save_pretrained(folder)  # type: ignore[operator]
        save_tokenizer(folder)
        made[kind] = folder
    return made


@pytest.fixture(scope="session")
def references() -> dict[str, torch.nn.Module]:
    """Transformers' own models with the weights of :func:`folders`."""
    return {kind: make_model(kind) for kind in KINDS}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny matrices gain nothing from a second thread and lose much when the other core is busy."""
    torch.set_num_threads(1)
