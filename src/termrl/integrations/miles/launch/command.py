"""From a profile to what is run: the steps of a first launch, then training, each an exact command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from termrl.errors import ConfigError
from termrl.integrations.miles.launch.flags import PARSERS, flag
from termrl.integrations.miles.launch.process import OWNER
from termrl.integrations.miles.launch.profile import Profile
from termrl.integrations.miles.launch.secrets import complaints

Mode = Literal["train", "rollout-only"]

EVERY_NODE = "termrl.integrations.miles.launch.every_node"
MODEL_ARGS = "miles/utils/external_utils/model_args_utils.py"
TRACKER = "latest_checkpointed_iteration.txt"
MODEL_ARGS_WORD = "{model_args}"
_MODEL_ARGS = '"${model_args[@]}"'


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        argv: its words. Where ``model_args`` is not empty, the word ``MODEL_ARGS`` among them stands for the words
            that this command prints: miles knows the shape of each model.
        cwd: where it runs.
        unless: it is left out where this file is.
    """

    name: str
    argv: tuple[str, ...]
    cwd: str
    model_args: tuple[str, ...] = ()
    unless: str | None = None

    def shell(self) -> str:
        """The command for bash, each flag on a line of its own."""
        inner = "" if self.unless is None else "  "
        quoted = [_MODEL_ARGS if word == MODEL_ARGS_WORD else shlex.quote(word) for word in self.argv]
        lines = [f"\\\n{inner}  {word}" if word.startswith("--") and word != "--" else word for word in quoted]
        parts = [f"cd {shlex.quote(self.cwd)}"]
        if self.model_args:
            # an assignment reports the failure that read would hide; read expands no pattern of --moe-layer-freq
            parts += [f'line="$({shlex.join(self.model_args)})"', 'read -ra model_args <<< "$line"']
        command = f" &&\n{inner}".join([*parts, " ".join(lines)])
        return command if self.unless is None else f"[ -e {shlex.quote(self.unless)} ] || {{\n{inner}{command}\n}}"

    def words(self, model_args: Sequence[str]) -> list[str]:
        """The command with the model's words in their place."""
        return [one for word in self.argv for one in (model_args if word == MODEL_ARGS_WORD else (word,))]


@dataclass(frozen=True)
class Plan:
    """All steps of a launch, in order, and the variables that each gets."""

    steps: tuple[Step, ...]
    env: dict[str, str]

    @property
    def train(self) -> Step:
        """The last step."""
        return self.steps[-1]


def build(profile: Profile, run: Path, *, mode: Mode = "train", resume: bool = False) -> Plan:
    """The plan of a launch.

    Args:
        run: the run folder; absolute, and on every machine the same.
        mode: ``rollout-only`` samples and does not train.
        resume: the run folder has checkpoints; nothing is prepared.

    Raises:
        ConfigError: a secret would be on a command line or in a job's variables.
    """
    train = _train(profile, run, mode)
    steps = (train,) if resume else (*_prepare(profile, mode), train)
    env = _environment(profile, run)
    told = [word for step in steps for word in step.argv]
    if found := complaints([*told, profile.cluster.ray_address or "", *profile.slurm.srun_args], env):
        raise ConfigError(
            found, hint="keep it in a file, or in the environment of the workers; only its path or name is passed on"
        )
    return Plan(steps, env)


def _train(profile: Profile, run: Path, mode: Mode) -> Step:
    cluster = profile.cluster
    placement = (
        [*flag("rollout_num_gpus", cluster.rollout_nodes * cluster.gpus_per_node)]
        if cluster.rollout_nodes
        else ["--colocate"]
    )
    wandb = profile.wandb.model_copy(update={"wandb_group": profile.wandb.wandb_group or run.name})
    prometheus = profile.prometheus.model_copy(
        update={"prometheus_run_name": profile.prometheus.prometheus_run_name or run.name}
    )
    reasoning, tools = PARSERS.get(profile.session.tito_model, (None, None))
    engine = profile.engine.model_copy(
        update={
            "sglang_reasoning_parser": profile.engine.sglang_reasoning_parser or reasoning,
            "sglang_tool_call_parser": profile.engine.sglang_tool_call_parser or tools,
        }
    )
    words = [
        *flag("hf_checkpoint", profile.rollout_folder),
        *flag("ref_load", profile.torch_dist),
        *flag("load", str(run / "checkpoints")),
        *flag("save", str(run / "checkpoints")),
        *profile.save.argv(),
        *flag("prompt_data", profile.paths.prompt_data),
        *flag("input_key", "prompt"),
        *flag("metadata_key", "metadata"),
        *profile.rollout.argv(),
        *profile.agent.argv(),
        *profile.session.argv(),
        *profile.grpo.argv(),
        *profile.optimizer.argv(),
        *profile.parallel.argv(),
        *engine.argv(),
        *profile.megatron.argv(),
        *flag("actor_num_nodes", cluster.nodes),
        *flag("actor_num_gpus_per_node", cluster.gpus_per_node),
        *flag("num_gpus_per_node", cluster.gpus_per_node),
        *placement,
        *(flag("dump_details", str(run / "dump_details")) if profile.dump_details else ()),
        *(wandb.argv() if wandb.use_wandb else ()),
        *(prometheus.argv() if prometheus.use_prometheus else ()),
        *flag("debug_rollout_only", mode == "rollout-only"),
        *profile.extra,
    ]
    script = "train_async.py" if profile.rollout.fully_async else "train.py"
    argv = (profile.paths.python, f"{profile.paths.miles}/{script}", MODEL_ARGS_WORD, *words)
    return Step("train", argv, profile.paths.miles, model_args=_model_args(profile))


