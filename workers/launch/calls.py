"""Making a worker and calling its methods by name, and telling what went wrong with it: its traceback, its end, the tail of its log."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

TAIL_LINES = 30
_TAIL_BYTES = 16 * 1024
_HOSTS = ("calls.py", "worker_process.py", "torchrun_group.py")


BUSY = "busy_seconds"
"""Method that every worker answers: seconds in each of its methods since it was last asked, and at first in `start`: from when its
process was asked for until it was made (of a rank under torchrun: its making alone)."""


class Hosted:
    """A worker in the process that hosts it: called by name, with a clock on every call.

    The clock tells how much of a phase is work and how much is transfer and waiting (`timing_s/busy/*`).
    """

    def __init__(self, factory: Callable[[], Any], asked: float | None = None) -> None:
        """Make the worker.

        Args:
            asked: the machine's monotonic clock when this process was asked for; null counts from now.
        """
        asked = time.monotonic() if asked is None else asked
        with without_collection():
            self.worker = factory()
        self._busy: dict[str, float] = {"start": time.monotonic() - asked}

    def call(self, method: str, arguments: Sequence[Any], common: dict[str, Any]) -> Any:
        """`worker.<method>(*arguments, **common)`; a dotted name reaches into attributes (`actor.update`).

        Raises:
            AttributeError: the worker has no such method.
        """
        if method == BUSY:
            busy, self._busy = self._busy, {}
            return busy
        target = self.worker
        for name in method.split("."):
            target = getattr(target, name)
        start = time.perf_counter()
        try:
            return target(*arguments, **common)
        finally:
            self._busy[method] = self._busy.get(method, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        """Let the worker close itself."""
        if hasattr(self.worker, "close"):
            self.worker.close()


@contextmanager
def without_collection() -> Iterator[None]:
    """No automatic garbage collection while a process imports and builds, and none afterwards of what it has made by then.

    An import makes millions of lasting objects, and walking them again and again is a fifth of its time. Frozen, they also stay
    untouched in the forks of this process, which therefore share their memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def traceback_text(error: BaseException) -> str:
    """The traceback as Python prints it, from the worker's own code on (the frames that host it are left out)."""
    return "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__))).rstrip()


def exit_text(returncode: int) -> str:
    """What a process's return code (negative: the signal's number) says, as half a sentence.

    Example:
        >>> exit_text(-11)
        'was killed by SIGSEGV (a crash in native code)'
    """
    if returncode >= 0:
        return f"exited with code {returncode}"
    number = -returncode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hints = {
        signal.SIGKILL: " (by someone, or by the kernel when memory ran out: see dmesg)",
        signal.SIGSEGV: " (a crash in native code)",
        signal.SIGABRT: " (native code gave up; its reason is in the log)",
    }
    return f"was killed by {name}{hints.get(signal.Signals(number), '') if number in hints else ''}"


def log_size(path: Path) -> int:
    """Bytes in a log that may not exist yet; where the next process's part begins."""
    return path.stat().st_size if path.exists() else 0


def log_tail(path: Path, start: int = 0) -> str:
    """The last lines of a log, none from before byte `start`; with a heading that names the file."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as stream:
        stream.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    if not lines:
        return f"(nothing was written to {path})"
    return "\n".join([f"--- the end of {path}", *lines, "---"])


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    inner = frames
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).name in _HOSTS:
        inner = inner.tb_next
    return inner if inner is not None else frames
