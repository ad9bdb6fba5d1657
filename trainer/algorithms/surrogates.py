"""The policy objectives, per token: PPO's clip, GSPO's sequence ratio, CISPO. Pure functions of tensors.

Notation: pi the policy that is trained, pi_old the policy before the step's first update, A the advantage,
r = pi / pi_old the ratio of a token. Each returns a *loss* (the negated objective) per token; `trainer.algorithms.losses` aggregates it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithms import POLICY_LOSSES
from trainer.algorithms.aggregate import row_sums
from trainer.algorithms.log_ratio import ratio_of
from trainer.algorithms.registry import Registry


@dataclass(frozen=True)
class Terms:
    """What an objective is made of; everything is 0 outside the mask."""

    logprobs: Tensor
    """[N, T] float32 with gradient: log pi of the sampled tokens."""
    log_ratio: Tensor
    """[N, T] float32 with gradient: log pi - log pi_old, as it is; `ratio` is its exponential."""
    advantages: Tensor
    """[N, T] float32."""
    mask: Tensor
    """[N, T] bool; trained tokens."""

    @classmethod
    def of(cls, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Terms:
        """Take the difference and clear what is outside the mask."""
        return cls(
            logprobs=torch.where(mask, logprobs, 0.0),
            log_ratio=torch.where(mask, logprobs - old_logprobs, 0.0),
            advantages=torch.where(mask, advantages, 0.0),
            mask=mask,
        )

    @property
    def ratio(self) -> Tensor:
        """[N, T] float32 with gradient: r = pi / pi_old, which can't overflow (`trainer.algorithms.log_ratio`); 1 outside the mask."""
        return ratio_of(self.log_ratio)


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio."""

    low: float = 0.2
    """Lower bound is 1 - low."""
    high: float = 0.2
    """Upper bound is 1 + high."""
    dual: float | None = None
    """Dual clip: the loss of a negative advantage is at most -dual * A; None turns it off."""


@dataclass(frozen=True)
class Surrogate:
    """An objective's result."""

    losses: Tensor
    """[N, T] float32 with gradient; loss per token."""
    ratio: Tensor
    """[N, T] float32, detached; the ratio that was compared with the bounds."""
    clipped: Tensor
    """[N, T] bool; tokens whose bound is in force (no gradient through the ratio)."""
    clipped_lower: Tensor
    """[N, T] bool; tokens on which the dual clip is in force."""


SurrogateFunction = Callable[[Terms, Clip], Surrogate]


def ppo_clip(terms: Terms, clip: Clip) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with dual clip, max(that objective, dual * A) where A < 0.

    Source: Schulman et al. 2017, equation 7; separate bounds: Yu et al. 2025 (DAPO); dual clip: Ye et al. 2020,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning".
    """
    return _clipped(terms.ratio, terms, clip)


def gspo(terms: Terms, clip: Clip) -> Surrogate:
    """PPO's clip with one ratio per sequence, s = exp(mean over its tokens of log r).

    Every token carries the value s and the gradient s * grad log pi; averaged over the sequence's tokens (aggregation
    `seq_mean_token_mean`) this is exactly the sequence objective. The bounds are compared with s and are far smaller than
    PPO's (the paper: low 3e-4, high 4e-4).

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (in its token-wise form).
    """
    counts = terms.mask.sum(dim=1).clamp(min=1)
    sequence = (row_sums(terms.log_ratio.detach(), terms.mask) / counts).to(terms.log_ratio.dtype)
    # Value of the sequence's mean, gradient of the token's own log-probability.
    log_ratio = sequence[:, None] + (terms.logprobs - terms.logprobs.detach())
    return _clipped(ratio_of(torch.where(terms.mask, log_ratio, 0.0)), terms, clip)


def cispo(terms: Terms, clip: Clip) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: the clipped ratio is a weight, and no token loses its gradient.

    The paper leaves the lower bound open: clip low 1.0 does that.

    Source: MiniMax 2025, "MiniMax-M1".
    """
    if clip.dual is not None:
        raise ValueError(f"algorithm.policy_loss.dual_clip={clip.dual} has no meaning for cispo; set it to null")
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    outside = terms.mask & (ratio != weight)
    return Surrogate(-weight * terms.advantages * terms.logprobs, ratio, outside, torch.zeros_like(outside))


SURROGATES: Registry[SurrogateFunction] = Registry(
    "policy loss", "algorithm.policy_loss.name", {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}, POLICY_LOSSES
)


def _clipped(ratio: Tensor, terms: Terms, clip: Clip) -> Surrogate:
    """The pessimistic one of the plain and the bounded loss, token by token."""
    plain = -terms.advantages * ratio
    bounded = -terms.advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    # `where`, not `maximum`: at a tie `maximum` halves the gradient between the two.
    clipped = terms.mask & (bounded > plain)
    losses = torch.where(clipped, bounded, plain)
    lower = torch.zeros_like(clipped)
    if clip.dual is not None:
        ceiling = -terms.advantages * clip.dual
        lower = terms.mask & (terms.advantages < 0) & (losses > ceiling)
        losses = torch.where(lower, ceiling, losses)
    return Surrogate(losses, ratio.detach(), clipped, lower)
