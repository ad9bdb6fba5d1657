"""Runs reward functions in processes of their own, with a time limit for each call.

    samples --> chunks of calls --> workers (own interpreter, own session) --> outcomes, in the samples' order

A worker reports after each call, so a limit counts one call and not its chunk. A worker that overruns it is killed with everything that
it started, its other calls go to somebody else, and the sample gets a `CallFailure`: never a reward. The limit is wall time; a
worker's start (interpreter, imports) is outside of it.

All work with processes is done by one thread of the pool. It lives as long as the pool, so the kernel can end the workers with it
(`workers/launch/worker_process.py`), and scoring goes on while the caller does something else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RewardFunctionConfig
from reward.functions import BATCHED
from reward.pool_processes import Call, PoolError, Processes, Worker, is_dead

__all__ = ["CallFailure", "FunctionPool", "FunctionSample", "PoolError", "SourceResults", "check_functions"]

CHUNK = 64
"""Calls sent to a worker at once, at most."""
ASYNC_GRACE_S = 1.0
"""Seconds beyond the limit for a worker of async calls, which ends late calls itself."""
GIVE_UP_AFTER = 8
"""Calls of one function that overrun the limit in a row before the step's remaining calls of it are not made any more."""


@dataclass(frozen=True)
class FunctionSample:
    """What functions may see of one sample; fields as in `reward/functions.py`."""

    name: str
    """The sample's name in messages, such as `addition/17 sample 3`."""
    prompt: str
    response: str
    answer: Any
    extra: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CallFailure:
    """Why a function gave a sample no score."""

    source: str
    """Name of the reward source."""
    sample: str
    """Name of the sample."""
    kind: str
    """`raised`, `timeout`, `died`, `type`, `not_finite`, `length`, or `skipped` (not called, since another had failed)."""
    message: str
    """What happened: the function's traceback, for example."""

    def __str__(self) -> str:
        return f"reward source {self.source!r}, sample {self.sample}: {self.kind}: {self.message}"


SourceResults = dict[str, list[float | CallFailure]]
"""Per source, in the configured order: an entry a sample, in the samples' order."""


