"""The values that a field may take beyond its type: choices, ranges, and where a user's own function is allowed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class Form:
    """A way to write a value that can't be listed."""

    pattern: re.Pattern[str]
    """What it must match as a whole."""
    text: str
    """The same for people."""


MODULE_FUNCTION = Form(re.compile(f"{_DOTTED}:{_DOTTED}"), "package.module:function")
FILE_FUNCTION = Form(re.compile(rf".+\.py:{_DOTTED}"), "path/to/file.py:function")
STEP = Form(re.compile(r"[0-9]+"), "the number of a step that has a checkpoint")

DTYPES = ("float32", "bfloat16")

# (dataclass, field) -> allowed values.
CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("RunConfig", "resume"): ("never", "auto"),
    ("DeterminismConfig", "cpu_linear"): ("auto", "pad1", "block16"),
    ("LedgerConfig", "record"): ("off", "digest", "full"),
    ("FsdpConfig", "precision"): ("fp32", "bf16"),
    ("FsdpConfig", "attention"): ("sdpa", "eager", "flash_attention_2"),
    ("OptimizerConfig", "schedule"): ("constant", "linear", "cosine"),
    ("DataSourceConfig", "kind"): ("reasoning_gym", "dataset"),
    ("DataConfig", "overlong_prompts"): ("error", "filter", "truncate_left", "truncate_right"),
    ("RolloutConfig", "engine"): ("vllm",),
    ("RolloutConfig", "dtype"): DTYPES,
    ("RewardModelConfig", "dtype"): DTYPES,
    ("RewardFunctionConfig", "function"): ("exact_match", "math_verify", "reasoning_gym", "http"),
    ("RewardConfig", "on_error"): ("fail", "drop", "penalise"),
    ("AdvantageConfig", "name"): (
        "gae",
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
    ),
    ("AdvantageConfig", "whiten"): ("none", "full", "scale"),
    ("PolicyLossConfig", "name"): ("ppo_clip", "gspo", "cispo"),
    ("KlConfig", "placement"): ("reward", "loss", "none"),
    ("KlConfig", "estimator"): ("k1", "k2", "k3", "full"),
    ("KlConfig", "controller"): ("fixed", "adaptive"),
    ("AlgorithmConfig", "aggregation"): (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
    ),
    ("AlgorithmConfig", "truncated"): ("keep", "mask", "penalise", "bootstrap"),
    ("LauncherConfig", "name"): ("auto", "ray", "torchrun"),
    ("LauncherConfig", "device"): ("auto", "cpu", "cuda"),
    ("TrackingConfig", "wandb_mode"): ("offline", "online", "disabled"),
}

# Fields whose value may also have one of these forms.
FORMS: dict[tuple[str, str], tuple[Form, ...]] = {
    ("RunConfig", "resume"): (STEP,),
    ("AdvantageConfig", "name"): (MODULE_FUNCTION, FILE_FUNCTION),
    ("PolicyLossConfig", "name"): (MODULE_FUNCTION, FILE_FUNCTION),
    ("RewardFunctionConfig", "function"): (MODULE_FUNCTION, FILE_FUNCTION),
}


