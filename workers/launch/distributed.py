"""torch.distributed for the ranks: how a process group comes up, and how Python values travel between ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from workers.launch.transport import from_blob, to_blob

PADDED_LIMIT = 1 << 20
"""Bytes. Up to here values are gathered in one padded collective; larger ones are broadcast one after the other at their own size."""
BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""On CUDA the group serves tensors of both kinds, so that host-side values need no copy to the device."""


def open_store(host: str, world_size: int, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """The rendezvous of rank 0; port 0 takes a free one (read `.port`), with no moment in which another process could take it."""
    return dist.TCPStore(
        host, port, world_size, True, timeout=datetime.timedelta(seconds=timeout_s), wait_for_workers=False
    )


def init_process_group(
    device: str, rank: int, world_size: int, local_rank: int, timeout_s: float, store: dist.Store | None = None
) -> None:
    """Bring up the default process group: gloo on CPU, gloo and NCCL on CUDA (with this rank's device selected).

    Args:
        store: the rendezvous; null takes MASTER_ADDR and MASTER_PORT.
        timeout_s: longest wait for one collective.
    """
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_s)}
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        options["device_id"] = torch.device("cuda", local_rank)
    if store is None:
        dist.init_process_group(BACKENDS[device], rank=rank, world_size=world_size, **options)
    else:
        dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world_size, **options)


def connect_store(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The rendezvous as the other ranks see it."""
    return dist.TCPStore(host, port, world_size, False, timeout=datetime.timedelta(seconds=timeout_s))


def object_group(timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of all ranks of its own, so that values never meet the trainer's collectives or another thread's.

    A collective call: every rank makes its groups in the same order.
    """
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Everybody's `value` in rank order, on every rank; copies, one's own included, so that nobody holds a worker's tensors."""
    world_size = dist.get_world_size(group)
    mine = bytearray(to_blob(value))
    if world_size == 1:
        return [from_blob(mine)]
    sizes = torch.zeros(world_size, dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(mine)]), group=group)
    largest = int(sizes.max())
    if largest <= PADDED_LIMIT:
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(world_size)]
        dist.all_gather(received, padded, group=group)
    else:
        received = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        received[dist.get_rank(group)] = torch.frombuffer(mine, dtype=torch.uint8)
        for rank, blob in enumerate(received):
            dist.broadcast(blob, src=dist.get_global_rank(group, rank), group=group)
    return [from_blob(memoryview(blob.numpy())) for blob in received]


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's `value` on every rank (rank 0 keeps its own); the others' argument is ignored."""
    if dist.get_world_size(group) == 1:
        return value
    mine = bytearray(to_blob(value)) if dist.get_rank(group) == 0 else bytearray()
    size = torch.tensor([len(mine)])
    dist.broadcast(size, src=0, group=group)
    blob = torch.frombuffer(mine, dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(blob, src=0, group=group)
    return value if mine else from_blob(memoryview(blob.numpy()))


def rank_variables(rank: int, world_size: int, local_rank: int, host: str, port: int) -> dict[str, str]:
    """What torchrun puts into a rank's environment; libraries look for it there."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def rank_worker(factory: Callable[[], Any], device: str, timeout_s: float) -> Any:
    """The factory of a rank's process: joins the ranks at the store that its `rank_variables` name, then makes the worker."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, timeout_s)
    init_process_group(device, rank, world_size, local_rank, timeout_s, store)
    return factory()
