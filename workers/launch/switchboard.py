"""The driver's side: a line to each worker process, and one thread that listens to all of them.

    worker processes ── connect, prove that they know the key ──> accepting thread ──> Line
    Line.call, Line.submit ──> messages out                       listening thread ──> futures resolved

A worker that dies closes its line. One that is silent for too long (it is stopped, or its machine is gone) is given up. Either way all its
futures fail with an error that names it and says what is known: how it ended, and the end of its log.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from workers.launch.service import Address
from workers.launch.transport import Blob, Channel

log = logging.getLogger(__name__)
TICK_S = 0.5
LOOK_S = 2.0
"""How often processes that have not connected yet are checked, in seconds."""
ADMIT_S = 10.0
"""Longest time that a new connection has to prove that it knows the key and to say which worker it is, in seconds."""
BUILD = 0
"""The number of the reply to "build"; calls and requests count from 1."""


class WorkerError(RuntimeError):
    """A worker failed. The message holds the worker's own traceback, because the user sees this message."""


class Line:
    """One worker, as the driver sees it."""

    def __init__(self, label: str, describe_end: Callable[[float], tuple[str, str]], start_timeout_s: float) -> None:
        """The line of a worker that has been asked for and has not connected yet.

        Args:
            describe_end: called with the seconds to wait for an end; returns how its process ended ("" when that isn't known) and the end of its log.
            start_timeout_s: longest time for building it, from when it is told what to build.
        """
        self.label = label
        self.pid: int | None = None
        self.host = ""
        self.ready: Future[None] = Future()
        """Done when the worker is built."""
        self.start_s = 0.0
        """Seconds from when it was asked for until it was built."""
        self.silence = 0.0
        """Seconds since the last message from it."""
        self._asked, self._deadline, self._next_look = math.inf, math.inf, math.inf
        self.failure: str | None = None
        self._start_timeout_s = start_timeout_s
        self._describe_end = describe_end
        self._channel: Channel | None = None
        self._factory: Blob | None = None
        self._numbers = itertools.count(BUILD + 1)
        self._pending: dict[int, tuple[Future[Any], str]] = {}
        self._lock = threading.Lock()
        self._losing = threading.Lock()

    @property
    def name(self) -> str:
        """For messages."""
        where = "" if self.host in ("", socket.gethostname()) else f" on {self.host}"
        return f"{self.label} (pid {self.pid}{where})" if self.pid is not None else self.label

    @property
    def busy(self) -> bool:
        """Whether some call or request has no answer yet."""
        return bool(self._pending) or not self.ready.done()

    def build(self, factory: Blob) -> None:
        """Tell it what to build, as soon as it has connected."""
        self._asked = time.monotonic()
        self._deadline, self._next_look = self._asked + self._start_timeout_s, self._asked + LOOK_S
        with self._lock:
            self._factory = factory
            channel = self._channel
        if channel is not None:
            self._send("its start", Blob(("build",)), factory)

    def attach(self, channel: Channel, pid: int, host: str) -> None:
        """The worker's process has connected."""
        with self._lock:
            self._channel, self.pid, self.host = channel, pid, host
            factory = self._factory
        if factory is not None:
            self._send("its start", Blob(("build",)), factory)

    def call(self, method: str, arguments: Sequence[Blob], common: Blob, handed: Mapping[str, Blob]) -> Future[Blob]:
        """Call the worker's `method`; its result stays packed."""
        number, future = self._expect(method)
        control = Blob(("call", number, method, bool(arguments), list(handed)))
        self._send(method, control, *arguments, common, *handed.values())
        return future

    def submit(self, requests: Sequence[Any], what: str) -> list[Future[Any]]:
        """Give an engine requests; one future for each."""
        expected = [self._expect(what) for _ in requests]
        if requests:
            self._send(what, Blob(("requests", [number for number, _ in expected])), Blob(list(requests)))
        return [future for _, future in expected]

    def stop(self) -> None:
        """Ask it to end; a worker that is in a call hears it afterwards."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sock.settimeout(0.2)
                self._channel.send(Blob(("stop",)))

    def hear(self, blobs: Sequence[Blob]) -> None:
        """Take a message in."""
        self.silence = 0.0
        kind, *details = blobs[0].value()
        if kind == "ready":
            self.start_s = time.monotonic() - self._asked
            with contextlib.suppress(InvalidStateError):  # the worker was given up meanwhile
                self.ready.set_result(None)
        elif kind == "ok":
            self._resolve(details[0], blobs[1])
        elif kind == "done":
            for number, result in zip(details[0], blobs[1].value(), strict=True):
                self._resolve(number, result)
        elif kind == "error":
            self._refuse(*details)

    def lose(self, what: str = "") -> None:
        """The worker is gone; all its futures fail.

        Args:
            what: how it was lost; empty when its line closed.
        """
        with self._losing:  # the sending and the listening thread may notice it at the same time
            if self.failure is not None:
                return
            ended, tail = self._describe_end(2.0)
            with self._lock:
                pending, self._pending = self._pending, {}
                during = next((method for _, method in pending.values()), "its start" if not self.ready.done() else "")
                while_at = f" during {during}" if during else ""
                parts = [f"{self.name} {what or ended or 'closed its connection'}{while_at}", tail]
                self.failure = "\n".join(part for part in parts if part)
        for future in [self.ready, *(future for future, _ in pending.values())]:
            _fail(future, self.failure)

    def kill(self) -> None:
        """Kill a worker that is given up, if it is on this machine: others may wait for it in a collective, and its end ends their wait."""
        if self._channel is not None and self._channel.sock.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                credentials = self._channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)

    def check_start(self) -> None:
        """Notice a worker that is not built in time, or whose process ended before it could connect."""
        if self.ready.done():
            return
        if time.monotonic() > self._deadline:
            self.lose(f"was not ready after {self._start_timeout_s:g} s")
        elif self.pid is None and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if self._describe_end(0.0)[0]:
                self.lose()

    def close(self) -> None:
        """Close the line; futures without an answer fail."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self.failure = f"{self.label} was called after the group was closed"
        if self._channel is not None:
            self._channel.close()
        for future in [self.ready, *(future for future, _ in pending.values())]:
            _fail(future, f"{self.label} had not answered when the group was closed")

    def _expect(self, method: str) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self.failure is not None:
                future.set_exception(WorkerError(self.failure))
            else:
                self._pending[number] = (future, method)
        return number, future

    def _send(self, method: str, *blobs: Blob) -> None:
        channel = self._channel
        if self.failure is not None or channel is None:
            return
        try:
            channel.send(*blobs)
        except TimeoutError:
            self.lose(f"takes no message any more, while {method} was sent to it")
        except OSError:
            self.lose()

    def _resolve(self, number: int, result: Any) -> None:
        with self._lock:
            future, _ = self._pending.pop(number, (None, ""))
        if future is not None:
            future.set_result(result)

    def _refuse(self, number: int, text: str) -> None:
        if number == BUILD:
            _fail(self.ready, self._raised("its start", text))
            return
        with self._lock:
            future, method = self._pending.pop(number, (None, ""))
        if future is not None:
            _fail(future, self._raised(method, text))

    def _raised(self, method: str, text: str) -> str:
        _, tail = self._describe_end(0.0)
        return "\n".join(part for part in (f"{self.name} raised in {method}", text, tail) if part)


