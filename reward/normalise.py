"""Rewards relative to their running mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_EPSILON = 1e-8


class RunningNormaliser:
    """Mean and variance over every reward seen so far, in float64.

    Batches are merged by the pairwise update of Chan, Golub and LeVeque (1983); sums within a batch are exactly rounded, so they do
    not depend on the order of its rewards.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Standard deviation of everything seen (population form); 0.0 before the first reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Take in a batch."""
        if not values:
            return
        count = len(values)
        mean = math.fsum(values) / count
        squares = math.fsum((value - mean) ** 2 for value in values)
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    def apply(self, value: float) -> float:
        """The reward in standard deviations from the mean."""
        return self.scale(value - self.mean)

    def scale(self, difference: float) -> float:
        """A difference of rewards in standard deviations."""
        return difference / (self.std + _EPSILON)

    def state_dict(self) -> dict[str, Any]:
        """Plain values that continue it."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
