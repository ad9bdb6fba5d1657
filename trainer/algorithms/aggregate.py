"""Sums over masked tokens: statistics that don't depend on any order, and losses that don't depend on padding.

Two kinds of sum, for two needs:

- Statistics (means, variances, metrics) use the *exact* sum (Shewchuk's, `math.fsum`): the correctly rounded value of the
  true sum. Row order, padding, batch layout and thread count can't change it.
- Losses need a gradient and stay on the device. They use a *pairwise* sum in float64 over the columns: neighbours are added,
  then neighbours of the result, and so on. Zeros on the right leave every partial sum as it is, so padding can't change it.

Losses are aggregated *globally*: a leaf contributes its share, sums divided by counts of the whole mini-batch, so shares
add up to the same loss however the mini-batch is cut into leaves and dealt to ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.models.batch import LossTotals

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
WHITENINGS = ("none", "full", "scale")
VARIANCE_EPS = 1e-8
"""Added to a variance before its root is taken."""


def exact_sum(values: Tensor) -> float:
    """The correctly rounded sum of all elements (any shape, any float dtype); 0.0 of none."""
    return math.fsum(values.detach().to("cpu", torch.float64).flatten().tolist())


@dataclass(frozen=True)
class Moments:
    """Statistics of the masked elements."""

    count: int
    """Elements under the mask."""
    mean: float
    """0.0 when there is none."""
    variance: float
    """Unbiased (divided by count - 1); 0.0 below two elements, and exactly 0.0 when all are equal."""
    low: float
    """Smallest; 0.0 when there is none."""
    high: float
    """Largest; 0.0 when there is none."""


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Mean, variance and extremes of `values` where `mask` (bool, same shape) is True."""
    chosen = values.detach().to(torch.float64)[mask]
    count = chosen.numel()
    if count == 0:
        return Moments(0, 0.0, 0.0, 0.0, 0.0)
    low, high = float(chosen.min()), float(chosen.max())
    if low == high:
        # The rounded mean of equal numbers may differ from them; their spread must not become a tiny positive number.
        return Moments(count, low, 0.0, low, high)
    mean = exact_sum(chosen) / count
    return Moments(count, mean, exact_sum((chosen - mean) ** 2) / (count - 1), low, high)


def whiten(values: Tensor, mask: Tensor, mode: str = "full") -> Tensor:
    """Normalise by the statistics of the masked elements; what is not masked becomes 0.

    Args:
        values: float, any shape.
        mask: bool, same shape.
        mode: `none`; `full`: (x - mean) / sqrt(variance + 1e-8); `scale`: x / sqrt(variance + 1e-8), which keeps every sign.

    A variance of zero leaves nothing to divide by: `full` gives zeros, `scale` gives the values as they are.
    """
    if mode not in WHITENINGS:
        raise ValueError(f"algorithm.advantage.whiten={mode}: known are {', '.join(WHITENINGS)}")
    wide = values.detach().to(torch.float64)
    if mode != "none":
        moments = masked_moments(values, mask)
        scale = math.sqrt(moments.variance + VARIANCE_EPS) if moments.variance > 0.0 else 1.0
        wide = (wide - (moments.mean if mode == "full" else 0.0)) / scale
    return torch.where(mask, wide, 0.0).to(values.dtype)


def pairwise_sum(values: Tensor) -> Tensor:
    """Sum of the last dimension by neighbours: ((x0 + x1) + (x2 + x3)) + ...; differentiable, unchanged by zeros on the right."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values[..., 0::2] + values[..., 1::2]
    if values.shape[-1] == 0:
        return values.sum(dim=-1)
    return values[..., 0] + 0.0  # no negative zero: whether one survives would depend on the padding


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """[N] float64: sum of each row's masked elements ([N, T]), differentiable, whatever the padding holds."""
    return pairwise_sum(torch.where(mask, values, 0.0).to(torch.float64))


def aggregate(values: Tensor, mask: Tensor, totals: LossTotals, aggregation: str) -> Tensor:
    """This leaf's share of the mini-batch's loss.

    Args:
        values: [N, T] float; a loss per token.
        mask: [N, T] bool; trained tokens. A row without any contributes nothing.
        totals: counts of the whole mini-batch.
        aggregation: with l_it the token losses, n_i the trained tokens of sequence i, S the mini-batch's sequences with at
            least one trained token and L the response cap:
            `token_mean` sum l_it / sum n_i (DAPO); `seq_mean_token_mean` sum_i (sum_t l_it / n_i) / S (GRPO);
            `seq_mean_token_sum` sum l_it / S; `seq_mean_token_sum_norm` sum l_it / (S L) (Dr. GRPO).

    Returns:
        Scalar float64 with gradient. Shares of any partition of the mini-batch add up to the same loss; the gradient of a
        token does not depend on the partition at all.
    """
    sums = row_sums(values, mask)
    if aggregation == "token_mean":
        weighted = sums / max(totals.tokens, 1)
    elif aggregation == "seq_mean_token_mean":
        weighted = sums / mask.sum(dim=1).clamp(min=1) / max(totals.sequences, 1)
    elif aggregation == "seq_mean_token_sum":
        weighted = sums / max(totals.sequences, 1)
    elif aggregation == "seq_mean_token_sum_norm":
        weighted = sums / (max(totals.sequences, 1) * totals.max_response_tokens)
    else:
        raise ValueError(f"algorithm.aggregation={aggregation}: known are {', '.join(AGGREGATIONS)}")
    return pairwise_sum(weighted)


def token_share(values: Tensor, mask: Tensor, totals: LossTotals) -> Tensor:
    """Share of a per-token mean (metrics): detached scalar float64."""
    return aggregate(values.detach().to(torch.float64), mask, totals, "token_mean")


def sequence_share(values: Tensor, mask: Tensor, totals: LossTotals) -> Tensor:
    """Share of a per-sequence mean ([N] values, over sequences with a trained token): detached scalar float64."""
    chosen = torch.where(mask.any(dim=1), values.detach().to(torch.float64), 0.0)
    return pairwise_sum(chosen) / max(totals.sequences, 1)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over masked tokens: 1 is perfect, 0 no better than a constant.

    0.0 when the returns don't vary: there is nothing to explain.
    """
    spread = masked_moments(returns, mask).variance
    if spread == 0.0:
        return 0.0
    error = returns.to(torch.float64) - values.to(torch.float64)
    return 1.0 - masked_moments(error, mask).variance / spread
