"""Workers in processes of their own, children of the calling process.

    group = ProcessGroup("rollout", functools.partial(Engine, config), replicas=2, env=env, log_dir=run / "logs")
    group.run("generate", [requests_0, requests_1])

Each child is a fresh interpreter (`child.py`) with `env` in place before it starts, or the fork of one (`fork_server.py`), with its
output, native code's too, in `{name}-{i}.log`. Children lead sessions of their own, so Ctrl-C reaches only the parent; they are killed by the kernel when
the parent ends, and whatever they started themselves is killed with them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from workers.launch.calls import exit_text, log_size, log_tail
from workers.launch.fork_server import ForkedProcess, ForkServer
from workers.launch.group import WorkerError, WorkerFactory
from workers.launch.transport import Blob, Channel, Packed, from_blob, pack, parts_of, unpack
from workers.launch.worker_process import BUILD_ID, start_interpreter

POLL_S = 0.2
"""How often children are looked at while their answers are awaited."""
POLITE_S, BUSY_S, TERM_S = 3.0, 0.3, 1.5
"""`close` waits this long after asking idle workers (those in a call can't listen), and then after SIGTERM, before SIGKILL."""
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_LAUNCH_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC", "ACCELERATE_", "FSDP_")


def child_environment(env: Mapping[str, str], inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this process's (or `inherited`), without what torchrun and accelerate put into it for the rank, plus `env`.

    A child is no rank: an engine that saw RANK would try to join the trainers' process group. PYTHONPATH carries this
    process's import path, so that a factory found here is found there.
    """
    kept = {
        key: value
        for key, value in (os.environ if inherited is None else inherited).items()
        if key not in _LAUNCH_VARIABLES and not key.startswith(_LAUNCH_PREFIXES)
    }
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": import_path()} | dict(env)


def import_path() -> str:
    """This process's `sys.path` as a PYTHONPATH value, in order, existing entries only."""
    entries = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if os.path.exists(entry)))


