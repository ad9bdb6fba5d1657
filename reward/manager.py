"""Scores episodes: the reward model and the functions at the same time, then one weighted sum per sample.

    episodes --> functions in the pool (main process)  --+
             --> reward model, judge                   --+--> by source --> error policy --> sum --> [normalise] --> Score

Sources are added in a fixed order (the reward model, the judge, then the functions as configured). A source that fails on a sample never counts as
a reward of 0: `reward.on_error` decides what happens, and the failure is named. NaN and infinity are failures too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import RewardConfig
from reward.by_turn import EpisodeRewards, process_places, sampled_turns
from reward.functions import LARGEST_REWARD
from reward.judge import JUDGE_SOURCE, JudgeModel
from reward.normalise import RunningNormaliser
from reward.outcomes import ProcessReward
from reward.pending import MODEL_SOURCE, PendingModelScores, PendingRewards, RewardError, sample_name
from reward.pool import CallFailure, FunctionPool, FunctionSample, SourceResults
from rollout.types import Episode, Score, end_of
from workers.launch.group import WorkerGroup

logger = logging.getLogger(__name__)

ERROR_POLICIES = ("fail", "drop", "penalise")
STATE_VERSION = 1
_NAMED_FAILURES = 3


@dataclass(frozen=True)
class _Source:
    name: str
    weight: float


class RewardManager:
    """Gives each episode its `Score`.

    Args:
        config: the reward group.
        model_group: reward engines; needed when `config.model.path` is set.
        tokenizer: the reward model's.
        log_dir: for the functions' output; None discards it.
        judge: the judge; needed when `config.judge.path` is set.
        model_context: most tokens that the reward model takes; the sample of a longer conversation fails.
        decode_all: response ids to text, special tokens included; for functions that ask for it.
        episodes: how the rewards count that environments or agents give; None for plain responses.

    Raises:
        RewardError: no source, two with the same name, an unknown error policy, a reward model without engines.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        model_group: WorkerGroup | None = None,
        tokenizer: Any = None,
        log_dir: Path | None = None,
        judge: JudgeModel | None = None,
        model_context: int | None = None,
        decode_all: Callable[[Sequence[int]], str] | None = None,
        episodes: EpisodeRewards | None = None,
    ) -> None:
        self.config = config
        self._decode_all = decode_all
        self._episodes = episodes
        self.sources = _sources(config, episodes)
        if config.model.path is not None and (model_group is None or tokenizer is None):
            raise RewardError("reward.model.path is set, but no reward engines or no tokenizer of theirs were given")
        if config.judge.path is not None and judge is None:
            raise RewardError("reward.judge.path is set, but no judge was given")
        self._judge = judge if config.judge.path is not None else None
        self._model_group = model_group if config.model.path is not None else None
        self._tokenizer = tokenizer
        self._model_context = model_context
        self._normaliser = RunningNormaliser() if config.normalise else None
        self._pool: FunctionPool | None = None
        if config.functions:
            self._pool = FunctionPool(config.functions, config.function_workers, log_dir=log_dir)

    def begin(self) -> PendingRewards:
        """Rewards of a batch that is still being sampled: its episodes may be added as they finish."""
        model = None
        if self._model_group is not None:
            model = PendingModelScores(self._model_group, self._tokenizer, self.config.model, self._model_context)
        judge = None if self._judge is None else self._judge.begin()
        return PendingRewards(model, self._submit if self._pool is not None else None, judge)

    def score(
        self, episodes: Sequence[Episode], pending: PendingRewards | None = None, *, all_may_drop: bool = False
    ) -> tuple[list[Score], dict[str, float]]:
        """Scores for training, in the episodes' order, and their metrics (`reward_metrics`).

        Args:
            pending: what `begin` returned for these episodes; None begins here.
            all_may_drop: these are not all of the step's episodes, so it is no error when every one is dropped.

        Raises:
            RewardError: a source failed and `reward.on_error` is `fail`; every sample was dropped; the audit found a function that
                scores differently when it is called again, under full determinism.
            PoolError: a function cannot be run at all.
            WorkerError: a reward engine failed.
        """
        results = self._results(episodes, pending)
        audited = self._audit(episodes)
        scores = self._combine(episodes, results)
        if episodes and not all_may_drop and all(score.dropped for score in scores):
            raise RewardError(f"every sample was dropped, so nothing is left to train on. {_first(_failures(results))}")
        metrics = reward_metrics([source.name for source in self.sources], episodes, scores, results)
        if self.config.audit_rows:
            metrics["reward/audit_mismatches"] = float(len(audited))
        return self._normalised(episodes, scores, metrics), metrics

    def evaluate(self, episodes: Sequence[Episode], pending: PendingRewards | None = None) -> list[Score]:
        """Scores for validation: as `score`, but raw (no normalisation), and without a change to the state of training."""
        return self._combine(episodes, self._results(episodes, pending))

    @property
    def judge(self) -> JudgeModel | None:
        """The judge, if there is one."""
        return self._judge

    @property
    def model_group(self) -> WorkerGroup | None:
        """The reward engines; None when no reward model is served."""
        return self._model_group

    def start(self) -> None:
        """Load the functions now instead of at the first step.

        Raises:
            PoolError: one cannot be loaded; names the source.
        """
        if self._pool is not None:
            self._pool.start()
        if self._judge is not None:
            self._judge.start()

    def close(self) -> None:
        """End the functions' processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()
        if self._judge is not None:
            self._judge.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain values."""
        return {"version": STATE_VERSION, "normaliser": self._normaliser.state_dict() if self._normaliser else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: the state is of another version, or was saved with another `reward.normalise`.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the reward state has version {state['version']}; this code reads {STATE_VERSION}")
        if (state["normaliser"] is not None) != (self._normaliser is not None):
            raise ValueError(f"the reward state was saved with another reward.normalise than {self.config.normalise}")
        if self._normaliser is not None:
            self._normaliser.load_state_dict(state["normaliser"])

    def _results(self, episodes: Sequence[Episode], pending: PendingRewards | None) -> SourceResults:
        """Raw results of every source, in the fixed order; waits for them."""
        pending = pending or self.begin()
        pending.complete(episodes)
        results: SourceResults = {}
        if pending.model is not None:
            results[MODEL_SOURCE] = list(pending.model.scores(episodes))
        if pending.judge is not None:
            results[JUDGE_SOURCE] = list(pending.judge.scores(episodes, [_function_sample(e) for e in episodes]))
        if pending.functions is not None:
            results |= {
                name: [_fitting(name, *pair) for pair in zip(entries, episodes, strict=True)]
                for name, entries in pending.functions.result().items()
            }
        if self._episodes is not None:
            source = self._episodes.source
            results |= {source: [self._given(source, episode) for episode in episodes]}
        return results

    def _given(self, source: str, episode: Episode) -> float | CallFailure:
        """What an environment or agent gave to an episode. One that gives nothing leaves the reward to the other sources."""
        if episode.failure is not None:
            return CallFailure(source, sample_name(episode), "raised", episode.failure)
        if episode.reward is None and len(self.sources) == 1:
            why = "it gave no reward, and there is no other source (reward.model, reward.functions)"
            return CallFailure(source, sample_name(episode), "raised", why)
        return episode.reward or 0.0

    def _submit(self, episodes: Sequence[Episode]) -> Future[SourceResults]:
        assert self._pool is not None
        # A source of weight 0 may fail without consequence, so its failure must not stop the others.
        stop = self.config.on_error == "fail" and all(source.weight != 0 for source in self.sources)
        return self._pool.submit(self._function_samples(episodes), stop_at_failure=stop)

    def _function_samples(self, episodes: Sequence[Episode]) -> list[FunctionSample]:
        assert self._pool is not None
        samples = [_function_sample(episode) for episode in episodes]
        if self._pool.wants("response_with_special_tokens"):
            assert self._decode_all is not None, "who builds the manager gives it the policy's tokenizer"
            texts = [self._decode_all(episode.response_ids) for episode in episodes]
            samples = [replace(s, response_with_special_tokens=text) for s, text in zip(samples, texts, strict=True)]
        return samples

    def _audit(self, episodes: Sequence[Episode]) -> list[str]:
        """Call each function twice on the first rows; returns a sentence for each difference."""
        if not self.config.audit_rows or self._pool is None:
            return []
        samples = self._function_samples(episodes[: self.config.audit_rows])
        first, second = self._pool.score(samples), self._pool.score(samples)
        found = []
        for name, values in first.items():
            for row, (one, other) in enumerate(zip(values, second[name], strict=True)):
                # Failures are left to the error policy.
                if not isinstance(one, CallFailure) and not isinstance(other, CallFailure) and one != other:
                    found.append(
                        f"reward source {name!r} gave sample {sample_name(episodes[row])} {one!r}, then {other!r}"
                    )
        if found:
            text = "the same call was scored differently when it was repeated: " + "; ".join(found[:_NAMED_FAILURES])
            if self.config.full_determinism:
                raise RewardError(
                    f"{text}. A run cannot repeat then (level D1): make the function depend on its arguments only, or set full_determinism=false"
                )
            logger.warning("%s", text)
        return found

    def _combine(self, episodes: Sequence[Episode], results: SourceResults) -> list[Score]:
        """Error policy, weighted sum, and where its parts lie."""
        weights = {source.name: source.weight for source in self.sources}
        scores = [self._score_row(row, weights, results) for row in range(len(episodes))]
        scores = [
            self._placed(row, *pair, weights, results) for row, pair in enumerate(zip(episodes, scores, strict=True))
        ]
        failures = _failures(results)
        failed = sum(score.error is not None for score in scores)
        if failed and self.config.on_error == "fail":
            raise RewardError(
                f"{failed} of {len(scores)} samples could not be scored. {_first(failures)}\n"
                "reward.on_error=drop or penalise goes on without them"
            )
        if failures:
            logger.warning(
                "%d reward calls failed (reward.on_error=%s). %s", len(failures), self.config.on_error, _first(failures)
            )
        return scores

    def _score_row(self, row: int, weights: Mapping[str, float], results: SourceResults) -> Score:
        values = {name: entries[row] for name, entries in results.items()}
        by_source = {name: _total(value) for name, value in values.items() if not isinstance(value, CallFailure)}
        # A source of weight 0 is only logged: its failure changes no reward.
        failures = [v for name, v in values.items() if isinstance(v, CallFailure) and weights[name] != 0]
        total = _weighted_sum(by_source, weights)
        error = "; ".join(str(failure) for failure in failures) or None
        if error is None and not abs(total) <= LARGEST_REWARD:
            error = f"the weighted sum of {dict(by_source)} is {total}, which is no finite float32"
        if error is None:
            return Score(total, by_source)
        if self.config.on_error == "penalise":
            return Score(self.config.penalty, by_source, error=error)
        return Score(0.0, by_source, dropped=True, error=error)

    def _placed(
        self, row: int, episode: Episode, score: Score, weights: Mapping[str, float], results: SourceResults
    ) -> Score:
        """The score with the places of its parts, where an environment, an agent or a process reward gives such; what has no place lies at the end."""
        own = self._episodes
        if score.error is not None:
            return score if own is None else replace(score, placed=end_of(episode, score.total))
        parts = {name: entries[row] for name, entries in results.items()}
        processes = {
            name: part for name, part in parts.items() if isinstance(part, ProcessReward) and weights[name] != 0
        }
        if own is None and not processes:
            return score
        placed = () if own is None else own.place(episode, weights[own.source])
        for name, part in processes.items():
            placed += process_places(episode, part, weights[name])
        at_end = {name: value for name, value in score.by_source.items() if own is None or name != own.source}
        at_end |= {name: part.score for name, part in processes.items()}
        rest = _weighted_sum(at_end, weights)
        return replace(score, placed=placed + (end_of(episode, rest) if rest else ()))

    def _normalised(self, episodes: Sequence[Episode], scores: list[Score], metrics: dict[str, float]) -> list[Score]:
        """Totals in running standard deviations. A penalty stays as it is and does not enter the statistics."""
        if self._normaliser is None:
            return scores
        self._normaliser.update([score.total for score in scores if score.error is None])
        metrics["reward/running_mean"], metrics["reward/running_std"] = self._normaliser.mean, self._normaliser.std
        made = []
        for episode, score in zip(episodes, scores, strict=True):
            if score.error is None:
                placed = [part._replace(value=self._normaliser.scale(part.value)) for part in score.placed]
                if placed:  # the mean is taken away at the end
                    placed += end_of(episode, self._normaliser.scale(-self._normaliser.mean))
                score = Score(self._normaliser.apply(score.total), score.by_source, placed=tuple(placed))
            made.append(score)
        return made


def reward_metrics(
    sources: Sequence[str], episodes: Sequence[Episode], scores: Sequence[Score], results: SourceResults
) -> dict[str, float]:
    """`reward/<source>/mean|std|min|max` (raw scores, before weights), `reward/<source>/errors`, `reward/total/...` over the samples
    kept (before normalisation), `reward/errors|dropped|penalised` (samples), `data/<source of prompts>/reward` (mean total).
    """
    metrics: dict[str, float] = {}
    for source in sources:
        values = [score.by_source[source] for score in scores if source in score.by_source]
        metrics |= _summary(f"reward/{source}", values)
        metrics[f"reward/{source}/errors"] = float(sum(isinstance(entry, CallFailure) for entry in results[source]))
    kept = [(episode, score) for episode, score in zip(episodes, scores, strict=True) if not score.dropped]
    metrics |= _summary("reward/total", [score.total for _, score in kept])
    metrics["reward/errors"] = float(sum(score.error is not None for score in scores))
    metrics["reward/dropped"] = float(sum(score.dropped for score in scores))
    metrics["reward/penalised"] = float(sum(score.error is not None for _, score in kept))
    for name in sorted({episode.prompt.source for episode, _ in kept}):
        totals = [score.total for episode, score in kept if episode.prompt.source == name]
        metrics[f"data/{name}/reward"] = math.fsum(totals) / len(totals)
    return metrics


def _summary(prefix: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    return {
        f"{prefix}/mean": mean,
        f"{prefix}/std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        f"{prefix}/min": min(values),
        f"{prefix}/max": max(values),
    }


def _sources(config: RewardConfig, episodes: EpisodeRewards | None) -> list[_Source]:
    sources = [_Source(MODEL_SOURCE, config.model.weight)] if config.model.path is not None else []
    sources += [_Source(JUDGE_SOURCE, config.judge.weight)] if config.judge.path is not None else []
    sources += [_Source(function.name, function.weight) for function in config.functions]
    sources += [_Source(episodes.source, config.episode_weight)] if episodes is not None else []
    names = [source.name for source in sources]
    if not sources:
        raise RewardError(
            "no reward: set reward.model.path or reward.judge.path, or name functions in reward.functions"
        )
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"{names.count(name)} reward sources have the name {name!r}; each needs its own")
    if config.on_error not in ERROR_POLICIES:
        raise RewardError(f"reward.on_error is {config.on_error!r}; it must be one of {', '.join(ERROR_POLICIES)}")
    return sources


def _total(entry: float | ProcessReward) -> float:
    return entry.total if isinstance(entry, ProcessReward) else entry


def _fitting(source: str, entry: Any, episode: Episode) -> Any:
    """The entry, or a failure if it has a place that the episode does not have."""
    if not isinstance(entry, ProcessReward):
        return entry
    try:
        process_places(episode, entry, 1.0)
    except ValueError as error:
        return CallFailure(source, sample_name(episode), "place", str(error))
    return entry


def _weighted_sum(by_source: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """In the order of the sources, from left to right, in float64."""
    total = 0.0
    for name, value in by_source.items():
        if weights[name] != 0:
            total += weights[name] * value
    return total


def _function_sample(episode: Episode) -> FunctionSample:
    prompt = episode.prompt
    messages = [dict(message) for message in (episode.conversation if episode.turns else prompt.messages)]
    return FunctionSample(
        *(sample_name(episode), prompt.text, episode.text, prompt.answer, prompt.extra, messages),
        turn_token_ids=[list(turn) for turn in sampled_turns(episode)],
    )


def _failures(results: SourceResults) -> list[CallFailure]:
    found = [entry for entries in results.values() for entry in entries if isinstance(entry, CallFailure)]
    # Calls that were not made are consequences, so they come last.
    return sorted(found, key=lambda failure: failure.kind == "skipped")


def _first(failures: Sequence[CallFailure]) -> str:
    shown = [str(failure) for failure in failures[:_NAMED_FAILURES]]
    more = [f"and {len(failures) - _NAMED_FAILURES} more"] if len(failures) > _NAMED_FAILURES else []
    return "First:\n" + "\n".join(shown + more)
