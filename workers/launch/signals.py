"""SIGTERM and Ctrl-C become exceptions in the main thread, so that every `finally` on the way out runs. When that takes too long, a watchdog
kills what is left of the process tree, and this process; it works even while the main thread is stuck.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

import psutil

DEADLINE_S = 10.0
"""Longest time in seconds from the first SIGTERM or SIGINT to the end of everything."""


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
        """Install the handlers (again). No effect outside the main thread, where Python allows no handlers."""
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
        """From here on a signal raises nothing, because the clean-up has begun already; the deadline still holds."""
        self._signalled = True

    def restore(self) -> None:
        """Restore the former handlers. Everything has ended, so the deadline is cancelled."""
        self._done.set()
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writing)
        self._before = None

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # Only once: torchrun and terminals send more than one signal, and a second exception would cut the clean-up short.
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
