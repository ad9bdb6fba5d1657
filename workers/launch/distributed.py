"""torch.distributed for the ranks: how they meet, and over which network interface."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist

BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""On CUDA the group serves tensors of both kinds, so that host-side values need no copy to the device."""
LOOPBACK = "127.0.0.1"
FOR_EVER = datetime.timedelta(days=365)


def open_store(host: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The store at which ranks meet: it listens at this one address of this machine, on a free port (read `.port`)."""
    listening = socket.socket()
    listening.bind((host, 0))
    store = dist.TCPStore(
        host,
        listening.getsockname()[1],
        world_size,
        True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.fileno(),
    )
    listening.detach()  # from here on it belongs to the store
    return store


def rank_variables(rank: int, world_size: int, local_rank: int, host: str, port: int) -> dict[str, str]:
    """The variables that torchrun puts into a rank's environment; libraries look for them there."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def rank_worker(
    factory: Callable[[], Any], device: str, timeout_s: float, *, one_machine: bool, store_is_open: bool
) -> Any:
    """The factory of a rank: joins the ranks at the store that `rank_variables` (or torchrun's variables) name, then makes the worker.

    gloo on CPU; gloo and NCCL on CUDA, with this rank's device selected.

    Args:
        timeout_s: longest wait for one collective.
        one_machine: all ranks are on this machine, so that nothing needs to be reachable from another.
        store_is_open: the driver has opened the store; otherwise rank 0 does, or torchrun has.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    options: dict[str, Any] = {"timeout": timeout, "rank": rank, "world_size": world_size}
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        options["device_id"] = torch.device("cuda", local_rank)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Without this gloo takes the interface of the host's name, which other machines may be unable to reach.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(LOOPBACK if one_machine else os.environ["MASTER_ADDR"])
    if world_size == 1:
        options["store"] = dist.HashStore()  # nobody to meet
    elif store_is_open:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options["store"] = dist.TCPStore(*place, world_size, False, timeout=timeout)
    dist.init_process_group(BACKENDS[device], **options)
    return factory()


def address_towards(host: str) -> str:
    """The address of this machine on the route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str:
    """The name of the network interface on the route to `host`.

    Raises:
        RuntimeError: no interface has the address on that route.
    """
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return name
    if own.startswith("127."):  # a host's name may stand for 127.0.1.1
        return "lo"
    raise RuntimeError(f"no network interface of this machine has the address {own}; set GLOO_SOCKET_IFNAME")