def _fail(future: Future[Any], text: str) -> None:
    with contextlib.suppress(InvalidStateError):  # it is done
        future.set_exception(WorkerError(text))


class Switchboard:
    """Takes connections and listens."""

    def __init__(self, silence_s: float, host: str | None = None) -> None:
        """Begin to listen.

        Args:
            silence_s: longest silence of a worker before it is given up; 0 waits for ever.
            host: address of this machine at which workers of other machines reach it; None serves this machine only.
        """
        self.key = secrets.token_bytes(32)
        self._silence_s = silence_s
        self._lines: dict[str, Line] = {}
        self._closed = False
        self._selector = selectors.DefaultSelector()
        # An abstract name: nothing lies in a folder, and nobody beyond this network namespace can reach it.
        self.addresses: list[Address] = [f"\0exactrl-{secrets.token_hex(16)}"]
        self._listeners = [Listener(self.addresses[0], backlog=64)]
        if host is not None:
            self._listeners.append(Listener((host, 0), backlog=64))
            self.addresses.append(self._listeners[1].address)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="accepting", daemon=True).start()
        threading.Thread(target=self._listen, name="listening", daemon=True).start()

    def expect(self, line: Line) -> Line:
        """A worker with this label will connect."""
        self._lines[line.label] = line
        return line

    def forget(self, lines: Sequence[Line]) -> None:
        """Stop watching these lines; they are closed."""
        for line in lines:
            self._lines.pop(line.label, None)
            if line._channel is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(line._channel)
            line.close()

    def close(self) -> None:
        """Accept no more connections, and close every line."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.close()
        self.forget(list(self._lines.values()))

    def _accept(self, listener: Listener) -> None:
        while not self._closed:
            try:
                connection = listener.accept()
            except Exception as error:  # a connection that went away is no reason to stop listening
                if not self._closed:
                    log.debug("a connection failed: %s", error)
                    time.sleep(0.01)
                continue
            # In a thread of its own: a stranger who connects and says nothing must not keep the workers out.
            threading.Thread(target=self._admit, args=(connection,), name="admitting", daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Accept a connection that proves to know the key and says in time which worker it is."""
        try:
            with connection, socket.socket(fileno=os.dup(connection.fileno())) as raw:
                _limit(raw, ADMIT_S)
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
                _limit(raw, 0)
                channel = Channel(raw.dup())
            channel.sock.settimeout(ADMIT_S)
            label, pid, host = channel.receive()[0].value()
            line = self._lines[label]
            channel.sock.settimeout(self._silence_s or None)
        except Exception as error:
            log.debug("a connection was refused: %s", error)
            return
        line.attach(channel, pid, host)
        self._selector.register(channel, selectors.EVENT_READ, line)

    def _listen(self) -> None:
        before = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(TICK_S):
                line = key.data
                try:
                    line.hear(key.fileobj.receive())  # type: ignore[union-attr]
                except TimeoutError:
                    self._give_up(line)
                except (EOFError, OSError):
                    self._drop(line)
                    line.lose()
                except Exception as error:  # the error concerns one worker; this thread goes on listening to the others
                    self._drop(line)
                    line.lose(f"sent what can't be read here ({type(error).__name__}: {error})")
            now = time.monotonic()
            # A driver that was itself stopped for a while has heard from no worker; that is not the workers' fault.
            elapsed, before = min(now - before, 2 * TICK_S), now
            for line in list(self._lines.values()):
                self._watch(line, elapsed)

    def _watch(self, line: Line, elapsed: float) -> None:
        line.check_start()
        if line.pid is None or line.failure is not None:
            return
        line.silence += elapsed
        if self._silence_s and line.silence > self._silence_s:
            self._give_up(line)

    def _give_up(self, line: Line) -> None:
        self._drop(line)
        line.lose(
            f"has given no sign of life for {self._silence_s:g} s (launcher.silence_s): its process is stopped, or its machine is gone"
        )
        line.kill()

    def _drop(self, line: Line) -> None:
        if line._channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(line._channel)


def _limit(sock: socket.socket, seconds: float) -> None:
    """Set the longest wait of a blocking read or write, for code that does not use Python sockets; 0 is no limit."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
