"""Groups that teach nothing make room for further prompts, in the order of the data and never twice with one seed."""

from __future__ import annotations

from types import SimpleNamespace

from configs.schema import DynamicSamplingConfig
from rollout.episodes import requests_for
from rollout.types import Episode, Prompt, SampleKey, Sampling, Score
from trainer.data.cursors import Source
from trainer.data.sampler import PromptSampler
from trainer.dynamic_sampling import RewardedBatch, fill_with_varied_groups

ON = DynamicSamplingConfig(enable=True, max_rounds=4)
DROPPED = None


def batch(*groups: tuple[str, list[float | None]], errors: float = 0.0) -> RewardedBatch:
    """Prompts by id with the rewards of their samples."""
    prompts = [Prompt(name, "rows", (1,), "", ()) for name, _ in groups]
    episodes = [
        Episode(SampleKey(task, i), prompts[task], 0, (2,), (True,), (-1.0,), "stop", f"{name}.{i}")
        for task, (name, rewards) in enumerate(groups)
        for i in range(len(rewards))
    ]
    scores = [
        Score(0.0, {}, dropped=True) if reward is DROPPED else Score(reward, {})
        for _, rewards in groups
        for reward in rewards
    ]
    return RewardedBatch(prompts, episodes, scores, {"reward/errors": errors, "reward/total/mean": 9.0 + errors})


class Rounds:
    """Gives prepared groups, and remembers what it was asked for."""

    def __init__(self, *rounds: RewardedBatch) -> None:
        self.rounds = list(rounds)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, requests: int) -> RewardedBatch:
        self.asked.append((count, requests))
        given = self.rounds.pop(0)
        assert len(given.prompts) == count
        return given


def ids(result: RewardedBatch) -> list[str]:
    return [prompt.id for prompt in result.prompts]


def test_switched_off_it_changes_nothing_and_asks_for_nothing():
    flat = batch(("a", [1.0, 1.0]))
    source = Rounds()
    assert fill_with_varied_groups(flat, DynamicSamplingConfig(), source) is flat
    assert source.asked == []


def test_a_batch_whose_groups_all_vary_stays_as_it_is():
    first = batch(("a", [1.0, 0.0]), ("b", [0.0, 1.0]))
    result = fill_with_varied_groups(first, ON, Rounds())
    assert (result.prompts, result.episodes, result.scores) == (first.prompts, first.episodes, first.scores)
    assert result.metrics["data/dynamic_sampling/rounds"] == 1.0
    assert result.metrics["data/dynamic_sampling/replaced"] == 0.0


def test_flat_groups_are_replaced_until_all_vary_and_each_round_asks_for_the_missing_ones_alone():
    first = batch(("a", [1.0, 1.0]), ("b", [0.0, 1.0]), ("c", [0.0, 0.0]))
    source = Rounds(batch(("d", [1.0, 1.0]), ("e", [1.0, 0.0])), batch(("f", [0.5, 0.0])))
    result = fill_with_varied_groups(first, ON, source)
    assert source.asked == [(2, 6), (1, 10)]
    assert ids(result) == ["b", "e", "f"]
    assert [score.total for score in result.scores] == [0.0, 1.0, 1.0, 0.0, 0.5, 0.0]
    assert result.metrics["data/dynamic_sampling/rounds"] == 3.0
    assert result.metrics["data/dynamic_sampling/replaced"] == 3.0
    assert result.metrics["data/dynamic_sampling/unfilled"] == 0.0


def test_tasks_are_numbered_anew_and_each_episode_keeps_its_prompt_and_score():
    first = batch(("a", [1.0, 1.0]), ("b", [0.0, 1.0]))
    result = fill_with_varied_groups(first, ON, Rounds(batch(("c", [3.0, 2.0]))))
    assert [episode.key for episode in result.episodes] == [SampleKey(t, s) for t in (0, 1) for s in (0, 1)]
    assert [episode.text for episode in result.episodes] == ["b.0", "b.1", "c.0", "c.1"]
    assert all(episode.prompt is result.prompts[episode.key.task] for episode in result.episodes)


def test_after_the_last_round_the_earliest_flat_groups_fill_up_those_without_any_score_last():
    first = batch(("a", [DROPPED, DROPPED]), ("b", [1.0, 1.0]), ("c", [0.0, 1.0]))
    source = Rounds(batch(("d", [1.0, 1.0]), ("e", [DROPPED, 2.0])))
    result = fill_with_varied_groups(first, DynamicSamplingConfig(enable=True, max_rounds=2), source)
    assert ids(result) == ["b", "c", "d"]
    assert result.metrics["data/dynamic_sampling/unfilled"] == 2.0


def test_a_dropped_sample_does_not_make_a_group_vary():
    first = batch(("a", [DROPPED, 1.0]))
    assert ids(fill_with_varied_groups(first, ON, Rounds(batch(("b", [0.0, 1.0]))))) == ["b"]


def test_rewards_that_differ_by_less_than_the_training_precision_are_equal():
    first = batch(("a", [1.0, 1.0 + 1e-12]))
    assert ids(fill_with_varied_groups(first, ON, Rounds(batch(("b", [0.0, 1.0]))))) == ["b"]


def test_metrics_are_the_unselected_first_rounds_with_all_errors():
    first = batch(("a", [1.0, 1.0]), errors=1.0)
    metrics = fill_with_varied_groups(first, ON, Rounds(batch(("b", [0.0, 1.0]), errors=2.0))).metrics
    assert metrics["reward/errors"] == 3.0
    assert metrics["reward/total/mean"] == 10.0


def test_seeds_of_all_rounds_differ_even_for_a_prompt_that_is_drawn_again():
    def seeds(first_index: int) -> set[int]:
        prompts = [Prompt("rows/0", "rows", (1,), "", ()), Prompt("rows/1", "rows", (1,), "", ())]
        sampling = Sampling(max_new_tokens=1, temperature=1.0)
        return {
            request.seed
            for request in requests_for(
                prompts, sampling, n=4, run_seed=0, split="train", step=1, first_index=first_index
            )
        }

    assert len(seeds(0) | seeds(8) | seeds(12)) == 24
    assert seeds(0) == seeds(0)


def sampler() -> PromptSampler:
    rows = tuple(Prompt(f"rows/{i}", "rows", (1,), "", ()) for i in range(20))
    return PromptSampler(SimpleNamespace(sources=(Source("rows", 1.0, rows),)), 4, seed=0)  # type: ignore[arg-type]


def test_the_position_after_further_prompts_is_exact():
    straight, resumed = sampler(), sampler()
    seen = straight.next_batch() + straight.more(3)
    resumed.load_state_dict(straight.state_dict())
    assert [p.id for p in resumed.next_batch() + resumed.more(1)] == [
        p.id for p in straight.next_batch() + straight.more(1)
    ]
    assert len({p.id for p in seen}) == 7
    assert straight.step == 2
