"""Step metrics: their values, their independence of order, and how they combine."""

import math
from pathlib import Path

import pytest
import torch

from rollout.types import Episode, Prompt, SampleKey, Score
from trainer.algorithms.losses import PolicyLoss, ValueLoss
from trainer.algorithms.rollout_gap import RolloutCorrection
from trainer.experience import Experience
from trainer.metrics import batch_metrics, combine_metrics, mean_metrics, mean_of
from workers.models.batch import LossTotals, PolicyOutputs, TokenBatch, ValueOutputs

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def episode(task: int, sample: int, prompt: int, response: int, finish: str = "stop") -> Episode:
    return Episode(
        key=SampleKey(task, sample),
        prompt=Prompt(f"p/{task}", "p", tuple(range(1, prompt + 1)), "", ({"role": "user", "content": ""},)),
        seed=0,
        response_ids=tuple(range(1, response + 1)),
        response_mask=(True,) * response,
        logprobs=(-1.0,) * response,
        finish_reason=finish,
        text="",
    )


def score(total: float, dropped: bool = False) -> Score:
    return Score(math.nan if dropped else total, {"model": total}, dropped=dropped)


def experience() -> Experience:
    """Responses of 3 (truncated), 5 (ends at the cap), 0 and 2 tokens; the last one was dropped."""
    episodes = [episode(0, 0, 2, 3, "length"), episode(0, 1, 2, 5), episode(1, 0, 4, 0), episode(1, 1, 4, 2)]
    found = Experience.from_episodes(
        episodes, [score(1.0), score(3.0), score(-1.0), score(99.0, dropped=True)], pad_id=0
    )
    mask = found.tokens.mask
    numbers = torch.arange(mask.numel(), dtype=torch.float32).reshape(mask.shape)
    return found.with_tokens(
        advantages=torch.where(mask, numbers - 3.0, 0.0), returns=torch.where(mask, numbers, 77.0), old_values=numbers
    )


def test_a_mean_does_not_depend_on_order_and_of_nothing_it_is_zero():
    numbers = [1e16, 1.0, -1e16, 3.0]
    assert mean_of(numbers) == mean_of(sorted(numbers)) == 1.0
    assert mean_of([]) == 0.0


def test_shares_are_added_and_extremes_compared():
    leaves = [{"a": 1.0, "r_max": 2.0, "r_min": 2.0}, {"a": torch.tensor(3.0), "r_max": 1.0, "r_min": 1.0}, {"a": 0.5}]
    assert combine_metrics(leaves) == {"a": 4.5, "r_max": 2.0, "r_min": 1.0}


def test_mini_batches_are_averaged_and_extremes_compared():
    parts = [{"a": 1.0, "r_max": 2.0, "s/min": 2.0}, {"a": 3.0, "r_max": 1.0, "s/min": 1.0}]
    assert mean_metrics(parts) == {"a": 2.0, "r_max": 2.0, "s/min": 1.0}
    assert mean_metrics([]) == {}


def test_the_step_metrics_have_their_values():
    metrics = batch_metrics(experience(), 5)
    expected = {
        "perf/total_num_tokens": 5.0 + 7.0 + 4.0 + 6.0,
        "critic/score/mean": 1.0,
        "critic/score/max": 3.0,
        "critic/score/min": -1.0,
        # row 0 trains columns 2-4 (2, 3, 4), row 1 columns 2-6 (9 to 13)
        "critic/values/mean": (2 + 3 + 4 + 9 + 10 + 11 + 12 + 13) / 8,
        "critic/advantages/mean": (2 + 3 + 4 + 9 + 10 + 11 + 12 + 13) / 8 - 3.0,
        "critic/advantages/max": 10.0,
        "critic/advantages/min": -1.0,
        "critic/returns/max": 13.0,
        "critic/vf_explained_var": 1.0,
        "response_length/mean": 8 / 3,
        "response_length/max": 5.0,
        "response_length/min": 0.0,
        "response_length/empty_ratio": 1 / 3,
        "prompt_length/mean": 8 / 3,
        "prompt_length/max": 4.0,
        "prompt_length/min": 2.0,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_case_p4_the_clip_ratio_counts_finish_reasons_not_lengths():
    assert experience().truncated.tolist() == [True, False, False, False]
    assert batch_metrics(experience(), 5)["response_length/clip_ratio"] == 1 / 3


def test_rewards_are_those_the_advantages_were_made_of():
    found = experience()
    rewards = torch.where(found.tokens.mask, 0.5, 9.0)
    metrics = batch_metrics(found, 5, token_rewards=rewards)
    assert (metrics["critic/rewards/mean"], metrics["critic/rewards/max"], metrics["critic/rewards/min"]) == (
        2.0,
        2.5,
        1.5,
    )
    assert "critic/rewards/mean" not in batch_metrics(found, 5)


def test_metrics_do_not_depend_on_the_order_of_the_rows():
    found, order = experience(), torch.tensor([2, 0, 3, 1])
    shuffled = Experience(
        tuple(found.episodes[i] for i in order),
        found.tokens._map(lambda value: value[order]),
        found.scores[order],
        found.keep[order],
        found.group[order],
        found.truncated[order],
        found.sample,
        found.first,
    )
    assert batch_metrics(shuffled, 5) == batch_metrics(found, 5)


def test_a_step_in_which_every_sample_was_dropped_has_finite_metrics():
    found = Experience.from_episodes([episode(0, 0, 2, 3)], [score(0.0, dropped=True)], pad_id=0)
    assert batch_metrics(found, 5) == {"perf/total_num_tokens": 5.0}


def test_without_a_critic_there_are_no_value_metrics():
    names = batch_metrics(experience().with_tokens(old_values=None), 5)
    assert not [name for name in names if "value" in name or "vf" in name]


def all_names() -> set[str]:
    """Every name that data and losses can give."""
    mask = torch.ones(1, 1).bool()
    one = torch.zeros(1, 1)
    batch = TokenBatch(one.long(), torch.ones(1).long(), mask, one, one, one, one, one, one)
    loss = PolicyLoss(entropy_coef=0.1, kl_coef=0.1, correction=RolloutCorrection(2.0, 0.5, 2.0))
    policy = loss(PolicyOutputs(one, one), batch, LossTotals(1, 1, 1))[1]
    value = ValueLoss()(ValueOutputs(one), batch, LossTotals(1, 1, 1))[1]
    found = experience()
    return {*policy, *value, *batch_metrics(found, 5, found.tokens.advantages)}


@pytest.mark.parametrize("name", sorted(all_names()))
def test_every_metric_is_documented(name):
    assert f"`{name}`" in DOCUMENT.read_text(encoding="utf-8")
