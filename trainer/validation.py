"""Validation on held-out prompts: a greedy pass, and a sampled one when it is set. It is seeded in the same way as training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import RolloutConfig, SamplingConfig
from determinism.digest import digest_value
from reward.manager import RewardManager
from rollout.episodes import Rollout
from rollout.sampling import sampling_from_config
from rollout.types import Episode, Prompt, Score
from trainer.grading import Grader
from trainer.metrics import mean_of


@dataclass
class ValidationResult:
    """One validation."""

    metrics: dict[str, float] = field(default_factory=dict)
    """`val/score/mean`, `val/<source of prompts>/pass@k`, ... (see `pass_metrics`); the sampled pass under `val_sampled/`."""
    digests: dict[str, str] = field(default_factory=dict)
    """Ledger phases `validation/...`."""
    episodes: list[Episode] = field(default_factory=list)
    """All passes' episodes, in canonical order within a pass."""
    scores: list[Score] = field(default_factory=list)
    """One score per episode."""


class Validation:
    """Scores the held-out prompts with the current weights.

    Args:
        prompts: the held-out prompts, in fixed order.
        grader: says which samples are right.
    """

    def __init__(
        self,
        rollout: Rollout,
        reward: RewardManager,
        config: RolloutConfig,
        prompts: Sequence[Prompt],
        eos_ids: Sequence[int],
        grader: Grader,
    ) -> None:
        self.rollout = rollout
        self.reward = reward
        self.prompts = prompts
        self.eos_ids = tuple(eos_ids)
        self.grader = grader
        self.passes: dict[str, SamplingConfig] = {"validation": config.validation}
        if config.validation_sampled is not None:
            self.passes["validation_sampled"] = config.validation_sampled

    def run(self, step: int) -> ValidationResult:
        """Validate; without held-out prompts the result is empty."""
        result = ValidationResult()
        if not self.prompts:
            return result
        for split, settings in self.passes.items():
            sampling = sampling_from_config(settings, self.eos_ids)
            pending = self.reward.begin()
            episodes = self.rollout.start(
                self.prompts,
                sampling,
                n=settings.n,
                split=split,
                step=step,
                shared_seed=settings.seed,
                on_finished=pending.add,
            ).result()
            scores = self.reward.evaluate(episodes, pending)
            result.episodes += episodes
            result.scores += scores
            prefix = split.replace("validation", "val")
            result.metrics |= pass_metrics(prefix, episodes, scores)
            accuracies = self.grader.metrics(episodes, scores, settings.n)
            result.metrics |= {f"{prefix}/{name}": value for name, value in accuracies.items()}
            rows = [row for e in episodes for row in e.rows]
            result.digests[f"{split}/token_ids"] = digest_value([list(row.response_ids) for row in rows])
            result.digests[f"{split}/rollout_logprobs"] = digest_value([list(row.logprobs) for row in rows])
            result.digests[f"{split}/rewards"] = digest_value([[s.total, dict(s.by_source)] for s in scores])
        return result


def pass_metrics(prefix: str, episodes: Sequence[Episode], scores: Sequence[Score]) -> dict[str, float]:
    """Means of one pass: scores over all, by reward source and by source of prompts; response lengths over all and by source of prompts.

    Dropped samples have no score; their lengths count.
    """
    kept = [(e, s) for e, s in zip(episodes, scores, strict=True) if not s.dropped]
    metrics = {
        f"{prefix}/score/mean": mean_of([s.total for _, s in kept]),
        f"{prefix}/response_length/mean": mean_of([float(e.sampled_tokens) for e in episodes]),
        f"{prefix}/response_length/clip_ratio": mean_of([float(e.truncated) for e in episodes]),
    }
    for source in sorted({name for _, s in kept for name in s.by_source}):
        metrics[f"{prefix}/reward/{source}/mean"] = mean_of(
            [s.by_source[source] for _, s in kept if source in s.by_source]
        )
    for name in sorted({e.prompt.source for e, _ in kept}):
        metrics[f"{prefix}/{name}/score/mean"] = mean_of([s.total for e, s in kept if e.prompt.source == name])
    for name in sorted({e.prompt.source for e in episodes}):
        of_source = [e for e in episodes if e.prompt.source == name]
        metrics[f"{prefix}/{name}/response_length/mean"] = mean_of([float(e.sampled_tokens) for e in of_source])
        metrics[f"{prefix}/{name}/response_length/clip_ratio"] = mean_of([float(e.truncated) for e in of_source])
    return metrics
