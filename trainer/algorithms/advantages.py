"""Advantage estimators: from rewards, values and groups to one number per trained token.

Every function is pure: tensors in, tensors out. Two promises hold for all of them:

- *Order*: permuting rows permutes the result, bit for bit, and so do padding on the right and thread counts. Statistics are
  exact sums (`trainer.algorithms.aggregate`), everything else is elementwise in float64 and rounded once to the input's dtype.
- *Finiteness*: the result is never NaN. A number that is not finite where it would count is an error that names the rows.

Shapes: N responses, T columns, in the layout of `workers.models.batch`. `mask` [N, T] is True at trained tokens and may have gaps
(what an environment wrote between turns). `group` [N] int64 says which prompt a response answers. `keep` [N] is False for
samples that were dropped: they take no part in any statistic, and their advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.algorithms import ESTIMATORS as BUILT_IN
from configs.algorithms import estimator_needs
from configs.schema import AdvantageConfig
from trainer.algorithms.aggregate import exact_sum, row_sums, whiten
from trainer.algorithms.registry import Registry
from trainer.experience import Experience

GRPO_STD_EPS = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation along the trained tokens; what is not masked neither gives nor takes anything.

        delta_t = r_t + gamma V_t' - V_t        A_t = delta_t + gamma lam A_t'        R_t = A_t + V_t

    with t' the next trained token (environment tokens in between are skipped) and nothing after the last one.

    Args:
        rewards: [N, T] float, per token.
        values: [N, T] float; value of the state in which the token is chosen.
        mask: [N, T] bool.
        gamma: discount per trained token.
        lam: GAE's lambda.
        bootstrap: [N] float; value after the last token, for responses that were cut off; 0 elsewhere. None is all 0.

    Returns:
        (advantages, returns), both [N, T] in the dtype of `rewards`, 0 outside the mask.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.

    Example:
        rewards [0, 1], values [0, 0], gamma 1, lam 0.95 -> advantages [0.95, 1.0], returns [0.95, 1.0].
    """
    _require_finite("rewards", rewards, mask)
    _require_finite("values", values, mask)
    # One row per column: each turn of the loop reads contiguous memory.
    column_rewards, column_values = (x.to(torch.float64).t().contiguous() for x in (rewards, values))
    column_mask = mask.t().contiguous()
    advantages = torch.zeros_like(column_rewards)
    next_advantage = column_rewards.new_zeros(len(rewards))
    next_value = next_advantage.clone()
    if bootstrap is not None:
        trained = mask.any(dim=1)
        _require_finite("bootstrap values", bootstrap, trained)
        next_value = torch.where(trained, bootstrap.to(torch.float64), 0.0)
    # Prompt and padding columns, in which no row has a trained token, are never visited.
    for t in reversed(mask.any(dim=0).nonzero().flatten().tolist()):
        here, value = column_mask[t], column_values[t]
        delta = column_rewards[t] + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        advantages[t] = torch.where(here, advantage, 0.0)
    returns = torch.where(column_mask, advantages + column_values, 0.0)
    return _rows(advantages, rewards.dtype), _rows(returns, rewards.dtype)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[N, T]: discounted sum of the rewards at a trained token and after it; 0 outside the mask."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def grpo(
    scores: Tensor,
    group: Tensor,
    mask: Tensor,
    use_std: bool = True,
    keep: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """(score - group mean) / (group standard deviation + 1e-6), the same for every token of a response.

    The standard deviation is the unbiased one. `use_std=False` only subtracts the mean (Dr. GRPO, Liu et al. 2025). A group
    of one, or one whose scores are all equal, gets exactly 0.

    Args:
        scores: [N] float.
        group: [N] int64.
        mask: [N, T] bool.
        use_std: divide by the standard deviation.
        keep: [N] bool, or None for all.
        first: [N] int64; where a sample has several rows, the number of its first one. It counts once in its group. None: each row is a sample.

    Returns:
        [N, T] in the dtype of `scores`.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2.
    """

    def per_group(members: Tensor) -> Tensor:
        centred = _centre(members)
        if not use_std or len(members) < 2:
            return centred
        deviation = (exact_sum(centred**2) / (len(members) - 1)) ** 0.5
        return centred / (deviation + GRPO_STD_EPS)

    return _spread(_by_group(per_group, scores, group, keep, first), mask)


