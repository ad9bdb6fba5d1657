"""Policy and value loss: objectives per token, put together and aggregated over the mini-batch.

A loss is a frozen record of plain numbers, so it can be sent to any worker. Called on one leaf it returns the leaf's *share*
of the mini-batch's loss (see `trainer.algorithms.aggregate`): shares, and the gradients of shares, add up to the same whole for any
cut into leaves and any number of ranks. Metrics are shares too (float64, detached), except names that end in `_max` or
`_min`, which combine by maximum and minimum and are absent from a leaf in which nothing is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from configs.user_code import absolute_reference
from trainer.algorithms.aggregate import AGGREGATIONS, aggregate, explained_variance, token_share
from trainer.algorithms.kl import SAMPLED_ESTIMATORS, kl_estimate
from trainer.algorithms.rollout_gap import RolloutCorrection, gap_metrics, token_weights
from trainer.algorithms.surrogates import SURROGATES, Clip, Terms
from workers.models.batch import LossTotals, PolicyOutputs, TokenBatch, ValueOutputs

__all__ = ["PolicyLoss", "ValueLoss", "explained_variance", "policy_loss_from_config", "value_loss_from_config"]


@dataclass(frozen=True)
class PolicyLoss:
    """objective + kl_coef * KL(pi || reference) - entropy_coef * entropy, each aggregated in the same way.

    Raises:
        ValueError: an unknown name, or numbers that make no sense; named by their configuration key.
    """

    name: str = "ppo_clip"
    """`ppo_clip`, `gspo`, `cispo`, or the user's own `module:function` of type `trainer.algorithms.surrogates.SurrogateFunction`."""
    clip_low: float = 0.2
    """Ratio's lower bound is 1 - clip_low."""
    clip_high: float = 0.2
    """Ratio's upper bound is 1 + clip_high."""
    dual_clip: float | None = None
    """Bound above 1 on the loss of negative advantages; None turns it off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: str = "token_mean"
    """See `trainer.algorithms.aggregate.aggregate`."""
    kl_coef: float = 0.0
    """Weight of the KL term; 0 leaves it out."""
    kl_estimator: str = "k3"
    """`k1`, `k2`, `k3`, or `full`."""
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """The train/rollout gap."""

    def __post_init__(self) -> None:
        SURROGATES.get(self.name)
        _require_aggregation(self.aggregation)
        if self.clip_low < 0.0 or self.clip_high < 0.0:
            raise ValueError(
                f"algorithm.policy_loss.clip_low={self.clip_low}, clip_high={self.clip_high}: bounds can't be negative"
            )
        if self.dual_clip is not None and (self.dual_clip <= 1.0 or self.name == "cispo"):
            raise ValueError(
                f"algorithm.policy_loss.dual_clip={self.dual_clip} with {self.name}: it must be above 1, "
                "and cispo has none; null turns it off"
            )
        if self.kl_coef != 0.0 and self.kl_estimator not in (*SAMPLED_ESTIMATORS, "full"):
            raise ValueError(f"algorithm.kl.estimator={self.kl_estimator}: known are k1, k2, k3, full")

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the worker must keep the entropy's graph."""
        return self.entropy_coef != 0.0

    @property
    def needs_full_kl(self) -> bool:
        """Whether the worker must compute `PolicyOutputs.full_kl`."""
        return self.kl_coef != 0.0 and self.kl_estimator == "full"

    def __call__(
        self, outputs: PolicyOutputs, batch: TokenBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The leaf's share of the loss (scalar float64 with gradient) and of the metrics.

        Raises:
            ValueError: the batch lacks old log-probabilities, advantages, or what the KL or the correction needs.
        """
        mask = batch.mask
        old_logprobs = _require(batch.old_logprobs, "old_logprobs", f"the policy loss {self.name}")
        advantages = _require(batch.advantages, "advantages", f"the policy loss {self.name}")
        terms = Terms.of(outputs.logprobs, old_logprobs, advantages, mask)
        surrogate = SURROGATES.get(self.name)(terms, Clip(self.clip_low, self.clip_high, self.dual_clip))
        losses, gap = self._corrected(surrogate.losses, old_logprobs, batch, totals)
        loss = aggregate(losses, mask, totals, self.aggregation)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": token_share(surrogate.clipped, mask, totals),
            "actor/pg_clipfrac_lower": token_share(surrogate.clipped_lower, mask, totals),
            "actor/ppo_kl": token_share(-terms.log_ratio, mask, totals),
            "actor/entropy": token_share(outputs.entropy, mask, totals),
        }
        if bool(mask.any()):
            ratio = surrogate.ratio[mask].to(torch.float64)
            metrics |= {"actor/ratio_max": ratio.max(), "actor/ratio_min": ratio.min()}
        if self.entropy_coef != 0.0:
            loss = loss - self.entropy_coef * aggregate(outputs.entropy, mask, totals, self.aggregation)
        if self.kl_coef != 0.0:
            kl_loss = aggregate(self._kl(outputs, batch), mask, totals, self.aggregation)
            metrics["actor/kl_loss"] = kl_loss.detach()
            loss = loss + self.kl_coef * kl_loss
        return loss, metrics | gap

    def _corrected(
        self, losses: Tensor, old_logprobs: Tensor, batch: TokenBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token losses weighted for the train/rollout gap, and the gap's metrics."""
        if batch.rollout_logprobs is None:
            if self.correction.active:
                _require(None, "rollout_logprobs", "algorithm.rollout_correction")
            return losses, {}
        log_gap = torch.where(batch.mask, old_logprobs - batch.rollout_logprobs, 0.0)
        if self.correction.active:
            losses = losses * token_weights(log_gap, batch.mask, self.correction)
        return losses, gap_metrics(log_gap, batch.mask, totals, self.correction)

    def _kl(self, outputs: PolicyOutputs, batch: TokenBatch) -> Tensor:
        """[N, T] KL to the reference, with gradient."""
        if self.kl_estimator == "full":
            return _require(outputs.full_kl, "full_kl", "algorithm.kl.estimator=full")
        reference = _require(batch.ref_logprobs, "ref_logprobs", "algorithm.kl.placement=loss")
        return kl_estimate(outputs.logprobs, reference, batch.mask, self.kl_estimator)


@dataclass(frozen=True)
class ValueLoss:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, aggregated.

    Source: Schulman et al. 2016 for the regression; the clip is that of the first PPO implementation (OpenAI baselines).
    """

    clip_range: float = 0.2
    """c: values may move this far from the old ones; 0 turns clipping off."""
    aggregation: str = "token_mean"
    """See `trainer.algorithms.aggregate.aggregate`."""

    def __post_init__(self) -> None:
        _require_aggregation(self.aggregation)
        if self.clip_range < 0.0:
            raise ValueError(
                f"algorithm.value_loss.clip_range={self.clip_range}: can't be negative; 0 turns clipping off"
            )

    def __call__(
        self, outputs: ValueOutputs, batch: TokenBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The leaf's share of the loss (scalar float64 with gradient) and of the metrics.

        Raises:
            ValueError: the batch lacks returns or, with clipping, old values.
        """
        mask = batch.mask
        values = torch.where(mask, outputs.values, 0.0)
        returns = torch.where(mask, _require(batch.returns, "returns", "the value loss"), 0.0)
        losses = (values - returns) ** 2
        outside = torch.zeros_like(mask)
        if self.clip_range > 0.0:
            old_values = torch.where(mask, _require(batch.old_values, "old_values", "the clipped value loss"), 0.0)
            moved = values - old_values
            bounded = (old_values + moved.clamp(-self.clip_range, self.clip_range) - returns) ** 2
            # Measured on the values as they came; after the clip nothing would ever be outside.
            outside = mask & (moved.detach().abs() > self.clip_range)
            # `where`, not `maximum`: at a tie `maximum` halves the gradient between the two.
            losses = torch.where(bounded > losses, bounded, losses)
        loss = aggregate(0.5 * losses, mask, totals, self.aggregation)
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": token_share(outside, mask, totals),
            "critic/vpred_mean": token_share(values, mask, totals),
        }
        return loss, metrics


