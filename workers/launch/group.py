"""Workers as the driver speaks to them: one group, whatever launched it.

    group.run("digests")                       every worker, all at once; results in rank order
    group.run("update", shares, loss=loss)     one share for each worker
    group.fetch("export_weights")              worker 0's result, still packed, to be passed on to another group's workers
    group.submit(replica, requests)            requests to one engine, at any time; one future for each

A *worker* is any object built by a picklable factory in a process of its own. Under torchrun the driver is rank 0 and has worker 0 of the
trainer group in its own process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from workers.launch.lifeline import traceback_text
from workers.launch.service import Hosted
from workers.launch.switchboard import Line, WorkerError
from workers.launch.transport import Blob

__all__ = ["WorkerError", "WorkerFactory", "WorkerGroup", "deal", "undeal"]

T = TypeVar("T")
WorkerFactory = Callable[[], Any]
"""Picklable; called in the worker's own process."""
ROOT_CAUSE_S = 3.0
"""When the driver's own worker fails: how long to wait for another worker's failure, which may be the cause. A broken collective names none."""

UNSTUCK_S = 20.0
"""How long the driver's own worker may go on after another has failed: it may be in a collective that never ends (a machine is gone)."""


class WorkerGroup:
    """`size` workers that are called together."""

    def __init__(
        self, name: str, lines: Sequence[Line], close: Callable[[], None], here: WorkerFactory | None = None
    ) -> None:
        """Workers that have been asked for; `ready` waits until they are built.

        Args:
            lines: one to each worker in another process, in order.
            close: ends these processes.
            here: the factory of worker 0, which then lives in this process; it is called once the other workers have begun to start. The lines are then
                those of workers 1 and up.
        """
        self.name = name
        self.size = len(lines) + (here is not None)
        self._lines = list(lines)
        self._close = close
        self._make_here = here
        self._here: Hosted | None = None
        self._here_start_s = 0.0
        self._closed = False
        self._start_failure: WorkerError | None = None

    @property
    def start_s(self) -> list[float]:
        """Seconds that each worker took from when it was asked for until it was built."""
        return [*([self._here_start_s] if self._here else []), *(line.start_s for line in self._lines)]

    @property
    def hosts(self) -> list[str]:
        """Name of the machine that each worker is on."""
        return [*([socket.gethostname()] if self._here else []), *(line.host for line in self._lines)]

    def ready(self) -> None:
        """Wait until every worker is built.

        Raises:
            WorkerError: one could not be built, or not in time; nothing of the group is left running. Every call raises the same error: the
                other workers were only ended.
        """
        if self._start_failure is not None:
            raise self._start_failure
        try:
            make = self._make_here
            if make is not None and self._here is None:
                start = time.monotonic()
                self._here = self._locally("its start", lambda: Hosted(make), self._readiness())
                self._here_start_s = time.monotonic() - start
            _results(self._readiness())
        except BaseException as error:
            if isinstance(error, WorkerError):
                self._start_failure = error
            self.close()
            raise

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        """Call `method` (dotted names reach into attributes) on every worker; results in rank order.

        Args:
            sharded: one positional argument per worker (length `size`); None sends none.
            common: keyword arguments that every worker gets. A `Blob` arrives as the value that it holds.

        Raises:
            WorkerError: a worker raised or died; carries its traceback and the tail of its log.
        """
        self.ready()
        futures = self._call(method, sharded, common)
        if self._here is None:
            return [blob.value() for blob in _results(futures)]
        arguments = [] if sharded is None else [sharded[0]]
        opened = {name: value.value() if isinstance(value, Blob) else value for name, value in common.items()}
        here = self._here
        mine = self._locally(method, lambda: here.call(method, arguments, opened), futures)
        return [mine, *(blob.value() for blob in _results(futures))]

    def fetch(self, method: str, /, **common: Any) -> Blob:
        """Call every worker; worker 0's result, still packed, to be passed on by `run` or `send` of another group."""
        self.ready()
        futures = self._call(method, None, common)
        if self._here is None:
            return _results(futures)[0]
        here = self._here
        mine = self._locally(method, lambda: here.call(method, [], common), futures)
        _results(futures)
        return Blob(mine)

    def send(self, method: str, /, **common: Any) -> list[Future[Blob]]:
        """Call every worker and don't wait. An engine takes the call after the requests sent before it and before those sent later."""
        self.ready()
        return self._call(method, None, common)

    def submit(self, worker: int, requests: Sequence[Any]) -> list[Future[Any]]:
        """Give requests to an engine; one future for each, in their order. May be called from any thread."""
        self.ready()
        return self._lines[worker].submit(requests, "its requests")

    def ask_to_stop(self) -> None:
        """Ask the workers to end; `close` waits until they have."""
        for line in self._lines:
            line.stop()

    def close(self) -> None:
        """End every worker; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        here, self._here = self._here, None
        if here is not None:
            here.close()
        self._close()

    def _readiness(self) -> list[Future[Any]]:
        return [line.ready for line in self._lines]

    def _call(self, method: str, sharded: Sequence[Any] | None, common: dict[str, Any]) -> list[Future[Blob]]:
        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{self.name}.{method}: {len(sharded)} sharded arguments for {self.size} workers")
        if not self._lines:
            return []
        # Everything is packed before anything is sent, so that a value that can't be pickled raises before any worker is called.
        handed = {name: value for name, value in common.items() if isinstance(value, Blob)}
        keywords = Blob({name: value for name, value in common.items() if name not in handed})
        first = self.size - len(self._lines)
        own = [[]] * len(self._lines) if sharded is None else [[Blob(value)] for value in sharded[first:]]
        return [line.call(method, own[i], keywords, handed) for i, line in enumerate(self._lines)]

    def _locally(self, method: str, function: Callable[[], T], others: Sequence[Future[Any]]) -> T:
        """Do the driver's own share. When it fails after another worker did, that worker's failure is raised: it is the cause."""
        returned = threading.Event()
        if others:
            threading.Thread(target=_end_if_stuck, args=(others, returned), name="own-share", daemon=True).start()
        try:
            return function()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's checkpoints raise one that is no Exception
            wait(others, ROOT_CAUSE_S, FIRST_EXCEPTION)
            for future in others:
                if future.done() and (cause := future.exception()) is not None:
                    raise cause from None
            text = f"{self.name}-0 (pid {os.getpid()}) raised in {method}\n{traceback_text(error)}"
            raise WorkerError(text) from error
        finally:
            returned.set()


def _end_if_stuck(others: Sequence[Future[Any]], returned: threading.Event) -> None:
    """When another worker fails and this process does not return from its own share: say why, and end this process by a signal."""
    done, _ = wait(others, return_when=FIRST_EXCEPTION)
    error = next((error for future in done if (error := future.exception()) is not None), None)
    if error is not None and not returned.wait(UNSTUCK_S):
        print(f"exactrl: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """All results; the first failure to arrive is raised at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


def deal(items: Sequence[T], size: int) -> list[list[T]]:
    """Deal items to workers like cards: item `slot * size + rank` goes to `rank`.

    Example:
        >>> deal([0, 1, 2, 3, 4, 5], 2)
        [[0, 2, 4], [1, 3, 5]]
    """
    return [list(items[rank::size]) for rank in range(size)]


def undeal(per_rank: Sequence[Sequence[T]]) -> list[T]:
    """Inverse of `deal`: back to the order before dealing.

    Example:
        >>> undeal([[0, 2, 4], [1, 3, 5]])
        [0, 1, 2, 3, 4, 5]
    """
    total = sum(len(items) for items in per_rank)
    size = len(per_rank)
    return [per_rank[i % size][i // size] for i in range(total)]
