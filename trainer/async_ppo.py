"""Bounded staleness: generation runs up to `rollout.max_head_offpolicyness` steps ahead of training.

    engines   gen 1 | gen 2 (weights 0) | gen 3 (weights 1) | ...
    trainer          | step 1            | step 2            | ...

The samples of step s come from weights that are at most k updates older than a synchronous run's. Which exact version serves
a step depends on timing, so full determinism refuses k > 0 (levels D1 to D5). Everything else is `trainer/ppo.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from reward.scoring import Scoring
from rollout.types import Episode, Prompt
from trainer.ppo import PPO


class AsyncPPO(PPO):
    """PPO whose rollouts run ahead in a thread. Needs the Ray launcher: there the loop is one process, and only its own
    thread waits for the engines while the trainer ranks work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ahead: deque[tuple[list[Prompt], dict[str, Any], Future[list[Episode]]]] = deque()
        self.started = 0
        self.sampler_state: dict[str, Any] | None = None
        # One generation at a time; weights and validation take their turn between two of them.
        self.engines = threading.Lock()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-ahead")

    def fit(self) -> None:
        """Train to the last step; generations that nobody needs any more are not waited for."""
        try:
            super().fit()
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def next_episodes(self, step: int, scoring: Scoring) -> tuple[list[Prompt], list[Episode]]:
        """The oldest generation in flight, after starting those that the bound allows."""
        self.started = max(self.started, step - 1)
        while self.started < min(step + self.config.rollout.max_head_offpolicyness, self.total_steps):
            self.started += 1
            prompts = self.parts.sampler.next_batch()
            state = self.parts.sampler.state_dict()
            self.ahead.append((prompts, state, self.pool.submit(self._generate, prompts, self.started)))
        prompts, self.sampler_state, future = self.ahead.popleft()
        return prompts, future.result()

    def sync_weights(self, step: int) -> None:
        """Between two generations, never within one."""
        with self.engines:
            super().sync_weights(step)

    def validate(self, step: int, metrics: dict[str, float]) -> None:
        """Validation has the engines to itself."""
        with self.engines:
            super().validate(step, metrics)

    def busy_seconds(self) -> dict[str, float]:
        """Nothing: asking an engine that generates ahead would wait for it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position is that of the trained batch, not of those generated ahead; they are generated again."""
        state = super().state_dict()
        return {**state, "sampler": self.sampler_state or state["sampler"]}

    def _generate(self, prompts: Sequence[Prompt], step: int) -> list[Episode]:
        with self.engines:
            return self.generate(prompts, step)
