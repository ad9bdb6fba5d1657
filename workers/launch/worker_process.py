"""The program of a hosted worker's process (`python -m workers.launch.worker_process PARENT_PID SOCKET_FD`, or a fork); its owner is `processes.py`.

Messages in: ("build", asked) + factory, ("call", id, method, has_argument, names) + argument + keywords + a value for each name, ("stop",).
Messages out: ("ok", id) + result, ("error", id, traceback).
Nothing heavy is imported here, so that the process is up in a few hundredths of a second and its worker decides what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.launch.calls import Hosted, traceback_text
from workers.launch.transport import Blob, Channel, from_blob

_PR_SET_PDEATHSIG = 1
BUILD_ID = 0
"""The id of the reply to "build"; calls count from 1."""


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when its parent ends; end now if it already has.

    The kernel's "parent" is the *thread* that started this process: that thread has to outlive it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_guard() -> tuple[int, int]:
    """A shell of a few hundred KiB that kills this process group once this process is gone, however it went.

    Returns the descriptor that keeps it waiting and its pid: writing a line to the descriptor dismisses the guard.
    A process killed by SIGKILL can't end its own children; this is who does.
    """
    reading, writing = os.pipe()
    # A second's grace: helpers that end by themselves (the resource tracker of multiprocessing) clean up in it.
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


def start_interpreter(
    module: str, env: Mapping[str, str], log: Path, fd: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs `module` with (this process's id, `fd`, `arguments`), leads a session of its own and writes to `log`.

    Args:
        env: its whole environment.
        fd: a descriptor that it inherits.
    """
    with log.open("ab") as output:
        # -P: a file of the working directory must not hide a package the parent imported from elsewhere.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), str(fd), *arguments],
            env=dict(env),
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class Host:
    """Holds the worker and answers messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._worker: Hosted | None = None

    def serve(self) -> None:
        """Answer until "stop" or until the parent is gone."""
        while True:
            try:
                parts = self._channel.receive()
            except EOFError:
                return
            kind, *details = from_blob(parts[0])
            if kind == "stop":
                if self._worker is not None:
                    self._worker.close()
                return
            if kind == "build":
                self._answer(BUILD_ID, functools.partial(self._build, parts[1], *details))
            else:
                number, *call = details
                self._answer(number, functools.partial(self._call, parts[1:], *call))
            del parts  # the memory of large arguments is not kept until the next message

    def _build(self, factory: memoryview, asked: float) -> None:
        self._worker = Hosted(lambda: from_blob(factory)(), asked)  # unpickling imports the worker's modules

    def _call(self, parts: list[memoryview], method: str, has_argument: bool, names: Sequence[str]) -> Any:
        values = [from_blob(part) for part in parts]
        arguments = [values.pop(0)] if has_argument else []
        keywords, *handed = values
        assert self._worker is not None, "built before it is called"
        return self._worker.call(method, arguments, keywords | dict(zip(names, handed, strict=True)))

    def _answer(self, number: int, function: Callable[[], Any]) -> None:
        try:
            blobs = [Blob(("ok", number)), Blob(function())]
        except Exception as error:
            blobs = [Blob(("error", number, traceback_text(error))), Blob(None)]
        sys.stdout.flush()
        sys.stderr.flush()
        self._channel.send(blobs)
        for blob in blobs:
            blob.close()


def host(parent: int, fd: int) -> None:
    """Serve the worker of this process over the socket `fd` until "stop", or until `parent` is gone."""
    die_with_parent(parent)
    # Neither may live on in a child of the worker: the parent and the guard take a closed end for this process's end.
    os.set_inheritable(fd, False)
    line, guard = start_guard()
    os.register_at_fork(after_in_child=functools.partial(os.closerange, fd, fd + 1))
    os.register_at_fork(after_in_child=functools.partial(os.closerange, line, line + 1))
    Host(Channel(socket.socket(fileno=fd))).serve()
    # Who is left behind stays guarded: the parent, which would end them, may be killed while it waits for this process.
    if process_group() <= {os.getpid(), guard}:
        os.write(line, b"\n")


if __name__ == "__main__":
    host(int(sys.argv[1]), int(sys.argv[2]))
