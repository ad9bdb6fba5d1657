"""Starts a run's workers, whatever the run was started with: `ray` (RayLauncher) or `torchrun` (TorchrunLauncher).

    driver: the loop ── lines ──> worker processes of its machine (NodeHost in the driver)
                          └─────> worker processes of other machines (NodeHost in a Ray actor, or in the first rank of a torchrun node)

The launchers differ in where the places for workers come from and in who starts the trainer ranks; everything else is shared.
"""

from __future__ import annotations

import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.problems import UserError
from configs.schema import Config, LauncherConfig
from determinism.environment import process_env
from workers.launch.group import WorkerFactory, WorkerGroup
from workers.launch.resources import check_resources, resolve_device
from workers.launch.service import Address
from workers.launch.signals import SignalWatch
from workers.launch.switchboard import Line, Switchboard
from workers.launch.transport import Blob


class LaunchError(UserError, ValueError):
    """The way the run was started and `launcher.*` contradict each other."""


class Host(Protocol):
    """A `NodeHost` of this machine, or a stand-in for one on another machine."""

    def start(self, label: str, addresses: Sequence[Address], key: bytes, late: Mapping[str, str]) -> None:
        """See `NodeHost.start`."""
        ...

    def describe_end(self, label: str, patience_s: float) -> tuple[str, str]:
        """See `NodeHost.describe_end`."""
        ...

    def end(self, labels: Sequence[str], idle: bool) -> None:
        """See `NodeHost.end`."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a worker's process will live."""

    host: Host
    late: Mapping[str, str]
    """Environment variables of this worker alone: its rank, its devices."""


class Launcher(ABC):
    """Starts groups of workers, and ends everything that it started."""

    _here: Host
    """Of this machine; set by the class that knows it."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._groups: list[WorkerGroup] = []
        self._exit_stack = contextlib.ExitStack()
        self._before_close: Callable[[], None] = lambda: None

    def own(self, exit_stack: contextlib.ExitStack, before_close: Callable[[], None]) -> None:
        """What `close` undoes last, and what it does first."""
        self._exit_stack, self._before_close = exit_stack, before_close

    @abstractmethod
    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """FSDP ranks. In each, torch.distributed is initialised with `num_ranks` before `factory` is called. `ready` waits for them."""

    @abstractmethod
    def engine_places(self, name: str, replicas: int, gpus: int) -> list[Place]:
        """Where the replicas of an engine live; on CUDA each has `gpus` GPUs."""

    def engine_group(
        self,
        name: str,
        factory: WorkerFactory | Sequence[WorkerFactory],
        replicas: int,
        *,
        start_timeout_s: float = 300.0,
        gpus: int = 1,
    ) -> WorkerGroup:
        """Engines, each a process of its own. They are still starting when this returns; the first use waits for them.

        Args:
            factory: of every replica, or one for each.
            gpus: GPUs that one replica sees (its tensor-parallel size); not used on CPU.
        """
        return self._start(name, factory, self.engine_places(name, replicas, gpus), start_timeout_s)

    def local_group(
        self, name: str, factory: WorkerFactory, size: int, *, start_timeout_s: float = 300.0
    ) -> WorkerGroup:
        """Processes beside the driver that need no device and little computing; no slots are counted for them."""
        place = Place(self._here, {"CUDA_VISIBLE_DEVICES": ""})
        return self._start(name, factory, [place] * size, start_timeout_s)

    def close(self) -> None:
        """End everything this launcher started; safe to call twice."""
        self._before_close()
        groups, self._groups = self._groups, []
        for group in groups:
            group.ask_to_stop()
        for group in reversed(groups):
            group.close()
        self._exit_stack.close()

    def _start(
        self,
        name: str,
        factory: WorkerFactory | Sequence[WorkerFactory],
        places: Sequence[Place],
        start_timeout_s: float,
    ) -> WorkerGroup:
        """Start a process in each place. A factory that can't be pickled raises before anything is started."""
        blobs = [Blob(factory)] * len(places) if callable(factory) else [Blob(own) for own in factory]
        lines = []
        for number, (place, blob) in enumerate(zip(places, blobs, strict=True)):
            label = f"{name}-{number}"
            line = self._board.expect(Line(label, functools.partial(place.host.describe_end, label), start_timeout_s))
            line.build(blob)
            place.host.start(label, self._board.addresses, self._board.key, place.late)
            lines.append(line)
        return self._keep(WorkerGroup(name, lines, functools.partial(self._end, lines, places)))

    def _keep(self, group: WorkerGroup) -> WorkerGroup:
        self._groups.append(group)
        return group

    def _end(self, lines: Sequence[Line], places: Sequence[Place]) -> None:
        idle = not any(line.busy for line in lines)
        for line in lines:
            line.stop()
        for host in dict.fromkeys(place.host for place in places):
            host.end([line.label for line, place in zip(lines, places, strict=True) if place.host is host], idle)
        self._board.forget(lines)


