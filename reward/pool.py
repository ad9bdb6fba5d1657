"""Runs reward functions in processes of their own, with a time limit for each call.

    samples --> portions of calls --> threads, each with one process --> outcomes, in the samples' order

A process answers after each call, so the time limit is for one call and not for its portion. A process that overruns it is killed with
everything that it started, and another process makes its other calls. The sample gets a `CallFailure`, never a reward. The limit is wall
time; a process's start (interpreter, imports) does not count.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.problems import UserError
from configs.schema import RewardFunctionConfig
from reward.function_process import FunctionProcess, Kind, Lost
from reward.functions import BATCHED
from reward.outcomes import Entry, Outcome, ProcessReward

PORTION = 64
"""Most calls that are sent to a process at once."""
GIVE_UP_AFTER = 8
"""After this many calls in a row that overran the limit, a function is not called again in the step."""


class PoolError(UserError, RuntimeError):
    """The pool cannot run the functions at all: one cannot be loaded, processes do not start, the pool is closed."""


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
    turn_token_ids: Sequence[Sequence[int]] = ()
    response_with_special_tokens: str | None = None
    """Needed where `FunctionPool.wants` says so."""

    @property
    def response_token_ids(self) -> list[int]:
        """Every sampled id, in order."""
        return [token for turn in self.turn_token_ids for token in turn]


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


SourceResults = dict[str, list[float | ProcessReward | CallFailure]]
"""Per source, in the configured order: one entry per sample, in the samples' order."""


class FunctionPool:
    """Processes that run reward functions. They start at the first use, or at `start`.

    Args:
        functions: what to run; every sample is scored by each.
        workers: number of processes.
        log_dir: where `reward-functions-{i}.log` with the functions' output goes; None discards it.
        env: variables of the processes on top of this process's.
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
        self.kinds: list[Kind] = []
        """One per function, once a process has loaded them."""
        self._log_dir, self._env = log_dir, dict(env or {})
        self._lock, self._closed = threading.Lock(), False
        self._processes: list[FunctionProcess | None] = [None] * workers
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # slots of `_processes`
        for slot in range(workers):
            self._free.put(slot)
        # These threads live as long as the pool, because the kernel ends a process with the thread that started it.
        self._jobs = ThreadPoolExecutor(1, "reward-pool")
        self._threads = ThreadPoolExecutor(workers, "reward-functions")

    def start(self) -> None:
        """Start a process and load every function.

        Raises:
            PoolError: a function cannot be loaded (its traceback is in the message).
        """
        self._jobs.submit(self._load).result()

    def wants(self, field: str) -> bool:
        """Whether some function takes this field of `FunctionSample`; loads the functions if that has not been done. Raises the same errors as `start`."""
        if not self.kinds:
            self.start()
        return any(field == BATCHED.get(name, name) for kind in self.kinds for name in kind.wanted)

    def submit(self, samples: Sequence[FunctionSample], *, stop_at_failure: bool = False) -> Future[SourceResults]:
        """Score the samples in the background.

        Args:
            samples: what to score.
            stop_at_failure: make no further calls after the first failure; those samples get failures of kind `skipped`.

        Returns:
            A future of the results; it raises `PoolError`.
        """
        return self._jobs.submit(self._score, list(samples), stop_at_failure)

    def score(self, samples: Sequence[FunctionSample], *, stop_at_failure: bool = False) -> SourceResults:
        """`submit`, and wait."""
        return self.submit(samples, stop_at_failure=stop_at_failure).result()

    def pids(self) -> list[int]:
        """Process ids of the processes that were started and not replaced."""
        return [process.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """End every process, also in the middle of a call; safe to call twice."""
        with self._lock:
            self._closed = True
        self._kill()  # which wakes the threads that listen
        self._jobs.shutdown(cancel_futures=True)
        self._threads.shutdown()
        for process in self._processes:
            if process is not None:
                process.end()

    def __enter__(self) -> FunctionPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        if self.functions and not self.kinds:
            self._process(0)

    def _score(self, samples: list[FunctionSample], stop_at_failure: bool) -> SourceResults:
        self._load()
        job = _Job(self.functions, samples, stop_at_failure)
        portions = [
            (index, calls) for index in range(len(self.functions)) for calls in self._portions(index, len(samples))
        ]
        for done in [self._threads.submit(self._work, job, index, calls) for index, calls in portions]:
            done.result()
        return job.results()

    def _portions(self, index: int, samples: int) -> list[dict[int, list[int]]]:
        """The calls of a function, {number: rows of the samples that it scores}, in portions for one process each."""
        kind, rows = self.kinds[index], list(range(samples))
        calls = [rows] * (samples > 0) if kind.batched else [[row] for row in rows]
        # Several portions per process, so that a process with slow calls does not keep the others waiting at the end.
        share = max(1, -(-len(calls) // (4 * len(self._processes))))
        size = self.functions[index].concurrency if kind.is_async else min(PORTION, share)
        return [dict(enumerate(calls[at : at + size])) for at in range(0, len(calls), size)]

    def _work(self, job: _Job, index: int, calls: dict[int, list[int]]) -> None:
        """Make these calls. When a process is lost, the next one makes the calls that it has not answered."""
        kind, one_by_one = self.kinds[index], False
        slot = self._free.get()
        try:
            while calls and not job.is_over(index):
                process = self._process(slot)
                some = dict([next(iter(calls.items()))]) if one_by_one else calls
                payload = {number: job.fields(kind, rows) for number, rows in some.items()}
                try:
                    for number, outcome in process.calls(index, kind, payload):
                        job.record(index, calls.pop(number), outcome)
                        if job.stopped:
                            self._kill()
                except Lost as lost:
                    self._check_open()
                    if kind.is_async and len(some) > 1:
                        one_by_one = True  # they ran together; one at a time shows which of them it was
                    elif not job.stopped:
                        rows = calls.pop(next(iter(calls)))
                        job.record(index, rows, [(lost.kind, str(lost))] * len(rows))
        except BaseException:
            if not job.stopped:  # otherwise it was killed while it started
                job.stopped = True
                raise
        finally:
            self._free.put(slot)

    def _process(self, slot: int) -> FunctionProcess:
        """The slot's process, ready for calls. One that ended between calls is replaced, and no call is blamed for it."""
        process = self._processes[slot]
        if process is not None and process.is_ready():
            return process
        if process is not None:
            process.end()
        log = None if self._log_dir is None else self._log_dir / f"reward-functions-{slot}.log"
        with self._lock:
            self._check_open()
            process = self._processes[slot] = FunctionProcess(self.functions, log, self._env)
        try:
            self.kinds = process.load()
        except Lost as lost:
            self._check_open()
            raise PoolError(
                str(lost) if lost.kind == "unusable" else f"the reward functions can't be loaded: {lost}"
            ) from None
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("the pool of reward functions was closed")

    def _kill(self) -> None:
        for process in self._processes:
            if process is not None:
                process.kill()