class FunctionPool:
    """Processes that run reward functions. Workers start at the first use, or at `start`.

    Args:
        functions: what to run; every sample is scored by each.
        workers: number of processes.
        log_dir: where `reward-functions-{i}.log` with the functions' output goes; None discards it.
        env: variables of the workers on top of this process's.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        workers: int = 1,
        *,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"reward.function_workers is {workers}; it must be at least 1")
        self.functions = tuple(functions)
        self._processes = Processes(functions, workers, log_dir, env or {})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-pool")

    def start(self) -> None:
        """Start a worker and load every function.

        Raises:
            PoolError: a function cannot be loaded (its traceback is in the message).
        """
        self._thread.submit(self._load).result()

    def submit(self, samples: Sequence[FunctionSample], *, stop_at_failure: bool = False) -> Future[SourceResults]:
        """Score the samples in the background.

        Args:
            samples: what to score.
            stop_at_failure: after the first failure make no further calls; they come back as failures of kind `skipped`.

        Returns:
            A future of the results; it raises `PoolError`.
        """
        return self._thread.submit(self._score, list(samples), stop_at_failure)

    def score(self, samples: Sequence[FunctionSample], *, stop_at_failure: bool = False) -> SourceResults:
        """`submit`, and wait."""
        return self.submit(samples, stop_at_failure=stop_at_failure).result()

    def pids(self) -> list[int]:
        """Process ids of the workers that are alive now."""
        return [worker.process.pid for worker in list(self._processes.workers)]

    def close(self) -> None:
        """End every worker, in the middle of a call too; safe to call twice."""
        self._processes.kill_all()  # which wakes the thread: it then gives up what it is at
        self._thread.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._processes.workers):
            self._processes.end(worker)

    def __enter__(self) -> FunctionPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        processes = self._processes
        while self.functions and not processes.kinds:
            processes.check_open()
            if not processes.workers:
                processes.start()
            processes.wait(lambda worker, why: None, lambda worker, call_id, outcome: None)

    def _score(self, samples: list[FunctionSample], stop_at_failure: bool) -> SourceResults:
        if not samples:
            return {function.name: [] for function in self.functions}
        self._load()
        job = _Job(self._processes, samples, stop_at_failure)
        try:
            return job.run()
        finally:
            job.stop()


class _Job:
    """One scoring of samples by all functions."""

    def __init__(self, processes: Processes, samples: Sequence[FunctionSample], stop_at_failure: bool) -> None:
        self.processes = processes
        self.functions = processes.functions
        self.kinds = processes.kinds
        self.samples = samples
        self.stop_at_failure = stop_at_failure
        self.outcomes: list[list[float | CallFailure | None]] = [[None] * len(samples) for _ in self.functions]
        self.timeouts = [0] * len(self.functions)
        self.queue: deque[list[Call]] = deque()
        self.next_id = 0
        for index in range(len(self.functions)):
            self._enqueue(index)

    def run(self) -> SourceResults:
        """Make every call; results in the samples' order, whatever the order in which they came."""
        while self.queue or any(worker.pending for worker in self.processes.workers):
            self._hand_out()
            self.processes.wait(self._lost, self._done)
        return {
            function.name: [self._entry(index, row) for row in range(len(self.samples))]
            for index, function in enumerate(self.functions)
        }

    def stop(self) -> None:
        """Make no further calls and end the workers that are at one."""
        self.queue.clear()
        for worker in list(self.processes.workers):
            if worker.pending:
                worker.pending = []
                self.processes.end(worker)

    def _enqueue(self, index: int) -> None:
        kind, rows = self.kinds[index], range(len(self.samples))
        calls = [self._call(index, list(rows))] if kind.batched else [self._call(index, [row]) for row in rows]
        # Several chunks a worker, so that one with slow calls does not keep the others waiting at the end.
        share = -(-len(calls) // (4 * self.processes.size))
        size = self.functions[index].concurrency if kind.is_async else min(CHUNK, share)
        self.queue.extend(calls[at : at + size] for at in range(0, len(calls), size))

    def _call(self, index: int, rows: list[int]) -> Call:
        self.next_id += 1
        return Call(self.next_id, index, rows)

    def _hand_out(self) -> None:
        """Chunks to idle workers; new workers for what is left, up to the pool's size."""
        processes = self.processes
        for worker in list(processes.workers):
            if not self.queue or worker.pending or not worker.ready:
                continue
            if is_dead(worker):  # between calls, so none of them is to blame
                processes.end(worker)
            else:
                self._send(worker, self.queue.popleft())
        starting = sum(not worker.ready for worker in processes.workers)
        for _ in range(min(processes.size - len(processes.workers), len(self.queue) - starting)):
            processes.start()

    def _send(self, worker: Worker, calls: list[Call]) -> None:
        index = calls[0].function
        fields = [BATCHED.get(name, name) for name in self.kinds[index].wanted]
        payload = [
            (call.id, [{name: getattr(self.samples[row], name) for name in fields} for row in call.rows])
            for call in calls
        ]
        worker.pending = list(calls)
        self.processes.send(worker, (index, payload))
        self._renew(worker)

    def _renew(self, worker: Worker) -> None:
        """The limit of the call that now begins; async calls begin together."""
        if worker.pending:
            index = worker.pending[0].function
            grace = ASYNC_GRACE_S if self.kinds[index].is_async else 0.0
            worker.deadline = time.monotonic() + self.functions[index].timeout_s + grace

    def _done(self, worker: Worker, call_id: int, outcome: Sequence[Any]) -> None:
        call = next((call for call in worker.pending if call.id == call_id), None)
        if call is None:
            return  # its worker was to be stopped
        worker.pending.remove(call)
        if not self.kinds[call.function].is_async:
            self._renew(worker)
        self._record(call, outcome)

    def _lost(self, worker: Worker, why: tuple[str, str]) -> None:
        pending, worker.pending = worker.pending, []
        if len(pending) > 1 and self.kinds[pending[0].function].is_async:
            # They ran together; one by one they show which of them it was.
            self.queue.extendleft([call] for call in reversed(pending))
            return
        if pending[1:]:
            self.queue.appendleft(pending[1:])
        self._record(pending[0], [why] * len(pending[0].rows))

    def _record(self, call: Call, outcome: Sequence[Any]) -> None:
        index = call.function
        for row, entry in zip(call.rows, outcome, strict=True):
            self.outcomes[index][row] = entry if isinstance(entry, float) else self._failure(index, row, entry)
        failures = [entry for entry in outcome if not isinstance(entry, float)]
        hung = any(kind == "timeout" for kind, _ in failures)
        self.timeouts[index] = self.timeouts[index] + 1 if hung else 0
        if failures and self.stop_at_failure:
            self.stop()
        elif self.timeouts[index] == GIVE_UP_AFTER:
            self._give_up(index)

    def _give_up(self, index: int) -> None:
        why = ("timeout", f"not called: {GIVE_UP_AFTER} calls in a row had overrun the limit")
        given_up = [chunk for chunk in self.queue if chunk[0].function == index]
        self.queue = deque(chunk for chunk in self.queue if chunk[0].function != index)
        for row in (row for chunk in given_up for call in chunk for row in call.rows):
            self.outcomes[index][row] = self._failure(index, row, why)

    def _entry(self, index: int, row: int) -> float | CallFailure:
        entry = self.outcomes[index][row]
        if entry is None:
            return self._failure(index, row, ("skipped", "not called, since another call had failed"))
        return entry

    def _failure(self, index: int, row: int, why: tuple[str, str]) -> CallFailure:
        return CallFailure(self.functions[index].name, self.samples[row].name, *why)


def check_functions(functions: Sequence[RewardFunctionConfig], env: Mapping[str, str] | None = None) -> None:
    """Load every function once, in a process of its own, so that a broken one is found before anything else starts.

    Raises:
        PoolError: names the source and says why.
    """
    with FunctionPool(functions, env=env) as pool:
        pool.start()