@dataclass(frozen=True)
class Range:
    """Bounds of a number; an open bound is not part of the range."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is inside."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        parts = []
        if self.low != -math.inf:
            parts.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if self.high != math.inf:
            high = "2^63" if self.high == 2**63 else f"{self.high:g}"
            parts.append(f"{'below' if self.high_open else 'at most'} {high}")
        return " and ".join(parts)


AT_LEAST_0 = Range(0)
AT_LEAST_1 = Range(1)
POSITIVE = Range(0, low_open=True)
SHARE = Range(0, 1)
SHARE_ABOVE_0 = Range(0, 1, low_open=True)
SHARE_BELOW_1 = Range(0, 1, high_open=True)
SEED = Range(0, 2**63, high_open=True)

# (dataclass, field) -> range; for a list, of each element.
RANGES: dict[tuple[str, str], Range] = {
    ("Config", "seed"): SEED,
    ("DeterminismConfig", "threads"): AT_LEAST_1,
    ("LoraConfig", "rank"): AT_LEAST_0,
    ("LoraConfig", "alpha"): POSITIVE,
    ("FsdpConfig", "leaf_size"): AT_LEAST_1,
    ("FsdpConfig", "leaf_tokens"): AT_LEAST_1,
    ("OptimizerConfig", "lr"): AT_LEAST_0,
    ("OptimizerConfig", "betas"): SHARE_BELOW_1,
    ("OptimizerConfig", "eps"): POSITIVE,
    ("OptimizerConfig", "weight_decay"): AT_LEAST_0,
    ("OptimizerConfig", "warmup_steps"): AT_LEAST_0,
    ("OptimizerConfig", "min_lr_ratio"): SHARE,
    ("OptimizerConfig", "max_grad_norm"): AT_LEAST_0,
    ("ActorConfig", "ppo_epochs"): AT_LEAST_1,
    ("ActorConfig", "mini_batch_size"): AT_LEAST_1,
    ("CriticConfig", "ppo_epochs"): AT_LEAST_1,
    ("CriticConfig", "mini_batch_size"): AT_LEAST_1,
    ("CriticConfig", "warmup_steps"): AT_LEAST_0,
    ("DataSourceConfig", "size"): AT_LEAST_1,
    ("DataSourceConfig", "seed"): SEED,
    ("DataSourceConfig", "weight"): POSITIVE,
    ("DataSourceConfig", "window"): AT_LEAST_1,
    ("DataConfig", "seed"): SEED,
    ("DataConfig", "prompts_per_step"): AT_LEAST_1,
    ("DataConfig", "max_prompt_tokens"): AT_LEAST_1,
    ("SamplingConfig", "n"): AT_LEAST_1,
    ("SamplingConfig", "max_new_tokens"): AT_LEAST_1,
    ("SamplingConfig", "temperature"): AT_LEAST_0,
    ("SamplingConfig", "top_p"): SHARE_ABOVE_0,
    ("SamplingConfig", "top_k"): AT_LEAST_0,
    ("SamplingConfig", "min_p"): SHARE,
    ("SamplingConfig", "repetition_penalty"): POSITIVE,
    ("SamplingConfig", "presence_penalty"): Range(-2, 2),
    ("SamplingConfig", "frequency_penalty"): Range(-2, 2),
    ("SamplingConfig", "stop_token_ids"): AT_LEAST_0,
    ("SamplingConfig", "seed"): SEED,
    ("RolloutConfig", "seed"): SEED,
    ("RolloutConfig", "replicas"): AT_LEAST_1,
    ("RolloutConfig", "tensor_parallel_size"): AT_LEAST_1,
    ("RolloutConfig", "max_model_len"): AT_LEAST_1,
    ("RolloutConfig", "max_num_seqs"): AT_LEAST_1,
    ("RolloutConfig", "max_num_batched_tokens"): AT_LEAST_1,
    ("RolloutConfig", "kv_cache_mib"): AT_LEAST_1,
    ("RolloutConfig", "gpu_memory_utilization"): SHARE_ABOVE_0,
    ("RolloutConfig", "max_head_offpolicyness"): AT_LEAST_0,
    ("RolloutConfig", "start_timeout_s"): POSITIVE,
    ("RewardModelConfig", "replicas"): AT_LEAST_1,
    ("RewardModelConfig", "max_num_seqs"): AT_LEAST_1,
    ("RewardModelConfig", "max_model_len"): AT_LEAST_1,
    ("RewardModelConfig", "kv_cache_mib"): AT_LEAST_1,
    ("RewardModelConfig", "gpu_memory_utilization"): SHARE_ABOVE_0,
    ("RewardModelConfig", "start_timeout_s"): POSITIVE,
    ("RewardFunctionConfig", "timeout_s"): POSITIVE,
    ("RewardFunctionConfig", "concurrency"): AT_LEAST_1,
    ("RewardConfig", "function_workers"): AT_LEAST_1,
    ("RewardConfig", "audit_rows"): AT_LEAST_0,
    ("AdvantageConfig", "gamma"): SHARE,
    ("AdvantageConfig", "lam"): SHARE,
    ("PolicyLossConfig", "clip_low"): SHARE_ABOVE_0,
    ("PolicyLossConfig", "clip_high"): POSITIVE,
    ("PolicyLossConfig", "dual_clip"): Range(1, low_open=True),
    ("PolicyLossConfig", "entropy_coef"): AT_LEAST_0,
    ("ValueLossConfig", "clip_range"): AT_LEAST_0,
    ("KlConfig", "coef"): AT_LEAST_0,
    ("KlConfig", "target"): POSITIVE,
    ("KlConfig", "horizon"): POSITIVE,
    ("RolloutCorrectionConfig", "tis_cap"): POSITIVE,
    ("RolloutCorrectionConfig", "sequence_mask_low"): SHARE,
    ("RolloutCorrectionConfig", "sequence_mask_high"): AT_LEAST_1,
    ("AlgorithmConfig", "overlong_buffer"): AT_LEAST_0,
    ("AlgorithmConfig", "overlong_penalty"): AT_LEAST_0,
    ("DynamicSamplingConfig", "max_rounds"): AT_LEAST_1,
    ("LauncherConfig", "num_ranks"): AT_LEAST_1,
    ("LauncherConfig", "ray_num_cpus"): AT_LEAST_1,
    ("LauncherConfig", "timeout_s"): POSITIVE,
    ("LauncherConfig", "silence_s"): AT_LEAST_0,
    ("TrackingConfig", "log_samples"): AT_LEAST_0,
    ("TrainerConfig", "total_steps"): AT_LEAST_1,
    ("TrainerConfig", "total_epochs"): AT_LEAST_1,
    ("TrainerConfig", "validate_every"): AT_LEAST_0,
    ("TrainerConfig", "checkpoint_every"): AT_LEAST_0,
    ("TrainerConfig", "keep_last"): AT_LEAST_0,
    ("TrainerConfig", "keep_every"): AT_LEAST_0,
    ("TrainerConfig", "max_nonfinite_updates"): AT_LEAST_1,
}


def is_reference(value: str) -> bool:
    """Whether `value` names a user's function."""
    return any(form.pattern.fullmatch(value) for form in (MODULE_FUNCTION, FILE_FUNCTION))


def allowed_text(owner: str, name: str) -> str:
    """The allowed values of a field in words; empty when its type says it all."""
    parts = []
    if (owner, name) in CHOICES:
        parts.append(", ".join(CHOICES[owner, name]))
    parts += [form.text for form in FORMS.get((owner, name), ())]
    if (owner, name) in RANGES:
        parts.append(str(RANGES[owner, name]))
    return " or ".join(parts)


def violation(owner: str, name: str, value: Any) -> str | None:
    """What is wrong with a value of the right type, or None.

    Args:
        owner: name of the dataclass.
        name: name of the field.
        value: the value, or one element of a list.
    """
    choices = CHOICES.get((owner, name))
    if choices is not None and value not in choices and not _has_form(owner, name, value):
        return f"must be {allowed_text(owner, name)}, not {value!r}"
    bounds = RANGES.get((owner, name))
    if bounds is not None and not bounds.holds(value):
        return f"must be {bounds}, not {value!r}"
    return None


def _has_form(owner: str, name: str, value: str) -> bool:
    return any(form.pattern.fullmatch(value) for form in FORMS.get((owner, name), ()))
