"""The program of a reward function's process (`python -m reward.pool_worker PARENT_PID SOCKET_FD`); its parent is `pool.py`.

In:   the functions, once; then (function, [(call id, samples), ...]) again and again.
Out:  ("ready", [(wanted, batched, async), ...]) or ("unusable", name, why), once; then ("done", call id, outcome) after each call.

An outcome is a list, one entry a sample: a finite float, or (kind, message). Outcomes are checked here, so that only plain values
travel: a function may return anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from reward.functions import BATCHED, LARGEST_REWARD, FunctionError, LoadedFunction, load_function
from workers.launch.lifeline import die_with_parent, start_guard

Outcome = list[float | tuple[str, str]]
_MESSAGE_CHARS = 4000


def main() -> None:
    """Entry of the process."""
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.set_inheritable(fd, False)
    guard, _ = start_guard()

    def leave_to_the_worker() -> None:
        os.close(fd)
        os.close(guard)

    os.register_at_fork(after_in_child=leave_to_the_worker)
    with contextlib.suppress(
        EOFError, BrokenPipeError, ConnectionResetError
    ):  # the parent is gone or has closed the pool
        _Server(Connection(fd)).serve()
    # At once: threads that a function left behind must not keep the process. The guard ends what it forked.
    os._exit(0)


class _Server:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self.thread_errors: list[str] = []
        self.runner: asyncio.Runner | None = None
        threading.excepthook = self._note_thread_error

    def serve(self) -> None:
        functions = self._load(self.connection.recv())
        while functions is not None:
            index, calls = self.connection.recv()
            function, limit = functions[index]
            if function.is_async:
                self._run_together(function, calls, limit)
            else:
                for call_id, samples in calls:
                    self._done(call_id, self._run(function, samples))

    def _load(self, configs: Sequence[Any]) -> list[tuple[LoadedFunction, float]] | None:
        functions = []
        for config in configs:
            try:
                functions.append((load_function(config.function, config.params), config.timeout_s))
            except BaseException as error:  # a module may do anything while it is imported, exit included
                # Our own errors say it all in their line; a module of the user's that breaks shows where.
                text = str(error) if isinstance(error, FunctionError) else _describe(error)
                self.connection.send(("unusable", config.name, text))
                return None
        self.connection.send(("ready", [(f.wanted, f.batched, f.is_async) for f, _ in functions]))
        return functions

    def _run(self, function: LoadedFunction, samples: Sequence[Mapping[str, Any]]) -> Outcome:
        self.thread_errors.clear()
        try:
            value = function.call(**_arguments(function, samples))
        except BaseException as error:  # SystemExit too: a function that exits has failed
            return [("raised", _describe(error))] * len(samples)
        finally:
            if os.getpid() != self.pid:
                os._exit(0)  # a child that the function forked came back through it: the answer is the parent's to give
        if self.thread_errors:
            return [("raised", "a thread that it started failed: " + self.thread_errors[0])] * len(samples)
        return _checked_batch(value, len(samples)) if function.batched else [_checked(value)]

    def _run_together(self, function: LoadedFunction, calls: Sequence[tuple[int, Any]], limit: float) -> None:
        async def one(call_id: int, samples: Sequence[Mapping[str, Any]]) -> None:
            try:
                value = await asyncio.wait_for(function.call(**_arguments(function, samples)), limit)
                outcome = _checked_batch(value, len(samples)) if function.batched else [_checked(value)]
            except TimeoutError as error:
                # The limit's own error has no message; one that the function raised is the function's.
                kind = ("raised", _describe(error)) if error.args else ("timeout", f"no result within {limit:g} s")
                outcome = [kind] * len(samples)
            except BaseException as error:
                outcome = [("raised", _describe(error))] * len(samples)
            self._done(call_id, outcome)

        async def together() -> None:
            await asyncio.gather(*(one(call_id, samples) for call_id, samples in calls))

        if self.runner is None:
            # One loop for the process's life: a function may keep a client open between calls.
            self.runner = asyncio.Runner()
            self.runner.get_loop().set_default_executor(ThreadPoolExecutor(max_workers=max(32, len(calls))))
        self.runner.run(together())

    def _done(self, call_id: int, outcome: Outcome) -> None:
        self.connection.send(("done", call_id, outcome))

    def _note_thread_error(self, info: threading.ExceptHookArgs) -> None:
        if info.exc_value is not None:
            self.thread_errors.append(_describe(info.exc_value))
        threading.__excepthook__(info)


def _arguments(function: LoadedFunction, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if function.batched:
        return {name: [sample[BATCHED[name]] for sample in samples] for name in function.wanted}
    return {name: samples[0][name] for name in function.wanted}


def _checked(value: Any) -> float | tuple[str, str]:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return ("type", f"returned {_shown(value)}; it must return a number")
    number = float(value)
    if not math.isfinite(number):
        return ("not_finite", f"returned {number}; it must return a finite number")
    if abs(number) > LARGEST_REWARD:
        return ("not_finite", f"returned {number}, which is infinite in the float32 that rewards are trained in")
    return number


def _checked_batch(value: Any, count: int) -> Outcome:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [("type", f"returned {_shown(value)}; it must return a list of {count} numbers")] * count
    if len(value) != count:
        return [("length", f"returned {len(value)} values for {count} samples")] * count
    return [_checked(item) for item in value]


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _describe(error: BaseException) -> str:
    """The traceback from the function's own frames on, its end where it is long."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return text if len(text) <= _MESSAGE_CHARS else "..." + text[-_MESSAGE_CHARS:]


if __name__ == "__main__":
    main()
