"""Wall time of the phases of a step. Times are for people and benchmarks; nothing in training depends on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Timing:
    """Seconds per phase, under the names that other PPO trainers plot (`timing_s/gen`)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, step: Mapping[str, float]) -> dict[str, float]:
        """`timing_s/*`, and `perf/throughput`: tokens (prompts and responses) per second of step time."""
        found = {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        tokens = step.get("perf/total_num_tokens")
        if tokens is not None and self.seconds.get("step"):
            found["perf/throughput"] = tokens / self.seconds["step"]
        return found
