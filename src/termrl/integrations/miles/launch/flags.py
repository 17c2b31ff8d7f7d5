"""The tables of a profile whose keys are miles' own flags: ``tensor_model_parallel_size = 4`` is that flag.

``None``, ``False`` and ``""`` leave a flag out, ``True`` gives it bare, a list gives it several values. What miles
takes that is not here goes behind ``--`` on the command line.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from termrl.config import Section

Tito = Literal[
    "qwen3",
    "qwen35",
    "qwennext",
    "glm47",
    "nemotron3",
    "kimi25",
    "kimi26",
    "minimax_m25",
    "minimax_m27",
    "deepseekv32",
    "deepseekv4",
]
"""Chat formats that miles' session server continues token by token."""

PARSERS: dict[str, tuple[str, str]] = {
    "qwen3": ("qwen3", "qwen25"),
    "qwennext": ("qwen3", "qwen25"),
    "qwen35": ("qwen3", "qwen3_coder"),
    "glm47": ("glm45", "glm47"),
    "nemotron3": ("nemotron_3", "qwen3_coder"),
    "kimi26": ("kimi_k2", "kimi_k2_raw_id"),
    "minimax_m25": ("minimax-append-think", "minimax-m2"),
    "minimax_m27": ("minimax-append-think", "minimax-m2"),
    "deepseekv32": ("deepseek-v3", "deepseekv32"),
    "deepseekv4": ("deepseek-v4", "deepseekv4"),
}
"""SGLang's reasoning parser and tool-call parser of each chat format."""


class Flags(Section):
    """A table of flags, in the order in which they are given."""

    def argv(self) -> list[str]:
        """The flags, with their values."""
        return [word for name in type(self).model_fields for word in flag(name, getattr(self, name))]


def flag(name: str, value: Any) -> list[str]:
    """One flag as words of a command line; none where it is left out."""
    spelled = f"--{name.replace('_', '-')}"
    if value is None or value is False or value == "":
        return []
    if value is True:
        return [spelled]
    values = value if isinstance(value, list | tuple) else [value]
    return [spelled, *(_text(one) for one in values)]


def _text(value: Any) -> str:
    return repr(value).replace("e-0", "e-") if isinstance(value, float) else str(value)


class RolloutFlags(Flags):
    """What is sampled for one training step."""

    num_rollout: int = Field(default=100, ge=1, description="rollouts, hence training phases, in all")
    rollout_batch_size: int = Field(default=8, ge=1, description="tasks of one rollout")
    n_samples_per_prompt: int = Field(default=8, ge=2, description="episodes of each task: a group")
    global_batch_size: int = Field(default=32, ge=1, description="episodes of one optimizer step")
    rollout_temperature: float = Field(default=0.8, gt=0)
    rollout_max_response_len: int = Field(default=8192, ge=1, description="tokens of one reply")
    max_seq_len: int = Field(default=16384, ge=2, description="tokens of a whole episode")
    over_sampling_batch_size: int | None = Field(default=None, ge=1)
    rollout_shuffle: bool = True
    balance_data: bool = True
    fully_async: bool = Field(default=False, description="rollout and training overlap (train_async.py)")
    async_max_concurrent_samples: int | None = Field(default=None, ge=1, description="episodes at once, fully async")
    rollout_submission_granularity: Literal["sample", "group"] | None = None
    pause_generation_mode: Literal["retract", "in_place"] | None = Field(
        default=None, description="how engines pause for new weights; abort does not go with sessions"
    )


class GrpoFlags(Flags):
    """The objective."""

    advantage_estimator: str = "grpo"
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(default=0.01, ge=0)
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    eps_clip: float = Field(default=0.2, gt=0)
    eps_clip_high: float = Field(default=0.28, gt=0)
    use_tis: bool = Field(default=False, description="truncated importance sampling")
    tis_clip_low: float | None = Field(default=None, ge=0)
    tis_clip: float | None = Field(default=None, gt=0)


class OptimizerFlags(Flags):
    """The optimizer."""

    optimizer: str = "adam"
    lr: float = Field(default=1e-6, gt=0)
    lr_decay_style: str = "constant"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    clip_grad: float | None = Field(default=None, gt=0)
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    stream_optimizer_state_to_disk: bool = False
    offload_train_disk_dir: str | None = None


