"""The worker's side: a process that connects to the driver, makes its worker and answers.

    in    ("build",) + factory            ("call", id, method, has_argument, names) + argument + keywords + a blob for each name
          ("requests", ids) + requests    ("stop",)
    out   ("ready",)                      ("ok", id) + result, ("error", id, traceback)
          ("done", ids) + results         ("beat",), regularly, whatever the worker is doing

Messages are taken in order. Requests run together; a call waits until the requests before it are done, and requests after it wait for it. So
new weights take effect after the requests sent before them and before those sent later, and the driver does not have to wait for that.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client
from typing import Any, Protocol

from workers.launch.lifeline import die_with_parent, process_group, start_guard, traceback_text
from workers.launch.transport import Blob, Channel

BEAT_S = 1.0
"""Seconds between two signs of life."""
BUSY = "busy_seconds"
"""Method that every worker answers at once: seconds in each of its methods since it was last asked (`timing_s/busy/*`)."""
FAREWELL_S = 30.0
"""Longest wait of a failed rank for the driver to end it."""
COUNTS = "take_counts"
"""Method that engines answer at once: what they have counted since they were last asked, by metric name."""
Address = str | tuple[str, int]
"""A Unix socket's (abstract) name, or host and port."""

# Objects that are still frozen when the interpreter ends are never collected. Native modules (Triton's, through torch.compile) would
# then print a page of leaked types and functions below the run's last lines.
atexit.register(gc.unfreeze)


class Engine(Protocol):
    """A worker that takes requests as well as calls, and works on many requests at a time.

    One that works in threads of its own has a file descriptor `wakes` too, which is readable when `step` has something. Without it, `step` is called
    all the time while there are requests.
    """

    work: str
    """Name under which the time for requests is counted (`generate`, `score`)."""

    def add(self, number: int, request: Any) -> None:
        """Take a request on, known as `number`.

        Raises:
            ValueError: it can't be served as asked.
        """
        ...

    def step(self) -> Sequence[tuple[int, Any]]:
        """Work for a moment; (number, result) of each request that has finished."""
        ...


