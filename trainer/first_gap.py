"""A check at the start of training: is the trainer's model the one that the engine sampled from?

Two numbers tell, whatever the cause (an attention feature that one side leaves out, dropout, other weights, another rotary scaling):

- the *gap*, |log pi_trainer - log pi_engine| of the sampled tokens before the first update; it should be rounding only;
- the *first ratio*, pi / pi_old in the first mini-batch before any weight has moved: the same leaf goes through the same code, so it is exactly 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from configs.problems import UserError
from configs.schema import Config
from trainer.algorithms.registry import is_reference
from workers.models.batch import TokenBatch

logger = logging.getLogger(__name__)

FLOAT32_GAP = 1e-3
"""Nats, mean over tokens. float32 keeps 24 bits and a deep network loses a few of them: the largest gap of any token is 4e-6 with the micro model.
TF32 products on a GPU keep 11 bits and stay below. A model that lacks a feature is off by 1e-2 to several."""

HALF_GAP = 0.15
"""Nats, mean over tokens, when engine or trainer compute in bfloat16, which keeps 8 bits: a logit of 20 is then off by up to 0.06, on both sides.
Small models show 0.003 to 0.01; the rest is a margin for deep ones."""

FLOAT32_RATIO = 1e-3
"""Largest |log ratio| of the first mini-batch. It is 0 by construction; the limit is a margin for kernels that add in no fixed order."""

HALF_RATIO = 2e-2
"""As `FLOAT32_RATIO`, when the trainer computes in bfloat16."""


class FirstGapError(UserError, RuntimeError):
    """Trainer and engine compute different models, or the trainer does not repeat itself."""


@dataclass(frozen=True)
class Gap:
    """|log pi_trainer - log pi_engine| over the trained tokens; nats."""

    mean: float
    largest: float
    tokens: int

    @classmethod
    def of(cls, tokens: TokenBatch) -> Gap | None:
        """None when nothing was sampled or the engine's log-probabilities are not known."""
        if tokens.old_logprobs is None or tokens.rollout_logprobs is None or not bool(tokens.mask.any()):
            return None
        distance = (tokens.old_logprobs - tokens.rollout_logprobs)[tokens.mask].to(torch.float64).abs()
        return cls(math.fsum(distance.tolist()) / len(distance), float(distance.max()), len(distance))


def check_first_gap(config: Config, role: str, step: int, tokens: TokenBatch, metrics: Mapping[str, float]) -> None:
    """Stop the run under full determinism, and warn without it, when the gap or the first ratio is more than the precision explains.

    Looks at the actor's first update in a run only: later the policy may be so sharp that rounding explains more.

    Args:
        role: `actor`; nothing is done for others.
        step: training step.
        tokens: the step's, with the engine's and the trainer's log-probabilities before the update.
        metrics: of the update's first mini-batch (`actor/ratio_max`, `actor/ratio_min`; absent when it trained on nothing).

    Raises:
        FirstGapError: with the numbers, the limit, and where to look.
    """
    if role != "actor" or step != config.critic.warmup_steps + 1:
        return
    problems = [*_gap_problem(config, tokens), *_ratio_problem(config, metrics)]
    if not problems:
        return
    message = f"step {step}, before any weight had moved: " + "\n".join(problems)
    if config.full_determinism:
        raise FirstGapError(f"{message}\nWith full_determinism=false this is a warning.")
    logger.warning("%s\nThe run goes on, but what it learns is not to be trusted.", message)


def _gap_problem(config: Config, tokens: TokenBatch) -> list[str]:
    gap = Gap.of(tokens)
    half = config.rollout.dtype != "float32" or config.actor.fsdp.precision != "fp32"
    limit = HALF_GAP if half else FLOAT32_GAP
    if gap is None or gap.mean <= limit:
        return []
    return [
        f"the trainer's log-probabilities are not the engine's: mean |difference| {gap.mean:.3g} nats, largest {gap.largest:.3g}, over "
        f"{gap.tokens} tokens; {'bfloat16' if half else 'float32'} explains a mean of {limit:g} at most. The two compute different models. "
        f"Look at: actor.fsdp.attention={config.actor.fsdp.attention} (`eager` computes whatever a model has), config.json and weights in "
        f"model.path={config.model.path} (softcapping, sliding window, rotary scaling), rollout.engine_args; docs/models.md lists the "
        "families that are tested"
    ]


def _ratio_problem(config: Config, metrics: Mapping[str, float]) -> list[str]:
    ratios = [metrics[name] for name in ("actor/ratio_min", "actor/ratio_max") if name in metrics]
    if is_reference(config.algorithm.policy_loss.name):  # a user's loss may call something else its ratio
        return []
    if not all(map(math.isfinite, ratios)):  # such an update is skipped and counted elsewhere
        return []
    limit = FLOAT32_RATIO if config.actor.fsdp.precision == "fp32" else HALF_RATIO
    if all(math.exp(-limit) <= ratio <= math.exp(limit) for ratio in ratios):
        return []
    return [
        f"the first ratio pi / pi_old goes from {ratios[0]:.4g} to {ratios[-1]:.4g} and must be 1: with the same weights, a second pass over "
        "the same tokens gave the trainer other log-probabilities. Something in the model is random in training (dropout, skipped layers, "
        "noise in a router), or a kernel adds in no fixed order"
    ]
