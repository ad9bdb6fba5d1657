"""Ends what is left of a Ray that a run started on this machine: `python -m workers.launch.ray_guard FOLDER PID`.

It waits until its standard input is closed: by a run that has ended its Ray, or by the end of a run that was killed. Then it kills every process
that still has a file of FOLDER open, except PID, the run itself (Ray's agents outlive a killed driver and would go on listening). Last it
removes FOLDER, Ray's session of 20 MB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil


def start_guard_of(folder: str) -> subprocess.Popen[bytes]:
    """Start a guard in a session of its own, so that signals for the run do not reach it. Closing its `stdin` starts its work."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.launch.ray_guard", folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def users_of(folder: str, run: int) -> list[psutil.Process]:
    """The processes other than `run` with an open file below `folder`; Ray's hide their command lines."""
    found = []
    for process in psutil.process_iter():
        if process.pid == run:
            continue
        with contextlib.suppress(OSError):
            links = os.scandir(f"/proc/{process.pid}/fd")
            if any(os.readlink(link.path).startswith(f"{folder}/") for link in links):
                found.append(process)
    return found


def main() -> None:
    """Entry of the process."""
    folder, run = os.path.realpath(sys.argv[1]), int(sys.argv[2])
    sys.stdin.buffer.read()
    for _ in range(3):  # a process may have started another meanwhile
        for process in users_of(folder, run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