class ProcessGroup:
    """A `WorkerGroup` of child processes."""

    def __init__(
        self,
        name: str,
        factory: WorkerFactory | Packed,
        replicas: int,
        env: Mapping[str, str],
        log_dir: Path,
        *,
        start_timeout_s: float = 300.0,
        numbers: Sequence[int] | None = None,
        member_env: Callable[[int], Mapping[str, str]] | None = None,
        wait: bool = True,
        fork_server: ForkServer | None = None,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Start all children at once and wait until each has built its worker (or, with `wait=False`, let the first call wait).

        Args:
            numbers: the replicas' numbers when they are a part of a larger group (log names, `member_env`); null counts from 0.
            member_env: variables of one replica, by its number (a device of its own).
            start_timeout_s: one limit for all children together.
            fork_server: who starts the children, by forks where it can; null starts an interpreter for each. Outlives the group.
            inherited: the environment that `env` is laid over; null takes this process's.

        Raises:
            WorkerError: a factory raised, a child died, or the time was up; nothing is left running.
        """
        self.name = name
        self.size = replicas
        self._lock = threading.Lock()
        self._calls = BUILD_ID
        self._failure: str | None = None
        self._start_deadline: float | None = time.monotonic() + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle = False
        self._closed = False
        log_dir.mkdir(parents=True, exist_ok=True)
        # The kernel ties a child to the thread that started it; this one lives as long as the group.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-starter")
        self._children: list[_Child] = []
        try:
            build = [
                Blob(("build", time.monotonic())),
                Blob(factory),
            ]  # what can't be pickled raises before anything is started
            for number in numbers if numbers is not None else range(replicas):
                full_env = child_environment({**env, **(member_env(number) if member_env else {})}, inherited)
                log = log_dir / f"{name}-{number}.log"
                child = self._starter.submit(_Child, f"{name}-{number}", full_env, log, fork_server).result()
                self._children.append(child)
                self._send(child, build, "its start")
            for blob in build:
                blob.close()
            if wait:
                self.ready()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int | None]:
        """Process ids in replica order; None for one that a fork server has not started yet."""
        return [child.process.pid for child in self._children]

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        """See `WorkerGroup.run`. Calls from several threads take turns."""
        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{self.name}.{method}: {len(sharded)} sharded arguments for {self.size} workers")
        # Everything is packed before anything is sent: what can't be pickled must not leave some workers called.
        arguments = None if sharded is None else [pack(value) for value in sharded]
        return [unpack(result.header, result.buffers) for result in self.run_packed(method, arguments, pack(common))]

    def run_packed(
        self,
        method: str,
        arguments: Sequence[Packed] | None,
        common: Packed,
        handed: Mapping[str, Packed] | None = None,
    ) -> list[Packed]:
        """`run` for a process that passes values on: packed they come and packed they go.

        Args:
            handed: further keywords, each packed on its own.
        """
        handed = handed or {}
        with self._lock:
            if self._failure is not None:
                raise WorkerError(self._failure)
            if self._closed:
                raise WorkerError(f"{self.name}.{method} was called after the group was closed")
            self._settle()
            self._calls += 1
            self._idle = False
            with contextlib.ExitStack() as stack:

                def blob(value: Any) -> Blob:
                    return stack.enter_context(contextlib.closing(Blob(value)))

                control = blob(("call", self._calls, method, arguments is not None, list(handed)))
                own = [[] if arguments is None else [blob(arguments[index])] for index in range(self.size)]
                shared = [blob(value) for value in (common, *handed.values())]
                for child, argument in zip(self._children, own, strict=True):
                    self._send(child, [control, *argument, *shared], method)
            return self._collect(self._calls, method, None)

    def export(self, method: str, /, **common: Any) -> Any:
        """See `WorkerGroup.export`; the handle is worker 0's result itself."""
        return self.run(method, everywhere=False, **common)[0]

    def close(self) -> None:
        """Ask every child to stop, then SIGTERM, then SIGKILL; returns when they and their descendants are gone."""
        if self._closed:
            return
        self._closed = True
        descendants = [found for child in self._children for found in child.descendants()]
        for child in self._children:
            child.ask_to_stop()
        polite = POLITE_S if self._idle else BUSY_S
        for patience, signum in ((polite, signal.SIGTERM), (TERM_S, signal.SIGKILL), (TERM_S, None)):
            deadline = time.monotonic() + patience
            while any(child.process.poll() is None for child in self._children) and time.monotonic() < deadline:
                time.sleep(0.02)
            for child in self._children:
                if signum is not None and child.process.poll() is None:
                    child.signal_group(signum)
        end_processes(descendants)
        for child in self._children:
            child.signal_group(signal.SIGKILL)  # what the worker left behind in its session
            child.channel.close()
        self._starter.shutdown(wait=False)

    def ready(self) -> None:
        """Wait until every child has built its worker, the first time; raises as the constructor does."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        if self._start_deadline is not None:
            try:
                self._collect(BUILD_ID, "its start", self._start_deadline)
            except BaseException:
                self.close()
                raise
            self._start_deadline = None

    def _send(self, child: _Child, blobs: Sequence[Blob], method: str) -> None:
        try:
            child.send(blobs)
        except OSError:
            self._raise_death(child, method)

    def _collect(self, number: int, method: str, deadline: float | None) -> list[Packed]:
        """Packed results of call `number` in replica order; the first failure to arrive is raised at once.

        The others' answers to a failed call are met later and dropped by their number.
        """
        results: dict[int, Packed] = {}
        while len(results) < len(self._children):
            waiting = {child.channel: i for i, child in enumerate(self._children) if i not in results}
            ready, _, _ = select.select(list(waiting), [], [], POLL_S)
            for channel in ready:
                child = self._children[waiting[channel]]
                try:
                    control, body = channel.receive()
                except (EOFError, OSError):
                    self._raise_death(child, method)
                status, answered, *details = from_blob(control)
                if answered != number:
                    continue
                if status == "error":
                    raise WorkerError(child.failed(f"raised in {method}", details[0]))
                results[waiting[channel]] = parts_of(body)
            for channel, index in waiting.items():
                ended = channel not in ready and self._children[index].process.poll() is not None
                # Its last words may have come in between; they are read in the next round.
                if ended and not select.select([channel], [], [], 0)[0]:
                    self._raise_death(self._children[index], method)
            if deadline is not None and time.monotonic() > deadline:
                late = [child for i, child in enumerate(self._children) if i not in results]
                raise WorkerError(
                    late[0].failed(
                        f"was not ready after {self._start_timeout_s:g} s ({len(late)} of {self.size} were not)"
                    )
                )
        self._idle = True
        return [results[i] for i in range(len(self._children))]

    def _raise_death(self, child: _Child, method: str) -> None:
        try:
            code = exit_text(child.process.wait(timeout=2.0))
        except subprocess.TimeoutExpired:
            code = "closed its connection"
        self._failure = child.failed(f"{code} during {method}")
        raise WorkerError(self._failure) from None


class _Child:
    """One child process and the way to it."""

    def __init__(self, label: str, env: Mapping[str, str], log: Path, fork_server: ForkServer | None) -> None:
        self.label = label
        self.log = log
        self._log_start = log_size(log)
        ours, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if fork_server is None:
            self.process = start_interpreter("workers.launch.worker_process", env, log, theirs.fileno())
        else:
            self.process = fork_server.fork(env, log, theirs)
        theirs.close()
        self.channel = Channel(ours)

    def send(self, blobs: Sequence[Blob]) -> None:
        self.channel.send(blobs)

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.sock.settimeout(0.2)
            self.channel.send([Blob(("stop",))])

    def descendants(self) -> list[psutil.Process]:
        if self.process.pid is None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def signal_group(self, signum: int) -> None:
        pid = self.process.pid
        if pid is None:
            assert isinstance(self.process, ForkedProcess), "only a fork may be still to come"
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signum)

    def failed(self, what: str, text: str = "") -> str:
        parts = [f"{self.label} (pid {self.process.pid}) {what}", text, log_tail(self.log, self._log_start)]
        return "\n".join(part for part in parts if part)


def end_processes(processes: Sequence[psutil.Process], patience_s: float = 1.0) -> None:
    """Give the processes `patience_s` to end by themselves, then kill the rest."""
    alive = _wait_for_end(processes, patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_end(alive, patience_s)


def _wait_for_end(processes: Sequence[psutil.Process], patience_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + patience_s
    alive = [process for process in processes if _is_alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [process for process in alive if _is_alive(process)]
    return alive


def _is_alive(process: psutil.Process) -> bool:
    # A zombie whose new parent is in no hurry to collect it has ended all the same.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
