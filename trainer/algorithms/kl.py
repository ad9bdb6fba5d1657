"""The KL to the reference policy: estimators, the penalty in the reward, and the controllers of its coefficient.

Estimators follow J. Schulman, "Approximating KL Divergence" (2020), for samples of the trained policy pi and the reference q:
KL(pi || q) = E[log pi - log q].
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.schema import KlConfig
from trainer.algorithms.aggregate import exact_sum
from trainer.algorithms.log_ratio import ratio_minus_one


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log q: unbiased, of either sign, high variance. As a *loss* its gradient is zero on average (use k2 or k3)."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log q)^2 / 2: biased, never negative; its gradient is that of the true KL on average."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/pi - 1 - log(q/pi): unbiased, never negative, low variance.

    Only q/pi is kept from overflowing (`ratio_minus_one`): where the policy has become far more certain than the reference,
    value and gradient are those of log(pi/q) - 1, which pulls it back however far it has gone.
    """
    log_ratio = ref_logprobs - logprobs
    # Rounding still can't go below 0.
    return (ratio_minus_one(log_ratio) - log_ratio).clamp(min=0.0)


SAMPLED_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimators from the sampled token's log-probabilities alone."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """[N, T] KL per trained token by the named estimator (`k1`, `k2`, `k3`), 0 outside the mask; nats.

    Raises:
        ValueError: another name; `full` needs logits and belongs in the loss.
    """
    if estimator not in SAMPLED_ESTIMATORS:
        hint = " (`full` needs logits: set algorithm.kl.placement=loss)" if estimator == "full" else ""
        raise ValueError(f"algorithm.kl.estimator={estimator}: known are {', '.join(SAMPLED_ESTIMATORS)}{hint}")
    inner = SAMPLED_ESTIMATORS[estimator](torch.where(mask, logprobs, 0.0), torch.where(mask, ref_logprobs, 0.0))
    return torch.where(mask, inner, 0.0)


def penalised_rewards(
    scores: Tensor, kl: Tensor | None, mask: Tensor, coef: float, placed: Tensor | None = None
) -> Tensor:
    """Rewards per token: the score on a response's last trained token, -coef * KL on every trained token.

    Args:
        scores: [N] float; one per response, or with `placed` what is added to that on the last trained token.
        placed: [N, T] float; rewards that already have their tokens.
        kl: [N, T] KL per token, or None for no penalty.
        mask: [N, T] bool; trained tokens. A response without any gets no reward anywhere.
        coef: the KL coefficient.

    Returns:
        [N, T], in the dtype of `scores`.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1) if mask.shape[1] else positions.new_full((len(mask),), -1)
    # Compared with every column, never used as an index: -1 (no trained token) matches none of them.
    at_last = positions[None, :] == last[:, None]
    rewards = torch.where(at_last, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))
    if placed is not None:
        rewards = rewards + torch.where(mask, placed, 0.0).to(scores.dtype)
    if kl is None or coef == 0.0:
        return rewards
    return rewards - torch.where(mask, coef * kl, 0.0).to(scores.dtype)


def sequence_kl(kl: Tensor, mask: Tensor) -> tuple[float, int]:
    """(mean over sequences of the summed token KL, number of sequences with a trained token); 0.0 when there is none.

    Independent of row order and padding. This is what the controllers follow.
    """
    count = int(mask.any(dim=1).sum())
    return (exact_sum(kl[mask]) / count if count else 0.0), count


class KlController(Protocol):
    """Owns the KL coefficient from step to step."""

    coef: float
    """The coefficient now."""

    def update(self, kl_per_sequence: float, n_sequences: int) -> None:
        """Learn the KL that was measured over a step's sequences."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


@dataclass
class FixedKl:
    """A coefficient that stays."""

    coef: float

    def update(self, kl_per_sequence: float, n_sequences: int) -> None:
        """Nothing to learn; a KL that is not finite is an error all the same."""
        _require_finite(kl_per_sequence)

    def state_dict(self) -> dict[str, Any]:
        """{"coef"}."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A fixed coefficient is the configuration's, so a resumed run takes a changed setting."""


@dataclass
class AdaptiveKl:
    """Moves the coefficient so that the KL per sequence approaches `target`.

    e = clip(KL / target - 1, -0.2, 0.2); coef <- coef * (1 + e * n / horizon), with n the sequences seen.

    Source: Ziegler et al. 2019, section 2.2.
    """

    coef: float
    """The coefficient now; the first one is set by the configuration."""
    target: float
    """KL per sequence aimed at, nats."""
    horizon: float
    """Sequences over which the coefficient follows."""

    def __post_init__(self) -> None:
        if self.target <= 0.0 or self.horizon <= 0.0:
            raise ValueError(
                f"algorithm.kl.target={self.target}, algorithm.kl.horizon={self.horizon}: both must be above 0 "
                "for the adaptive controller"
            )

    def update(self, kl_per_sequence: float, n_sequences: int) -> None:
        """Follow the measured KL (nats per sequence, mean over `n_sequences`).

        Raises:
            ValueError: the KL is not finite (the coefficient would be lost for good), or the horizon is shorter than a
                fifth of the step's sequences (it would change sign).
        """
        _require_finite(kl_per_sequence)
        error = min(max(kl_per_sequence / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * n_sequences / self.horizon
        if factor <= 0.0:
            raise ValueError(
                f"{n_sequences} sequences in one step would turn the KL coefficient negative: "
                f"raise algorithm.kl.horizon={self.horizon} above {0.2 * n_sequences}"
            )
        self.coef *= factor

    def state_dict(self) -> dict[str, Any]:
        """{"coef", "target", "horizon"}."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the coefficient; target and horizon are the configuration's."""
        self.coef = float(state["coef"])


def controller(config: KlConfig) -> FixedKl | AdaptiveKl:
    """The controller named by `algorithm.kl.controller`."""
    if config.controller == "fixed":
        return FixedKl(config.coef)
    if config.controller == "adaptive":
        return AdaptiveKl(config.coef, config.target, config.horizon)
    raise ValueError(f"algorithm.kl.controller={config.controller}: known are fixed, adaptive")


def _require_finite(kl: float) -> None:
    if not math.isfinite(kl):
        raise ValueError(f"the measured KL per sequence is {kl}; check the log-probabilities of actor and reference")