def launched_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or `accelerate launch` started this process (the latter sets no RANK for a single process)."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys() or "ACCELERATE_MIXED_PRECISION" in environment


def choose_launcher(config: LauncherConfig, environment: Mapping[str, str] = os.environ) -> str:
    """`ray` or `torchrun`.

    Raises:
        LaunchError: `launcher.name` or `launcher.num_ranks` does not fit the way this process was started.
    """
    started = launched_by_torchrun(environment)
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if config.name == "ray" and started and world_size > 1:
        raise LaunchError(
            f"launcher.name=ray, but this process is one of {world_size} that torchrun or accelerate started: Ray starts its "
            "own ranks. Start the run with python (or `exactrl train`), or set launcher.name=torchrun."
        )
    if config.name == "ray" or (config.name == "auto" and not started):
        return "ray"
    if config.name not in ("auto", "torchrun"):
        raise LaunchError(f"launcher.name={config.name!r} is not known; take auto, ray or torchrun")
    if config.num_ranks != world_size:
        how = f"torchrun started {world_size} rank(s) (WORLD_SIZE)" if started else "this process was started alone"
        start = f"torchrun --nproc-per-node={config.num_ranks}"
        if started and "WORLD_SIZE" not in environment:
            # accelerate 1.15 starts a single process without --multi_gpu, whatever --num_processes says.
            how = "accelerate started a single process"
            start = f"accelerate launch --multi_gpu --num_processes={config.num_ranks}` (on CPU too, without --cpu) or `{start}"
        raise LaunchError(
            f"launcher.num_ranks={config.num_ranks}, but {how}. Set launcher.num_ranks={world_size}, or start the run with "
            f"`{start} -m trainer.main_ppo ...`."
        )
    return "torchrun"


def make_launcher(config: Config, run_dir: Path, preload: Sequence[str] = ()) -> Launcher:
    """The launcher for `config` in this environment; `close` ends everything that it started and restores the signal handlers.

    Args:
        preload: modules that workers need and that take long to import; processes begin to import them now.

    Raises:
        LaunchError: see `choose_launcher`.
        ResourceError: more CPUs or GPUs are needed than exist; nothing was started.
    """
    kind = choose_launcher(config.launcher)
    device = resolve_device(config.launcher.device)
    env = process_env(config.full_determinism, config.determinism.threads, device)
    started = int(os.environ.get("WORLD_SIZE", "1")) if kind == "torchrun" else None
    needs = check_resources(config, started)
    signals = SignalWatch()
    with contextlib.ExitStack() as undo:
        undo.callback(signals.restore)
        signals.install()
        logs = run_dir.absolute() / "logs"
        launcher: Launcher
        if kind == "torchrun":
            from workers.launch.torchrun_launcher import TorchrunLauncher

            launcher = TorchrunLauncher(config.launcher, logs, device, env, preload, undo)
        else:
            from workers.launch.ray_launcher import RayLauncher

            launcher = RayLauncher(config.launcher, needs, logs, device, env, preload, undo)
            signals.install()  # ray.init has replaced our handler with its own
        launcher.own(undo.pop_all(), signals.start_of_end)
        return launcher
