"""Run a function on several gloo ranks and collect what each returned."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "accelerate",
    "workers.models.trainer_worker",
]
"""Imported once by a clean server that forks the ranks."""

_run_numbers = itertools.count()


def _rank_main(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        torch.save(function(*arguments), f"{folder}/result-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(ranks: int, tmp_path: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank; results in rank order. Any rank's exception is raised here."""
    folder = tmp_path / f"ranks-{next(_run_numbers)}"
    folder.mkdir()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(PRELOAD)
    mp.start_processes(_rank_main, (ranks, str(folder), function, arguments), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]
