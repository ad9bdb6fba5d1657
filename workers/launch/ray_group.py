"""Workers under Ray: on each node one actor, which starts the node's ranks and engines as its children and passes calls on to them.

    driver -- Ray --> NodeHost (an actor a node) -- socket, memory files --> ranks, engines

So the workers of a node can be forks of processes that have imported what they need (`fork_server.py`), they start, fail and end as
engines do under torchrun, and a value for all of them leaves the object store once a node. The actor never unpacks what it passes on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.launch.calls import traceback_text
from workers.launch.group import WorkerError, WorkerFactory
from workers.launch.node_processes import NodeProcesses
from workers.launch.processes import ProcessGroup
from workers.launch.ray_values import RayHandle, Wire, as_packed, as_wire, from_wire, split_handles, to_wire

CONCURRENT_CALLS = 16
"""Calls that a host takes on at a time: the groups of a node, each with one call running and one that closes it."""
PATIENCE_S = 60.0
"""How much longer than its workers a host may take to start."""
CLOSE_S = 9.0
"""Longest wait for a host that closes a group."""


class NodeHost:
    """What runs in a node's actor."""

    def __init__(self, log_dir: str, node: int, device: str) -> None:
        self._processes = NodeProcesses(Path(log_dir), node, device)
        self._groups: dict[int, ProcessGroup] = {}
        self._lock = threading.Lock()

    def whereabouts(self) -> tuple[str, int]:
        """Ray's id of the node, and the process id there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def prepare(self, preloads: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
        """See `NodeProcesses.prepare`."""
        with self._lock:
            self._processes.prepare(preloads, env)

    def take_over(self, address: str) -> None:
        """`NodeProcesses.take_over` from the driver, which listens at `address` on this node."""
        with self._lock, socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            self._processes.take_over(sock)

    def start(
        self,
        key: int,
        name: str,
        factory: Wire,
        envs: Mapping[int, Mapping[str, str]],
        start_timeout_s: float,
        preload: Sequence[str],
    ) -> tuple[str, Any]:
        """Start a group, known as `key` from here on."""

        def start() -> None:
            with self._lock:
                self._groups[key] = self._processes.start(
                    name, as_packed(factory), envs, start_timeout_s=start_timeout_s, preload=preload
                )

        return _answer(start)

    def ready(self, key: int) -> tuple[str, Any]:
        """Wait until the group's workers are built."""
        return _answer(lambda: self._groups[key].ready())

    def call(
        self,
        key: int,
        method: str,
        arguments: Sequence[Wire] | None,
        common: Wire,
        names: Sequence[str],
        *handles: Wire,
    ) -> tuple[str, Any]:
        """`ProcessGroup.run_packed`; `handles` are exported results, `names` their keywords."""

        def call() -> list[Wire]:
            packed = None if arguments is None else [as_packed(argument) for argument in arguments]
            handed = {name: as_packed(wire) for name, wire in zip(names, handles, strict=True)}
            results = self._groups[key].run_packed(method, packed, as_packed(common), handed)
            return [as_wire(result) for result in results]

        return _answer(call)

    def export(self, key: int, method: str, common: Wire) -> tuple[tuple[str, Any], Wire | None]:
        """Call every worker: (how it went, the first one's result). Two values to Ray, so that only who needs the second takes it."""
        how, results = self.call(key, method, None, common, ())
        return (how, None if how == "ok" else results), results[0] if how == "ok" else None

    def stop(self, key: int) -> None:
        """Close a group."""
        with self._lock:
            group = self._groups.get(key)
        if group is not None:
            group.close()


@dataclass(frozen=True)
class Share:
    """The workers of a group that one node has."""

    host: Any
    """Ray's handle of the node's `NodeHost`."""
    numbers: Sequence[int]
    """The workers' numbers in the group."""


