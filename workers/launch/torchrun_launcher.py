"""Under `torchrun`, `accelerate launch`, or a plain start as a single rank: rank 0 drives, the other ranks serve.

    rank 0: the loop ── its own worker (trainer-0)       machine 0: engines are children of rank 0
       └── lines ──> rank 1: `follow` (trainer-1) ...    machine k: children of its first rank

A rank other than 0 waits without a time limit until it is called or told to stop. It ends when the driver does. When a call of its worker
raises, it tells the driver why, leaves the collectives (so that no rank waits in one for it) and waits until it is ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import LauncherConfig
from workers.launch import distributed
from workers.launch.group import WorkerFactory, WorkerGroup
from workers.launch.launcher import Launcher, Place
from workers.launch.lifeline import die_with_parent
from workers.launch.node_host import NodeHost
from workers.launch.service import FAREWELL_S, Service, beat, connect
from workers.launch.switchboard import Line, Switchboard
from workers.launch.transport import Blob

log = logging.getLogger(__name__)
DRIVER = "exactrl/driver"
"""Key in the ranks' common store; its value says how to reach the driver."""
TERM = 15


class TorchrunLauncher(Launcher):
    """The launcher of rank 0."""

    def __init__(
        self,
        config: LauncherConfig,
        logs: Path,
        device: str,
        env: Mapping[str, str],
        preload: Sequence[str],
        undo: contextlib.ExitStack,
    ) -> None:
        """Tell the other ranks that torchrun started where to connect, if there are any.

        Args:
            logs: folder for the engines' output.
            env: variables of every engine.
            preload: modules that engines need and that take long to import.
            undo: receives what must be undone at the end.
        """
        _check_port()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid(), TERM)
        if "RANK" not in os.environ:
            os.environ.update(distributed.rank_variables(0, 1, 0, distributed.LOOPBACK, 0))
            undo.callback(_forget_rank_variables)
        self._timeout_s = config.timeout_s
        self._device = device
        self._world_size = int(os.environ["WORLD_SIZE"])
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        self._nodes = -(-self._world_size // per_node)
        reachable = distributed.address_towards(os.environ["MASTER_ADDR"]) if self._nodes > 1 else None
        super().__init__(Switchboard(config.silence_s, reachable))
        undo.callback(self._board.close)
        here = NodeHost(logs, device, env, preload)
        undo.callback(here.close)
        self._here = here
        undo.callback(_leave_process_group)
        self._ranks = [
            self._board.expect(Line(f"trainer-{rank}", _unknown, config.timeout_s))
            for rank in range(1, self._world_size)
        ]
        self._hosts: list[Any] = [here]
        for node in range(1, self._nodes):
            line = self._board.expect(Line(f"host-{node}", _unknown, config.timeout_s))
            line.build(Blob(functools.partial(NodeHost, str(logs), device, dict(env), list(preload))))
            self._hosts.append(_HostOfRank(line))
            undo.callback(line.stop)
        if self._ranks:
            told = {"addresses": self._board.addresses, "key": self._board.key.hex()}
            self._store = _common_store()
            self._store.set(DRIVER, json.dumps(told))

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`; worker 0 is made in this process.

        Raises:
            ValueError: `num_ranks` is not the number of ranks that were started.
        """
        if num_ranks != self._world_size:
            raise ValueError(f"{num_ranks} trainer ranks were asked for, but {self._world_size} were started")
        joining = functools.partial(
            distributed.rank_worker,
            factory,
            self._device,
            self._timeout_s,
            one_machine=self._nodes == 1,
            store_is_open=False,
        )
        for line in self._ranks:
            line.build(Blob(joining))
        return self._keep(WorkerGroup("trainer", self._ranks, self._dismiss, here=joining))

    def engine_places(self, name: str, replicas: int, gpus: int) -> list[Place]:
        """The replicas are dealt to the machines."""
        return [Place(self._hosts[i % self._nodes], self._visible(i, gpus)) for i in range(replicas)]

    def _dismiss(self) -> None:
        """Let the other ranks end, also those that still wait for a worker to build."""
        for line in self._ranks:
            line.stop()

    def _visible(self, number: int, gpus: int) -> dict[str, str]:
        """On CUDA, replicas take the GPUs of their node in turn; with one GPU each, a replica shares a rank's. Not verified on a machine with GPUs."""
        if self._device != "cuda":
            return {}
        import torch

        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        first = number // self._nodes * gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[(first + i) % count] for i in range(gpus))}


class _HostOfRank:
    """The `NodeHost` of another machine, in that machine's first rank."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def start(self, label: str, addresses: Sequence[Any], key: bytes, late: Mapping[str, str]) -> None:
        self._call("start", label=label, addresses=list(addresses), key=key, late=dict(late))

    def describe_end(self, label: str, patience_s: float) -> tuple[str, str]:
        # The thread that asks is the one that would hear the answer; so the rank that hosts the worker says it in its own output.
        return "", f"(its log is on {self._line.host or 'its machine'})"

    def end(self, labels: Sequence[str], idle: bool) -> None:
        future = self._call("end", labels=list(labels), idle=idle)
        with contextlib.suppress(Exception):
            future.result(FAREWELL_S)

    def _call(self, method: str, **arguments: Any) -> Any:
        self._line.ready.result()
        return self._line.call(method, [], Blob(arguments), {})


def follows() -> bool:
    """Whether this process is a rank that serves rank 0."""
    return int(os.environ.get("RANK", "0")) > 0


def follow() -> int:
    """Serve rank 0 until told to stop; returns the exit code."""
    _check_port()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), TERM)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    try:
        told = json.loads(_common_store().get(DRIVER))
    except Exception as error:
        print(f"exactrl: rank {rank}: the driver (rank 0) ended before it began: {error}", flush=True)
        return 1
    addresses = [tuple(address) if isinstance(address, list) else address for address in told["addresses"]]
    key = bytes.fromhex(told["key"])
    ends = []
    if local_rank == 0:
        hosting = connect(addresses, key, f"host-{rank // per_node}")
        ends.append(beat(hosting))
        threading.Thread(target=_serve_quietly, args=(Service(hosting),), name="node-host", daemon=True).start()
    channel = connect(addresses, key, f"trainer-{rank}")
    ends.append(beat(channel))
    service = Service(channel, on_failure=_leave_process_group)
    try:
        service.serve()
    except (EOFError, OSError):
        print(f"exactrl: rank {rank}: the driver (rank 0) is gone", flush=True)
        return 1
    for end in ends:
        end.set()  # the driver doesn't wait for this rank, which still has an exit code of its own
    _leave_process_group()
    return 0  # the driver knows what went wrong here; with another code torchrun would kill it before it could say so


def _serve_quietly(service: Service) -> None:
    with contextlib.suppress(EOFError, OSError):
        service.serve()


def _common_store() -> Any:
    """The store at which torchrun's ranks meet."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", timeout=distributed.FOR_EVER))
    return store


def _leave_process_group() -> None:
    """Leave the process group, so that ranks that wait for this one in a collective notice that it is gone."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _check_port() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("MASTER_PORT") == "0":
        raise ValueError(
            "MASTER_PORT=0: each rank would wait at a port of its own; use `torchrun --standalone`, or name a port"
        )


def _unknown(patience_s: float) -> tuple[str, str]:
    """Nothing: torchrun knows how a rank ended, and the rank's output is on the terminal."""
    return "", ""


def _forget_rank_variables() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
