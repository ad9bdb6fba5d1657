"""What runs in a trainer rank's actor: a worker and the way to it; and how values travel between actors and the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workers.calls import Hosted, log_size, log_tail, traceback_text
from workers.transport import Packed, pack, unpack

Wire = tuple[bytes, list[np.ndarray]]
"""A packed value as Ray carries it: arrays travel beside the pickle without a copy."""


PUT_LIMIT = 100 * 1024
"""Bytes. Keywords larger than this go to the object store once instead of to each actor."""


@dataclass(frozen=True)
class RayHandle:
    """A result that stayed in the object store; pass it as a keyword to another group's `run`."""

    ref: Any
    """Ray's reference to (`ok`, wire) of worker 0."""


class ActorHost:
    """What runs in an actor: a worker, and the way to it."""

    def __init__(self, label: str, log_file: str) -> None:
        import faulthandler

        self._label = label
        self._log = Path(log_file)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_size(self._log)
        # On the level of descriptors, so that native code's output comes along.
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        faulthandler.enable(2)
        self._worker: Hosted | None = None
        self._store: Any = None

    def whereabouts(self) -> tuple[str, int]:
        """Ray's id of the node, and the process id there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """The ranks' rendezvous on this actor's node: (address, port)."""
        import ray

        from workers.distributed import open_store

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout_s)
        return host, self._store.port

    def build(self, factory: Wire, rendezvous: tuple[str, int, int, str, int, float] | None) -> tuple[str, Any]:
        """Join the other ranks, when there is a rendezvous, and build the worker."""

        def build() -> None:
            if rendezvous is not None:
                self._join(*rendezvous)
            self._worker = Hosted(lambda: from_wire(factory)())  # unpickling imports the worker's modules

        return self._answer("its start", build)

    def call(
        self, method: str, argument: Wire | None, common: Wire, names: Sequence[str], *handles: Any
    ) -> tuple[str, Any]:
        """Call the worker; `handles` are the values of exported results, `names` their keywords."""

        def call() -> Any:
            keywords = from_wire(common)
            keywords.update({name: from_wire(value) for name, (_, value) in zip(names, handles, strict=True)})
            assert self._worker is not None, "built before it is called"
            return self._worker.call(method, [] if argument is None else [from_wire(argument)], keywords)

        return self._answer(method, call)

    def stop(self) -> None:
        """Let the worker close itself."""
        if self._worker is not None:
            self._worker.close()

    def _join(self, device: str, rank: int, world_size: int, host: str, port: int, timeout_s: float) -> None:
        from workers import distributed

        distributed.set_rank_variables(rank, world_size, 0, host, port)
        store = self._store or distributed.connect_store(host, port, world_size, timeout_s)
        distributed.init_process_group(device, rank, world_size, 0, timeout_s, store)

    def _answer(self, method: str, function: Callable[[], Any]) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = ("ok", to_wire(function()))
        except Exception as error:
            sys.stdout.flush()
            sys.stderr.flush()
            what = f"{self._label} (pid {os.getpid()}) raised in {method}"
            answer = ("error", "\n".join([what, traceback_text(error), log_tail(self._log, self._log_start)]))
        return answer


def split_handles(common: dict[str, Any], receivers: int) -> tuple[dict[str, Any], Any]:
    """Keywords of a call: (keyword -> reference of an exported result, the others as a wire or, when large, a reference to it)."""
    import ray

    handles = {key: value.ref for key, value in common.items() if isinstance(value, RayHandle)}
    plain = pack({key: value for key, value in common.items() if key not in handles})
    keywords: Any = as_wire(plain)
    if plain.nbytes > PUT_LIMIT and receivers > 1:
        keywords = ray.put(keywords)
    return handles, keywords


def as_wire(packed: Packed) -> Wire:
    """What `pack` made, as Ray carries it."""
    return bytes(packed.header), [np.frombuffer(buffer, dtype=np.uint8) for buffer in packed.buffers]


def to_wire(value: Any) -> Wire:
    """Pack a value."""
    return as_wire(pack(value))


def from_wire(wire: Wire) -> Any:
    """Unpack; copies, since the object store's memory is shared and must not be written to."""
    header, arrays = wire
    return unpack(header, [bytearray(array) for array in arrays])
