"""One driver and remote workers, on a Ray of this machine or on an existing cluster.

On each node an actor hosts the ranks and engines that live there (`ray_group.py`): processes of their own, their variables in place before
an interpreter starts, their output in `logs/{name}-{i}.log` on their node. A placement group reserves the run's slots (`resources.py`);
actors ask for no CPUs of their own and are put into the slots, so that ranks and engines which take turns share them.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from workers.launch.group import Modules, WorkerError, WorkerFactory, WorkerGroup
from workers.launch.node_processes import NodeProcesses
from workers.launch.processes import end_processes, import_path
from workers.launch.ray_cluster import Slot, knock, locate, release, reserve, start_ray, stop_ray
from workers.launch.ray_group import CONCURRENT_CALLS, NodeHost, RayGroup, Share
from workers.launch.resources import Needs, ResourceError

T = TypeVar("T")
HOST_START_S = 60.0
"""Longest wait for Ray to start the process that hosts workers."""


class RayLauncher:
    """A `Launcher` with one driver."""

    is_main = True

    def __init__(
        self,
        run_dir: Path,
        needs: Needs,
        *,
        address: str | None = None,
        num_cpus: int | None = None,
        device: str = "cpu",
        process_env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        modules: Modules = Modules(),  # noqa: B008, it is frozen
        on_close: Callable[[], None] | None = None,
        exit_stack: contextlib.ExitStack | None = None,
    ) -> None:
        """Start Ray on this machine, or join the cluster at `address`, and reserve the slots.

        A Ray to which this process is already connected is used and left running.

        Args:
            needs: checked here against a cluster; against this machine `launch.py` checks it earlier.
            num_cpus: CPUs that a Ray started here counts; null takes the machine's.
            process_env: variables that every worker gets.
            timeout_s: longest wait for one collective of the trainer ranks.
            modules: imported while Ray starts, on this node; on others once they are reached.
            on_close: what `close` does first.
            exit_stack: what `close` undoes last, also when this fails.

        Raises:
            ResourceError: there is no cluster at `address`, it has less than `needs`, or others hold it.
            WorkerError: on this node the process that hosts workers can't be started.
        """
        self._on_close = on_close
        self._exit_stack = exit_stack or contextlib.ExitStack()
        self._logs = run_dir.absolute() / "logs"
        self._needs = needs
        self._device = device
        # What can be imported here can be there; on another node, where it lies in the same place.
        basic = {"OMP_NUM_THREADS": str(needs.threads), "PYTHONPATH": import_path()}
        self._env = {**basic, **(process_env or {})}
        # In this order the engines' server is a fork of the ranks', who need the less.
        self._rank_modules, self._engine_modules = list(modules.ranks), [*modules.ranks, *modules.engines]
        self._timeout_s = timeout_s
        self._groups: list[RayGroup] = []
        self._hosts: dict[str, Any] = {}  # by node
        self._places: list[Any] = []  # references to the hosts' answers where they are
        self._store: Any = None
        try:
            if address is not None:
                knock(address)
            # Ray takes seconds to start; meanwhile what the workers of this node need is imported.
            here = NodeProcesses(self._logs, 0, device)
            self._exit_stack.callback(here.close)
            here.prepare([self._rank_modules, self._engine_modules], self._env)
            connected = start_ray(address, num_cpus)
            self._own_ray = connected and address is None
            if connected:
                self._exit_stack.callback(stop_ray)
            self._placement = reserve(needs)
            self._exit_stack.callback(release, self._placement)
            self._slots = locate(self._placement, needs)
            self._start_hosts(here)
        except BaseException:
            self._exit_stack.close()
            raise

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`; the ranks meet at this process."""
        import ray

        from workers.launch.distributed import open_store, rank_variables, rank_worker

        self._check_slots("trainer", num_ranks)
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, num_ranks, self._timeout_s)
        # A rank sees its own device only, so it is always device 0 to it.
        ranks = [rank_variables(rank, num_ranks, 0, host, self._store.port) for rank in range(num_ranks)]
        places = [[slot] for slot in self._slots[:num_ranks]]
        joining = functools.partial(rank_worker, factory, self._device, self._timeout_s)
        return self._start("trainer", joining, places, ranks, self._timeout_s, self._rank_modules, wait=True)

    def engine_group(
        self,
        name: str,
        factory: WorkerFactory,
        replicas: int,
        env: Mapping[str, str],
        *,
        start_timeout_s: float = 300.0,
        gpus: int = 1,
        wait: bool = True,
    ) -> WorkerGroup:
        """See `Launcher.engine_group`."""
        gpus = gpus if self._device == "cuda" else 1
        self._check_slots(name, replicas * gpus)
        places = [self._slots[i * gpus : (i + 1) * gpus] for i in range(replicas)]
        for i, slots in enumerate(places):
            if len({slot.node for slot in slots}) > 1:
                raise ResourceError(f"{name}-{i} needs {gpus} GPUs of one node, but its slots are on several")
        return self._start(name, factory, places, [env] * replicas, start_timeout_s, self._engine_modules, wait)

    def on_main(self, function: Callable[[], T]) -> T:
        """See `Launcher.on_main`; the driver is the main process."""
        return function()

    def close(self) -> None:
        """End all actors, and Ray itself if it was started here."""
        if self._on_close is not None:
            self._on_close()
        groups, self._groups = self._groups, []
        for group in reversed(groups):
            group.close()
        hosts, self._hosts = self._hosts, {}
        _end_actors(list(hosts.values()), self._places)
        self._store = None
        self._exit_stack.close()

    def _start(
        self,
        name: str,
        factory: WorkerFactory,
        places: Sequence[Sequence[Slot]],
        envs: Sequence[Mapping[str, str]],
        start_timeout_s: float,
        preload: Sequence[str],
        wait: bool,
    ) -> RayGroup:
        """Start a group whose workers live in `places` and have the variables `envs`."""
        numbers: dict[str, list[int]] = {}
        for i, slots in enumerate(places):
            numbers.setdefault(slots[0].node, []).append(i)
        shares = [Share(self._hosts[node], own) for node, own in numbers.items()]
        group = RayGroup(len(self._groups), name, len(places), shares)
        self._groups.append(group)
        full = [{**self._env, **env, **self._visible(slots)} for env, slots in zip(envs, places, strict=True)]
        group.start(factory, full, start_timeout_s, preload, wait)
        return group

    def _check_slots(self, name: str, count: int) -> None:
        if count > self._needs.slots:
            raise ResourceError(f"{name}: {count} slots needed, {self._needs.slots} reserved ({self._needs.reason})")

    def _visible(self, slots: Sequence[Slot]) -> dict[str, str]:
        """On CUDA: a worker sees the devices of its slots only."""
        if self._device != "cuda":
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(device for slot in slots for device in slot.gpus)}

    def _start_hosts(self, here: NodeProcesses) -> None:
        """Start what hosts the workers of each node; the one of this node takes over what `here` has begun.

        On a Ray started here they have its variables, which are this process's. So they need none of their own, and Ray can take a
        process that is there already instead of starting one (a second).

        Raises:
            ResourceError: Ray does not start a process on this node in time.
            WorkerError: what it starts fails.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = ray.get_runtime_context().get_node_id()
        nodes = list(dict.fromkeys(slot.node for slot in self._slots))
        for number, node in enumerate(sorted(nodes, key=lambda node: node != own)):
            bundle = next(slot.bundle for slot in self._slots if slot.node == node)
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": where, "max_concurrency": CONCURRENT_CALLS}
            if not self._own_ray:
                options["runtime_env"] = {"env_vars": self._env}
            host = ray.remote(NodeHost).options(**options).remote(str(self._logs), number, self._device)
            self._hosts[node] = host
            self._places.append(host.whereabouts.remote())
            if node != own:
                host.prepare.remote([self._rank_modules, self._engine_modules], self._env)
        if own in self._hosts:
            _hand_over(here, self._hosts[own])
        else:
            here.close()


def _hand_over(here: NodeProcesses, host: Any) -> None:
    """Let the host of this node take over what was begun here."""
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="exactrl-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/servers")
        listener.listen(1)
        listener.settimeout(1.0)
        taken = host.take_over.remote(f"{folder}/servers")
        deadline = time.monotonic() + HOST_START_S
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    break
                if ray.wait([taken], timeout=0)[0]:
                    ray.get(taken)  # raises: it can't have worked
                if time.monotonic() > deadline:
                    raise ResourceError(f"Ray did not start a process on this node within {HOST_START_S:g} s")
            with connection:
                here.hand_over(connection)
            ray.get(taken)
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the process that hosts the workers of this node did not start\n{error}") from None


def _end_actors(actors: Sequence[Any], places: Sequence[Any]) -> None:
    """Kill actors, and on this node whatever their processes have started.

    Args:
        places: references to the actors' answers to `whereabouts`, as far as they have come.
    """
    import ray

    if not actors or not ray.is_initialized():
        return
    here = ray.get_runtime_context().get_node_id()
    mine: list[psutil.Process] = []
    for ref in ray.wait(list(places), num_returns=len(places), timeout=0)[0]:
        with contextlib.suppress(psutil.NoSuchProcess, ray.exceptions.RayError):
            node, pid = ray.get(ref)
            if node == here:
                process = psutil.Process(pid)
                mine += [process, *process.children(recursive=True)]
    for actor in actors:
        ray.kill(actor, no_restart=True)
    end_processes(mine)
