"""A profile: all that a launch is made from, one TOML file per model over the shared ``base.toml``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from termrl.config import Section
from termrl.errors import ConfigError
from termrl.integrations.miles.launch.flags import (
    AgentFlags,
    EngineFlags,
    GrpoFlags,
    MegatronFlags,
    OptimizerFlags,
    ParallelFlags,
    PrometheusFlags,
    RolloutFlags,
    SaveFlags,
    SessionFlags,
    WandbFlags,
)
from termrl.settings import load_settings

BASE = "base.toml"
_PACKAGE = "termrl.integrations.miles.launch"
DEFAULT_URL = "http://localhost:8003"


class Paths(Section):
    """Where things are on the machines that train."""

    miles: str = Field(default="/root/miles", description="miles' checkout")
    megatron: str = Field(default="/root/Megatron-LM", description="Megatron-LM's checkout")
    models: str = Field(default="/root/models", description="folder of checkpoints")
    python: str = Field(default="python3", description="the Python that miles is installed for")
    prompt_data: str = Field(default="train.jsonl", description="rows written by termrl tasks rows")


class Model(Section):
    """The checkpoint."""

    name: str = Field(min_length=1, description="of its folders below paths.models")
    hub_id: str | None = Field(default=None, description="downloaded first, unless its folder is there")
    megatron_model_type: str = Field(min_length=1, description="a file of miles' scripts/models, without .py")
    folder: str | None = Field(default=None, description="in transformers form; none: paths.models/name")
    rollout_folder: str | None = Field(default=None, description="what the engines load; none: folder")
    torch_dist: str | None = Field(default=None, description="Megatron's form; none: paths.models/name_torch_dist")


class Conversion(Section):
    """Steps of a first run, from the downloaded checkpoint to Megatron's form."""

    cast_bf16: bool = Field(default=False, description="the download is FP8: cast it for Megatron")
    fp8_rollout: bool = Field(default=False, description="quantise for the engines (model.rollout_folder)")
    gpus_per_node: int | None = Field(default=None, ge=1, description="none: cluster.gpus_per_node")
    nodes: int = Field(default=1, ge=1)
    master_port: int = Field(default=23456, ge=1, le=65535)
    args: tuple[str, ...] = Field(default=(), description="further arguments of tools/convert_hf_to_torch_dist.py")


class Cluster(Section):
    """The machines."""

    nodes: int = Field(default=1, ge=1, description="that train")
    rollout_nodes: int = Field(default=0, ge=0, description="that only sample; 0: those that train do both")
    gpus_per_node: int = Field(default=8, ge=1)
    ray_address: str | None = Field(
        default=None, description="http://HEAD:8265 of a Ray cluster; none: one machine, this one"
    )
    master_addr: str | None = Field(default=None, description="of the head node, for torch; none: 127.0.0.1 or Ray's")

    @property
    def gpus(self) -> int:
        """All GPUs of the run."""
        return (self.nodes + self.rollout_nodes) * self.gpus_per_node


class EpisodeSettings(Section):
    """What the agent function reads: where episodes run, and their bounds. Times are seconds."""

    url: str | None = Field(
        default=None, description="of an environment server that the workers share; none: http://localhost:8003"
    )
    token_file: str | None = Field(default=None, description="its bearer token, readable where miles runs")
    sandbox_backend: str | None = Field(
        default=None, description="bubblewrap or docker on each worker, in place of url"
    )
    tasks_dir: str | None = Field(default=None, description="of sandbox_backend: folder of tasks on each worker")
    max_turns: int = Field(default=30, ge=1)
    message_timeout_s: float = Field(default=1200.0, gt=0, description="one answer of the environment")
    max_rollout_time_s: float = Field(default=3600.0, gt=0, description="one episode, without queues and set-up")
    sandbox_ttl_s: float | None = Field(default=None, gt=0, description="after which the server ends any sandbox")
    legacy_workdir: str | None = Field(default=None, description="of servers without a canonical evaluate")
    legacy_tests_src: str | None = Field(default=None, description="of servers without a canonical evaluate")
    config: str | None = Field(default=None, description="TOML file of further agent settings, readable there")
    model_name: str = Field(default="model", description="name of the policy in requests")
    router_external_host: str | None = Field(default=None, description="host by which workers reach the session server")
    host_ip: str | None = Field(default=None, description="numeric address that miles listens on")


