"""Bounded staleness: generation may run up to `rollout.max_head_offpolicyness` steps ahead of training.

    engines   gen 1 | gen 2 (weights 0) | gen 3 (weights 1) | ...
    trainer          | step 1            | step 2            | ...

The samples of step s come from weights that are at most k updates older than a synchronous run's. Which exact version serves
a step depends on timing, so full determinism refuses k > 0 (levels D1 to D5). With k = 0 nothing runs ahead: the samples of step s are
requested when step s begins, and come from the weights after s - 1 steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reward.pending import PendingRewards
from rollout.episodes import Generating
from rollout.types import Episode, Prompt
from trainer.data.sampler import PromptSampler


class StalenessError(RuntimeError):
    """An engine sampled with older weights than the bound allows."""


@dataclass(frozen=True)
class StalenessBound:
    """How far samples may lag behind.

    Example:
        >>> StalenessBound(0).newest_step(synced=4), StalenessBound(2).newest_step(synced=4)
        (5, 7)
    """

    lag: int
    """`rollout.max_head_offpolicyness`: weight versions."""

    def newest_step(self, synced: int) -> int:
        """The last step whose samples may be requested once the engines were sent the weights after `synced` steps."""
        return synced + 1 + self.lag

    def check(self, episodes: Sequence[Episode], step: int) -> None:
        """Refuse samples that are too old.

        Raises:
            StalenessError: names the first such sample, its weights and the bound.
        """
        for episode in episodes:
            if step > self.newest_step(episode.weight_version):
                raise StalenessError(
                    f"step {step}: {episode.key} was sampled with the weights after {episode.weight_version} steps; "
                    f"rollout.max_head_offpolicyness={self.lag} allows those after {step - 1 - self.lag} at the oldest"
                )


class _Asked(NamedTuple):
    prompts: list[Prompt]
    sampler: dict[str, Any]
    """The sampler's position after these prompts."""
    generating: Generating
    pending: PendingRewards


Start = Callable[[Sequence[Prompt], int], tuple[Generating, PendingRewards]]


class RolloutsAhead:
    """Requests the samples of coming steps as early as the bound allows, and hands them out in order.

    Args:
        start: begins to sample and score prompts for a step.
        sampler: gives the prompts.
        lag: `rollout.max_head_offpolicyness`.
        total_steps: the last step.
    """

    def __init__(self, start: Start, sampler: PromptSampler, lag: int, total_steps: int) -> None:
        self._start = start
        self._sampler = sampler
        self._bound = StalenessBound(lag)
        self._total_steps = total_steps
        self._waiting: deque[_Asked] = deque()
        self._asked = 0
        self._position: dict[str, Any] | None = None

    @property
    def ahead(self) -> bool:
        """Whether samples of later steps are being made already."""
        return bool(self._waiting)

    def next(self, step: int) -> tuple[list[Prompt], list[Episode], PendingRewards]:
        """The samples of `step`; waits for them. Before that, it requests the samples of later steps, as far as the bound allows.

        Raises:
            StalenessError: an engine used older weights than allowed.
            WorkerError: an engine failed.
        """
        self._asked = max(self._asked, step - 1)
        while self._asked < min(self._bound.newest_step(step - 1), self._total_steps):
            self._asked += 1
            prompts = self._sampler.next_batch()
            position = self._sampler.state_dict()
            self._waiting.append(_Asked(prompts, position, *self._start(prompts, self._asked)))
        prompts, self._position, generating, pending = self._waiting.popleft()
        episodes = generating.result()
        self._bound.check(episodes, step)
        return prompts, episodes, pending

    def sampler_state(self) -> dict[str, Any]:
        """For a checkpoint: the sampler's position after the batch that was trained. Later samples are made again after a resume."""
        return self._position if self._waiting and self._position is not None else self._sampler.state_dict()
