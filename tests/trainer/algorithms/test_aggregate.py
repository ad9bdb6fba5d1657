"""Sums that no order, no padding and no cut into leaves can change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms.aggregate import (
    AGGREGATIONS,
    aggregate,
    exact_sum,
    explained_variance,
    masked_moments,
    pairwise_sum,
    sequence_share,
    token_share,
    whiten,
)
from workers.models.batch import LossTotals

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def ragged(seed: int, rows: int = 5, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Random float32 values and a mask with gaps, empty rows and different lengths."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (rows, 1), generator=generator
    )
    return values, torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator)


def by_hand(values, mask, aggregation, sequences, tokens, cap) -> float:
    """The four aggregations written as loops."""
    total = 0.0
    for row, chosen in zip(values.tolist(), mask.tolist(), strict=True):
        picked = [v for v, m in zip(row, chosen, strict=True) if m]
        if not picked:
            continue
        total += {
            "token_mean": sum(picked) / tokens,
            "seq_mean_token_mean": sum(picked) / len(picked) / sequences,
            "seq_mean_token_sum": sum(picked) / sequences,
            "seq_mean_token_sum_norm": sum(picked) / sequences / cap,
        }[aggregation]
    return total


def totals_of(mask, cap=7) -> LossTotals:
    return LossTotals(int(mask.sum()), int(mask.any(dim=1).sum()), cap)


def test_the_exact_sum_is_correctly_rounded_in_any_order():
    values = torch.tensor([1e16, 1.0, -1e16, 1e-3], dtype=torch.float64)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3]):
        assert exact_sum(values[order]) == 1.001
    assert float(values.sum()) != 1.001, "a plain sum must differ, or this test shows nothing"


def test_the_sum_of_nothing_is_zero():
    assert exact_sum(torch.empty(0)) == 0.0
    assert masked_moments(torch.tensor([math.nan]), torch.tensor([False])).mean == 0.0
    assert float(pairwise_sum(torch.empty(0))) == 0.0


def test_moments_are_the_textbook_ones():
    moments = masked_moments(torch.tensor([1.0, 2.0, 99.0, 6.0]), torch.tensor([True, True, False, True]))
    assert (moments.count, moments.mean, moments.variance, moments.low, moments.high) == (3, 3.0, 7.0, 1.0, 6.0)


def test_equal_numbers_have_no_variance_at_all():
    assert masked_moments(torch.full((3,), 0.1, dtype=torch.float64), torch.ones(3).bool()).variance == 0.0


def test_full_whitening_gives_zero_mean_and_unit_variance():
    values = torch.tensor([[1.0, 2.0, 77.0], [6.0, 77.0, 77.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    root = math.sqrt(7.0 + 1e-8)
    expected = torch.tensor([[-2.0 / root, -1.0 / root, 0.0], [3.0 / root, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(whiten(values, mask), expected)


def test_scale_whitening_keeps_the_mean_and_every_sign():
    values, mask = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), torch.ones(3).bool()
    assert torch.equal(whiten(values, mask, "scale"), values / math.sqrt(7.0 + 1e-8))


def test_whitening_without_spread_divides_by_nothing():
    values, mask = torch.tensor([3.0, 3.0]), torch.ones(2).bool()
    assert torch.equal(whiten(values, mask, "full"), torch.zeros(2))
    assert torch.equal(whiten(values, mask, "scale"), values)
    assert torch.equal(whiten(values, torch.zeros(2).bool(), "full"), torch.zeros(2))


def test_no_whitening_only_clears_what_is_masked():
    values = torch.tensor([3.0, math.nan])
    assert torch.equal(whiten(values, torch.tensor([True, False]), "none"), torch.tensor([3.0, 0.0]))


def test_an_unknown_whitening_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.advantage\.whiten=half"):
        whiten(torch.zeros(1), torch.ones(1).bool(), "half")


@repeatable
@given(seeds)
def test_whitening_is_bit_equal_under_row_order_and_padding(seed):
    values, mask = ragged(seed)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    whole = whiten(values, mask)
    assert torch.equal(whiten(values[order], mask[order]), whole[order])
    padded = whiten(torch.nn.functional.pad(values, (0, 5), value=9.0), torch.nn.functional.pad(mask, (0, 5)))
    assert torch.equal(padded[:, : values.shape[1]], whole)


@repeatable
@given(seeds, st.integers(1, 40), st.integers(0, 20))
def test_the_pairwise_sum_does_not_see_zeros_on_the_right(seed, width, extra):
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(pairwise_sum(torch.nn.functional.pad(values, (0, extra))), pairwise_sum(values))


def test_a_plain_sum_does_see_them():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(101, generator=generator) for _ in range(50)]
    assert any(not torch.equal(torch.nn.functional.pad(row, (0, 60)).sum(), row.sum()) for row in rows)


def test_the_pairwise_sum_never_gives_a_negative_zero():
    for width in (1, 2, 3):
        assert math.copysign(1.0, float(pairwise_sum(torch.full((width,), -0.0)))) == 1.0


@repeatable
@given(seeds, st.sampled_from(AGGREGATIONS))
def test_aggregations_equal_their_definition(seed, aggregation):
    values, mask = ragged(seed)
    totals = totals_of(mask)
    expected = by_hand(values, mask, aggregation, max(totals.sequences, 1), max(totals.tokens, 1), 7)
    assert float(aggregate(values, mask, totals, aggregation)) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@repeatable
@given(seeds, st.sampled_from(AGGREGATIONS), st.integers(1, 5))
def test_shares_of_any_cut_add_up_and_gradients_do_not_move_a_bit(seed, aggregation, size):
    values, mask = ragged(seed)
    totals = totals_of(mask)
    whole = values.clone().requires_grad_()
    aggregate(whole, mask, totals, aggregation).backward()
    cut = values.clone().requires_grad_()
    shares = [
        aggregate(cut[i : i + size], mask[i : i + size], totals, aggregation) for i in range(0, len(values), size)
    ]
    added = sum(shares)
    added.backward()
    assert float(added.detach()) == pytest.approx(
        float(aggregate(values, mask, totals, aggregation)), rel=1e-12, abs=1e-12
    )
    assert torch.equal(cut.grad, whole.grad)


def test_means_of_leaves_averaged_are_wrong_which_is_why_totals_are_global():
    values, mask = torch.tensor([[-1.0, 0, 0], [1.0, 1.0, 1.0]]), torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    shares = [aggregate(values[i : i + 1], mask[i : i + 1], totals_of(mask), "token_mean") for i in range(2)]
    local = [aggregate(values[i : i + 1], mask[i : i + 1], totals_of(mask[i : i + 1]), "token_mean") for i in range(2)]
    assert float(sum(shares)) == 0.5
    assert float(sum(local)) / 2 == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_without_trained_tokens_contribute_nothing_even_when_they_hold_nan(aggregation):
    values = torch.tensor([[math.nan, math.inf], [2.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[False, False], [True, False]])
    loss = aggregate(values, mask, LossTotals(1, 1, 4), aggregation)
    assert float(loss.detach()) == (0.5 if aggregation == "seq_mean_token_sum_norm" else 2.0)
    loss.backward()
    assert bool(values.grad.isfinite().all())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_mini_batch_without_any_trained_token_has_loss_zero(aggregation):
    nothing = torch.zeros(2, 3)
    assert float(aggregate(nothing, nothing.bool(), LossTotals(0, 0, 4), aggregation)) == 0.0


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.aggregation=mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1).bool(), LossTotals(1, 1, 1), "mean")


def test_metric_shares_are_means_over_tokens_and_sequences():
    values, mask = torch.tensor([[1.0, 3.0], [8.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]).bool()
    assert float(token_share(values, mask, totals_of(mask))) == 4.0
    assert float(sequence_share(torch.tensor([True, False]), mask, totals_of(mask))) == 0.5


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    returns, mask = torch.tensor([[1.0, 2.0, 50.0], [6.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == 0.0
    assert explained_variance(2 * returns, returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == -3.0


def test_explained_variance_of_constant_returns_is_zero_not_nan():
    same, mask = torch.ones(1, 3), torch.ones(1, 3).bool()
    assert explained_variance(torch.tensor([[1.0, 2.0, 3.0]]), same, mask) == 0.0