def _prepare(profile: Profile, mode: Mode) -> list[Step]:
    """Download, casts and conversion; each is left out where its result is. Only training needs Megatron's form."""
    model, conversion, miles = profile.model, profile.conversion, profile.paths.miles
    steps = []
    if model.hub_id is not None:
        argv = ("hf", "download", model.hub_id, "--local-dir", profile.folder)
        steps.append(Step("download", argv, miles, unless=f"{profile.folder}/config.json"))
    source = profile.folder
    if conversion.cast_bf16 and mode == "train":
        source = f"{profile.folder}-bf16"
        argv = (profile.paths.python, f"{miles}/tools/fp8_cast_bf16.py")
        argv += ("--input-fp8-hf-path", profile.folder, "--output-bf16-hf-path", source)
        steps.append(Step("cast", argv, miles, unless=f"{source}/model.safetensors.index.json"))
    if conversion.fp8_rollout:
        target = profile.rollout_folder
        argv = (profile.paths.python, f"{miles}/tools/convert_hf_to_fp8.py", "--model-dir", profile.folder)
        argv += ("--save-dir", target, "--strategy", "block", "--block-size", "128", "128", "--max-workers", "16")
        steps.append(Step("quantise", argv, miles, unless=f"{target}/model.safetensors.index.json"))
    if mode == "train":
        steps.append(_convert(profile, source))
    return steps


def _convert(profile: Profile, source: str) -> Step:
    conversion, miles = profile.conversion, profile.paths.miles
    torchrun = ["torchrun", "--nproc-per-node", str(conversion.gpus_per_node or profile.cluster.gpus_per_node)]
    if conversion.nodes > 1:
        torchrun += ["--nnodes", str(conversion.nodes), "--node-rank", "{node_rank}"]
        torchrun += ["--master-addr", "{master_addr}", "--master-port", str(conversion.master_port)]
    torchrun += [f"{miles}/tools/convert_hf_to_torch_dist.py", MODEL_ARGS_WORD]
    torchrun += ["--hf-checkpoint", source, "--save", profile.torch_dist, *conversion.args]
    if conversion.nodes > 1:
        torchrun = [profile.paths.python, "-m", EVERY_NODE, "--nodes", str(conversion.nodes), "--", *torchrun]
    unless = f"{profile.torch_dist}/{TRACKER}"
    return Step("convert", tuple(torchrun), miles, model_args=_model_args(profile), unless=unless)


def _model_args(profile: Profile) -> tuple[str, ...]:
    return (profile.paths.python, f"{profile.paths.miles}/{MODEL_ARGS}", profile.model.megatron_model_type)


def _environment(profile: Profile, run: Path) -> dict[str, str]:
    """The variables of every step: those of the agent function under the names that its users know."""
    episodes, address = profile.episodes, profile.cluster.master_addr or "127.0.0.1"
    paths = [profile.paths.miles, profile.paths.megatron, *filter(None, [profile.env.get("PYTHONPATH")])]
    told: dict[str, object] = {
        "PYTHONPATH": ":".join(paths),
        "MASTER_ADDR": profile.cluster.master_addr if profile.cluster.ray_address else address,
        "no_proxy": "127.0.0.1,localhost" + (f",{address}" if profile.cluster.master_addr else ""),
        "OPENENV_ENV_URL": profile.env_url,
        "OPENENV_SANDBOX_BACKEND": episodes.sandbox_backend,
        "OPENENV_TB2_TASKS_DIR": episodes.tasks_dir,
        "OPENENV_TOKEN_FILE": episodes.token_file,
        "OPENENV_CONFIG": episodes.config,
        "OPENENV_MAX_TURNS": episodes.max_turns,
        "OPENENV_MESSAGE_TIMEOUT_S": f"{episodes.message_timeout_s:g}",
        "OPENENV_MAX_ROLLOUT_TIME_SECONDS": f"{episodes.max_rollout_time_s:g}",
        "OPENENV_TASK_WORKDIR": episodes.legacy_workdir,
        "OPENENV_TB2_TESTS_SRC": episodes.legacy_tests_src,
        "OPENENV_RUN_ID": run.name,
        OWNER: None if profile.cluster.ray_address else str(run),
        "AGENT_MODEL_NAME": episodes.model_name,
        "MILES_ROUTER_EXTERNAL_HOST": episodes.router_external_host,
        "MILES_HOST_IP": episodes.host_ip,
    }
    return profile.env | {name: str(value) for name, value in told.items() if value is not None}