class Slurm(Section):
    """Of the batch script."""

    time: str = "48:00:00"
    partition: str | None = None
    account: str | None = None
    network_prefix: str | None = Field(default=None, description="begin of the head's address, such as 10.4.")
    srun_args: tuple[str, ...] = Field(default=(), description="such as --container-image=…, --container-mounts=…")
    setup: str = Field(default="", description="shell lines on every node before Ray starts")


class PreflightSettings(Section):
    """What is held against the machines."""

    disk_gb: float = Field(default=100.0, ge=0, description="free space that the run folder and paths.models need")
    max_fault_rate: float = Field(default=0.02, ge=0, le=1, description="measured; above it groups are lost")
    validation: tuple[Path, ...] = Field(default=(), description="reports of termrl validate")
    results: Path | None = Field(default=None, description="results.jsonl of termrl eval, for the fault rate")


class Profile(Section):
    """Everything that ``termrl launch miles`` takes."""

    paths: Paths = Paths()
    model: Model
    conversion: Conversion = Conversion()
    cluster: Cluster = Cluster()
    episodes: EpisodeSettings = EpisodeSettings()
    rollout: RolloutFlags = RolloutFlags()
    grpo: GrpoFlags = GrpoFlags()
    optimizer: OptimizerFlags = OptimizerFlags()
    parallel: ParallelFlags = ParallelFlags()
    engine: EngineFlags = EngineFlags()
    session: SessionFlags = SessionFlags()
    agent: AgentFlags = AgentFlags()
    save: SaveFlags = SaveFlags()
    megatron: MegatronFlags = MegatronFlags()
    wandb: WandbFlags = WandbFlags()
    prometheus: PrometheusFlags = PrometheusFlags()
    dump_details: bool = Field(default=True, description="keep every rollout in dump_details/ of the run folder")
    slurm: Slurm = Slurm()
    preflight: PreflightSettings = PreflightSettings()
    extra: tuple[str, ...] = Field(default=(), description="words that come last on miles' command line")
    env: dict[str, str] = Field(default={}, description="further variables of every process; none may be a secret")

    @property
    def folder(self) -> str:
        """The checkpoint in transformers form."""
        return self.model.folder or f"{self.paths.models}/{self.model.name}"

    @property
    def rollout_folder(self) -> str:
        """What the engines load."""
        return self.model.rollout_folder or self.folder

    @property
    def torch_dist(self) -> str:
        """What Megatron loads."""
        return self.model.torch_dist or f"{self.paths.models}/{self.model.name}_torch_dist"

    @property
    def env_url(self) -> str | None:
        """The environment server; ``None`` where each worker has sandboxes of its own."""
        return None if self.episodes.sandbox_backend else self.episodes.url or DEFAULT_URL

    @property
    def concurrency(self) -> int:
        """Episodes at once."""
        rollout = self.rollout
        batch = (rollout.over_sampling_batch_size or rollout.rollout_batch_size) * rollout.n_samples_per_prompt
        return rollout.async_max_concurrent_samples or batch if rollout.fully_async else batch

    @model_validator(mode="after")
    def _fits(self) -> Self:
        problems = [*_batch_problems(self.rollout), *_parallel_problems(self), *_placement_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _batch_problems(rollout: RolloutFlags) -> list[str]:
    found = []
    episodes = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if episodes % rollout.global_batch_size:
        found.append(
            f"rollout.global_batch_size {rollout.global_batch_size} does not divide the {episodes} episodes of a "
            "rollout (rollout_batch_size × n_samples_per_prompt)"
        )
    if rollout.rollout_max_response_len > rollout.max_seq_len:
        found.append("rollout.rollout_max_response_len is larger than rollout.max_seq_len")
    if rollout.fully_async and (rollout.async_max_concurrent_samples or episodes) < rollout.n_samples_per_prompt:
        found.append("rollout.async_max_concurrent_samples is smaller than one group (n_samples_per_prompt)")
    return found


def _parallel_problems(profile: Profile) -> list[str]:
    parallel, gpus = profile.parallel, profile.cluster.nodes * profile.cluster.gpus_per_node
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    found = []
    if gpus % (tensor * pipeline * parallel.context_parallel_size):
        found.append(f"parallel: TP × PP × CP does not divide the {gpus} GPUs that train")
    if gpus % (pipeline * parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size):
        found.append(f"parallel: PP × EP × expert-TP does not divide the {gpus} GPUs that train")
    return found


def _placement_problems(profile: Profile) -> list[str]:
    cluster, each = profile.cluster, profile.engine.rollout_num_gpus_per_engine
    sampling = (cluster.rollout_nodes or cluster.nodes) * cluster.gpus_per_node
    found = []
    if sampling % each:
        found.append(f"engine.rollout_num_gpus_per_engine {each} does not divide the {sampling} GPUs that sample")
    if profile.rollout.fully_async and not cluster.rollout_nodes:
        found.append("rollout.fully_async needs nodes of its own for sampling (cluster.rollout_nodes)")
    return found


ALIASES: Mapping[str, tuple[str, ...]] = {
    "OPENENV_ENV_URL": ("episodes", "url"),
    "OPENENV_SANDBOX_BACKEND": ("episodes", "sandbox_backend"),
    "OPENENV_TB2_TASKS_DIR": ("episodes", "tasks_dir"),
    "OPENENV_MAX_TURNS": ("episodes", "max_turns"),
    "OPENENV_MESSAGE_TIMEOUT_S": ("episodes", "message_timeout_s"),
    "OPENENV_MAX_ROLLOUT_TIME_SECONDS": ("episodes", "max_rollout_time_s"),
    "OPENENV_TASK_WORKDIR": ("episodes", "legacy_workdir"),
    "OPENENV_TB2_TESTS_SRC": ("episodes", "legacy_tests_src"),
    "OPENENV_TOKEN_FILE": ("episodes", "token_file"),
    "OPENENV_CONFIG": ("episodes", "config"),
    "AGENT_MODEL_NAME": ("episodes", "model_name"),
    "MILES_ROUTER_EXTERNAL_HOST": ("episodes", "router_external_host"),
    "MILES_HOST_IP": ("episodes", "host_ip"),
    "WANDB_PROJECT": ("wandb", "wandb_project"),
    "WANDB_TEAM": ("wandb", "wandb_team"),
}
"""Variables that fill settings where no ``--set`` does; the names of the first adapter among them."""


def profile_names() -> list[str]:
    """The profiles that ship."""
    files = resources.files(_PACKAGE).joinpath("profiles").iterdir()
    return sorted(
        file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml") and file.name != BASE
    )


def load_profile(
    name: str,
    *,
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> Profile:
    """Fill a profile: base, then the named one, then ``files``, then variables, then ``settings``.

    Args:
        name: of a shipped profile, or a TOML file.
        environ: where :data:`ALIASES` are looked up.
        settings: each ``key=value``, as after ``--set``.

    Raises:
        ConfigError: no such profile, or bad values; names all of them.
    """
    flags = []
    for text in settings:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text}: key=value is needed", hint="for example --set rollout.num_rollout=200")
        flags.append(f"--{text}")
    named = _file_of(name)
    with resources.as_file(resources.files(_PACKAGE).joinpath("profiles")) as folder:
        chosen = named or folder / f"{name}.toml"
        loaded = load_settings(
            Profile,
            files=[folder / BASE, chosen, *files],
            environ={key: value for key, value in (environ or {}).items() if key in ALIASES},
            aliases=ALIASES,
            flags=flags,
        ).config
    return _with_whole_paths(loaded)


def _with_whole_paths(profile: Profile) -> Profile:
    """The files that a user names from where they stand, as every process finds them."""
    episodes, checks = profile.episodes, profile.preflight
    named = {name: getattr(episodes, name) for name in ("token_file", "config", "tasks_dir")}
    return profile.model_copy(
        update={
            "paths": profile.paths.model_copy(update={"prompt_data": _whole(profile.paths.prompt_data)}),
            "episodes": episodes.model_copy(update={key: _whole(path) for key, path in named.items() if path}),
            "preflight": checks.model_copy(
                update={
                    "validation": tuple(Path(_whole(path)) for path in checks.validation),
                    "results": None if checks.results is None else Path(_whole(checks.results)),
                }
            ),
        }
    )


def _whole(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _file_of(name: str) -> Path | None:
    """The file that a profile's name is, or ``None`` for a shipped one."""
    known = profile_names()
    if name in known:
        return None
    path = Path(name)
    if name.endswith(".toml") or path.is_file():
        return path
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"no profile {name}{meant}", hint=f"profiles: {', '.join(known)}, or a TOML file")
