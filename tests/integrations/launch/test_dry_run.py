from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from termrl.errors import ConfigError
from termrl.integrations.miles.launch import flags, launching
from termrl.integrations.miles.launch.command import build
from termrl.integrations.miles.launch.flags import Flags
from termrl.integrations.miles.launch.profile import Profile, load_profile, profile_names
from termrl.integrations.miles.launch.secrets import complaints, is_secret_name, masked

Termrl = Callable[..., subprocess.CompletedProcess[str]]

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/shared/runs/first")
ROWS = "paths.prompt_data=/shared/train.jsonl"
PROFILES = ("deepseek-v4-flash", "glm-4.7-flash", "glm-5.2", "qwen3-8b")
SECRET = "hf_0123456789"


def check_golden(name: str, text: str) -> None:
    """Hold ``text`` against a file; ``UPDATE_GOLDEN=1`` writes it."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def train_words(*settings: str, profile: str = "qwen3-8b", **options: Any) -> list[str]:
    return list(build(load_profile(profile, settings=[ROWS, *settings]), RUN, **options).train.argv)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_these_profiles_ship() -> None:
    assert tuple(profile_names()) == PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_dry_run_prints_the_exact_command_and_environment(name: str, termrl: Termrl) -> None:
    done = termrl("miles", name, "--dry-run", "--run-dir", RUN, "--set", ROWS)
    assert (done.returncode, done.stderr) == (0, "")
    check_golden(f"{name}.txt", done.stdout)
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_slurm_script_starts_ray_on_every_node_and_the_launch_on_the_first(termrl: Termrl) -> None:
    arguments = ("miles", "glm-5.2", "--slurm", "--dry-run", "--run-dir", RUN, "--set", ROWS)
    network = ("--set", "slurm.network_prefix=10.4.", "--set", "slurm.setup=ulimit -n 65536")
    done = termrl(*arguments, *network)
    assert (done.returncode, done.stderr) == (0, "")
    check_golden("glm-5.2.sbatch.txt", done.stdout)
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("glm-4.7-flash", "TP4 sequence PP1 CP1 EP2 ETP1 16384 offload 0.7 glm47 glm45 31000 colocate 8 kl"),
        (
            "deepseek-v4-flash",
            "TP8 sequence PP8 CP1 EP8 ETP1 2048 offload 0.7 deepseekv4 deepseek-v4 31000 colocate 8 kl",
        ),
        ("glm-5.2", "TP2 sequence PP4 CP4 EP8 ETP1 8192 gpu 0.85 glm47 glm45 31000 32 8 tis"),
        ("qwen3-8b", "TP2 sequence PP1 CP1 EP1 ETP1 16384 gpu 0.7 qwen25 qwen3 31000 colocate 8 kl"),
    ],
)
def test_profiles_say_what_their_recipes_say(name: str, said: str) -> None:
    words = train_words(profile=name)
    found = [
        f"TP{value(words, '--tensor-model-parallel-size')}",
        *(["sequence"] if "--sequence-parallel" in words else []),
        f"PP{value(words, '--pipeline-model-parallel-size')}",
        f"CP{value(words, '--context-parallel-size')}",
        f"EP{value(words, '--expert-model-parallel-size')}",
        f"ETP{value(words, '--expert-tensor-parallel-size')}",
        value(words, "--max-tokens-per-gpu"),
        "offload" if "--optimizer-cpu-offload" in words else "gpu",
        value(words, "--sglang-mem-fraction-static"),
        value(words, "--sglang-tool-call-parser"),
        value(words, "--sglang-reasoning-parser"),
        value(words, "--sglang-router-port"),
        "colocate" if "--colocate" in words else value(words, "--rollout-num-gpus"),
        value(words, "--rollout-batch-size"),
        "kl" if "--use-kl-loss" in words else "tis" if value(words, "--tis-clip") == "2.0" else "neither",
    ]
    assert " ".join(found) == said


def test_every_tito_model_has_its_parsers() -> None:
    for tito, (reasoning, tools) in flags.PARSERS.items():
        words = train_words(f"session.tito_model={tito}")
        assert (value(words, "--sglang-reasoning-parser"), value(words, "--sglang-tool-call-parser")) == (
            reasoning,
            tools,
        )
    assert value(train_words("engine.sglang_tool_call_parser=mine"), "--sglang-tool-call-parser") == "mine"


def test_never_a_chat_template_over_prompt_rows() -> None:
    assert not [name for name in PROFILES if "--apply-chat-template" in train_words(profile=name)]


def _settable() -> list[tuple[str, str]]:
    found = []
    for table, info in Profile.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Flags):
            found += [(table, field) for field in info.annotation.model_fields]
    return found


@pytest.mark.parametrize(("table", "field"), _settable())
def test_every_flag_can_be_set(table: str, field: str) -> None:
    info = Profile.model_fields[table].annotation.model_fields[field]  # type: ignore[union-attr]
    switch = info.annotation is bool
    on = {"wandb": ["wandb.use_wandb=true"], "prometheus": ["prometheus.use_prometheus=true"]}.get(table, [])
    fully_async = ["cluster.rollout_nodes=1"] if field == "fully_async" else []
    flag = f"--{field.replace('_', '-')}"
    if switch:
        assert flag in train_words(*on, *fully_async, f"{table}.{field}=true")
        assert flag not in train_words(*[] if field.startswith("use_") else on, f"{table}.{field}=false")
        return
    literal = re.search(r"Literal\['(\w+)', '(\w+)'", str(info.annotation))
    new = literal[2] if literal else {"global_batch_size": "16", "n_samples_per_prompt": "4"}.get(field, "2")
    new = "0.5" if field == "sglang_mem_fraction_static" else new
    more = ["rollout.rollout_max_response_len=2"] if field == "max_seq_len" else []
    more += ["rollout.global_batch_size=16"] if field == "rollout_batch_size" else []
    assert value(train_words(*on, *more, f"{table}.{field}={new}"), flag) in (new, f"{new}.0")


def test_files_variables_and_set_come_over_the_profile_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[rollout]\nnum_rollout = 7\n[episodes]\nmax_turns = 7\nurl = 'http://file:1'\n"
    )
    loaded = load_profile(
        "qwen3-8b",
        files=[tmp_path / "mine.toml"],
        environ={"OPENENV_MAX_TURNS": "8", "OPENENV_ENV_URL": "http://variable:1", "TERMRL_ROLLOUT__LR": "no setting"},
        settings=["episodes.url=http://set:1"],
    )
    assert (loaded.rollout.num_rollout, loaded.episodes.max_turns) == (7, 8)
    assert build(loaded, RUN).env["OPENENV_ENV_URL"] == "http://set:1"


def test_bad_settings_are_all_named_with_what_was_meant(termrl: Termrl) -> None:
    wrong = ("--set", "rollout.num_rolout=5", "--set", "grpoo.eps_clip=1", "--set", "optimizer.lr=fast")
    done = termrl("miles", "qwen3-8b", "--dry-run", *wrong)
    assert done.returncode == 2
    assert "rollout.num_rolout: unknown key; did you mean rollout.num_rollout?" in done.stderr
    assert "grpoo: unknown key; did you mean grpo?" in done.stderr
    assert "optimizer.lr: input should be a valid number" in done.stderr


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("rollout.global_batch_size=48", "does not divide the 64 episodes"),
        ("parallel.tensor_model_parallel_size=3", "TP × PP × CP does not divide the 8 GPUs"),
        ("parallel.expert_model_parallel_size=16", "PP × EP × expert-TP does not divide"),
        ("engine.rollout_num_gpus_per_engine=3", "does not divide the 8 GPUs that sample"),
        ("rollout.fully_async=true", "needs nodes of its own"),
        ("rollout.max_seq_len=4096", "larger than rollout.max_seq_len"),
        ("session.tito_model=gpt5", "session.tito_model"),
        ("rollout.pause_generation_mode=abort", "rollout.pause_generation_mode"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_profile("qwen3-8b", settings=[setting])


def test_unknown_profile_names_the_close_one(termrl: Termrl) -> None:
    done = termrl("miles", "glm-4.7-flsh", "--dry-run")
    assert done.returncode == 2
    assert "did you mean glm-4.7-flash?" in done.stderr
    assert "qwen3-8b" in termrl("miles", "--dry-run").stderr


def test_extra_flags_come_last() -> None:
    words = train_words("extra=--lr,2e-6")
    assert words[-2:] == ["--lr", "2e-6"]
    assert words.index("--lr") < len(words) - 2


def test_flags_of_miles_that_are_not_behind_the_dashes_are_refused(termrl: Termrl) -> None:
    assert "flags of miles go behind --" in termrl("miles", "qwen3-8b", "num_rollout=5", "--dry-run").stderr
    assert termrl("miles", "qwen3-8b", "--num-rollout", "5", "--dry-run").returncode == 2


def test_rollout_only_samples_and_prepares_nothing_for_megatron() -> None:
    plan = build(load_profile("deepseek-v4-flash"), RUN, mode="rollout-only")
    assert [step.name for step in plan.steps] == ["download", "train"]
    assert "--debug-rollout-only" in plan.train.argv
    assert "--debug-rollout-only" not in train_words()


def test_resume_prepares_nothing_and_loads_the_run() -> None:
    plan = build(load_profile("qwen3-8b"), RUN, resume=True)
    assert [step.name for step in plan.steps] == ["train"]
    assert value(list(plan.train.argv), "--load") == f"{RUN}/checkpoints"


def test_async_runs_the_async_driver() -> None:
    assert train_words(profile="glm-5.2")[1] == "/root/miles/train_async.py"


def test_wandb_has_no_key_on_the_command_line() -> None:
    words = train_words("wandb.use_wandb=true", "wandb.wandb_team=team")
    assert value(words, "--wandb-group") == "first"
    assert "--wandb-key" not in words
    assert "--use-wandb" not in train_words()


def test_secrets_of_the_shell_are_masked_wherever_they_stand(termrl: Termrl) -> None:
    more = {"HF_TOKEN": SECRET, "WANDB_API_KEY": "w" * 40}
    done = termrl("miles", "qwen3-8b", "--dry-run", "--run-dir", RUN, "--", "--label-key", f"x{SECRET}x", **more)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout and "w" * 40 not in done.stdout
    assert "# export HF_TOKEN=•••" in done.stdout
    assert "# export WANDB_API_KEY=•••" in done.stdout
    assert "--label-key x•••x" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--", "--wandb-key", SECRET),
        ("--", f"--wandb-key={SECRET}"),
        ("--set", f"env.HF_TOKEN={SECRET}"),
        ("--set", f"env.SOME_API_KEY={SECRET}"),
        ("--set", f"episodes.url=http://me:{SECRET}@host:8003"),
        ("--set", f"cluster.ray_address=http://me:{SECRET}@host:8265"),
        ("--", "--wandb-host", f"https://{SECRET}@host"),
    ],
)
def test_secrets_that_would_travel_are_refused_and_not_repeated(arguments: tuple[str, ...], termrl: Termrl) -> None:
    done = termrl("miles", "qwen3-8b", "--dry-run", "--run-dir", RUN, *arguments)
    assert done.returncode == 2
    assert "hint: keep it in a file" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_paths_of_secrets_travel() -> None:
    loaded = load_profile("qwen3-8b", settings=["episodes.token_file=/keys/token", "env.NETRC=/keys/netrc"])
    env = build(loaded, RUN).env
    assert (env["OPENENV_TOKEN_FILE"], env["NETRC"]) == ("/keys/token", "/keys/netrc")


def test_names_of_credentials_are_told_from_names_that_look_alike() -> None:
    secret = (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "--wandb-key",
        "AWS_SECRET",
        "DB_PASSWORD",
        "TERMRL_TOKEN",
        "DAYTONA_API_KEY",
    )
    plain = ("--input-key", "--metadata-key", "OPENENV_TOKEN_FILE", "--max-tokens-per-gpu", "TOKENIZERS_PARALLELISM")
    assert [name for name in secret if not is_secret_name(name)] == []
    assert [name for name in plain if is_secret_name(name)] == []
    assert masked("abcdefgh abc", ["abc", "abcdefgh"]) == "••• abc"
    assert complaints(["--wandb-key"], {}) == []


def test_script_says_that_steps_are_jobs_and_nothing_of_this_shells_secrets() -> None:
    loaded = load_profile("qwen3-8b", settings=["cluster.ray_address=http://head:8265"])
    text = launching.script(loaded, build(loaded, RUN), environ={"HF_TOKEN": SECRET})
    assert "each a job of the Ray cluster http://head:8265" in text
    assert "HF_TOKEN" not in text  # it does not reach the cluster


def test_words_are_those_of_the_script() -> None:
    loaded = load_profile("qwen3-8b", settings=["paths.prompt_data=/with space/it's.jsonl"])
    step = build(loaded, RUN).train
    words = shlex.split(step.shell().partition('read -ra model_args <<< "$line" &&\n')[2].replace("\\\n", " "))
    assert words == [word if word != "{model_args}" else "${model_args[@]}" for word in step.argv]
