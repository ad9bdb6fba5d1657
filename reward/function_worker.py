"""The program of a process of reward functions (`python -m reward.function_worker PARENT_PID SOCKET_FD`); the trainer's side is `function_process.py`.

    trainer ── keeper ── worker: loads the functions and calls them ── whatever they start

The keeper is this program's first process; the worker is its fork. The keeper becomes the parent of every process below it that loses its own
(after a double fork, or in a session of its own). Once the worker has ended, or the trainer is gone or sends SIGTERM, the keeper kills whatever is
left. It also copies the output to the log, so that the log can have a limit.

In (pickled):  the functions, once; then (function, [(key, samples), ...]) again and again.
Out (JSON):    once, [[wanted, batched, async], ...] or a text that says why loading failed; then [key, outcome] after each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import pickle
import signal
import socket
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from reward.functions import BATCHED, FunctionError, LoadedFunction, load_function
from reward.outcomes import Outcome, checked, checked_batch, describe
from workers.launch.lifeline import die_with_parent

LOG_LIMIT = 8 << 20
"""Largest size of a log in bytes. A log that would grow beyond it keeps its first half, and after that what came last."""
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Entry of the process."""
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, reading, writing = os.getpid(), *os.pipe()
    has_log = stat.S_ISREG(os.fstat(1).st_mode)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        die_with_parent(keeper)
        if has_log:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer closed the pool
            _Worker(fd).serve()
        os._exit(0)  # at once: threads that a function left behind must not keep the process

    def end_worker(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_worker)
    os.close(fd)
    os.close(writing)
    copier = threading.Thread(target=_copy, args=(reading, 1), daemon=True)
    copier.start()
    code = _outlive(worker)
    copier.join(5.0)
    os._exit(code if code >= 0 else 128 - code)


def _outlive(worker: int) -> int:
    """Wait for the worker, then end every other process below this one; the worker's exit code, negative for a signal."""
    pid, status = 0, 0
    while pid != worker:
        pid, status = os.waitpid(-1, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status)


def _copy(source: int, log: int) -> None:
    """Copy whatever is written to `source` into the log."""
    notice = f"\n--- output is missing here: a log takes {LOG_LIMIT >> 20} MiB, its first half and what came last ---\n"
    while data := os.read(source, 1 << 16):
        with contextlib.suppress(OSError):  # a full disk; the functions must not wait for it
            if os.fstat(log).st_size + len(data) > LOG_LIMIT:
                os.ftruncate(log, LOG_LIMIT // 2)
                os.write(log, notice.encode())
            os.write(log, data)


class _Worker:
    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=lambda: os.closerange(fd, fd + 1))
        self.stream = socket.socket(fileno=fd).makefile("rwb")
        self.pid = os.getpid()
        self.thread_errors: list[str] = []
        self.runner: asyncio.Runner | None = None
        threading.excepthook = self._note_thread_error

    def serve(self) -> None:
        """Load the functions and make the calls that are asked for."""
        functions = []
        for config in pickle.load(self.stream):
            try:
                functions.append((load_function(config.function, config.params), config.timeout_s))
            except BaseException as error:  # a module may do anything while it is imported, exit included
                # One line of our own errors says enough; for a user's module that breaks, the traceback shows where.
                why = str(error) if isinstance(error, FunctionError) else describe(error, __file__)
                return self._tell(f"reward source {config.name!r} cannot be used: {why}")
        self._tell([[f.wanted, f.batched, f.is_async] for f, _ in functions])
        while True:
            index, calls = pickle.load(self.stream)
            function, limit = functions[index]
            if function.is_async:
                self._run_together(function, calls, limit)
            else:
                for key, samples in calls:
                    self._tell([key, self._run(function, samples)])

    def _run(self, function: LoadedFunction, samples: Sequence[Mapping[str, Any]]) -> Outcome:
        self.thread_errors.clear()
        try:
            outcome = _outcome(function, function.call(**_arguments(function, samples)), len(samples))
        except BaseException as error:  # SystemExit too: a function that exits has failed
            return _raised(error, len(samples))
        if self.thread_errors:
            return [("raised", "a thread that it started failed: " + self.thread_errors[0])] * len(samples)
        return outcome

    def _run_together(self, function: LoadedFunction, calls: Sequence[tuple[int, Any]], limit: float) -> None:
        async def one(key: int, samples: Sequence[Mapping[str, Any]]) -> None:
            try:
                value = await asyncio.wait_for(function.call(**_arguments(function, samples)), limit)
                outcome = _outcome(function, value, len(samples))
            except BaseException as error:
                # The limit's own timeout error has no message; one with a message was raised by the function.
                late = isinstance(error, TimeoutError) and not error.args
                told: Outcome = [("timeout", f"no result within {limit:g} s")] * len(samples)
                outcome = told if late else _raised(error, len(samples))
            self._tell([key, outcome])

        async def together() -> None:
            await asyncio.gather(*(one(key, samples) for key, samples in calls))

        if self.runner is None:
            # One loop for the process's life: a function may keep a client open between calls.
            self.runner = asyncio.Runner()
            self.runner.get_loop().set_default_executor(ThreadPoolExecutor(max_workers=max(32, len(calls))))
        self.runner.run(together())

    def _tell(self, message: Any) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a child that a function forked has returned from it; only the parent answers
        self.stream.write(json.dumps(message, default=dataclasses.asdict).encode() + b"\n")
        self.stream.flush()

    def _note_thread_error(self, info: threading.ExceptHookArgs) -> None:
        if info.exc_value is not None:
            self.thread_errors.append(describe(info.exc_value, __file__))
        threading.__excepthook__(info)


def _arguments(function: LoadedFunction, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if function.batched:
        return {name: [sample[BATCHED[name]] for sample in samples] for name in function.wanted}
    return {name: samples[0][name] for name in function.wanted}


def _outcome(function: LoadedFunction, value: Any, count: int) -> Outcome:
    return checked_batch(value, count) if function.batched else [checked(value)]


def _raised(error: BaseException, count: int) -> Outcome:
    return [("raised", describe(error, __file__))] * count


if __name__ == "__main__":
    main()
