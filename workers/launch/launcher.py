"""Which launcher a run gets, and how the run ends when it is told to.

SIGTERM and Ctrl-C become exceptions in the main thread, so that every `finally` on the way out runs; a watchdog that needs
neither the main thread nor its luck kills what is left of the process tree, and this process, when that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from configs.problems import UserError
from configs.schema import Config, LauncherConfig
from determinism.environment import process_env
from workers.launch.group import Launcher, Modules
from workers.launch.resources import check_resources, resolve_device
from workers.launch.worker_process import die_with_parent

DEADLINE_S = 10.0
"""From the first SIGTERM or SIGINT to the end of everything."""


class LaunchError(UserError, ValueError):
    """The way the run was started and `launcher.*` contradict each other."""


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
            # accelerate 1.15: without --multi_gpu it starts a single process, whatever --num_processes says.
            how = "accelerate started a single process"
            start = f"accelerate launch --multi_gpu --num_processes={config.num_ranks}` (on CPU too, without --cpu) or `{start}"
        raise LaunchError(
            f"launcher.num_ranks={config.num_ranks}, but {how}. Set launcher.num_ranks={world_size}, or start the run with "
            f"`{start} -m trainer.main_ppo ...`."
        )
    return "torchrun"


def make_launcher(config: Config, run_dir: Path, modules: Modules = Modules()) -> Launcher:  # noqa: B008, it is frozen
    """The launcher for `config` in this environment; `close` ends all it started and gives the signals back.

    Raises:
        LaunchError: see `choose_launcher`.
        ResourceError: more CPUs or GPUs are needed than exist; nothing was started.
    """
    settings = config.launcher
    kind = choose_launcher(settings)
    device = resolve_device(settings.device)
    env = process_env(config.full_determinism, config.determinism.threads, device)
    started = int(os.environ.get("WORLD_SIZE", "1")) if kind == "torchrun" else None
    needs = check_resources(config, started)
    signals = SignalWatch()
    undo = contextlib.ExitStack()
    undo.callback(signals.restore)
    signals.install()
    launcher: Launcher
    if kind == "torchrun":
        from workers.launch.torchrun_group import TorchrunLauncher

        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid(), signal.SIGTERM)
        launcher = TorchrunLauncher(
            run_dir,
            device=device,
            process_env=env,
            timeout_s=settings.timeout_s,
            modules=modules,
            on_close=signals.start_of_end,
            exit_stack=undo,
        )
    else:
        from workers.launch.ray_launcher import RayLauncher

        launcher = RayLauncher(
            run_dir,
            needs,
            address=settings.ray_address,
            num_cpus=settings.ray_num_cpus,
            device=device,
            process_env=env,
            timeout_s=settings.timeout_s,
            modules=modules,
            on_close=signals.start_of_end,
            exit_stack=undo,
        )
        signals.install()  # ray.init has put a handler of its own in the place of ours
    return launcher


class SignalWatch:
    """SIGTERM and SIGINT end the process in order, or by force after a deadline."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._before: dict[int, Any] | None = None
        self._wakeup_before = -1
        self._reading, self._writing = -1, -1
        self._signalled = False
        self._done = threading.Event()

    def install(self) -> None:
        """Take the signals (again); without effect outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        before: dict[int, Any] = {
            number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGINT)
        }
        if self._before is None:
            self._before = dict(before)
            self._reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            # Python writes a signal's number here as soon as it arrives, also while the main thread is stuck in native code.
            self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="signal-watch", daemon=True).start()

    def start_of_end(self) -> None:
        """From here on a signal raises nothing, since the clean-up is under way anyway; the deadline still holds."""
        self._signalled = True

    def restore(self) -> None:
        """Give the signals back; everything has ended, so the deadline is called off."""
        self._done.set()
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writing)
        self._before = None

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # Once: torchrun and terminals send more than one, and a second exception would cut the clean-up short.
        if self._signalled:
            return
        self._signalled = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _watch(self) -> None:
        while numbers := os.read(self._reading, 1):
            if numbers[0] in (signal.SIGTERM, signal.SIGINT):
                if not self._done.wait(self._deadline_s):
                    kill_descendants()
                    os._exit(128 + numbers[0])
                break
        os.close(self._reading)


def kill_descendants() -> None:
    """SIGKILL to every process below this one."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