def policy_loss_from_config(algorithm: AlgorithmConfig, kl_coef: float) -> PolicyLoss:
    """The configured policy loss.

    Args:
        algorithm: the `algorithm` group.
        kl_coef: the controller's coefficient now when `algorithm.kl.placement` is `loss`, else 0.
    """
    settings, gap = algorithm.policy_loss, algorithm.rollout_correction
    return PolicyLoss(
        name=absolute_reference(settings.name),
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        entropy_coef=settings.entropy_coef,
        aggregation=algorithm.aggregation,
        kl_coef=kl_coef,
        kl_estimator=algorithm.kl.estimator,
        correction=RolloutCorrection(gap.tis_cap, gap.sequence_mask_low, gap.sequence_mask_high, gap.decoupled),
    )


def value_loss_from_config(algorithm: AlgorithmConfig) -> ValueLoss:
    """The configured value loss."""
    return ValueLoss(algorithm.value_loss.clip_range, algorithm.aggregation)


def _require(value: Tensor | None, name: str, who: str) -> Tensor:
    if value is None:
        raise ValueError(f"{who} needs `{name}`, which the batch does not have")
    return value


def _require_aggregation(name: str) -> None:
    if name not in AGGREGATIONS:
        raise ValueError(f"algorithm.aggregation={name}: known are {', '.join(AGGREGATIONS)}")