def rloo(
    scores: Tensor, group: Tensor, mask: Tensor, keep: Tensor | None = None, first: Tensor | None = None
) -> Tensor:
    """Score minus the mean score of the *other* members of the group; 0 for a group of one. Arguments as in `grpo`.

    Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization".
    """

    def per_group(members: Tensor) -> Tensor:
        # score - (sum - score) / (n - 1) = n / (n - 1) * (score - mean)
        return _centre(members) * len(members) / max(len(members) - 1, 1)

    return _spread(_by_group(per_group, scores, group, keep, first), mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0, keep: Tensor | None = None) -> Tensor:
    """Discounted reward-to-go, whitened over all trained tokens of the batch (no critic, no groups).

    Args:
        rewards: [N, T] float, per token (the KL penalty included when it is in the reward).
        mask: [N, T] bool.
        gamma: discount per trained token.
        keep: [N] bool, or None for all.

    Returns:
        [N, T] in the dtype of `rewards`.

    Source: Hu 2025, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models".
    """
    alive = _alive(mask, keep)
    return whiten(reward_to_go(rewards, alive, gamma), alive, "full")


def reinforce_plus_plus_baseline(
    scores: Tensor, group: Tensor, mask: Tensor, keep: Tensor | None = None, first: Tensor | None = None
) -> Tensor:
    """Score minus the group's mean, whitened over all trained tokens of the batch. Arguments as in `grpo`.

    Source: Hu 2025, "REINFORCE++", the variant with the group mean as baseline.
    """
    centred = _spread(_by_group(_centre, scores, group, keep, first), mask)
    return whiten(centred, _alive(mask, keep), "full")


def remax(scores: Tensor, greedy_scores: Tensor, mask: Tensor, keep: Tensor | None = None) -> Tensor:
    """Score minus the score of the greedy response to the same prompt.

    Args:
        scores: [N] float.
        greedy_scores: [N] float; of the greedy response to each row's prompt.
        mask: [N, T] bool.
        keep: [N] bool, or None for all.

    Returns:
        [N, T] in the dtype of `scores`.

    Source: Li et al. 2024, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method", algorithm 1.
    """
    chosen = _all(scores) if keep is None else keep
    _require_finite("scores", scores, chosen)
    _require_finite("greedy scores", greedy_scores, chosen)
    difference = torch.where(chosen, scores.to(torch.float64) - greedy_scores.to(torch.float64), 0.0)
    return _spread(difference.to(scores.dtype), mask)


def varied_groups(scores: Tensor, group: Tensor, keep: Tensor | None = None) -> Tensor:
    """[N] bool: whether the row's group has at least two different scores, that is, anything to learn from.

    DAPO's dynamic sampling (Yu et al. 2025, section 3.2) draws new prompts for the others.
    """
    chosen = _all(scores) if keep is None else keep
    varied = torch.zeros_like(chosen)
    for rows in _members(group, chosen):
        varied[rows] = bool((scores[rows] != scores[rows[0]]).any())
    return varied


