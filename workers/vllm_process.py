"""A vLLM engine inside this process: the one place that knows vLLM's arguments, how it is started and how it is run.

The rollout engine (`rollout/vllm_engine.py`) and the reward engine (`reward/model.py`) add what is theirs. The process must be
the engine's own: vLLM reseeds Python's, numpy's and torch's generators, fixes the thread count and makes a process group.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from configs.engine_args import engine_args_problems
from determinism import cpu_kernels
from determinism.environment import facts, pin_process
from workers.launch.service import without_collection

MIB = 1 << 20
CPU_BLOCK_SIZE = 32
"""Tokens of a KV block on CPU: the smallest its attention kernel takes, so that most of a shared prefix is found."""

PRELOAD = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
)
"""What takes long to import and is the same for every engine on CPU. `cpu_kernels` replaces attributes of these modules and classes
after they are imported, before a model is built."""

_DEFAULTS = {"block_size", "use_tqdm_on_load"}
"""What `common_arguments` sets only because vLLM's own default is worse here."""


def check_engine_args(
    extra: Mapping[str, Any], origin: str, full_determinism: bool, known: Collection[str] | None = None
) -> None:
    """Refuse what `engine_args` may not hold (see `configs/engine_args.py`).

    Raises:
        ValueError: a key that a setting owns, that `known` does not have, or that breaks level D3 under full determinism.
    """
    for problem in engine_args_problems(extra, origin, full_determinism, known):
        raise ValueError(str(problem))


def check_dtype(dtype: str, device: str) -> None:
    """Refuse a type that an engine can't compute in on this machine.

    Raises:
        ValueError: bfloat16 on a processor for which oneDNN has no bfloat16 (one without AVX-512).
    """
    import torch

    if device == "cpu" and dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        capability = torch.backends.cpu.get_cpu_capability()
        raise ValueError(f"bfloat16 needs a processor with AVX-512, and this one has {capability}; use float32")


def common_arguments(
    model: str | Path, *, config: Any, max_model_len: int, full_determinism: bool, device: str
) -> dict[str, Any]:
    """vLLM's arguments that rollout and reward engines share.

    Args:
        config: a RolloutConfig or RewardModelConfig (the fields with the same names are read).
        device: `cpu` or `cuda`.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": config.dtype,
        "max_model_len": max_model_len,
        # Only vLLM's own global generators see this; every request brings a seed.
        "seed": 0,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if device == "cpu":
        arguments |= {
            "kv_cache_memory_bytes": config.kv_cache_mib * MIB,
            "block_size": CPU_BLOCK_SIZE,
            "distributed_executor_backend": "uni",
        }
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if full_determinism:
            arguments["async_scheduling"] = False
    return arguments


def start_engine(
    arguments: Mapping[str, Any],
    extra: Mapping[str, Any],
    *,
    origin: str,
    full_determinism: bool,
    threads: int,
    device: str,
    cpu_linear: str = "auto",
) -> Any:
    """Import vLLM, replace its CPU kernels and build an engine whose core runs in this process.

    Args:
        arguments: what the role and the settings decide.
        extra: the user's further arguments, checked here; they win over defaults such as `block_size`.
        origin: dotted name of `extra`.
        cpu_linear: `determinism.cpu_linear`.

    Returns:
        A `vllm.v1.engine.llm_engine.LLMEngine`.

    Raises:
        RuntimeError: the process environment was not in place before Python started.
        ValueError: an argument in `extra` is owned by a setting, unknown to vLLM or breaks full determinism.
    """
    check_engine_args(extra, origin, full_determinism)
    for key in sorted(set(extra) & set(arguments) - _DEFAULTS):
        raise ValueError(f"{origin}.{key}: this engine needs {key}={arguments[key]!r}")
    _check_environment()
    with without_collection():
        engine_class, args_class = _import_vllm(full_determinism, threads)
        check_engine_args(extra, origin, full_determinism, args_class.__dataclass_fields__)
        if device == "cpu":
            cpu_kernels.install(linear=cpu_linear, full_determinism=full_determinism)
        # vLLM collects garbage five times while it starts; what was imported so far need not be walked each time.
        gc.freeze()
        engine = engine_class.from_engine_args(args_class(**{**arguments, **extra}))
    if device == "cpu" and full_determinism:
        cpu_kernels.check_model(engine.vllm_config.model_config)
    return engine


class RunningRequests:
    """What a vLLM engine has in work.

    Args:
        engine: what `start_engine` returned.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._taken = 0
        self.preemptions = 0
        """How often a running request was set back because the KV cache was full; its answer is the same, the work is done twice."""
        scheduler = engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting

    def add(self, number: int, token_ids: list[int], params: Any, priority: int = 0) -> None:
        """Take a request on.

        Args:
            number: what `step` will call it.
            params: vLLM's SamplingParams or PoolingParams.
            priority: the scheduler's; of two alike, the one that was taken on first goes first.
        """
        # A count stands in for the arrival time, so that nothing is read from the clock.
        self._taken += 1
        prompt = {"type": "token", "prompt_token_ids": token_ids}
        self._engine.add_request(str(number), prompt, params, arrival_time=float(self._taken), priority=priority)

    def step(self) -> list[tuple[int, Any]]:
        """One step of the engine: number and vLLM's output of each request that has finished in it."""
        return [(int(output.request_id), output) for output in self._engine.step() if output.finished]


def engine_facts(config: Any, device: str, **more: Any) -> dict[str, Any]:
    """What is in force in this engine's process, read back: `determinism.environment.facts`, and under `engine` vLLM's side.

    Args:
        config: vLLM's own (`vllm_config`).
        more: further entries of `engine`.
    """
    kernels = cpu_kernels.installed() if device == "cpu" else None
    return {
        **facts(),
        "device": device,
        "engine": {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "scheduling_policy": config.scheduler_config.policy,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "cpu_kernels": None if kernels is None else kernels.facts(),
            **more,
        },
    }


def stop_engine(engine: Any) -> None:
    """End what the engine has started beside this process. Its own memory goes with the process, which is the engine's.

    (vLLM's shutdown of an engine in one process collects garbage three times: seconds for nothing.)
    """
    if engine.vllm_config.parallel_config.world_size > 1:
        engine.engine_core.shutdown()


def _check_environment() -> None:
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0 in an engine's process: its core runs here, not in a child that would take "
            "40 s to start. Start the process with determinism.environment.process_env(...)"
        )


def _import_vllm(full_determinism: bool, threads: int) -> tuple[Any, Any]:
    pin_process(full_determinism, threads)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine, EngineArgs