class Hosted:
    """A worker in this process: called by name, with a clock on every call."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        with without_collection():
            self.worker = factory()
        self._busy: dict[str, float] = {}

    def call(self, method: str, arguments: Sequence[Any], common: Mapping[str, Any]) -> Any:
        """`worker.<method>(*arguments, **common)`; a dotted name reaches into attributes (`actor.update`).

        Raises:
            AttributeError: the worker has no such method.
        """
        if method == BUSY:
            busy, self._busy = self._busy, {}
            return busy
        target = functools.reduce(getattr, method.split("."), self.worker)
        with self.clock(method):
            return target(*arguments, **common)

    @contextlib.contextmanager
    def clock(self, method: str) -> Iterator[None]:
        """Count the time spent in this block as time of `method`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._busy[method] = self._busy.get(method, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        """Let the worker close itself."""
        if hasattr(self.worker, "close"):
            self.worker.close()


class Service:
    """Answers the driver's messages, and lets an engine work between them."""

    def __init__(self, channel: Channel, on_failure: Callable[[], None] | None = None) -> None:
        """Args:
        on_failure: called after the driver was told that a call (of a worker that takes no requests) has raised.
        """
        self._channel = channel
        self._on_failure = on_failure
        self._waiting: deque[tuple[list[Any], list[Blob]]] = deque()
        self._open: set[int] = set()
        self._hosted: Hosted | None = None
        self._engine: Engine | None = None
        self._stopped = False

    def serve(self) -> None:
        """Answer until told to stop. An engine's unfinished requests are then given up.

        Raises:
            EOFError, OSError: the driver is gone.
        """
        while not self._stopped:
            idle = not self._open and not self._waiting
            while idle or self._has_message():
                self._take()
                idle = False
            # A call waits for the requests before it.
            while self._waiting and not self._stopped and (not self._open or self._waiting[0][0][0] == "requests"):
                self._handle(*self._waiting.popleft())
            if self._open and not self._stopped:
                self._step()
        if self._hosted is not None:
            self._hosted.close()

    def _has_message(self) -> bool:
        """Whether the driver has sent something. With an engine that works in threads of its own, it waits until the driver or the engine has something."""
        wakes = getattr(self._engine, "wakes", None)
        if wakes is None or not self._open or self._waiting:
            return bool(select.select([self._channel], [], [], 0)[0])
        return self._channel in select.select([self._channel, wakes], [], [])[0]

    def _take(self) -> None:
        control, *blobs = self._channel.receive()
        message = list(control.value())
        if message[0] == "stop":
            self._stopped = True
            self._waiting.clear()
        elif message[0] == "call" and message[2] in (BUSY, COUNTS):
            self._handle(message, blobs)
        else:
            self._waiting.append((message, blobs))

    def _handle(self, message: list[Any], blobs: list[Blob]) -> None:
        kind, *details = message
        if kind == "build":
            self._answer(("ready",), ("error", 0), lambda: self._build(blobs[0]))
        elif kind == "call":
            number, method, has_argument, names = details
            self._answer(("ok", number), ("error", number), lambda: self._call(blobs, method, has_argument, names))
        else:
            self._add(details[0], blobs[0].value())

    def _build(self, factory: Blob) -> None:
        self._hosted = Hosted(lambda: factory.value()())  # unpickling imports the worker's modules
        if hasattr(self._hosted.worker, "step"):
            self._engine = self._hosted.worker

    def _call(self, blobs: list[Blob], method: str, has_argument: bool, names: Sequence[str]) -> Any:
        assert self._hosted is not None, "built before it is called"
        values = [blob.value() for blob in blobs]
        arguments = [values.pop(0)] if has_argument else []
        keywords, *handed = values
        return self._hosted.call(method, arguments, keywords | dict(zip(names, handed, strict=True)))

    def _add(self, numbers: Sequence[int], requests: Sequence[Any]) -> None:
        hosted, engine = self._engine_at_work()
        for number, request in zip(numbers, requests, strict=True):
            try:
                with hosted.clock(engine.work):
                    engine.add(number, request)
                self._open.add(number)
            except Exception as error:
                self._send(("error", number, traceback_text(error)))

    def _step(self) -> None:
        hosted, engine = self._engine_at_work()
        try:
            with hosted.clock(engine.work):
                finished = engine.step()
        except Exception as error:
            text = traceback_text(error)
            for number in sorted(self._open):
                self._send(("error", number, text))
            self._open.clear()
            return
        if finished:
            self._open.difference_update(number for number, _ in finished)
            self._send(("done", [number for number, _ in finished]), [result for _, result in finished])

    def _engine_at_work(self) -> tuple[Hosted, Engine]:
        if self._hosted is None or self._engine is None:
            raise RuntimeError("requests came for a worker that takes none")
        return self._hosted, self._engine

    def _answer(self, good: tuple[Any, ...], bad: tuple[Any, ...], function: Callable[[], Any]) -> None:
        try:
            result = Blob(function())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's checkpoints raise one that is no Exception
            self._send((*bad, traceback_text(error)))
            if self._engine is None and self._on_failure is not None:
                self._on_failure()
            return
        self._flush()
        self._channel.send(Blob(good), result)

    def _send(self, message: tuple[Any, ...], value: Any = None) -> None:
        self._flush()
        self._channel.send(Blob(message), Blob(value))

    @staticmethod
    def _flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()


def connect(addresses: Sequence[Address], key: bytes, label: str) -> Channel:
    """Connect to the driver at the first of its addresses that answers, and say who this is.

    Raises:
        ConnectionError: none answers.
        multiprocessing.AuthenticationError: it has another key.
    """
    problems = []
    for address in addresses:
        try:
            with Client(address, authkey=key) as connection:
                channel = Channel(socket.socket(fileno=os.dup(connection.fileno())))
        except (OSError, EOFError) as error:
            problems.append(f"{address!r}: {error}")
            continue
        channel.send(Blob((label, os.getpid(), socket.gethostname())))
        return channel
    raise ConnectionError(f"{label} can't reach the driver of the run: {'; '.join(problems)}")


def beat(channel: Channel) -> threading.Event:
    """Send signs of life from a thread of its own. Once the driver is gone, this process is ended: it has no use any more.

    Returns:
        An event to be set when the service has ended as it should. From then on the driver may go, and this process ends by itself.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                channel.send(Blob(("beat",)))
            except OSError:
                if not ended.is_set():
                    os._exit(1)
            ended.wait(BEAT_S)

    threading.Thread(target=work, name="heartbeat", daemon=True).start()
    return ended


def worker_process(
    label: str, addresses: Sequence[Address], key: bytes, log: str, env: Mapping[str, str], parent: int | None
) -> None:
    """The program of a worker's process.

    Args:
        label: the worker's name, such as `rollout-1`.
        log: file for its output, native code's too.
        env: its environment variables: all of them for an interpreter of its own, for a fork only those that the server does not have.
        parent: process id of the parent of an interpreter of its own; None for a fork.
    """
    os.setsid()  # Ctrl-C reaches only the driver, and whatever this process starts can be ended with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    die_with_parent(parent or os.getppid())
    if parent is not None:
        os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # makes Python read TMPDIR again
    line, guard = start_guard()
    channel = connect(addresses, key, label)
    # Neither may stay open in a child of the worker: the driver and the guard take a closed end to mean that this process has ended.
    for owned in (channel.fileno(), line):
        os.set_inheritable(owned, False)
        os.register_at_fork(after_in_child=functools.partial(os.closerange, owned, owned + 1))
    beat(channel)
    with contextlib.suppress(EOFError, OSError):
        Service(channel).serve()
    # The guard stays for processes that are left behind: the parent, which would end them, may be killed while it waits for this process.
    if process_group() <= {os.getpid(), guard}:
        os.write(line, b"\n")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No automatic garbage collection while a process imports and builds; afterwards it leaves out the objects that exist by then.

    An import makes millions of lasting objects, and walking them again and again takes a fifth of its time. Frozen, they also stay
    unchanged in the forks of this process, which therefore share their memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
