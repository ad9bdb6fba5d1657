"""Runs a command and ends with it: `python keeper.py PARENT COMMAND...`. Everything that the command started, sessions of their own included, is killed when
it ends, when this process is told to (SIGTERM), and when PARENT ends. Only the standard library is imported: one of these starts for every sample.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Entry of the process; its exit code is the command's, 128 + the number where a signal ended it, 127 where it can't be started."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if os.getppid() != keeper:
            os._exit(1)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)

    def end_child(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    pid, status = 0, 0
    while pid != child:
        pid, status = os.waitpid(-1, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            # Orphans come to this process, so killing its children again and again reaches every generation.
            with open(f"/proc/self/task/{os.getpid()}/children") as stream:
                for one in stream.read().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(one), signal.SIGKILL)
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
