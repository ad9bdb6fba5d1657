"""What each algorithm needs, said once: the schema takes its choices from here, the checks and the loop take the needs.

A new built-in estimator is a row here and a function in `trainer/algorithms/advantages.py` (a policy loss: `surrogates.py`); the
import there fails when one of the two is missing. A user's own function brings its needs along (`needs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from configs.user_code import is_reference, load_reference

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class EstimatorNeeds:
    """What has to be built and generated for an advantage estimator."""

    critic: bool = False
    """Values of a critic."""
    groups: bool = False
    """Several samples per prompt, which it compares."""
    greedy: bool = False
    """A greedy response to each prompt, and its score."""
    whitens: bool = False
    """The result is whitened by definition, so `algorithm.advantage.whiten` has nothing to add."""


ESTIMATORS = {
    "gae": EstimatorNeeds(critic=True),
    "grpo": EstimatorNeeds(groups=True),
    "rloo": EstimatorNeeds(groups=True),
    "reinforce_plus_plus": EstimatorNeeds(whitens=True),
    "reinforce_plus_plus_baseline": EstimatorNeeds(groups=True, whitens=True),
    "remax": EstimatorNeeds(greedy=True),
}

POLICY_LOSSES = ("ppo_clip", "gspo", "cispo")

WITHOUT_DUAL_CLIP = ("cispo",)
"""Policy losses in which `algorithm.policy_loss.dual_clip` has no meaning."""


def needs(
    *, critic: bool = False, groups: bool = False, greedy: bool = False, whitens: bool = False
) -> Callable[[F], F]:
    """Mark a user's own estimator with what it needs (see `EstimatorNeeds`); one without the mark needs nothing."""

    def mark(function: F) -> F:
        function.needs = EstimatorNeeds(critic, groups, greedy, whitens)  # type: ignore[attr-defined]
        return function

    return mark


def estimator_needs(name: str) -> EstimatorNeeds:
    """What the estimator called `name`, or the user's at that reference, needs.

    Raises:
        UserCodeError: a user's function that can't be loaded.
    """
    if is_reference(name):
        return getattr(load_reference(name), "needs", EstimatorNeeds())
    return ESTIMATORS[name]
