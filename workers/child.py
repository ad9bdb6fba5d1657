"""The program of a hosted worker's process (`python -m workers.child PARENT_PID SOCKET_FD`); its parent is `processes.py`.

Messages in: ("build",) + factory, ("call", id, method, has_argument) + argument + keywords, ("stop",).
Messages out: ("ok", id) + result, ("error", id, traceback).
Nothing heavy is imported here, so that the process is up in a few hundredths of a second and its worker decides what it needs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from workers.calls import invoke, traceback_text
from workers.transport import Blob, Channel, from_blob

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


def start_guard() -> int:
    """A shell of a few hundred KiB that kills this process group once this process is gone, however it went.

    Returns the descriptor that keeps it waiting: writing a line to it dismisses the guard.
    A process killed by SIGKILL can't end its own children; this is who does.
    """
    reading, writing = os.pipe()
    # A second's grace: helpers that end by themselves (the resource tracker of multiprocessing) clean up in it.
    program = "trap '' TERM INT HUP; read _ && exit 0; sleep 1; kill -KILL 0"
    subprocess.Popen(["/bin/sh", "-c", program], stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reading)
    return writing


def serve(channel: Channel) -> None:
    """Answer messages until "stop" or until the parent is gone."""
    worker: Any = None
    while True:
        try:
            parts = channel.receive()
        except EOFError:
            return
        kind, *details = from_blob(parts[0])
        if kind == "stop":
            if hasattr(worker, "close"):
                worker.close()
            return
        if kind == "build":
            worker = _answer(channel, BUILD_ID, lambda parts=parts: from_blob(parts[1])(), keep=True)
            continue
        number, method, has_argument = details

        def call(parts: list[memoryview] = parts, method: str = method, has_argument: bool = has_argument) -> Any:
            arguments = [from_blob(parts[1])] if has_argument else []
            return invoke(worker, method, arguments, from_blob(parts[-1]))

        _answer(channel, number, call)


def _answer(channel: Channel, number: int, function: Callable[[], Any], keep: bool = False) -> Any:
    """Send the function's result (or only that it ended well, and return the result, when it is to be kept here)."""
    result = None
    try:
        result = function()
        blobs = [Blob(("ok", number)), Blob(None if keep else result)]
    except Exception as error:
        blobs = [Blob(("error", number, traceback_text(error))), Blob(None)]
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(blobs)
    for blob in blobs:
        blob.close()
    return result if keep else None


def main() -> None:
    """Entry of the process."""
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # Neither may live on in a child of the worker: the parent and the guard take a closed end for this process's end.
    os.set_inheritable(fd, False)
    guard = start_guard()
    os.register_at_fork(after_in_child=lambda: (os.close(fd), os.close(guard)))
    serve(Channel(socket.socket(fileno=fd)))
    os.write(guard, b"\n")


if __name__ == "__main__":
    main()
