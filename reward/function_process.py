"""A process of reward functions, as the trainer sees it: how it is started, called, and ended together with everything that it started.

Calls go in pickled. What comes back is JSON and is checked, so nothing that a function writes into the connection is ever executed here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import RewardFunctionConfig
from reward.outcomes import Entry, Outcome, ProcessReward, checked
from workers.launch.lifeline import exit_text, log_size, log_tail

START_TIMEOUT_S = 120.0
"""Longest start of a process, seconds: interpreter, imports of the functions."""
ASYNC_GRACE_S = 1.0
"""Seconds beyond the limit that a process of async calls is given; it ends late calls itself."""
_END_TIMEOUT_S = 10.0
_LONGEST_LINE = 1 << 26


class Lost(Exception):
    """A process gives no further answer and has been ended; the message says how, with the end of its log."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        """`died`, `timeout`, or `unusable` (a function can't be loaded)."""


class Kind(NamedTuple):
    """How a loaded function is called."""

    wanted: tuple[str, ...]
    """Its parameters that are filled from the sample."""
    batched: bool
    is_async: bool


class FunctionProcess:
    """One process that loads all functions.

    Args:
        functions: what it loads.
        log: file of its output; None discards it.
        env: variables on top of this process's.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig], log: Path | None, env: Mapping[str, str]) -> None:
        self._functions, self._log, self._killed, self._calls = functions, log, False, 0
        self._socket, theirs = socket.socketpair()
        self._reader = self._socket.makefile("rb")
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            output: Any = subprocess.DEVNULL
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            self._log_start = log_size(log) if log is not None else 0
            self._process = subprocess.Popen(
                # Unbuffered: the author of a function that was killed wants to read what it printed last.
                [sys.executable, "-u", "-m", "reward.function_worker", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONHASHSEED": "0", **env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    def load(self) -> list[Kind]:
        """Load the functions; returns how each is called.

        Raises:
            Lost: one can't be loaded.
        """
        self._send(list(self._functions))
        kinds = self._receive(START_TIMEOUT_S, time.monotonic() + START_TIMEOUT_S)
        if isinstance(kinds, str):
            self.end()
            raise Lost("unusable", kinds)
        return [Kind(tuple(wanted), batched, is_async) for wanted, batched, is_async in kinds]

    def is_ready(self) -> bool:
        """Whether it can take calls: it is alive, and has sent nothing that it was not asked for."""
        if self._killed or self._process.poll() is not None:
            return False
        self._socket.settimeout(0)
        return not self._reader.peek(1)

    def calls(
        self, index: int, kind: Kind, calls: Mapping[int, Sequence[Mapping[str, Any]]]
    ) -> Iterator[tuple[int, Outcome]]:
        """Call function `index` with the samples of each of `calls`; (its key, its outcome) as each ends.

        Raises:
            Lost: the process died, a call was too late, or something other than an outcome came.
        """
        # Keys that were never used before: a surplus answer (one that a function wrote itself) can't be taken for another call's.
        first, self._calls = self._calls, self._calls + len(calls)
        remaining = dict(zip(range(first, self._calls), calls, strict=True))
        self._send((index, list(zip(remaining, calls.values(), strict=True))))
        begin, limit = time.monotonic(), self._functions[index].timeout_s
        while remaining:
            message = self._receive(limit, begin + limit + ASYNC_GRACE_S if kind.is_async else time.monotonic() + limit)
            try:
                number, outcome = message
                if number < first:
                    continue
                key = remaining.pop(number)
                entries = [_entry(entry) for _, entry in zip(calls[key], outcome, strict=True)]
            except (TypeError, ValueError, KeyError):
                raise self._lost("died", "wrote something that is no outcome into its connection; killed") from None
            yield key, entries

    def kill(self) -> None:
        """Kill it and everything that it started, without waiting; may be called from any thread."""
        self._killed = True
        self._process.terminate()  # the keeper kills the others, then ends

    def end(self) -> None:
        """`kill`, and wait; safe to call twice."""
        self.kill()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.close()
        self._socket.close()

    def _send(self, message: Any) -> None:
        # With a limit: threads that a function left behind may keep the process from reading. If it is gone, that shows when it does not answer.
        with contextlib.suppress(OSError):
            self._socket.settimeout(_END_TIMEOUT_S)
            self._socket.sendall(pickle.dumps(message))

    def _receive(self, limit: float, deadline: float) -> Any:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            line = self._reader.readline(_LONGEST_LINE)
            if line:
                return json.loads(line)
        except TimeoutError:
            raise self._lost("timeout", "was killed", f"no result within {limit:g} s; ") from None
        except (ValueError, RecursionError):
            raise self._lost("died", "wrote something that is no outcome into its connection; killed") from None
        except OSError:
            pass  # a reset connection: it is gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # to read its exit code; a process that only closed its connection is still running
        code = self._process.poll()
        raise self._lost("died", "closed its connection; killed" if code is None else exit_text(_shell_code(code)))

    def _lost(self, kind: str, what: str, why: str = "") -> Lost:
        self.end()
        text = f"{why}its process {what}"
        if self._log is None:
            return Lost(kind, text)
        # A log that reached its limit was cut, perhaps to less than it was when this process began.
        start = self._log_start if log_size(self._log) >= self._log_start else 0
        return Lost(kind, f"{text}\n{log_tail(self._log, start)}")


def _entry(entry: Any) -> Entry:
    """A sample's part of an outcome as it came in."""
    if isinstance(entry, float) and math.isfinite(entry):
        return entry
    if isinstance(entry, dict):
        found = checked({**entry, "turns": dict(entry["turns"])})
        if not isinstance(found, ProcessReward):
            raise ValueError(str(found))
        return found
    kind, message = entry
    return str(kind), str(message)


def _shell_code(code: int) -> int:
    """The keeper ends with the functions' exit code or, as shells do, with 128 + the signal that ended them."""
    return 128 - code if code > 128 else code
