"""Run a function on several gloo ranks, for tests of collectives."""

import multiprocessing
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(rank: int, world_size: int, port: int, function: Callable[..., None], arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()


def on_ranks(world_size: int, function: Callable[..., None], *arguments) -> None:
    """Call the picklable `function(*arguments)` on every rank; an exception of any rank is raised here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # One clean server imports torch once and forks the ranks, which are fresh processes in everything that matters here.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "pytest"])
    mp.start_processes(
        _rank_main, (world_size, port, function, arguments), nprocs=world_size, start_method="forkserver"
    )
