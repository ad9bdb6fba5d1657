"""How processes end together: with their parent, with everything that they have started, and with a reason that is told.

The kernel ends a child with its parent (`die_with_parent`), a guard ends a process group with its leader (`start_guard`), and
`end_processes` ends what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

TAIL_LINES = 30
_TAIL_BYTES = 16 * 1024
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when its parent ends; end now if it already has.

    The kernel's "parent" is the *thread* that started this process, so that thread has to outlive it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_guard() -> tuple[int, int]:
    """Start a guard: a shell of a few hundred KiB that kills this process group once this process has ended, however it ended.

    Returns the descriptor that keeps it waiting and its pid: writing a line to the descriptor dismisses the guard.
    A process killed by SIGKILL can't end its own children; the guard does.
    """
    reading, writing = os.pipe()
    # One second of grace, in which helpers that end by themselves (the resource tracker of multiprocessing) clean up.
    program = "trap '' TERM INT HUP; read _ && exit 0; sleep 1; kill -KILL 0"
    guard = subprocess.Popen(
        ["/bin/sh", "-c", program], stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(reading)
    return writing, guard.pid


def process_group() -> set[int]:
    """The pids of this process group."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == os.getpgrp():
                    found.add(int(entry))
    return found


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group that `pid` leads, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid`."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_processes(processes: Sequence[psutil.Process], patience_s: float = 1.0) -> None:
    """Give the processes `patience_s` to end by themselves, then kill the rest."""
    alive = _wait_for_end(processes, patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_end(alive, patience_s)


def traceback_text(error: BaseException) -> str:
    """The traceback as Python prints it, from the worker's own code on (the frames that host it are left out)."""
    return "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__))).rstrip()


def exit_text(returncode: int) -> str:
    """What a process's return code means, in words that continue a sentence; a negative code is a signal's number.

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
    """Size of a log in bytes, 0 when it does not exist yet: where the next process's part begins."""
    return path.stat().st_size if path.exists() else 0


def log_tail(path: Path, start: int = 0) -> str:
    """The last lines of a log from byte `start` on, with a heading that names the file."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as stream:
        stream.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    if not lines:
        return f"(nothing was written to {path})"
    return "\n".join([f"--- the end of {path}", *lines, "---"])


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    here = Path(__file__).parent
    inner = frames
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == here:
        inner = inner.tb_next
    return inner if inner is not None else frames


def _wait_for_end(processes: Sequence[psutil.Process], patience_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + patience_s
    alive = [process for process in processes if _is_alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [process for process in alive if _is_alive(process)]
    return alive


def _is_alive(process: psutil.Process) -> bool:
    # A zombie that its new parent has not collected yet has ended all the same.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
