"""Dynamic sampling: groups whose samples all have the same reward are replaced by groups of further prompts.

    scored batch --> groups that vary ... enough? --> the step's batch
                          ^                  | no
                          +--- generate, score as many as are missing

Such a group has advantage 0 everywhere: it takes up a place in the batch and teaches nothing. Which group replaces it depends on the
order of the data and on rewards alone, never on timing: each round draws exactly the missing number of prompts, and the groups
that stay keep the order in which they were drawn.

Source: Yu et al. 2025, "DAPO", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from configs.schema import DynamicSamplingConfig
from rollout.types import Episode, Prompt, Score
from trainer.algorithms.advantages import varied_groups

PREFIX = "data/dynamic_sampling"


class RewardedBatch(NamedTuple):
    """A step's prompts with what was sampled for them; `episodes` and `scores` in canonical order."""

    prompts: list[Prompt]
    episodes: list[Episode]
    scores: list[Score]
    metrics: dict[str, float]
    """Metrics of the scoring."""


class _Group(NamedTuple):
    prompt: Prompt
    episodes: list[Episode]
    scores: list[Score]
    varied: bool
    kept: bool
    """Whether any sample was scored."""


Draw = Callable[[int, int], RewardedBatch]
"""(number of prompts, requests already made in this step) -> further groups, scored."""


def fill_with_varied_groups(batch: RewardedBatch, settings: DynamicSamplingConfig, draw: Draw) -> RewardedBatch:
    """Replace the groups of `batch` that teach nothing.

    Args:
        batch: the step's first round.
        settings: `algorithm.dynamic_sampling`; without `enable` the batch is returned as it is.
        draw: generates and scores further prompts. Its second argument continues the count of requests, so that no two
            requests of a step get the same seed.

    Returns:
        As many groups as `batch` has, in the order in which they were drawn, tasks renumbered from 0. Places that are still open
        after `max_rounds` keep groups of equal rewards, the earliest drawn first (those without any scored sample last).
        Metrics are those of the first round, which no selection has touched, with the errors of later rounds added, and
        `data/dynamic_sampling/rounds`, `/replaced` and `/unfilled`.
    """
    if not settings.enable:
        return batch
    wanted = len(batch.prompts)
    drawn = _groups(batch)
    metrics = dict(batch.metrics)
    rounds, requests = 1, len(batch.episodes)
    while (missing := wanted - sum(group.varied for group in drawn)) > 0 and rounds < settings.max_rounds:
        more = draw(missing, requests)
        rounds, requests = rounds + 1, requests + len(more.episodes)
        drawn += _groups(more)
        metrics = _with_errors(metrics, more.metrics)
    chosen = _choose(drawn, wanted)
    metrics[f"{PREFIX}/rounds"] = float(rounds)
    metrics[f"{PREFIX}/replaced"] = float(len(drawn) - wanted)
    metrics[f"{PREFIX}/unfilled"] = float(sum(not group.varied for group in chosen))
    episodes = [
        replace(episode, key=episode.key._replace(task=task))
        for task, group in enumerate(chosen)
        for episode in group.episodes
    ]
    scores = [score for group in chosen for score in group.scores]
    return RewardedBatch([group.prompt for group in chosen], episodes, scores, metrics)


def _choose(drawn: list[_Group], wanted: int) -> list[_Group]:
    """The best `wanted` groups, in the order in which they were drawn."""
    best = sorted(range(len(drawn)), key=lambda i: (not drawn[i].varied, not drawn[i].kept, i))[:wanted]
    return [drawn[i] for i in sorted(best)]


def _groups(batch: RewardedBatch) -> list[_Group]:
    # In float32, as they are trained on: rewards that differ by less give no advantage either.
    totals = torch.tensor([0.0 if score.dropped else score.total for score in batch.scores], dtype=torch.float32)
    keep = torch.tensor([not score.dropped for score in batch.scores])
    tasks = torch.tensor([episode.key.task for episode in batch.episodes])
    varied = varied_groups(totals, tasks, keep)
    groups = []
    for task, prompt in enumerate(batch.prompts):
        rows = (tasks == task).nonzero().flatten().tolist()
        groups.append(
            _Group(
                prompt,
                [batch.episodes[row] for row in rows],
                [batch.scores[row] for row in rows],
                bool(varied[rows].any()),
                bool(keep[rows].any()),
            )
        )
    return groups


def _with_errors(metrics: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The first round's metrics with a later round's counts of what went wrong added."""
    counts = ("reward/dropped", "reward/penalised", "reward/audit_mismatches")
    added = {name: metrics[name] + more[name] for name in metrics if name in more and _counts(name, counts)}
    return {**metrics, **added}


def _counts(name: str, counts: tuple[str, ...]) -> bool:
    return name in counts or name.endswith("/errors")
