"""One driver and remote workers, on a Ray of this machine or on an existing cluster.

On each node an actor hosts the ranks and engines that live there (`ray_group.py`): processes of their own, their variables in place before
an interpreter starts, their output in `logs/{name}-{i}.log` on their node. A placement group reserves the run's slots (`resources.py`);
actors ask for no CPUs of their own and are put into the slots, so that ranks and engines which take turns share them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from workers.group import Modules, WorkerFactory, WorkerGroup
from workers.node_processes import NodeProcesses
from workers.processes import end_processes, import_path
from workers.ray_group import CONCURRENT_CALLS, NodeHost, RayGroup, Share
from workers.resources import Needs, ResourceError

T = TypeVar("T")
log = logging.getLogger(__name__)
RESERVE_S = 60.0
"""Longest wait for the slots; on a shared cluster others may hold them."""
KNOCK_S = 10.0
"""Longest wait for the head of a cluster to take a connection."""


@dataclass(frozen=True)
class Slot:
    """Where a rank and its engines live."""

    bundle: int
    """Index in the placement group."""
    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...]
    """Device ids on that node."""


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
            on_close: what `close` does first.
            exit_stack: what `close` undoes last, also when this fails.

        Raises:
            ResourceError: there is no cluster at `address`, it has less than `needs`, or others hold it.
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
                _knock(address)
            # Ray takes seconds to start; meanwhile what the workers of this node need is imported.
            here = NodeProcesses(self._logs, 0, device)
            self._exit_stack.callback(here.close)
            self._prepare(here)
            if _start_ray(address, num_cpus):
                self._exit_stack.callback(_stop_ray)
            self._placement = _reserve(needs)
            self._exit_stack.callback(_release, self._placement)
            self._slots = _locate(self._placement, needs)
            self._start_hosts(here)
        except BaseException:
            self._exit_stack.close()
            raise

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`; the ranks meet at this process."""
        import ray

        from workers.distributed import open_store, rank_variables, rank_worker

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

    def _prepare(self, processes: NodeProcesses) -> None:
        for modules in (self._rank_modules, self._engine_modules):
            processes.prepare(modules, self._env)

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

        Without variables of their own, so that Ray can take a process that is there already instead of starting one (a second).

        Raises:
            ResourceError: Ray does not start a process on this node.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = ray.get_runtime_context().get_node_id()
        nodes = list(dict.fromkeys(slot.node for slot in self._slots))
        for number, node in enumerate(sorted(nodes, key=lambda node: node != own)):
            bundle = next(slot.bundle for slot in self._slots if slot.node == node)
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            options = {"num_cpus": 0, "scheduling_strategy": where, "max_concurrency": CONCURRENT_CALLS}
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
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="exactrl-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.bind(f"{folder}/servers")
        listener.listen(1)
        listener.settimeout(RESERVE_S)
        taken = host.take_over.remote(f"{folder}/servers")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise ResourceError(f"Ray did not start a process on this node within {RESERVE_S:g} s") from None
        with connection:
            here.hand_over(connection)
        ray.get(taken)


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


def _start_ray(address: str | None, num_cpus: int | None) -> bool:
    """Connect; True when it was done here and is to be undone here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's answer to actors without GPUs: leave CUDA_VISIBLE_DEVICES alone (and don't warn about it).
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return False
    # Says at each start that a token guards the local cluster, which is as it should be.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "namespace": "exactrl"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            # Ray itself offers its token to an address only when told to, and calls a refusal a failed connection.
            way_out = "" if "RAY_AUTH_MODE" in os.environ else "; if it asks for a token, set RAY_AUTH_MODE=token"
            raise ResourceError(
                f"launcher.ray_address={address}: no Ray cluster answers there ({error}){way_out}"
            ) from error
    else:
        # "local": a cluster that RAY_ADDRESS names is joined only when launcher.ray_address says so.
        _start_local({"address": "local", "num_cpus": num_cpus, "include_dashboard": False, **quiet})
    return True


def _knock(address: str) -> None:
    """Whether anything listens at `host:port`: Ray itself would try for more than three minutes.

    Raises:
        ResourceError: nothing does, or the address is of a kind that is not served.
    """
    if address.startswith("ray://"):
        raise ResourceError(
            f"launcher.ray_address={address}: Ray's client is not supported; start the run on a node of the cluster and give "
            "`auto`, or the head's host:port"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or whatever else Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        raise ResourceError(f"launcher.ray_address={address}: no Ray cluster answers there ({error})") from error


def _start_local(options: dict[str, Any]) -> None:
    """`ray.init`, tried once more when Ray gave up on its own start.

    Ray 2.60 allows its node process 30 s to report, a number nobody can set; a machine that is busy with something else needs longer.
    """
    import ray

    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        log.warning("Ray was not up after 30 s (is this machine busy?); trying once more")
        ray.shutdown()
        end_processes([process for process in me.children(recursive=True) if process not in before], patience_s=0.0)
        ray.init(**options)


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _reserve(needs: Needs) -> Any:
    """A placement group of one bundle a slot.

    Raises:
        ResourceError: the cluster is too small, or the slots are not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from workers.resources import check

    total = ray.cluster_resources()
    where = f"the Ray cluster of {len(ray.nodes())} node(s)"
    check(
        needs,
        total.get("CPU", 0),
        total.get("GPU", 0),
        where,
        "Add nodes, or set launcher.ray_num_cpus when Ray is started by the run.",
    )
    bundle: dict[str, float] = {"CPU": needs.threads}
    if needs.gpus_per_slot:
        bundle["GPU"] = needs.gpus_per_slot
    group = placement_group([bundle] * needs.slots, strategy="PACK")
    if not group.wait(RESERVE_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ResourceError(
            f"{needs.cpus} CPUs and {needs.gpus} GPUs needed, {free.get('CPU', 0):g} and {free.get('GPU', 0):g} free on {where} "
            f"after {RESERVE_S:g} s ({needs.reason}): others hold the rest"
        )
    return group


def _release(group: Any) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        remove_placement_group(group)


def _locate(group: Any, needs: Needs) -> list[Slot]:
    """Where each slot is; on CUDA a probe in each tells its device."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = placement_group_table(group)["bundles_to_node_id"]
    if not needs.gpus_per_slot:
        return [Slot(i, nodes[i], ()) for i in range(needs.slots)]

    def probe() -> list[Any]:
        return ray.get_gpu_ids()

    task = ray.remote(probe)
    refs = [
        task.options(num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
        for i in range(needs.slots)
    ]
    return [Slot(i, nodes[i], tuple(map(str, gpus))) for i, gpus in enumerate(ray.get(refs))]
