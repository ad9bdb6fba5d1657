"""Bounded staleness: asked for as early as the bound allows and never earlier, handed out in order, refused when too old."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.types import Episode, Prompt, SampleKey
from trainer.async_ppo import RolloutsAhead, StalenessBound, StalenessError
from trainer.data.cursors import Source
from trainer.data.sampler import PromptSampler


def episode(prompt: Prompt, weight_version: int) -> Episode:
    return Episode(SampleKey(0, 0), prompt, 0, (1,), (True,), (-1.0,), "stop", "", weight_version)


def sampler() -> PromptSampler:
    rows = tuple(Prompt(f"rows/{i}", "rows", (1,), "", ()) for i in range(40))
    return PromptSampler(SimpleNamespace(sources=(Source("rows", 1.0, rows),)), 4, seed=0)  # type: ignore[arg-type]


class Engines:
    """Sample at once, with the newest weights that they have."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []

    def start(self, prompts: list[Prompt], step: int) -> tuple[Any, Any]:
        self.asked.append(step)
        episodes = [episode(prompt, self.version) for prompt in prompts]
        return SimpleNamespace(result=lambda: episodes), f"rewards of step {step}"


def test_the_bound():
    assert [StalenessBound(0).newest_step(synced) for synced in (0, 1, 4)] == [1, 2, 5]
    assert [StalenessBound(2).newest_step(synced) for synced in (0, 1, 4)] == [3, 4, 7]


@pytest.mark.parametrize(("lag", "step", "oldest"), [(0, 1, 0), (0, 5, 4), (1, 5, 3), (3, 5, 1), (3, 2, 0)])
def test_samples_one_version_older_than_allowed_are_refused_by_name(lag, step, oldest):
    prompt = Prompt("rows/0", "rows", (1,), "", ())
    for version in range(oldest, step):
        StalenessBound(lag).check([episode(prompt, version)], step)
    if oldest:
        with pytest.raises(
            StalenessError,
            match=rf"step {step}: .*after {oldest - 1} steps; rollout.max_head_offpolicyness={lag} allows .*{oldest} at",
        ):
            StalenessBound(lag).check([episode(prompt, oldest), episode(prompt, oldest - 1)], step)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_steps_are_asked_for_as_early_as_the_bound_allows_and_come_in_the_order_of_the_data(lag):
    engines, straight = Engines(), sampler()
    rollouts = RolloutsAhead(engines.start, sampler(), lag, total_steps=6)
    for step in range(1, 7):
        prompts, episodes, rewards = rollouts.next(step)
        assert engines.asked == list(range(1, min(step + lag, 6) + 1))
        assert prompts == straight.next_batch()
        assert [found.prompt for found in episodes] == prompts
        assert rewards == f"rewards of step {step}"
        assert all(0 <= step - 1 - found.weight_version <= lag for found in episodes)
        assert rollouts.ahead == (lag > 0 and step < 6)
        engines.version = step  # weights after the step


def test_what_a_slow_weight_update_makes_too_old_is_refused():
    engines = Engines()
    rollouts = RolloutsAhead(engines.start, sampler(), 1, total_steps=6)
    rollouts.next(1)
    rollouts.next(2)
    with pytest.raises(StalenessError, match=r"step 3: .*sampled with the weights after 0 steps"):
        rollouts.next(3)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_checkpoints_position_is_behind_the_batch_that_was_trained(lag):
    engines, first = Engines(), sampler()
    rollouts = RolloutsAhead(engines.start, first, lag, total_steps=6)
    before = rollouts.sampler_state()
    for step in (1, 2):
        rollouts.next(step)
        engines.version = step
    state = rollouts.sampler_state()
    assert state != before

    resumed = sampler()
    resumed.load_state_dict(state)
    again = RolloutsAhead(engines.start, resumed, lag, total_steps=6)
    assert again.sampler_state() == state
    engines.asked.clear()
    for step in (3, 4):
        assert rollouts.next(step)[0] == again.next(step)[0]
        engines.version = step
    assert set(engines.asked) == set(range(3, min(4 + lag, 6) + 1))


def test_the_position_at_the_end_is_that_of_a_run_in_step():
    def end(lag: int) -> dict[str, Any]:
        engines = Engines()
        rollouts = RolloutsAhead(engines.start, sampler(), lag, total_steps=3)
        for step in (1, 2, 3):
            rollouts.next(step)
            engines.version = step
        return rollouts.sampler_state()

    assert end(2) == end(0)
