from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from termrl.errors import ConfigError
from termrl.settings import load_settings, to_toml


class Optim(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    mode: Literal["fast", "exact"] = "exact"
    decay: bool = False

    @model_validator(mode="after")
    def _sane(self) -> Optim:
        if self.lr > 1:
            raise ValueError("lr must be at most 1")
        return self


class Root(BaseModel):
    model_config = ConfigDict(extra="forbid")
    steps: int = 10
    run_dir: Path | None = None
    families: tuple[str, ...] = ()
    optim: Optim = Optim()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(**layers: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(Root, **layers)  # type: ignore[arg-type]
    return caught.value.problems


def test_later_layers_win(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "steps = 1\nfamilies = ['a']\n[optim]\nlr = 0.1\nmode = 'fast'\n")
    two = write(tmp_path / "two.toml", "[optim]\nlr = 0.2\n")
    environ = {"TERMRL_OPTIM__LR": "0.3", "TERMRL_STEPS": "3", "TERMRL_CACHE": "/x", "HOME": "/y"}
    loaded = load_settings(Root, files=[one, two], environ=environ, flags=["--steps", "4", "--run-dir=here"])
    assert loaded.config.steps == 4
    assert loaded.config.optim.lr == 0.3
    assert loaded.config.optim.mode == "fast"
    assert loaded.config.families == ("a",)
    assert loaded.config.run_dir == Path("here")
    assert loaded.given["optim"] == {"lr": "0.3", "mode": "fast"}
    assert loaded.sources["optim", "lr"] == "TERMRL_OPTIM__LR"


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--optim.lr", "1e-4"], "lr", 1e-4),
        (["--optim.decay"], "decay", True),
        (["--optim.no-decay"], "decay", False),
        (["--optim.decay", "--steps", "3"], "decay", True),
        (["--optim.betas", "0.5,0.6"], "betas", (0.5, 0.6)),
        (["--optim.betas=[0.5, 0.6]"], "betas", (0.5, 0.6)),
    ],
)
def test_flags_take_the_type_of_their_key(flags: list[str], key: str, value: object) -> None:
    assert getattr(load_settings(Root, flags=flags).config.optim, key) == value


def test_a_negative_number_is_a_value_not_a_flag() -> None:
    assert load_settings(Root, flags=["--steps", "-1"]).config.steps == -1


def test_none_and_an_empty_list_can_be_given_as_text() -> None:
    config = load_settings(Root, flags=["--run-dir", "none", "--families", ""]).config
    assert (config.run_dir, config.families) == (None, ())


def test_every_problem_of_every_layer_is_reported_at_once(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.toml", "stepz = 1\nsteps = 'many'\n[optim]\nlearning = 1\nmode = 'slow'\nbetas = [1]\n")
    broken = write(tmp_path / "broken.toml", "steps = \n")
    found = problems(
        files=[bad, broken, tmp_path / "absent.toml"],
        environ={"TERMRL_OPTIM__LR": "fast"},
        flags=["--lr", "3", "stray", "--steps"],
    )
    text = "\n".join(found)
    assert f"{bad}: stepz: unknown key; did you mean steps?" in found
    assert f"{bad}: optim.learning: unknown key" in text
    assert f"{bad}: optim.mode: input should be 'fast' or 'exact' (got 'slow')" in found
    assert f"{bad}: optim.betas" in text
    assert f"{bad}: steps: input should be a valid integer" in text
    assert f"{broken}: not valid TOML" in text
    assert f"{tmp_path / 'absent.toml'}: no such file" in found
    assert "TERMRL_OPTIM__LR: optim.lr: input should be a valid number" in text
    assert "command line: lr: unknown key; did you mean optim.lr?" in found
    assert any(line.startswith("command line: stray: unexpected") for line in found)
    assert "command line: steps: a value is missing" in found


def test_a_rule_over_several_keys_names_the_source(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.toml", "[optim]\nlr = 2.0\n")
    assert problems(files=[bad]) == [f"{bad}: optim: lr must be at most 1"]


def test_a_value_where_a_table_belongs(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.toml", "optim = 3\n")
    assert problems(files=[bad]) == [f"{bad}: optim: must be a table of settings"]


def test_an_unknown_section_in_the_environment_is_an_error_but_other_variables_are_not() -> None:
    assert load_settings(Root, environ={"TERMRL_STATE": "x"}).config == Root()
    assert problems(environ={"TERMRL_OPTIMS__LR": "1"}) == [
        "TERMRL_OPTIMS__LR: optims: unknown key; did you mean optim?"
    ]


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    config = Root(steps=3, families=("a", "b"), optim=Optim(lr=0.25))
    saved = write(tmp_path / "config.toml", to_toml(config))
    assert load_settings(Root, files=[saved]).config == config
