"""What `rollout.engine_args` and `reward.model.engine_args` may not hold: arguments of vLLM that something else decides."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.problems import Problem
from configs.suggest import nearest

ROLE = "the engine's role"

# vLLM's argument -> the setting, or the fact, that decides it: for the rollout (None: free there), and for the reward model.
OWNED: dict[str, tuple[str | None, str]] = {
    "model": ("model.path", "reward.model.path"),
    "tokenizer": ("model.tokenizer", "reward.model.tokenizer"),
    "skip_tokenizer_init": ("model.tokenizer", ROLE),
    "trust_remote_code": ("model.trust_remote_code", "model.trust_remote_code"),
    "seed": ("rollout.seed", ROLE),
    "dtype": ("rollout.dtype", "reward.model.dtype"),
    "max_model_len": ("rollout.max_model_len", "reward.model.max_model_len"),
    "max_num_seqs": ("rollout.max_num_seqs", "reward.model.max_num_seqs"),
    "max_num_batched_tokens": ("rollout.max_num_batched_tokens", ROLE),
    "tensor_parallel_size": ("rollout.tensor_parallel_size", ROLE),
    "data_parallel_size": ("rollout.replicas", "reward.model.replicas"),
    "kv_cache_memory_bytes": ("rollout.kv_cache_mib", "reward.model.kv_cache_mib"),
    "gpu_memory_utilization": ("rollout.gpu_memory_utilization", "reward.model.gpu_memory_utilization"),
    "enable_prefix_caching": ("rollout.enable_prefix_caching", ROLE),
    "enable_chunked_prefill": (None, ROLE),
    "enforce_eager": ("rollout.enforce_eager", ROLE),
    "runner": (ROLE, ROLE),
    "convert": (ROLE, ROLE),
    "pooler_config": (ROLE, ROLE),
    "logprobs_mode": ("the trained distribution", ROLE),
    "generation_config": ("rollout.sampling", ROLE),
    "override_generation_config": ("rollout.sampling", ROLE),
    "scheduling_policy": ("the requests' priorities", ROLE),
    "distributed_executor_backend": ("launcher.device", "launcher.device"),
    "disable_log_stats": (ROLE, ROLE),
}

BREAKS_BATCH_INVARIANCE = {
    "async_scheduling": "steps would depend on timing",
    "speculative_config": "draft tokens depend on the batch",
    "spec_method": "draft tokens depend on the batch",
    "spec_model": "draft tokens depend on the batch",
    "spec_tokens": "draft tokens depend on the batch",
    "quantization": "quantized kernels are not batch-invariant",
    "enable_lora": "adapter kernels are not batch-invariant",
}


def engine_args_problems(
    arguments: Mapping[str, Any], origin: str, full_determinism: bool, known: Collection[str] | None = None
) -> Iterator[Problem]:
    """What is wrong with further engine arguments; needs no vLLM, so it is said before anything starts.

    Args:
        arguments: the mapping.
        origin: its dotted key, `rollout.engine_args` or `reward.model.engine_args`.
        known: every argument of the engine; None leaves unknown ones to it.
    """
    for name in arguments:
        key = f"{origin}.{name}"
        owner = OWNED.get(name, (None, None))[origin.startswith("reward")]
        if owner is not None:
            yield Problem(key, f"follows from {owner}", "set that instead" if "." in owner else "leave it out")
        elif full_determinism and name in BREAKS_BATCH_INVARIANCE:
            text = BREAKS_BATCH_INVARIANCE[name]
            yield Problem(key, text, "leave it out, or full_determinism=false", level="D3")
        elif known is not None and name not in known:
            near = nearest(name, known)
            yield Problem(
                key, f"vLLM's engine has no argument {name!r}", f"did you mean `{near}`?" if near else "leave it out"
            )


@functools.cache
def vllm_arguments() -> frozenset[str] | None:
    """Names of the engine's arguments, read from vLLM's source (importing it takes seconds); None when it isn't found there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_bytes()
    except OSError:
        return None
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            )
    return None