class RayGroup:
    """A `WorkerGroup` on one node or several."""

    def __init__(self, key: int, name: str, size: int, shares: Sequence[Share]) -> None:
        """Nothing is started yet.

        Args:
            key: what the hosts are to know the group by.
            shares: each worker's number is in one of them; worker 0 is the first's first.
        """
        self.name = name
        self.size = size
        self._key = key
        self._shares = shares
        self._starting: list[Any] = []
        self._deadline = 0.0
        self._closed = False

    def start(
        self,
        factory: WorkerFactory,
        envs: Sequence[Mapping[str, str]],
        start_timeout_s: float,
        preload: Sequence[str],
        wait: bool,
    ) -> None:
        """Start all workers; raises as `run` does when one can't be built (unless the first call is to wait)."""
        wire = to_wire(factory)
        for share in self._shares:
            own = {number: dict(envs[number]) for number in share.numbers}
            self._starting.append(
                share.host.start.remote(self._key, self.name, wire, own, start_timeout_s, list(preload))
            )
        self._deadline = time.monotonic() + start_timeout_s + PATIENCE_S
        if wait:
            self._settle("its start")

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        """See `WorkerGroup.run`."""
        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{self.name}.{method}: {len(sharded)} sharded arguments for {self.size} workers")
        self._settle(method)
        handles, keywords = split_handles(common, len(self._shares))
        arguments = None if sharded is None else [to_wire(value) for value in sharded]
        refs = [
            share.host.call.remote(
                self._key,
                method,
                None if arguments is None else [arguments[number] for number in share.numbers],
                keywords,
                list(handles),
                *handles.values(),
            )
            for share in self._shares
        ]
        results: dict[int, Any] = {}
        for share, wires in zip(self._shares, self._answers(refs, method), strict=True):
            results.update(zip(share.numbers, map(from_wire, wires), strict=True))
        return [results[number] for number in range(self.size)]

    def export(self, method: str, /, **common: Any) -> Any:
        """See `WorkerGroup.export`; the handle names a value in the object store."""
        self._settle(method)
        keywords = to_wire({"everywhere": False, **common})
        answers = [
            share.host.export.options(num_returns=2).remote(self._key, method, keywords) for share in self._shares
        ]
        self._answers([how for how, _ in answers], method)
        return RayHandle(answers[0][1])

    def close(self) -> None:
        """End every worker; safe to call twice."""
        import ray

        closed, self._closed = self._closed, True
        if not closed and ray.is_initialized():
            refs = [share.host.stop.remote(self._key) for share in self._shares]
            ray.wait(refs, num_returns=len(refs), timeout=CLOSE_S)

    def _settle(self, method: str) -> None:
        """Wait until every worker is built, the first time."""
        if self._closed:
            raise WorkerError(f"{self.name}.{method} was called after the group was closed")
        if not self._starting:
            return
        try:
            self._answers(self._starting, "its start", self._deadline)
            waiting = [share.host.ready.remote(self._key) for share in self._shares]
            self._answers(waiting, "its start", self._deadline)
        except BaseException:
            self.close()
            raise
        self._starting = []

    def _answers(self, refs: Sequence[Any], method: str, deadline: float | None = None) -> list[Any]:
        """What each host answered; the first failure to arrive is raised without waiting for the others."""
        import ray

        answers: dict[Any, Any] = {}
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=1.0)
            for ref in ready:
                try:
                    status, answers[ref] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise WorkerError(
                        f"the process that hosts {self.name} died during {method}\n{type(error).__name__}: {error}"
                    ) from None
                if status == "error":
                    raise WorkerError(answers[ref])
            if pending and deadline is not None and time.monotonic() > deadline:
                raise WorkerError(
                    f"{self.name}: Ray did not start {len(pending)} of {len(refs)} host processes in time"
                )
        return [answers[ref] for ref in refs]


def _answer(function: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "ok", function()
    except WorkerError as error:
        return "error", str(error)
    except Exception as error:
        return "error", traceback_text(error)
