"""Starts and ends the worker processes of one machine: in the driver itself, in a Ray actor, or in a rank that torchrun started.

On CPU, workers are forks of `multiprocessing`'s fork server, which has imported what they need (imports are most of an engine's start). A worker
has an interpreter of its own on CUDA, where a fork is unsafe, and when it needs another environment than the server's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from workers.launch import server_setup
from workers.launch.lifeline import descendants, end_processes, exit_text, log_size, log_tail, signal_group
from workers.launch.service import Address, worker_process

POLITE_S, BUSY_S, TERM_S = 5.0, 0.3, 1.5
"""Seconds that `end` waits for workers that were asked to stop (those in a call can't listen), and again between SIGTERM and SIGKILL."""
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_LAUNCH_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC", "ACCELERATE_", "FSDP_")
_SERVER_GONE = 255
"""The exit code that `multiprocessing` reports for a fork when its server is gone and can't report the real one."""
_EARLY = ("PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
"""Variables that Python reads when it starts."""
_starting = threading.Lock()
_server_env: dict[str, str] | None = None
"""The environment of this process's fork server; `multiprocessing` has one server per process."""


class NodeHost:
    """The worker processes of this machine."""

    def __init__(self, log_dir: str | Path, device: str, env: Mapping[str, str], preload: Sequence[str]) -> None:
        """Begin to import what workers need.

        Args:
            log_dir: for `{label}.log`.
            device: `cpu` or `cuda`.
            env: variables of every worker, on top of this process's environment (without what torchrun put there for a rank).
            preload: modules that workers need and that take long to import.
        """
        self._log_dir = Path(log_dir)
        self._device = device
        self._env = worker_environment(env)
        self._preload = list(preload)
        self._processes: dict[str, tuple[BaseProcess, int]] = {}
        """Each worker's process, and where its part of the log begins."""
        self._failed: dict[str, str] = {}
        # The kernel ties a child to the thread that started it; this one lives as long as this object.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="node-host")
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.mkdtemp(prefix="exactrl-")
        """Temporary folder of the workers; what they leave in it (as vLLM does) is removed with it."""
        if device == "cpu":
            self._start_server()
        atexit.register(self.close)

    def start(self, label: str, addresses: Sequence[Address], key: bytes, late: Mapping[str, str]) -> None:
        """Start a worker's process, which connects to the driver; returns before the process exists.

        Args:
            addresses, key: the driver's.
            late: variables of this worker alone.
        """
        self._starter.submit(self._start, label, list(addresses), key, {**late, "TMPDIR": self._temporary})

    def describe_end(self, label: str, patience_s: float = 2.0) -> tuple[str, str]:
        """How the worker's process ended ("" while it runs or has not started yet), and the end of its log.

        Args:
            patience_s: how long to wait for an end.
        """
        path = self._log_dir / f"{label}.log"
        found = self._processes.get(label)  # `end` may remove it at any moment
        if found is None:
            return self._failed.get(label, ""), log_tail(path)
        process, start = found
        process.join(patience_s)
        code = process.exitcode
        if code == _SERVER_GONE and isinstance(process, ForkServerProcess):
            return "ended with the server that forked it, which is gone (killed by someone, or for lack of memory)", ""
        return "" if code is None else exit_text(code), log_tail(path, start)

    def end(self, labels: Sequence[str], idle: bool) -> None:
        """End workers that were asked to stop: SIGTERM, then SIGKILL; returns when they and what they started are gone.

        Args:
            idle: the workers were not in a call, so they have received the request to stop and are given time.
        """
        processes = [self._processes.pop(label)[0] for label in labels if label in self._processes]
        below = [found for process in processes for found in descendants(process.pid or 0)]
        for patience, signum in ((POLITE_S if idle else BUSY_S, signal.SIGTERM), (TERM_S, signal.SIGKILL), (TERM_S, 0)):
            deadline = time.monotonic() + patience
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            for process in processes:
                if signum and process.is_alive():
                    signal_group(process.pid or 0, signum)
        end_processes(below)
        for process in processes:
            signal_group(process.pid or 0, signal.SIGKILL)  # what the worker left behind in its session

    def close(self) -> None:
        """End every worker; safe to call twice."""
        atexit.unregister(self.close)
        self._starter.shutdown(wait=True, cancel_futures=True)
        self.end(list(self._processes), idle=False)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def pids(self) -> dict[str, int | None]:
        """Process id of each worker that was started."""
        return {label: process.pid for label, (process, _) in self._processes.items()}

    def _start_server(self) -> None:
        """Start this process's fork server, unless it has one: it imports while this process goes on."""
        global _server_env
        with _starting:
            if _server_env is None:
                forkserver.set_forkserver_preload(
                    [server_setup.__name__, *self._preload, "workers.launch.server_check"]
                )
                told = {"env": self._env, "path": sys.path, "log": str(self._log_dir.absolute() / "imports.log")}
                with self._inheriting({server_setup.NAME: json.dumps(told)}):
                    forkserver.ensure_running()
                _server_env = self._env

    def _start(self, label: str, addresses: list[Address], key: bytes, late: dict[str, str]) -> None:
        log = self._log_dir / f"{label}.log"
        start = log_size(log)
        forked = self._device == "cpu" and _server_env == self._env
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        env = late if forked else self._env | late
        arguments = (label, addresses, key, str(log), env, None if forked else os.getpid())
        process = context.Process(target=worker_process, args=arguments, name=label)
        try:
            if forked:
                process.start()  # blocks until the server has imported everything
            else:
                with _starting, self._inheriting({}):
                    process.start()
        except Exception as error:
            self._failed[label] = f"could not be started: {type(error).__name__}: {error}"
            return
        self._processes[label] = (process, start)

    @contextlib.contextmanager
    def _inheriting(self, more: Mapping[str, str]) -> Iterator[None]:
        """A process started in this block sees `more` and the variables that Python reads at its start; it sets the rest itself.

        `multiprocessing` gives it this process's environment. Other threads read that meanwhile, so nothing is removed from it.
        """
        early = {name: self._env[name] for name in _EARLY if name in self._env} | dict(more)
        before = {name: os.environ.get(name) for name in early}
        os.environ.update(early)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def worker_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: this process's, without what torchrun and accelerate put into it for the rank, plus `env`.

    An engine is no rank: if it saw RANK, it would try to join the trainers' process group. PYTHONPATH carries this process's import path,
    so that a worker finds the same modules.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCH_VARIABLES and not key.startswith(_LAUNCH_PREFIXES)
    }
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": import_path()} | dict(env)


def import_path() -> str:
    """This process's `sys.path` as a PYTHONPATH value, in order, existing entries only."""
    entries = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if os.path.exists(entry)))
