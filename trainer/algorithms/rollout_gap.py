"""The gap between the policy that sampled (the engine, or older weights) and the one that is trained: weights and metrics.

With pi_roll the sampling policy and pi_old the trainer's before the step's first update, each token has the importance
weight pi_old / pi_roll. It is 1 when engine and trainer agree bit for bit and no sample is stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.aggregate import row_sums, sequence_share, token_share
from trainer.algorithms.kl import kl_k3
from trainer.algorithms.log_ratio import ratio_of
from workers.models.batch import LossTotals


@dataclass(frozen=True)
class RolloutCorrection:
    """What is done about the gap; the default is nothing. Field meanings: `configs.schema.RolloutCorrectionConfig`."""

    tis_cap: float | None = None
    sequence_mask_low: float | None = None
    sequence_mask_high: float | None = None
    decoupled: bool = False

    def __post_init__(self) -> None:
        setting = "algorithm.rollout_correction"
        if self.tis_cap is not None and self.tis_cap <= 0.0:
            raise ValueError(f"{setting}.tis_cap={self.tis_cap}: a cap must be above 0; null turns it off")
        low, high = self.sequence_mask_low, self.sequence_mask_high
        if low is not None and not 0.0 <= low <= 1.0:
            raise ValueError(
                f"{setting}.sequence_mask_low={low}: must lie in 0 to 1, or equal sequences would be left out"
            )
        if high is not None and high < 1.0:
            raise ValueError(
                f"{setting}.sequence_mask_high={high}: must be 1 or more, or equal sequences would be left out"
            )

    @property
    def active(self) -> bool:
        """Whether it changes the loss."""
        return self.decoupled or self.tis_cap is not None or self.masks_sequences

    @property
    def masks_sequences(self) -> bool:
        """Whether a sequence may be left out."""
        return self.sequence_mask_low is not None or self.sequence_mask_high is not None


def token_weights(log_gap: Tensor, mask: Tensor, correction: RolloutCorrection) -> Tensor:
    """[N, T] weight of each token's loss, detached; 1 where nothing is corrected, 0 for sequences that are left out.

    - decoupled: pi_old / pi_roll as it is (Hilton et al. 2022, "Batch size-invariance for policy optimization";
      Fu et al. 2025, "AReaL").
    - tis_cap: min(pi_old / pi_roll, cap) (Espeholt et al. 2018, IMPALA; Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training").
    - sequence masks: 0 when the geometric mean of the sequence's weights is out of bounds.

    Args:
        log_gap: [N, T] log pi_old - log pi_roll, 0 outside the mask.
        mask: [N, T] bool.
    """
    weights = torch.ones_like(log_gap)
    if correction.decoupled or correction.tis_cap is not None:
        weights = ratio_of(log_gap)
    if correction.tis_cap is not None:
        weights = weights.clamp(max=correction.tis_cap)
    if correction.masks_sequences:
        weights = weights * kept_sequences(log_gap, mask, correction)[:, None]
    return weights.detach()


def kept_sequences(log_gap: Tensor, mask: Tensor, correction: RolloutCorrection) -> Tensor:
    """[N] bool: sequences whose geometric mean weight lies within the bounds."""
    geometric = (row_sums(log_gap, mask) / mask.sum(dim=1).clamp(min=1)).exp()
    kept = torch.ones_like(geometric, dtype=torch.bool)
    if correction.sequence_mask_low is not None:
        kept &= geometric >= correction.sequence_mask_low
    if correction.sequence_mask_high is not None:
        kept &= geometric <= correction.sequence_mask_high
    return kept


def gap_metrics(log_gap: Tensor, mask: Tensor, totals: LossTotals, correction: RolloutCorrection) -> dict[str, Tensor]:
    """Shares of `rollout_corr/*` (docs/metrics.md); extremes are left out when nothing is trained on."""
    ratio = ratio_of(log_gap.detach())
    metrics = {
        # The samples are pi_roll's, so these estimate KL(pi_roll || pi_old).
        "rollout_corr/kl": token_share(-log_gap, mask, totals),
        "rollout_corr/k3_kl": token_share(kl_k3(-log_gap, torch.zeros_like(log_gap)), mask, totals),
        "rollout_corr/ratio_mean": token_share(ratio, mask, totals),
    }
    if bool(mask.any()):
        chosen = ratio[mask].to(torch.float64)
        metrics["rollout_corr/ratio_max"] = chosen.max()
        metrics["rollout_corr/ratio_min"] = chosen.min()
        metrics["rollout_corr/logprob_diff_max"] = log_gap.detach()[mask].abs().max().to(torch.float64)
    if correction.tis_cap is not None:
        metrics["rollout_corr/tis_clipfrac"] = token_share(ratio > correction.tis_cap, mask, totals)
    if correction.masks_sequences:
        metrics["rollout_corr/masked_sequences"] = sequence_share(
            ~kept_sequences(log_gap.detach(), mask, correction), mask, totals
        )
    return metrics
