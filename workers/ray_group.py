"""One driver and remote actors, on a Ray of this machine or on an existing cluster.

Each trainer rank is an actor (`ray_actor.py`), and so is what hosts the engines of a node (`ray_engines.py`). Ranks and engines are
processes of their own, their variables in place before an interpreter starts, their output in `logs/{name}-{i}.log` on their node. A
placement group reserves the run's slots (`resources.py`); actors ask for no CPUs of their own and are put into the slots, so that
ranks and engines which take turns share them.

Arguments and results are packed by `transport.py`, since Ray would pickle a tensor the slow way; a failure travels as text,
so that the user sees the worker's own traceback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from workers.calls import log_size, log_tail, traceback_text
from workers.group import WorkerError, WorkerFactory, WorkerGroup
from workers.processes import end_processes, import_path
from workers.ray_actor import ActorHost, RayHandle, Wire, from_wire, split_handles, to_wire
from workers.ray_engines import CONCURRENT_CALLS, EngineHost, RayEngineGroup, Share
from workers.resources import Needs, ResourceError

T = TypeVar("T")
log = logging.getLogger(__name__)
RESERVE_S = 60.0
"""Longest wait for the slots; on a shared cluster others may hold them."""
KNOCK_S = 10.0
"""Longest wait for the head of a cluster to take a connection."""
POLITE_S = 3.0
"""How long idle workers may take to close themselves before their actors are killed."""


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
        self._run_dir = run_dir
        self._needs = needs
        self._device = device
        self._process_env = dict(process_env or {})
        self._timeout_s = timeout_s
        self._groups: list[_TrainerGroup | RayEngineGroup] = []
        self._hosts: dict[str, tuple[Any, Any]] = {}  # node -> (actor, where it is)
        try:
            if _start_ray(address, num_cpus):
                self._exit_stack.callback(_stop_ray)
            self._placement = _reserve(needs)
            self._exit_stack.callback(_release, self._placement)
            self._slots = _locate(self._placement, needs)
        except BaseException:
            self._exit_stack.close()
            raise

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`."""
        self._check_slots("trainer", num_ranks)
        # A rank sees its own device only, so it is always device 0 to it.
        rank = {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
        logs = [self._log("trainer", i) for i in range(num_ranks)]
        actors = [
            self._actor(ActorHost, slot.bundle, self._env({"RANK": str(i), **rank, **self._visible([slot])})).remote(
                f"trainer-{i}", str(logs[i])
            )
            for i, slot in enumerate(self._slots[:num_ranks])
        ]
        group = _TrainerGroup("trainer", actors, logs, self._timeout_s)
        self._groups.append(group)
        with group.closing_on_error():
            host, port = group.call_one(0, "open_store", num_ranks, self._timeout_s)
            rendezvous = [(self._device, i, num_ranks, host, port, self._timeout_s) for i in range(num_ranks)]
            group.build(factory, rendezvous)
        return group

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
        preload: Sequence[str] = (),
    ) -> WorkerGroup:
        """See `Launcher.engine_group`."""
        gpus = gpus if self._device == "cuda" else 1
        self._check_slots(name, replicas * gpus)
        places = [self._slots[i * gpus : (i + 1) * gpus] for i in range(replicas)]
        for i, slots in enumerate(places):
            if len({slot.node for slot in slots}) > 1:
                raise ResourceError(f"{name}-{i} needs {gpus} GPUs of one node, but its slots are on several")
        nodes = {slots[0].node: slots[0].bundle for slots in reversed(places)}
        shares = [
            Share(self._host(node, bundle), [i for i, slots in enumerate(places) if slots[0].node == node])
            for node, bundle in nodes.items()
        ]
        group = RayEngineGroup(len(self._groups), name, replicas, shares)
        self._groups.append(group)
        envs = [self._env({**env, **self._visible(slots)}) for slots in places]
        group.start(factory, envs, start_timeout_s, preload, wait)
        return group

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
        hosts, self._hosts = list(self._hosts.values()), {}
        end_actors([host for host, _ in hosts], [place for _, place in hosts])
        self._exit_stack.close()

    def _env(self, env: Mapping[str, str]) -> dict[str, str]:
        basic = {"OMP_NUM_THREADS": str(self._needs.threads), "PYTHONUNBUFFERED": "1", "PYTHONPATH": import_path()}
        return {**basic, **self._process_env, **env}

    def _check_slots(self, name: str, count: int) -> None:
        if count > self._needs.slots:
            raise ResourceError(f"{name}: {count} slots needed, {self._needs.slots} reserved ({self._needs.reason})")

    def _visible(self, slots: Sequence[Slot]) -> dict[str, str]:
        """On CUDA: a worker sees the devices of its slots only."""
        if self._device != "cuda":
            return {}
        # The slot's GPU is held by the reservation; Ray must not hide it from actors that ask for none.
        devices = ",".join(device for slot in slots for device in slot.gpus)
        return {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    def _actor(self, kind: Any, bundle: int, env: dict[str, str], **options: Any) -> Any:
        """An actor class, to be started in a slot."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        return ray.remote(kind).options(num_cpus=0, scheduling_strategy=where, runtime_env={"env_vars": env}, **options)

    def _host(self, node: str, bundle: int) -> Any:
        """The actor that hosts the engines of a node."""
        if node not in self._hosts:
            start = self._actor(EngineHost, bundle, self._env({}), max_concurrency=CONCURRENT_CALLS)
            log = f"engines-{len(self._hosts)}"
            host = start.remote(str(self._run_dir.absolute() / "logs"), log, self._device)
            self._hosts[node] = (host, host.whereabouts.remote())
        return self._hosts[node][0]

    def _log(self, name: str, i: int) -> Path:
        return self._run_dir.absolute() / "logs" / f"{name}-{i}.log"


class _TrainerGroup:
    """The `WorkerGroup` of the ranks, an actor each."""

    def __init__(self, name: str, actors: Sequence[Any], logs: Sequence[Path], start_timeout_s: float) -> None:
        self.name = name
        self.size = len(actors)
        self._actors = list(actors)
        self._logs = logs
        self._starts = [log_size(path) for path in logs]
        self._deadline = time.monotonic() + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle = False
        # Asked for first, so that it is known although the worker is never built.
        self._places = [actor.whereabouts.remote() for actor in self._actors]
        self._pids: list[int] = []

    def build(self, factory: WorkerFactory, rendezvous: Sequence[Any]) -> None:
        """Let every actor build its worker; raises as `run` does, and when the start takes too long."""
        import ray

        wire = to_wire(factory)
        building = [actor.build.remote(wire, place) for actor, place in zip(self._actors, rendezvous, strict=True)]
        self._wait(self._places, range(self.size), "its start", self._deadline)
        self._pids = [pid for _, pid in ray.get(self._places)]
        self._collect(building, "its start", self._deadline)

    def call_one(self, index: int, name: str, *arguments: Any) -> Any:
        """A method of one actor's host."""
        import ray

        ref = getattr(self._actors[index], name).remote(*arguments)
        self._wait([ref], [index], name, self._deadline)
        return ray.get(ref)

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        return [from_wire(wire) for wire in self._collect(self._send(method, sharded, common), method)]

    def export(self, method: str, /, **common: Any) -> Any:
        refs = self._send(method, None, {"everywhere": False, **common})
        self._wait(refs, range(self.size), method, None)
        self._idle = True
        return RayHandle(refs[0])

    def close(self) -> None:
        import ray

        actors, self._actors = self._actors, []
        if not actors or not ray.is_initialized():
            return
        if self._idle:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=POLITE_S)
        end_actors(actors, self._places)

    @contextlib.contextmanager
    def closing_on_error(self) -> Any:
        """Leave nothing behind when the group's start fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, sharded: Sequence[Any] | None, common: dict[str, Any]) -> list[Any]:

        if not self._actors:
            raise WorkerError(f"{self.name}.{method} was called after the group was closed")
        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{self.name}.{method}: {len(sharded)} sharded arguments for {self.size} workers")
        handles, keywords = split_handles(common, self.size)
        arguments = [None] * self.size if sharded is None else [to_wire(value) for value in sharded]
        self._idle = False
        return [
            actor.call.remote(method, argument, keywords, list(handles), *handles.values())
            for actor, argument in zip(self._actors, arguments, strict=True)
        ]

    def _collect(self, refs: Sequence[Any], method: str, deadline: float | None = None) -> list[Wire]:
        import ray

        self._wait(refs, range(self.size), method, deadline)
        self._idle = True
        return [wire for _, wire in ray.get(list(refs))]

    def _wait(self, refs: Sequence[Any], indices: Sequence[int], method: str, deadline: float | None) -> None:
        """Wait for all; raise the first failure to arrive without waiting for the others (a rank may be stuck because of it)."""
        import ray

        index_of = dict(zip(refs, indices, strict=True))
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=1.0)
            for ref in ready:
                try:
                    answer = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise WorkerError(self._death(index_of[ref], method, error)) from None
                if isinstance(answer, tuple) and answer[0] == "error":
                    raise WorkerError(answer[1])
            if pending and deadline is not None and time.monotonic() > deadline:
                late = index_of[pending[0]]
                tail = log_tail(self._logs[late], self._starts[late])
                raise WorkerError(
                    f"{self.name}-{late} was not ready after {self._start_timeout_s:g} s ({len(pending)} of {self.size} were not)\n{tail}"
                )

    def _death(self, index: int, method: str, error: Exception) -> str:
        pid = f" (pid {self._pids[index]})" if self._pids else ""
        cause = getattr(error, "cause", None)
        text = f"{type(error).__name__}: {error}" if cause is None else traceback_text(cause)
        return (
            f"{self.name}-{index}{pid} died during {method}\n{text}\n{log_tail(self._logs[index], self._starts[index])}"
        )


def end_actors(actors: Sequence[Any], places: Sequence[Any]) -> None:
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
        _knock(address)
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
