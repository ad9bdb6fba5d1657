"""Rollout engines: the methods that one must have, the list of engines, and all replicas of a run as the driver sees them.

    GenerationRequest --RolloutEngines.submit--> a replica's process: RolloutEngine.add, step, step, ... --> future of a Generation

To add an engine, write one file with a class that has `RolloutEngine`'s methods, and add one line to `ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from rollout.routing import assign, replica_of
from rollout.types import Generation, GenerationRequest
from workers.launch.group import WorkerGroup
from workers.launch.service import COUNTS
from workers.launch.transport import Blob

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = {
    "vllm": "rollout.vllm_engine:VLLMEngine",
    "vllm_server": "rollout.servers.vllm_server:VLLMServerEngine",
    "sglang_server": "rollout.servers.sglang_server:SGLangServerEngine",
}
"""Name (`rollout.engine`) -> module and class. The class is built with the arguments of `VLLMEngine`, one that joins a running server with its `url` too."""


class RolloutEngine(Protocol):
    """One replica. Its process is its own, so it may touch global generators and thread pools."""

    work: str
    """`generate`: the name of its work in metrics (`timing_s/busy/generate`)."""

    def add(self, number: int, request: GenerationRequest) -> None:
        """Take a request; others may still be running.

        Args:
            number: `step` returns its result under this number.

        Raises:
            ValueError: it cannot be served as asked (because it is too long for the context, for example).
        """
        ...

    def step(self) -> Sequence[tuple[int, Generation]]:
        """Work for a moment, and return what has finished. Called as long as requests are running."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the policy's weights; later generations carry `weight_version=version`. No request is running.

        Args:
            tensors: every parameter under its checkpoint name, full (not sharded), on any device, any float dtype.
            version: number of weight updates these weights have seen.

        Raises:
            ValueError: a name is missing, unknown or has the wrong shape; the engine must not be used afterwards.
        """
        ...

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by metric name. May be called while requests are running."""
        ...

    def facts(self) -> dict[str, Any]:
        """The settings in force in this process, as read back from it, for the run's manifest. Texts under `engine`, `warnings` are shown to the person."""
        ...

    def close(self) -> None:
        """Free the engine's memory; safe to call twice."""
        ...


def engine_class(name: str) -> type:
    """The class behind a name of `ENGINES`; imports its module."""
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class RolloutEngines:
    """All replicas. Requests may be submitted at any time; no replica waits for another.

    Args:
        group: each worker is a `RolloutEngine`.
        keep_groups: `rollout.serialize_group_samples`.
    """

    def __init__(self, group: WorkerGroup, keep_groups: bool = False) -> None:
        self.group = group
        self._keep_groups = keep_groups
        self._loading: list[Future[Blob]] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Generation]]:
        """Place requests on replicas; one future for each, in their order."""
        futures: dict[Any, Future[Generation]] = {}
        for replica, share in enumerate(assign(requests, self.group.size, keep_groups=self._keep_groups)):
            found = self.group.submit(replica, share)
            futures.update(zip((request.key for request in share), found, strict=True))
        return [futures[request.key] for request in requests]

    def ask(self, request: GenerationRequest) -> Future[Generation]:
        """Ask for one turn of an episode. The requests of an episode go to one replica, which then has their common beginning in its cache."""
        (future,) = self.group.submit(replica_of(request.key, self.group.size, self._keep_groups), [request])
        return future

    def ask_each(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Give the same requests to every replica, and wait; one list per replica, in the order of `requests`."""
        return ask_each(self.group, requests)

    def counts(self) -> dict[str, float]:
        """What all replicas have counted since the last call (`rollout/preemptions`)."""
        total: dict[str, float] = {}
        for counts in self.group.run(COUNTS):
            for name, count in counts.items():
                total[name] = total.get(name, 0.0) + count
        return total

    def load_weights(self, weights: Blob | Mapping[str, Tensor], version: int) -> None:
        """Send every engine new weights; returns at once. Each takes them after the requests sent before this call and before those sent later.

        Raises:
            WorkerError: an engine could not take the weights of an earlier call.
        """
        self.wait_for_weights()
        self._loading = self.group.send("load_weights", tensors=weights, version=version)

    def wait_for_weights(self) -> None:
        """Wait until every engine has the weights that it was sent; raises the same errors as `load_weights`."""
        loading, self._loading = self._loading, []
        for future in loading:
            future.result()


def ask_each(group: WorkerGroup, requests: Sequence[Any]) -> list[list[Any]]:
    """Give the same requests to every engine of a group, and wait; one list per engine, in the order of `requests`."""
    futures = [group.submit(worker, requests) for worker in range(group.size)]
    wait([future for own in futures for future in own], return_when=FIRST_EXCEPTION)
    return [[future.result() for future in own] for own in futures]
