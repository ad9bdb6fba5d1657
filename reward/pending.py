"""Rewards that are computed while responses are still being generated and while the trainer works.

    episode finished ──add──> reward engines ──> future of a score        (one conversation, one score)
    batch complete ──complete──> functions on the whole batch ──> future of their results

With `max_num_seqs=1` and no prefix cache a score is a function of its own conversation, so the order in which conversations are
scored, and what else happens meanwhile, can't change a bit. For the same reason samples of a batch with the same conversation share
one score, which is computed once. (A group of short answers has many such samples.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reward.pool import CallFailure, SourceResults
from rollout.types import Episode, SampleKey
from workers.launch.group import WorkerGroup

if TYPE_CHECKING:
    from configs.schema import RewardModelConfig
    from reward.judge import PendingJudgements

MODEL_SOURCE = "model"
"""Name of the reward model among the sources."""

ModelScore = float | CallFailure


class RewardError(RuntimeError):
    """Scoring failed in a way that the configuration does not allow; names samples and sources."""


class PendingRewards:
    """One batch while it is scored by all sources; see `RewardManager.begin`.

    Args:
        model: the reward model's part; None when none is served.
        judge: the judge's part; None without one.
        submit: starts the functions on whole batches; None where there are none.
    """

    def __init__(
        self,
        model: PendingModelScores | None,
        submit: Callable[[Sequence[Episode]], Future[SourceResults]] | None,
        judge: PendingJudgements | None = None,
    ) -> None:
        self.model = model
        self.judge = judge
        self.functions: Future[SourceResults] | None = None
        self._submit = submit

    def add(self, episode: Episode) -> None:
        """Take an episode that has finished while others are still being sampled. Not to be called from two threads at once."""
        if self.model is not None:
            self.model.add(episode)
        if self.judge is not None:
            self.judge.add(episode)

    def complete(self, episodes: Sequence[Episode]) -> None:
        """Say that the batch consists of these episodes, in canonical order: every source starts. Safe to call twice."""
        if self._submit is not None:
            # Functions first: they run in processes of their own, while the reward model's tokens are made here.
            self.functions = self._submit(episodes)
            self._submit = None
        for episode in episodes:
            self.add(episode)


class PendingModelScores:
    """The reward model's part in scoring one batch.

    Args:
        group: the reward engines.
        tokenizer: the reward model's.
        config: `reward.model`.
        context: most tokens that the reward model takes; the sample of a longer conversation fails.
    """

    def __init__(self, group: WorkerGroup, tokenizer: Any, config: RewardModelConfig, context: int | None) -> None:
        self._group = group
        self._tokenizer = tokenizer
        self._config = config
        self._context = context
        self._replica = itertools.cycle(range(group.size))
        self._by_sample: dict[SampleKey, Future[float] | CallFailure] = {}
        self._by_conversation: dict[tuple[int, ...], Future[float]] = {}

    def add(self, episode: Episode) -> None:
        """Start to score this episode, unless it was added before; returns at once."""
        if episode.key not in self._by_sample:
            self._by_sample[episode.key] = self._ask(episode)

    def scores(self, episodes: Sequence[Episode]) -> list[ModelScore]:
        """The raw logit of each episode, or why there is none; waits until all are there.

        Raises:
            WorkerError: a reward engine failed.
        """
        for episode in episodes:
            self.add(episode)
        done, _ = wait(self._by_conversation.values(), return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # a failure is raised at once, without waiting for the rest
        return [self._score(episode) for episode in episodes]

    def _ask(self, episode: Episode) -> Future[float] | CallFailure:
        from reward.model import RewardInput, reward_tokens

        prompt = episode.prompt
        if episode.turns:  # what was said before the last turn is part of what it answers
            prompt = replace(prompt, messages=episode.conversation[:-1])
        ids = tuple(reward_tokens(prompt, episode.text, self._tokenizer, self._config))
        try:
            RewardInput(episode.key, ids).check(self._context or len(ids))
        except ValueError as error:
            return _failure(episode, "length", str(error))
        if ids not in self._by_conversation:
            (self._by_conversation[ids],) = self._group.submit(next(self._replica), [list(ids)])
        return self._by_conversation[ids]

    def _score(self, episode: Episode) -> ModelScore:
        found = self._by_sample[episode.key]
        if isinstance(found, CallFailure):
            return found
        value = found.result()
        return value if math.isfinite(value) else _failure(episode, "not_finite", f"the reward model gave {value}")


def sample_name(episode: Episode) -> str:
    """How messages name a sample."""
    return f"{episode.prompt.id} (task {episode.key.task}, sample {episode.key.sample})"


def _failure(episode: Episode, kind: str, message: str) -> CallFailure:
    return CallFailure(MODEL_SOURCE, sample_name(episode), kind, message)
