"""The Ray that a run uses, started on this machine or an existing cluster, and the slots reserved on it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from workers.launch.lifeline import end_processes
from workers.launch.node_host import import_path
from workers.launch.ray_guard import start_guard_of
from workers.launch.resources import Needs, ResourceError, check

log = logging.getLogger(__name__)
RESERVE_S = 60.0
"""Longest wait for the slots; on a shared cluster other runs may hold them."""
END_S = 4.0
"""Longest wait for each of Ray's answers at the end of a run."""
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


def start_ray(address: str | None, num_cpus: int | None) -> Callable[[], None]:
    """Start a Ray on this machine, or connect to the one at `address`; returns what undoes it.

    Raises:
        ResourceError: no cluster answers at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # For actors without GPUs Ray would change CUDA_VISIBLE_DEVICES; this makes it leave the variable alone (and not warn).
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return lambda: None  # it belongs to somebody else
    # At each start it says that a token guards the local cluster, which is as intended.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "namespace": "exactrl"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            # Ray offers its token to an address only when told to, and reports a refusal as a failed connection.
            way_out = "" if "RAY_AUTH_MODE" in os.environ else "; if it asks for a token, set RAY_AUTH_MODE=token"
            raise ResourceError(
                f"launcher.ray_address={address}: no Ray cluster answers there ({error}){way_out}"
            ) from error
        return _shut_down
    # Ray puts Unix sockets there, whose paths may be 107 bytes long at most.
    folder = tempfile.mkdtemp(prefix="exactrl-ray-", dir=None if len(tempfile.gettempdir()) <= 30 else "/tmp")
    guard = start_guard_of(folder)

    def end() -> None:
        _shut_down()
        guard.communicate()

    try:
        # "local": a cluster that RAY_ADDRESS names is joined only when launcher.ray_address says so.
        with _importable_from_here():
            local = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": folder}
            _start_local({**local, **quiet})
    except BaseException:
        end()
        raise
    return end


def _shut_down() -> None:
    """Disconnect from Ray, and end the one that was started here."""
    import ray

    if not _in_time(ray.shutdown):
        atexit.unregister(ray.shutdown)  # it would wait again


def _in_time(function: Callable[[], Any]) -> bool:
    """Call, but don't wait for ever: a Ray whose head is gone waits for it. Returns whether the call came back."""
    calling = threading.Thread(target=function, name="ray-end", daemon=True)
    calling.start()
    calling.join(END_S)
    return not calling.is_alive()


@contextlib.contextmanager
def _importable_from_here() -> Iterator[None]:
    """Processes started in this block find modules where this process does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = import_path()
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def knock(address: str) -> None:
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

    Ray 2.60 gives its node process 30 s to report and has no setting for that; a busy machine needs longer.
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
        # Processes that were there before are left running, and so is what they have started since (a fork server forks).
        ours = [child for child in me.children(recursive=True) if before.isdisjoint([child, *child.parents()])]
        end_processes(ours, patience_s=0.0)
        ray.init(**options)


def reserve(needs: Needs) -> Any:
    """A placement group with one bundle per slot.

    Raises:
        ResourceError: the cluster is too small, or the slots are not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

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


def release(group: Any) -> None:
    """Give back what `reserve` took."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        _in_time(lambda: remove_placement_group(group))


def locate(group: Any, needs: Needs, own: str) -> list[Slot]:
    """Where each slot is, sorted by machine (the driver's, `own`, first) and device. On CUDA a probe in each slot tells its device."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = placement_group_table(group)["bundles_to_node_id"]
    devices: list[tuple[str, ...]] = [()] * needs.slots
    if needs.gpus_per_slot:

        def probe() -> list[Any]:
            return ray.get_gpu_ids()

        task = ray.remote(probe)
        refs = [
            task.options(
                num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)
            ).remote()
            for i in range(needs.slots)
        ]
        devices = [tuple(map(str, found)) for found in ray.get(refs)]
    return in_order([Slot(i, nodes[i], devices[i]) for i in range(needs.slots)], own)


def in_order(slots: Sequence[Slot], own: str) -> list[Slot]:
    """Sorted by machine, so that consecutive slots are neighbours: a replica over several GPUs must not straddle two machines."""
    return sorted(
        slots, key=lambda slot: (slot.node != own, slot.node, [gpu.zfill(4) for gpu in slot.gpus], slot.bundle)
    )