class _Job:
    """One scoring of samples by all functions: what is known so far, filled in by several threads."""

    def __init__(
        self, functions: Sequence[RewardFunctionConfig], samples: Sequence[FunctionSample], stop_at_failure: bool
    ) -> None:
        self.samples = samples
        self.stopped = False
        """Make no further calls."""
        self._functions = functions
        self._stop_at_failure = stop_at_failure
        self._lock = threading.Lock()
        self._outcomes: list[list[Entry | None]] = [[None] * len(samples) for _ in functions]
        self._timeouts = [0] * len(functions)
        self._given_up: set[int] = set()

    def fields(self, kind: Kind, rows: Sequence[int]) -> list[dict[str, Any]]:
        """What a function of this kind sees of some samples."""
        names = [BATCHED.get(name, name) for name in kind.wanted]
        return [{name: getattr(self.samples[row], name) for name in names} for row in rows]

    def is_over(self, index: int) -> bool:
        """Whether the function is not to be called any more."""
        return self.stopped or index in self._given_up

    def record(self, index: int, rows: Sequence[int], outcome: Outcome) -> None:
        """What a call of the function gave."""
        with self._lock:
            for row, entry in zip(rows, outcome, strict=True):
                self._outcomes[index][row] = entry
            failures = [entry[0] for entry in outcome if isinstance(entry, tuple)]
            self._timeouts[index] = self._timeouts[index] + 1 if "timeout" in failures else 0
            if self._timeouts[index] == GIVE_UP_AFTER:
                self._given_up.add(index)
            self.stopped |= bool(failures) and self._stop_at_failure

    def results(self) -> SourceResults:
        """All entries, in the samples' order."""
        return {
            function.name: [
                entry
                if isinstance(entry, float | ProcessReward)
                else CallFailure(function.name, sample.name, *(entry or self._why(index)))
                for sample, entry in zip(self.samples, self._outcomes[index], strict=True)
            ]
            for index, function in enumerate(self._functions)
        }

    def _why(self, index: int) -> tuple[str, str]:
        """Why a call was not made."""
        if index in self._given_up:
            return ("timeout", f"not called: {GIVE_UP_AFTER} calls in a row had overrun the limit")
        return ("skipped", "not called, since another call had failed")


def check_functions(functions: Sequence[RewardFunctionConfig], env: Mapping[str, str] | None = None) -> None:
    """Load every function once, in a process of its own, so that a broken one is found before anything else starts.

    Raises:
        PoolError: names the source and says why.
    """
    with FunctionPool(functions, env=env) as pool:
        pool.start()
