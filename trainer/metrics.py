"""Step metrics: how they are computed and combined. `docs/metrics.md` explains every name.

Every mean is an exact sum (`math.fsum`) divided once, so row order and padding can't change a logged number. Names that end
in `_max` or `/max` (`_min`, `/min`) combine by maximum (minimum), all others by sum or mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.aggregate import explained_variance, masked_moments, row_sums
from trainer.experience import Experience


def mean_of(values: Sequence[float]) -> float:
    """Mean of the numbers, independent of their order; 0.0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def combine_metrics(per_leaf: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a mini-batch from the shares of its leaves: added in list order; `_max` and `_min` names by maximum and minimum.

    A name that only some leaves have is combined over those leaves. Values may be floats or scalar tensors.

    Example:
        >>> combine_metrics([{"a": 1.0, "b_max": 2.0}, {"a": 3.0, "b_max": 1.0}])
        {'a': 4.0, 'b_max': 2.0}
    """
    return _combine(per_leaf, _add)


def mean_metrics(per_mini_batch: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a step from its mini-batches: the mean of each name; `_max` and `_min` names by maximum and minimum."""
    return _combine(per_mini_batch, mean_of)


def batch_metrics(
    experience: Experience, max_response_tokens: int, token_rewards: Tensor | None = None
) -> dict[str, float]:
    """Metrics of a step's data; dropped samples take no part (except in `perf/total_num_tokens`, which was computed).

    Args:
        experience: the step's, with advantages, returns and old values where there are any.
        max_response_tokens: the response cap, for the share of it that is used.
        token_rewards: [N, T]; what the advantages were made of, for `critic/rewards/*`.

    Returns:
        Finite floats. A family whose data is missing (values without a critic), or empty, is absent.
    """
    tokens, kept = experience.tokens, experience.per_episode(experience.keep)
    trained = tokens.mask & experience.keep[:, None]
    metrics = {"perf/total_num_tokens": float(int(tokens.lengths.sum()))}
    metrics |= _statistics("critic/score", experience.per_episode(experience.scores), kept)
    if token_rewards is not None:
        sums = experience.per_episode(experience.sum_rows(row_sums(token_rewards, trained)))
        anything = experience.per_episode(experience.sum_rows(trained.sum(dim=1))) > 0
        metrics |= _statistics("critic/rewards", sums, kept & anything)
    for name, values in (("advantages", tokens.advantages), ("returns", tokens.returns), ("values", tokens.old_values)):
        if values is not None:
            metrics |= _statistics(f"critic/{name}", values, trained)
    if tokens.old_values is not None and tokens.returns is not None:
        metrics["critic/vf_explained_var"] = explained_variance(tokens.old_values, tokens.returns, trained)
    episodes = experience.episodes
    response = torch.tensor([episode.sampled_tokens for episode in episodes])
    prompt = torch.tensor([len(episode.rows[0].prompt_ids) for episode in episodes])
    metrics |= _statistics("response_length", response, kept)
    metrics |= _statistics("prompt_length", prompt, kept)
    if bool(kept.any()):
        # From the engine's finish reasons: a response that ends by EOS exactly at the cap was not cut.
        cut = torch.tensor([episode.truncated for episode in episodes])
        metrics["response_length/clip_ratio"] = masked_moments(cut, kept).mean
        metrics["response_length/empty_ratio"] = masked_moments(response == 0, kept).mean
        metrics["response_length/cap_usage"] = metrics["response_length/mean"] / max_response_tokens
    if any(episode.turns for episode in episodes):
        metrics |= _turn_metrics(experience, kept)
    return metrics


def _turn_metrics(experience: Experience, kept: Tensor) -> dict[str, float]:
    """`rollout/turns/*` over kept episodes; `rollout/rows` with `/blank_rows`; and the sums of what episodes have counted (`rollout/forked_turns`)."""
    episodes = experience.episodes
    metrics = _statistics("rollout/turns", torch.tensor([len(episode.turns) for episode in episodes]), kept)
    metrics["rollout/rows"] = float(int((experience.sample >= 0).sum()))
    metrics["rollout/blank_rows"] = float(int((experience.sample < 0).sum()))
    for name in sorted({name for episode in episodes for name in episode.counts}):
        metrics[name] = sum(episode.counts.get(name, 0.0) for episode in episodes)
    return metrics


def _statistics(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """`name/mean`, `/max` and `/min` over the mask; nothing when it is empty."""
    moments = masked_moments(values, mask)
    if moments.count == 0:
        return {}
    return {f"{name}/mean": moments.mean, f"{name}/max": moments.high, f"{name}/min": moments.low}


def _combine(parts: Sequence[Mapping[str, Any]], ordinary: Callable[[list[float]], float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(float(value))
    combined = {}
    for name, values in found.items():
        if name.endswith(("_max", "/max")):
            combined[name] = max(values)
        elif name.endswith(("_min", "/min")):
            combined[name] = min(values)
        else:
            combined[name] = ordinary(values)
    return combined


def _add(values: Sequence[float]) -> float:
    # Not fsum: the loss itself is added share by share in leaf order, and `actor/pg_loss` should equal it bit for bit.
    total = 0.0
    for value in values:
        total += value
    return total
