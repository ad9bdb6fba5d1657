"""What the length cap does to scores, masks and returns."""

import math

import pytest
import torch

from configs.schema import AlgorithmConfig
from trainer.algorithms.shaping import bootstrap_values, shape_scores, trained_mask

scores = torch.tensor([1.0, 1.0, 1.0])
lengths = torch.tensor([3, 10, 10])
truncated = torch.tensor([False, True, False])


def test_by_default_scores_pass_unchanged():
    assert torch.equal(shape_scores(scores, lengths, truncated, AlgorithmConfig(), 10), scores)


def test_the_penalty_falls_on_truncated_responses_not_on_those_that_end_at_the_cap():
    algorithm = AlgorithmConfig(truncated="penalise", truncated_penalty=-2.0)
    assert shape_scores(scores, lengths, truncated, algorithm, 10).tolist() == [1.0, -1.0, 1.0]


def test_the_soft_penalty_is_linear_within_the_buffer():
    algorithm = AlgorithmConfig(overlong_buffer=4, overlong_penalty=2.0)
    at = torch.tensor([0, 6, 7, 8, 9, 10])
    shaped = shape_scores(torch.zeros(6), at, torch.zeros(6).bool(), algorithm, 10)
    assert shaped.tolist() == [0.0, 0.0, -0.5, -1.0, -1.5, -2.0]


def test_the_soft_penalty_never_exceeds_its_size_past_the_cap():
    algorithm = AlgorithmConfig(overlong_buffer=4)
    assert shape_scores(torch.zeros(1), torch.tensor([25]), torch.tensor([True]), algorithm, 10).tolist() == [-1.0]


def test_both_penalties_add_up():
    algorithm = AlgorithmConfig(truncated="penalise", truncated_penalty=-2.0, overlong_buffer=5, overlong_penalty=1.0)
    assert shape_scores(scores, lengths, truncated, algorithm, 10).tolist() == [1.0, -2.0, 0.0]


def test_a_buffer_longer_than_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.overlong_buffer=11: must lie in 0 to the response cap 10"):
        shape_scores(scores, lengths, truncated, AlgorithmConfig(overlong_buffer=11), 10)


def test_masking_takes_truncated_responses_out_of_the_loss_only_when_set():
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    assert torch.equal(trained_mask(mask, truncated, AlgorithmConfig()), mask)
    expected = torch.tensor([[True, False], [False, False], [False, True]])
    assert torch.equal(trained_mask(mask, truncated, AlgorithmConfig(truncated="mask")), expected)


def test_bootstrapping_takes_the_value_of_truncated_responses_alone():
    last = torch.tensor([math.nan, 3.0, 4.0])
    assert bootstrap_values(last, truncated, AlgorithmConfig()) is None
    assert bootstrap_values(last, truncated, AlgorithmConfig(truncated="bootstrap")).tolist() == [0.0, 3.0, 0.0]


def test_an_unknown_mode_is_refused_by_each_function():
    algorithm = AlgorithmConfig(truncated="drop")
    for call in (
        lambda: shape_scores(scores, lengths, truncated, algorithm, 10),
        lambda: trained_mask(torch.ones(3, 1).bool(), truncated, algorithm),
        lambda: bootstrap_values(scores, truncated, algorithm),
    ):
        with pytest.raises(ValueError, match=r"algorithm\.truncated=drop: known are keep, mask, penalise, bootstrap"):
            call()
