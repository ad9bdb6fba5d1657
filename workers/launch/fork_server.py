"""A process that has imported what workers need, and starts each worker as a fork of itself.

Importing vLLM is nearly all of an engine's start: 6 to 8 s of CPU time, against about one for a fork and its model. The engines of a
machine import the same modules, so one process imports them once (`python -m workers.launch.fork_server`). It may itself be the fork of
another that has imported less: what trainer ranks need, which is half of it.

    owner -- {number, log} and the socket to the worker --> server -- fork --> the worker's process (`child.py`)
    owner <-- {number, pid}, and when it has ended {number, code} -- server

`multiprocessing.forkserver` is made of the same idea, but takes the environment and the main module of the process that uses it.
A fork can't have variables of its own that are read when an interpreter or a library starts, so one that is to have another
environment than the server gets a fresh interpreter (a rank's number and meeting point apart, which are read late); so does everyone
when an import left threads behind, which a fork loses.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.launch import worker_process as child
from workers.launch.calls import without_collection

MESSAGE_LIMIT = 1 << 20
"""Bytes of one message; an environment is a few KiB."""
POLL_S = 0.02
CLOSE_S = 10.0
"""Longest wait for a killed server to be gone."""
LATE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that nothing reads before a worker is built: a fork gets its own."""
_GONE = (BrokenPipeError, ConnectionResetError)
"""What a socket raises when the other end is gone; anything else is an error of ours."""


class ForkServer:
    """The server, seen by the process that owns it. It ends with the process that started it, and when its owner is gone; its forks
    end with it."""

    _starter: ThreadPoolExecutor | None = None
    _process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __init__(
        self, env: Mapping[str, str], modules: Sequence[str], log: Path, base: ForkServer | None = None
    ) -> None:
        """Start the server; it imports while this process goes on.

        Args:
            env: the whole environment of the server and of its forks, but for what is `LATE`.
            modules: what to import, in order. One that fails is left to the worker that needs it.
            log: where its output goes until a fork has a log of its own.
            base: a server to start it as a fork of, where forks are possible; ends it with itself.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own(ours, env, 0)
        try:
            if base is not None:
                self._process = base.fork(self._env, log, theirs, modules)
                return
            self._starter = ThreadPoolExecutor(1, thread_name_prefix="fork-server-starter")
            # The kernel ties a child to the thread that started it; this one lives as long as the server.
            start = self._starter.submit(
                child.start_interpreter, "workers.launch.fork_server", self._env, log, theirs.fileno(), *modules
            )
            self._process = start.result()
        finally:
            theirs.close()

    @classmethod
    def adopted(cls, sock: socket.socket, env: Mapping[str, str], first: int) -> ForkServer:
        """A server that another process of this machine has started and handed over (`detach`)."""
        server = cls.__new__(cls)
        server._own(sock, env, first)
        return server

    def _own(self, sock: socket.socket, env: Mapping[str, str], first: int) -> None:
        self._sock = sock
        self._env = _early(env)
        self._next = first
        self._lock = threading.Lock()
        self._asked: dict[int, ForkedProcess] = {}
        self._gone = False

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while its base has not started it, and where it was not started."""
        return self._process.pid if self._process else None

    def detach(self) -> tuple[socket.socket, dict[str, str], int]:
        """What `adopted` takes. From here on this object can only `close`."""
        with self._lock:
            self._gone = True
            return self._sock, self._env, self._next

    def fork(
        self, env: Mapping[str, str], log: Path, sock: socket.socket, modules: Sequence[str] = ()
    ) -> ForkedProcess:
        """Ask for a worker's process; returns before it exists.

        Args:
            env: the whole environment of the process.
            log: where its output goes.
            sock: the worker's end of its channel; the caller may close its copy.
            modules: what a server imports; given, the process becomes a server, and `sock` is its owner's.
        """
        with self._lock:
            forked = ForkedProcess(self, self._next)
            self._next += 1
            self._asked[forked.number] = forked
            late = {name: env[name] for name in LATE if name in env}
            other = None if _early(env) == self._env else dict(env)
            request = {
                "number": forked.number,
                "other_env": other,
                "late": late,
                "log": str(log),
                "modules": list(modules),
            }
            if not self._gone:
                with contextlib.suppress(*_GONE):  # noticed by `receive`
                    socket.send_fds(self._sock, [json.dumps(request).encode()], [sock.fileno()])
        return forked

    def give_up(self, forked: ForkedProcess) -> None:
        """Take a request back; should it be too late, what was forked is killed."""
        with self._lock, contextlib.suppress(*_GONE):
            forked.returncode = -signal.SIGKILL
            if not self._gone:
                self._sock.send(json.dumps({"number": forked.number, "kill": True}).encode())

    def receive(self) -> None:
        """Take in what the server has said so far; without waiting."""
        with self._lock:
            while self._gone or select.select([self._sock], [], [], 0)[0]:
                message = b""
                if not self._gone:
                    with contextlib.suppress(*_GONE):
                        message = self._sock.recv(MESSAGE_LIMIT)
                if not message:
                    self._end_all()
                    return
                said = json.loads(message)
                forked = self._asked.get(said["number"])
                if forked is None:  # a server, started by who owned this one before
                    continue
                forked.known_pid = said.get("pid", forked.known_pid)
                forked.returncode = said.get("code", forked.returncode)

    def close(self) -> None:
        """End the server and whatever it has forked; one that was not started here ends a moment later."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(CLOSE_S)
        with self._lock:
            self._end_all()
        if self._starter is not None:
            self._starter.shutdown(wait=False)

    def _end_all(self) -> None:
        """The server is gone; the kernel has killed its forks."""
        self._gone = True
        self._sock.close()
        for forked in self._asked.values():
            if forked.returncode is None:
                forked.returncode = -signal.SIGKILL


class ForkedProcess:
    """A fork: as much of `subprocess.Popen` as a process group needs. Its exit code comes from its parent, the server."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self.number = number
        self.known_pid: int | None = None
        self.returncode: int | None = None
        self._server = server

    @property
    def pid(self) -> int | None:
        """Process id; None while the server is still importing."""
        if self.known_pid is None:
            self._server.receive()
        return self.known_pid

    def poll(self) -> int | None:
        """The exit code (negative: a signal's number), or None while it runs or is still to come."""
        if self.returncode is None:
            self._server.receive()
        return self.returncode

    def kill(self) -> None:
        """End it, although it may not have begun."""
        self._server.give_up(self)

    def wait(self, timeout: float) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(POLL_S)
        return code