@dataclass(frozen=True)
class AdvantageInputs:
    """What estimators may look at."""

    token_rewards: Tensor
    """[N, T] float; reward per trained token: the score on the last, less the KL penalty when it is in the reward."""
    scores: Tensor
    """[N] float; reward of each response."""
    mask: Tensor
    """[N, T] bool; trained tokens."""
    group: Tensor
    """[N] int64; which prompt."""
    keep: Tensor
    """[N] bool; False for dropped samples."""
    values: Tensor | None = None
    """[N, T] float; the critic's."""
    greedy_scores: Tensor | None = None
    """[N] float; score of the greedy response to each row's prompt."""
    bootstrap: Tensor | None = None
    """[N] float; value after the last token of responses that were cut off, 0 elsewhere."""
    first: Tensor | None = None
    """[N] int64; number of the first row of the same sample. None: each row is a sample."""

    @classmethod
    def of(
        cls,
        experience: Experience,
        token_rewards: Tensor,
        scores: Tensor,
        greedy_scores: Tensor | None = None,
        bootstrap: Tensor | None = None,
    ) -> AdvantageInputs:
        """From a step's experience, with the (shaped) scores [N] and token rewards [N, T] made of them."""
        tokens = experience.tokens
        return cls(
            token_rewards=token_rewards,
            scores=scores,
            mask=tokens.mask,
            group=experience.group,
            keep=experience.keep,
            values=tokens.old_values,
            greedy_scores=greedy_scores,
            bootstrap=bootstrap,
            first=experience.first if len(experience) > len(experience.episodes) else None,
        )

    def outcomes(self) -> Tensor:
        """[N]: sum of each response's token rewards, so that a KL penalty in the reward reaches outcome estimators too.

        A response without a trained token has no token rewards; it counts with its score in its group's statistics.
        """
        sums = row_sums(self.token_rewards, self.mask)
        trained = self.mask.any(dim=1)
        if self.first is not None:  # the whole sample's, in each of its rows
            sums = torch.zeros_like(sums).index_add(0, self.first, sums)[self.first]
            trained = torch.zeros_like(self.first).index_add(0, self.first, trained.long())[self.first] > 0
        return torch.where(trained, sums.to(self.scores.dtype), self.scores)


@dataclass(frozen=True)
class AdvantageOutputs:
    """What every estimator gives."""

    advantages: Tensor
    """[N, T], dtype of the token rewards; 0 outside the mask and for dropped samples."""
    returns: Tensor
    """[N, T]; the value targets of GAE; for estimators without a critic the return before any baseline."""


EstimatorFunction = Callable[[AdvantageInputs, AdvantageConfig], AdvantageOutputs]