class ParallelFlags(Flags):
    """How training is spread over GPUs, and what fits into one."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    decoder_first_pipeline_num_layers: int | None = Field(default=None, ge=1)
    decoder_last_pipeline_num_layers: int | None = Field(default=None, ge=1)
    context_parallel_size: int = Field(default=1, ge=1)
    expert_model_parallel_size: int = Field(default=1, ge=1)
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    recompute_granularity: str | None = "full"
    recompute_method: str | None = "uniform"
    recompute_num_layers: int | None = 1
    use_dynamic_batch_size: bool = True
    micro_batch_size: int | None = Field(default=None, ge=1)
    max_tokens_per_gpu: int | None = Field(default=16384, ge=1)
    data_pad_size_multiplier: int | None = Field(default=None, ge=1)
    log_probs_chunk_size: int | None = Field(default=None, ge=1)
    allgather_cp: bool = False


class EngineFlags(Flags):
    """SGLang's engines and their router."""

    rollout_num_gpus_per_engine: int = Field(default=1, ge=1)
    sglang_mem_fraction_static: float = Field(default=0.7, gt=0, lt=1)
    sglang_tool_call_parser: str | None = Field(default=None, description="none: that of session.tito_model")
    sglang_reasoning_parser: str | None = Field(default=None, description="none: that of session.tito_model")
    sglang_router_port: int | None = Field(default=31000, ge=1, le=65535)
    sglang_tp_size: int | None = Field(default=None, ge=1)
    sglang_dp_size: int | None = Field(default=None, ge=1)
    sglang_ep_size: int | None = Field(default=None, ge=1)
    sglang_enable_dp_attention: bool = False
    sglang_attention_backend: str | None = None
    sglang_nsa_prefill_backend: str | None = None
    sglang_nsa_decode_backend: str | None = None
    sglang_kv_cache_dtype: str | None = None
    sglang_page_size: int | None = Field(default=None, ge=1)
    sglang_cuda_graph_max_bs: int | None = Field(default=None, ge=1)
    sglang_max_running_requests: int | None = Field(default=None, ge=1)
    sglang_chunked_prefill_size: int | None = Field(default=None, ge=1)
    sglang_watchdog_timeout: float | None = Field(default=None, gt=0)
    sglang_moe_a2a_backend: str | None = None
    sglang_speculative_algorithm: str | None = None
    sglang_speculative_num_steps: int | None = Field(default=None, ge=1)
    sglang_speculative_eagle_topk: int | None = Field(default=None, ge=1)
    sglang_speculative_num_draft_tokens: int | None = Field(default=None, ge=1)
    sglang_speculative_draft_attention_backend: str | None = None
    router_health_success_threshold: int | None = Field(default=None, ge=1)
    router_health_check_interval_secs: int | None = Field(default=None, ge=1)
    router_health_failure_threshold: int | None = Field(default=None, ge=1)
    rollout_health_check_interval: float | None = Field(default=None, gt=0)
    rollout_health_check_timeout: float | None = Field(default=None, gt=0)
    use_rollout_routing_replay: bool = False


class SessionFlags(Flags):
    """miles' session server, which keeps the tokens."""

    use_session_server: bool = True
    session_server_port: int | None = Field(default=30000, ge=1, le=65535)
    tito_model: Tito = "qwen3"


class AgentFlags(Flags):
    """What miles calls."""

    custom_generate_function_path: str = "miles.rollout.generate_hub.agentic_tool_call.generate"
    custom_agent_function_path: str = "termrl.integrations.miles.run"
    custom_rm_path: str = "termrl.integrations.miles.reward_func"
    dynamic_sampling_filter_path: str = "miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted"
    custom_rollout_log_function_path: str | None = "termrl.integrations.miles.log_rollout"
    custom_eval_rollout_log_function_path: str | None = "termrl.integrations.miles.log_eval"


class SaveFlags(Flags):
    """Checkpoints; where they go is the run folder."""

    save_interval: int = Field(default=100, ge=1)
    save_retain_interval: int | None = Field(default=None, ge=1)
    no_save_optim: bool = False


class WandbFlags(Flags):
    """Weights & Biases. There is no key here: it comes from WANDB_API_KEY or a netrc file where miles runs."""

    use_wandb: bool = False
    wandb_project: str = "termrl"
    wandb_group: str | None = Field(default=None, description="none: the run folder's name")
    wandb_team: str | None = None
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    wandb_dir: str | None = None
    disable_wandb_random_suffix: bool = True


class PrometheusFlags(Flags):
    """Prometheus."""

    use_prometheus: bool = True
    prometheus_port: int = Field(default=9090, ge=1, le=65535)
    prometheus_run_name: str | None = Field(default=None, description="none: the run folder's name")


class MegatronFlags(Flags):
    """What is left of Megatron's and miles' flags."""

    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    accumulate_allreduce_grads_in_fp32: bool = True
    attention_softmax_in_fp32: bool = True
    attention_backend: str | None = "flash"
    transformer_impl: str | None = None
    bf16: bool = False
    fp8_format: str | None = None
    fp8_recipe: str | None = None
    model_name: str | None = None
    qkv_format: Literal["thd", "bshd"] | None = None
    moe_router_freeze_gate: bool = False
    freeze_e_score_correction_bias: bool = False
    moe_token_dispatcher_type: str | None = None
    deterministic_mode: bool = False
    use_fault_tolerance: bool = False
    train_memory_margin_bytes: int | None = Field(default=None, ge=0)
    update_weight_buffer_size: int | None = Field(default=None, ge=1)
    update_weight_transfer_mode: str | None = None
