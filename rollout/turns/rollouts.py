"""Episodes of several turns as the driver sees them: sessions begin on the hosts, and what these want from the engines is passed on.

SessionSpec --SessionHosts.start--> host ──Ask──> RolloutEngines.ask ──Generation──> host ──SessionResult──> future
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rollout.engines import RolloutEngines
from rollout.turns.host import Answer, Ask, Pull
from rollout.turns.session import SessionResult, SessionSpec
from rollout.types import Episode
from workers.launch.group import WorkerGroup

logger = logging.getLogger(__name__)


class AuditError(RuntimeError):
    """An episode that was played again went another way, under full determinism."""


class SessionHosts:
    """All processes that play episodes.

    Args:
        group: each worker is a `SessionHost`.
        engines: what the sessions' requests go to.
        audit: `rollout.turns.audit_episodes`.
        full_determinism: a difference that the audit finds is an error.
    """

    def __init__(
        self, group: WorkerGroup, engines: RolloutEngines, *, audit: int = 0, full_determinism: bool = True
    ) -> None:
        self.group = group
        self._engines = engines
        self._audit, self._full_determinism = audit, full_determinism
        self._lock = threading.Lock()
        self._open: set[Future[SessionResult]] = set()
        self._running = [0] * group.size
        self._pulling = [False] * group.size
        # Callbacks come from the thread that listens to all workers; the work is passed on.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self.addresses: list[str | None] = []

    def open(self) -> None:
        """Load the user's code in every process and let the agents' addresses be served.

        Raises:
            WorkerError: the code can't be used, or a port is in use.
        """
        self.addresses = self.group.run("open", list(range(self.group.size)))
        for address in self.addresses:
            if address is not None:
                logger.info("agents speak to %s", address)

    def start(self, specs: Sequence[SessionSpec]) -> list[Future[SessionResult]]:
        """Begin episodes; one future for each. A failed engine fails all that are open."""
        futures = [self._begin(spec) for spec in specs]
        for place, spec in enumerate(specs[: self._audit] if specs and specs[0].split == "train" else []):
            futures[place] = self._compared(spec, futures[place], self._begin(spec))
        return futures

    def _begin(self, spec: SessionSpec) -> Future[SessionResult]:
        # Any process will do: which one plays a session enters nothing.
        host = spec.request_index % self.group.size
        future: Future[SessionResult] = Future()
        with self._lock:
            self._open.add(future)
            self._running[host] += 1
        (found,) = self.group.submit(host, [spec])
        found.add_done_callback(lambda done: self._aside.submit(self._ended, host, future, done))
        self._pull(host)
        return future

    def _ended(self, host: int, future: Future[SessionResult], found: Future[SessionResult]) -> None:
        with self._lock:
            self._running[host] -= 1
        self._settle(future, found)

    def _settle(self, future: Future[SessionResult], found: Future[SessionResult]) -> None:
        with self._lock:
            mine = future in self._open
            self._open.discard(future)
        if not mine:
            return
        error = found.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found.result())

    def _pull(self, host: int) -> None:
        with self._lock:
            if self._pulling[host] or not self._running[host]:
                return
            self._pulling[host] = True
        (asked,) = self.group.submit(host, [Pull()])
        asked.add_done_callback(lambda done: self._aside.submit(self._guarded, self._forward, host, done))

    def _forward(self, host: int, asked: Future[list[Ask]]) -> None:
        asks = asked.result()
        with self._lock:
            self._pulling[host] = False
        self._pull(host)
        for ask in asks:
            answer = self._engines.ask(ask.request)
            answer.add_done_callback(
                lambda done, number=ask.number: self._aside.submit(self._guarded, self._answer, host, number, done)  # type: ignore[misc]
            )

    def _answer(self, host: int, number: int, answer: Future[Any]) -> None:
        self.group.submit(host, [Answer(number, answer.result())])

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it; what goes wrong fails every open episode, since none of them can go on."""
        try:
            function(*arguments)
        except BaseException as error:
            with self._lock:
                failed, self._open = self._open, set()
            for future in failed:
                future.set_exception(error)

    def _compared(
        self, spec: SessionSpec, first: Future[SessionResult], second: Future[SessionResult]
    ) -> Future[SessionResult]:
        """The first result, once the second has been compared with it."""
        future: Future[SessionResult] = Future()

        def compare(_: Any) -> None:
            if not (first.done() and second.done()) or future.done():
                return
            try:
                future.set_result(self._audited(spec, first.result(), second.result()))
            except BaseException as error:
                future.set_exception(error)

        for one in (first, second):
            one.add_done_callback(compare)
        return future

    def _audited(self, spec: SessionSpec, first: SessionResult, second: SessionResult) -> SessionResult:
        what = first_difference(first, second)
        if what is None:
            return first
        text = (
            f"the episode of {spec.name} was played twice with the same seeds and differs: {what}. Its environment or agent is not a function of "
            "what it is given (a clock, a network, random numbers of its own)"
        )
        if self._full_determinism:
            raise AuditError(f"{text}; a run cannot repeat then (level D6). Mend it, or set full_determinism=false")
        logger.warning("%s", text)
        return replace(first, counts={**first.counts, "rollout/audit_mismatches": 1.0})


def first_difference(first: SessionResult, second: SessionResult) -> str | None:
    """Where two plays of one episode part, in words; None where nothing differs."""
    for number, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        for field in ("parent", "prompt_ids", "seed", "token_ids", "logprobs", "finish_reason", "reward"):
            mine, theirs = getattr(one, field), getattr(other, field)
            if mine != theirs:
                return f"turn {number}, {field}: {_short(mine)} and {_short(theirs)}"
    if len(first.turns) != len(second.turns):
        return f"{len(first.turns)} turns and {len(second.turns)}"
    if first.reward != second.reward:
        return f"reward {first.reward} and {second.reward}"
    if (first.failure is None) != (second.failure is None):
        return f"failure {first.failure!r} and {second.failure!r}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:60]} ... {text[-50:]}"


def episode_of(spec: SessionSpec, result: SessionResult) -> Episode:
    """The episode that a session was."""
    rows = result.rows
    first = rows[0] if rows else None
    return Episode(
        key=spec.key,
        prompt=spec.prompt,
        seed=result.turns[0].seed if result.turns else None,
        response_ids=first.response_ids if first else (),
        response_mask=first.mask if first else (),
        logprobs=first.logprobs if first else (),
        finish_reason="length" if result.truncated else "stop",
        text=result.text,
        weight_version=min((turn.weight_version for turn in result.turns), default=0),
        turns=result.turns,
        paths=rows,
        messages=result.messages,
        reward=result.reward,
        failure=None if result.failure is None else f"{spec.name}: {result.failure}",
        counts=result.counts,
    )
