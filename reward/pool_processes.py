"""The processes of a pool of reward functions: started, listened to, ended with everything that they started.

One thread uses this (`pool.py` says which); only `kill_all` may be called from another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from configs.problems import UserError
from configs.schema import RewardFunctionConfig
from workers.launch.lifeline import exit_text, log_size, log_tail

START_TIMEOUT_S = 120.0
"""Longest start of a worker, seconds: interpreter, imports of the functions."""
_SEND_TIMEOUT_S = 10
_LONGEST_WAIT_S = 0.5


class PoolError(UserError, RuntimeError):
    """The pool cannot run the functions at all: one cannot be loaded, workers do not start, the pool is closed."""


@dataclass
class Call:
    """One call of a function."""

    id: int
    function: int
    rows: list[int]
    """Samples that it scores: one, or all of them for a batched function."""


@dataclass(frozen=True)
class Kind:
    """How a loaded function is called."""

    wanted: tuple[str, ...]
    batched: bool
    is_async: bool


@dataclass(eq=False)
class Worker:
    """A process and the calls that it has not answered."""

    process: subprocess.Popen[bytes]
    connection: Connection
    pidfd: int | None
    slot: int
    log_start: int
    deadline: float
    """`time.monotonic()` by which its next message must be here."""
    ready: bool = False
    """It has loaded the functions."""
    pending: list[Call] = field(default_factory=list)


class Processes:
    """Up to `size` workers.

    Args:
        functions: what each of them loads.
        size: number of processes.
        log_dir: where `reward-functions-{i}.log` goes; None discards the output.
        env: variables of the workers on top of this process's.
    """

    def __init__(
        self, functions: Sequence[RewardFunctionConfig], size: int, log_dir: Path | None, env: Mapping[str, str]
    ) -> None:
        self.functions = tuple(functions)
        self.size = size
        self.workers: list[Worker] = []
        self.kinds: list[Kind] = []
        """One a function, once the first worker is ready."""
        self._log_dir = log_dir
        self._env = dict(env)
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start one more worker; `wait` tells when it is ready."""
        slot = next(i for i in range(self.size) if all(worker.slot != i for worker in self.workers))
        log = self._log_path(slot)
        ours, theirs = Pipe(duplex=True)
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            output: Any = subprocess.DEVNULL
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            log_start = log_size(log) if log is not None else 0
            process = subprocess.Popen(
                # Unbuffered: what a function printed before it was killed is what its author wants to read.
                [sys.executable, "-u", "-m", "reward.pool_worker", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONHASHSEED": "0", **self._env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _limit_sending(ours)
        pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        worker = Worker(process, ours, pidfd, slot, log_start, time.monotonic() + START_TIMEOUT_S)
        with self._lock:
            self.workers.append(worker)
        self.send(worker, self.functions)

    def send(self, worker: Worker, message: Any) -> None:
        """Send a message; that the worker is gone shows in `wait`."""
        with contextlib.suppress(OSError):
            worker.connection.send(message)

    def wait(
        self, lost: Callable[[Worker, tuple[str, str]], None], done: Callable[[Worker, int, Sequence[Any]], None]
    ) -> None:
        """Wait for the next events and handle them: messages first, then deaths, then limits.

        Args:
            lost: called with a worker that was ended while calls were pending, and (kind, message).
            done: called with a worker, a call's id and its outcome.

        Raises:
            PoolError: a worker cannot load the functions; the pool was closed.
        """
        self.check_open()
        watched = [worker for worker in self.workers if worker.pending or not worker.ready]
        soonest = min(worker.deadline for worker in watched) - time.monotonic()
        events: list[Any] = [worker.connection for worker in watched]
        events += [worker.pidfd for worker in watched if worker.pidfd is not None]
        wait(events, timeout=max(0.0, min(soonest, _LONGEST_WAIT_S)))
        self.check_open()
        for worker in watched:
            if worker not in self.workers:
                continue  # ended meanwhile by what another's message led to
            dead = is_dead(worker)  # asked first: what it sent before its end is then all there to be read
            dead |= not self._read(worker, done)
            if dead:
                self._lose(worker, "died", lost)
            elif (worker.pending or not worker.ready) and time.monotonic() >= worker.deadline:
                self._lose(worker, "timeout", lost)

    def end(self, worker: Worker) -> None:
        """Kill a worker and everything that it started."""
        with self._lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
            # Before it is reaped, and also after it died by itself: what it forked is still there, under its process id.
            _kill_group(worker)
            worker.process.wait()
        worker.connection.close()
        if worker.pidfd is not None:
            os.close(worker.pidfd)

    def kill_all(self) -> None:
        """Refuse further work and kill every worker, from any thread; `wait` then raises."""
        self._closed = True
        with self._lock:
            for worker in self.workers:
                _kill_group(worker)

    def check_open(self) -> None:
        """Raises PoolError after `kill_all`."""
        if self._closed:
            raise PoolError("the pool of reward functions was closed")

    def _read(self, worker: Worker, done: Callable[[Worker, int, Sequence[Any]], None]) -> bool:
        """Take what the worker has sent; False when its end of the socket is closed."""
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if message[0] == "ready":
                    worker.ready = True
                    self.kinds = [Kind(*kind) for kind in message[1]]
                elif message[0] == "unusable":
                    raise PoolError(f"reward source {message[1]!r} cannot be used: {message[2]}")
                else:
                    done(worker, message[1], message[2])
        except (EOFError, OSError):
            return False
        return True

    def _lose(self, worker: Worker, kind: str, lost: Callable[[Worker, tuple[str, str]], None]) -> None:
        self.end(worker)
        log = self._log_path(worker.slot)
        tail = "" if log is None else "\n" + log_tail(log, worker.log_start)
        ended = exit_text(worker.process.returncode)
        if not worker.ready:
            what = ended if kind == "died" else f"was not ready within {START_TIMEOUT_S:g} s"
            raise PoolError(f"the process of the reward functions {what} while it loaded them{tail}")
        if worker.pending:
            limit = self.functions[worker.pending[0].function].timeout_s
            what = f"its process {ended}" if kind == "died" else f"no result within {limit:g} s; its process was killed"
            lost(worker, (kind, what + tail))

    def _log_path(self, slot: int) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"reward-functions-{slot}.log"


def is_dead(worker: Worker) -> bool:
    """Whether the process has ended; it is not reaped, so its process id (and group) stays its own."""
    return os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(worker: Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)


def _limit_sending(connection: Connection) -> None:
    """A worker that does not read (a thread left behind may keep its interpreter) must not block the pool for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