class _Server:
    """The server's side."""

    def __init__(self, sock: socket.socket, env: dict[str, str]) -> None:
        self._sock = sock
        self._env = env
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._can_fork = len(os.listdir("/proc/self/task")) == 1
        if not self._can_fork:
            print("an import has left threads behind, so workers get interpreters of their own", flush=True)

    def serve(self) -> tuple[int, list[str]] | None:
        """Fork when asked to, and report ends, until the owner is gone.

        Returns:
            In a fork, and only there: the descriptor of its channel, and what a server has to have imported.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._sock:
                    self._report_end(key.fd, *key.data)
                    continue
                message, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_LIMIT, 1, socket.MSG_CMSG_CLOEXEC)
                if not message:
                    return None
                request = json.loads(message)
                if "kill" in request:
                    self._kill(request["number"])
                    continue
                if self._can_fork and request["other_env"] is None:
                    pid = self._fork(request["log"], request["late"])
                    if pid == 0:
                        return fds[0], request["modules"]
                else:
                    env = request["other_env"] or self._env | request["late"]
                    pid = self._spawn(env, request["log"], fds[0], request["modules"])
                os.close(fds[0])
                self._say(request["number"], pid=pid)
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (request["number"], pid))

    def _fork(self, log: str, late: dict[str, str]) -> int:
        """0 in the fork, which is then as `subprocess` would have left a child; its pid here."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            os.read(reading, 1)  # its session is made: from here on its process group can be signalled
            os.close(reading)
            return pid
        os.setsid()
        os.environ.update(late)
        for owned in [key.fd for key in self._selector.get_map().values()]:
            os.close(owned)
        self._selector.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for done in (output, reading, writing):
            os.close(done)
        return 0

    def _spawn(self, env: dict[str, str], log: str, fd: int, modules: Sequence[str]) -> int:
        """A fresh interpreter; its pid."""
        program = "workers.launch.fork_server" if modules else "workers.launch.worker_process"
        process = child.start_interpreter(program, env, Path(log), fd, *modules)
        process.returncode = 0  # it is waited for here, not by subprocess
        return process.pid

    def _kill(self, number: int) -> None:
        for key in self._selector.get_map().values():
            if key.data is not None and key.data[0] == number:
                os.killpg(key.data[1], signal.SIGKILL)

    def _report_end(self, pidfd: int, number: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._say(number, code=os.waitstatus_to_exitcode(status))

    def _say(self, number: int, **what: Any) -> None:
        with contextlib.suppress(*_GONE):  # the owner, which the next round notices
            self._sock.send(json.dumps({"number": number, **what}).encode())


def _early(env: Mapping[str, str]) -> dict[str, str]:
    """What has to be in place before an interpreter starts."""
    return {name: value for name, value in env.items() if name not in LATE}


def _import(modules: Sequence[str]) -> None:
    with without_collection():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()


def _run(parent: int, sock: socket.socket, env: dict[str, str], modules: Sequence[str]) -> None:
    """Be a server, until `parent` or the owner is gone; in a fork, be what was asked for."""
    child.die_with_parent(parent)
    sock.set_inheritable(False)
    _import(modules)
    me = os.getpid()
    forked = _Server(sock, env).serve()
    if forked is None:
        os._exit(0)  # there is nothing to undo, and libraries that are taken apart complain
    channel, more = forked
    if more:
        _run(me, socket.socket(fileno=channel), env, more)
    else:
        child.host(me, channel)


def main() -> None:
    """Entry of the process."""
    env = dict(os.environ)  # before an import adds to it
    _run(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), env, sys.argv[3:])


if __name__ == "__main__":
    main()
