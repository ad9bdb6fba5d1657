"""On a Ray of this machine or on an existing cluster: Ray reserves the slots and reaches the other machines.

The driver hosts the workers of its own machine; on each other machine one Ray actor hosts the workers there. Each worker process connects to
the driver by itself. A placement group reserves the run's slots (`resources.py`); actors ask for no CPUs of their own and are put into
the slots, so that ranks and engines which take turns share them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import LauncherConfig
from workers.launch import distributed
from workers.launch.group import WorkerFactory, WorkerGroup
from workers.launch.launcher import Launcher, Place
from workers.launch.node_host import NodeHost, import_path
from workers.launch.ray_cluster import Slot, knock, locate, release, reserve, start_ray
from workers.launch.resources import Needs, ResourceError
from workers.launch.service import Address
from workers.launch.switchboard import Switchboard

ASK_S = 10.0
"""Longest wait for an answer of another machine's host."""


class RayLauncher(Launcher):
    """A launcher whose places are slots of a Ray cluster."""

    def __init__(
        self,
        config: LauncherConfig,
        needs: Needs,
        logs: Path,
        device: str,
        env: Mapping[str, str],
        preload: Sequence[str],
        undo: contextlib.ExitStack,
    ) -> None:
        """Start Ray on this machine, or join the cluster at `launcher.ray_address`, and reserve the slots.

        A Ray to which this process is already connected is used and left running.

        Args:
            needs: compared here with what a cluster has; `launcher.py` has compared it with this machine before.
            logs: folder for the workers' output, on each machine.
            env: variables of every worker.
            preload: modules that workers need, imported while Ray starts.
            undo: receives what must be undone at the end.

        Raises:
            ResourceError: there is no cluster at the address, it has less than `needs`, or other runs hold that.
        """
        if config.ray_address is not None:
            knock(config.ray_address)
        self._needs = needs
        self._device = device
        self._timeout_s = config.timeout_s
        self._store: Any = None
        here = NodeHost(logs, device, env, preload)
        undo.callback(here.close)
        undo.callback(start_ray(config.ray_address, config.ray_num_cpus))
        import ray

        placement = reserve(needs)
        undo.callback(release, placement)
        own = ray.get_runtime_context().get_node_id()
        self._slots = locate(placement, needs, own)
        others = [node for node in dict.fromkeys(slot.node for slot in self._slots) if node != own]
        self._address = ray.util.get_node_ip_address() if others else distributed.LOOPBACK
        super().__init__(Switchboard(config.silence_s, self._address if others else None))
        undo.callback(self._board.close)
        self._here = here
        self._hosts: dict[str, Any] = {own: here}
        for node in others:
            slot = next(slot for slot in self._slots if slot.node == node)
            self._hosts[node] = _HostOfNode(placement, slot, logs, device, env, preload)
            undo.callback(self._hosts[node].close)

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`; the ranks meet at this process."""
        self._check_slots("trainer", num_ranks)
        self._store = distributed.open_store(self._address, num_ranks, self._timeout_s)
        joining = functools.partial(
            distributed.rank_worker,
            factory,
            self._device,
            self._timeout_s,
            one_machine=len(self._hosts) == 1,
            store_is_open=True,
        )
        places = []
        for rank, slot in enumerate(self._slots[:num_ranks]):
            # A rank sees only its own device, which is therefore always device 0 for it.
            variables = distributed.rank_variables(rank, num_ranks, 0, self._address, self._store.port)
            places.append(Place(self._hosts[slot.node], variables | self._visible([slot])))
        return self._start("trainer", joining, places, self._timeout_s)

    def engine_places(self, name: str, replicas: int, gpus: int) -> list[Place]:
        """Consecutive slots. Slots are sorted by machine, so each replica is on one machine.

        Raises:
            ResourceError: more slots than were reserved, or slots of several machines for one replica.
        """
        gpus = gpus if self._device == "cuda" else 1
        self._check_slots(name, replicas * gpus)
        places = []
        for i in range(replicas):
            slots = self._slots[i * gpus : (i + 1) * gpus]
            if len({slot.node for slot in slots}) > 1:
                raise ResourceError(f"{name}-{i} needs {gpus} GPUs of one node, but its slots are on several")
            places.append(Place(self._hosts[slots[0].node], self._visible(slots)))
        return places

    def _check_slots(self, name: str, count: int) -> None:
        if count > self._needs.slots:
            raise ResourceError(f"{name}: {count} slots needed, {self._needs.slots} reserved ({self._needs.reason})")

    def _visible(self, slots: Sequence[Slot]) -> dict[str, str]:
        """On CUDA a worker sees only the devices of its slots."""
        if self._device != "cuda":
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(device for slot in slots for device in slot.gpus)}


class _HostOfNode:
    """The `NodeHost` of another machine, in a Ray actor."""

    def __init__(
        self, placement: Any, slot: Slot, logs: Path, device: str, env: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=slot.bundle)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": where,
            "max_concurrency": 4,
            # Modules are found on the other machine when they are in the same place there.
            "runtime_env": {"env_vars": {**env, "PYTHONPATH": import_path()}},
        }
        actor = ray.remote(NodeHost).options(**options)
        self._actor = actor.remote(str(logs), device, dict(env), list(preload))

    def start(self, label: str, addresses: Sequence[Address], key: bytes, late: Mapping[str, str]) -> None:
        self._actor.start.remote(label, list(addresses), key, dict(late))

    def describe_end(self, label: str, patience_s: float) -> tuple[str, str]:
        import ray

        gone = "is lost, and nothing on its machine answers any more"
        try:
            return ray.get(self._actor.describe_end.remote(label, patience_s), timeout=patience_s + 1.0)
        except ray.exceptions.GetTimeoutError:
            return gone if patience_s else "", ""  # without patience: it may just be starting
        except ray.exceptions.RayError as error:
            return f"{gone} ({type(error).__name__})", ""

    def end(self, labels: Sequence[str], idle: bool) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.end.remote(list(labels), idle), timeout=ASK_S)

    def close(self) -> None:
        """End the actor's workers and the actor."""
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.close.remote(), timeout=ASK_S)
        ray.kill(self._actor, no_restart=True)
