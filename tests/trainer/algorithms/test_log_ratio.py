"""The exponential of a log-ratio: exact below its limit, the tangent above, with the right gradient on both sides."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.algorithms.log_ratio import LOG_RATIO_LIMIT, ratio_minus_one, ratio_of
from trainer.algorithms.rollout_gap import RolloutCorrection, token_weights
from trainer.algorithms.surrogates import Clip, Terms, cispo, gspo, ppo_clip

E20 = math.exp(20.0)


def with_gradient(function, values, dtype=torch.float64) -> tuple[list[float], list[float]]:
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    result = function(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    return result.tolist(), gradient.tolist()


@pytest.mark.parametrize(("function", "offset"), [(ratio_of, 0.0), (ratio_minus_one, 1.0)])
def test_value_and_gradient_on_both_sides(function, offset):
    below = [-800.0, -29.0, -1e-9, 0.0, 1.5, 20.0]
    values, gradients = with_gradient(function, below)
    assert values == pytest.approx([math.exp(x) - offset if offset == 0 else math.expm1(x) for x in below], rel=1e-14)
    assert gradients == pytest.approx([math.exp(x) for x in below], rel=1e-14)
    values, gradients = with_gradient(function, [21.0, 30.0, 1000.0])
    assert values == pytest.approx([E20 * 2 - offset, E20 * 11 - offset, E20 * 981 - offset], rel=1e-14)
    assert gradients == pytest.approx([E20] * 3, rel=1e-14)


def test_float32_neither_overflows_nor_moves_below_the_limit():
    x = torch.linspace(-30.0, LOG_RATIO_LIMIT, 10_001)
    assert torch.equal(ratio_of(x), x.exp())
    values, gradients = with_gradient(ratio_of, [89.0, 1e4, -1e4], torch.float32)
    assert all(map(math.isfinite, values + gradients))
    assert (torch.tensor(values) * 0.0 == 0.0).all(), "an advantage of zero stays zero"


def terms(log_ratios: list[float], advantage: float) -> tuple[Terms, torch.Tensor]:
    """One sequence; the gradient is asked for with respect to the second result, log pi."""
    logprobs = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, len(log_ratios), dtype=torch.float64)
    return Terms.of(logprobs, torch.zeros_like(ones), advantage * ones, ones.bool()), logprobs


def gradient_of(surrogate, log_ratios: list[float], advantage: float, clip: Clip = Clip()) -> list[float]:  # noqa: B008
    inputs, logprobs = terms(log_ratios, advantage)
    return torch.autograd.grad(surrogate(inputs, clip).losses.sum(), logprobs)[0][0].tolist()


def test_ppo_still_lowers_a_bad_token_whose_ratio_is_beyond_the_limit():
    assert gradient_of(ppo_clip, [29.0], -1.0) == pytest.approx([E20])
    assert gradient_of(ppo_clip, [-29.0], 1.0) == pytest.approx([-math.exp(-29.0)], rel=1e-12)
    # The bounds of the clip are in force as everywhere.
    assert gradient_of(ppo_clip, [29.0], 1.0) == gradient_of(ppo_clip, [-29.0], -1.0) == [0.0]
    assert gradient_of(ppo_clip, [29.0], -1.0, Clip(dual=3.0)) == [0.0]


def test_gspo_takes_the_mean_of_the_log_ratios_as_they_are():
    inputs, _ = terms([-40.0, 39.9], 1.0)
    assert gspo(inputs, Clip()).ratio[0].tolist() == pytest.approx([math.exp(-0.05)] * 2, rel=1e-12)
    gradient = gradient_of(gspo, [-40.0, 39.9], 1.0)
    assert gradient == pytest.approx([-math.exp(-0.05)] * 2, rel=1e-12)


def test_cispo_weighs_by_the_clipped_ratio_on_both_sides():
    assert gradient_of(cispo, [29.0, -29.0], 2.0) == pytest.approx([-1.2 * 2.0, -0.8 * 2.0])


def test_importance_weights_are_exact_below_and_finite_above():
    gap = torch.tensor([[-29.0, 1.0, 200.0]])
    weights = token_weights(gap, torch.ones(1, 3).bool(), RolloutCorrection(decoupled=True))[0]
    assert weights.tolist() == pytest.approx([math.exp(-29.0), math.e, E20 * 181], rel=1e-6)
    assert not weights.requires_grad
