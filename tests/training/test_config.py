from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from termrl.training.config import LoraSettings, TrainingConfig


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tis_cap": 2.0}, "recomputed"),
        ({"aggregation": "constant"}, "max_new_tokens"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"lora": {"targets": ["lm_head"]}}, "targets"),
        ({"lora": {"targets": ["q_proj", "q_proj"]}}, "twice"),
        ({"lora": {"dropout": 0.1}}, "dropout"),
        ({"updates_per_batch": 0}, "updates_per_batch"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"betas": [0.9, 1.0]}, "betas"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        TrainingConfig.model_validate(settings)


def test_truncated_importance_sampling_is_allowed_with_recomputed_logprobs() -> None:
    assert TrainingConfig(old_logprobs="recomputed", tis_cap=2.0).tis_cap == 2.0


def test_every_key_is_documented() -> None:
    for model in (TrainingConfig, LoraSettings):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_settings_survive_being_saved() -> None:
    config = TrainingConfig(aggregation="constant", max_new_tokens=72, lora=LoraSettings(targets=("q_proj",)))
    assert TrainingConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"loss": "dapo"}, "loss"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"sequence_mask": [1.01, 1.1]}, "sequence_mask"),
        ({"sequence_mask": [0.0, 1.1]}, "sequence_mask"),
        ({"clip_low": 1.1}, "clip_low"),
    ],
)
def test_bad_losses_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        TrainingConfig.model_validate(settings)