def _gae(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    assert inputs.values is not None
    alive = _alive(inputs.mask, inputs.keep)
    rewards, values = inputs.token_rewards, inputs.values
    return AdvantageOutputs(*gae(rewards, values, alive, settings.gamma, settings.lam, inputs.bootstrap))


def _grpo(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    outcomes = inputs.outcomes()
    advantages = grpo(outcomes, inputs.group, inputs.mask, settings.group_std, inputs.keep, inputs.first)
    return AdvantageOutputs(advantages, _returns(outcomes, inputs))


def _rloo(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    outcomes = inputs.outcomes()
    advantages = rloo(outcomes, inputs.group, inputs.mask, inputs.keep, inputs.first)
    return AdvantageOutputs(advantages, _returns(outcomes, inputs))


def _reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    advantages = reinforce_plus_plus(inputs.token_rewards, inputs.mask, settings.gamma, inputs.keep)
    alive = _alive(inputs.mask, inputs.keep)
    return AdvantageOutputs(advantages, reward_to_go(inputs.token_rewards, alive, settings.gamma))


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    outcomes = inputs.outcomes()
    advantages = reinforce_plus_plus_baseline(outcomes, inputs.group, inputs.mask, inputs.keep, inputs.first)
    return AdvantageOutputs(advantages, _returns(outcomes, inputs))


def _remax(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    assert inputs.greedy_scores is not None
    outcomes = inputs.outcomes()
    return AdvantageOutputs(remax(outcomes, inputs.greedy_scores, inputs.mask, inputs.keep), _returns(outcomes, inputs))


ESTIMATORS: Registry[EstimatorFunction] = Registry(
    "advantage estimator",
    "algorithm.advantage.name",
    {
        "gae": _gae,
        "grpo": _grpo,
        "rloo": _rloo,
        "reinforce_plus_plus": _reinforce_plus_plus,
        "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
        "remax": _remax,
    },
    declared=BUILT_IN,
)


def compute_advantages(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    """Estimate, check, whiten: the one way from rewards to advantages.

    Returns are what the estimator gave; only advantages are whitened.

    Raises:
        ValueError: an unknown name, something the estimator needs is missing, or numbers that are not finite (rows named).
    """
    name = settings.name
    function, needs = ESTIMATORS.get(name), estimator_needs(name)
    if needs.critic and inputs.values is None:
        raise ValueError(f"algorithm.advantage.name={name} needs a critic's values, but none were computed")
    if needs.greedy and inputs.greedy_scores is None:
        raise ValueError(f"algorithm.advantage.name={name} needs scores of greedy responses, but none were generated")
    if inputs.bootstrap is not None and not needs.critic:
        raise ValueError(f"algorithm.truncated=bootstrap needs an estimator with a critic, not {name}")
    outputs = function(inputs, settings)
    for what in (outputs.advantages, outputs.returns):
        if what.shape != inputs.mask.shape:
            raise ValueError(f"{name} gave shape {list(what.shape)} for tokens of shape {list(inputs.mask.shape)}")
    alive = _alive(inputs.mask, inputs.keep)
    _require_finite(f"advantages of {name}", outputs.advantages, alive)
    _require_finite(f"returns of {name}", outputs.returns, alive)
    mode = "none" if needs.whitens and settings.whiten in ("full", "scale") else settings.whiten
    return AdvantageOutputs(whiten(outputs.advantages, alive, mode), torch.where(alive, outputs.returns, 0.0))


def _all(scores: Tensor) -> Tensor:
    return torch.ones(len(scores), dtype=torch.bool, device=scores.device)


def _alive(mask: Tensor, keep: Tensor | None) -> Tensor:
    return mask if keep is None else mask & keep[:, None]


def _spread(per_row: Tensor, mask: Tensor) -> Tensor:
    """[N] to [N, T]: every trained token gets its row's number."""
    return torch.where(mask, per_row[:, None], torch.zeros((), dtype=per_row.dtype, device=per_row.device))


def _rows(columns: Tensor, dtype: torch.dtype) -> Tensor:
    return columns.t().to(dtype).contiguous()


def _returns(outcomes: Tensor, inputs: AdvantageInputs) -> Tensor:
    return _spread(outcomes, _alive(inputs.mask, inputs.keep)).to(inputs.token_rewards.dtype)


def _centre(members: Tensor) -> Tensor:
    """Float64 scores of one group minus their mean; exactly 0 when they are equal or there is one."""
    if bool((members == members[0]).all()):
        return torch.zeros_like(members)
    return members - exact_sum(members) / len(members)


def _members(group: Tensor, keep: Tensor) -> list[list[int]]:
    """Row numbers of each group's kept members."""
    found: dict[int, list[int]] = {}
    for row, (number, kept) in enumerate(zip(group.tolist(), keep.tolist(), strict=True)):
        if kept:
            found.setdefault(number, []).append(row)
    return list(found.values())


def _by_group(
    function: Callable[[Tensor], Tensor],
    scores: Tensor,
    group: Tensor,
    keep: Tensor | None,
    first: Tensor | None = None,
) -> Tensor:
    """[N]: `function` of each group's kept scores (float64, [members]), put back in place; 0 for dropped rows. A sample's further rows get what its
    first row got."""
    chosen = _all(scores) if keep is None else keep
    if first is not None:
        chosen = chosen & (first == torch.arange(len(scores), device=scores.device))
    _require_finite("scores", scores, chosen)
    wide = scores.to(torch.float64)
    result = torch.zeros_like(wide)
    for rows in _members(group, chosen):
        result[rows] = function(wide[rows])
    return (result if first is None else result[first]).to(scores.dtype)


def _require_finite(what: str, values: Tensor, where: Tensor) -> None:
    """Raise when `values` ([N] or [N, T]) are not finite under the mask; names rows and a value."""
    bad = where & ~values.isfinite()
    if not bool(bad.any()):
        return
    rows = sorted(set(bad.nonzero()[:, 0].tolist()))
    shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    raise ValueError(
        f"{what} are not finite in {len(rows)} of {len(values)} rows (rows {shown}; the first is {float(values[bad][0])}). "
        "Advantages can't be computed from them; reward.on_error (fail, drop, penalise) decides about failed rewards"
    )
