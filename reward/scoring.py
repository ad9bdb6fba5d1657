"""Scores of the reward model, made while responses are still being generated and while the trainer is at work.

    add(finished) ─┐  one thread
    add(finished) ─┼─> queue ──> reward engines ──> score by sample
    scores(all) ───┘  adds the rest and waits

With `max_num_seqs=1` and no prefix cache a score is a function of its own conversation, so the order in which conversations are
scored, and what else happens meanwhile, can't change a bit. For the same reason samples of a batch with the same conversation share
one score (a group of short answers has many such): it is computed once.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from reward.pool import CallFailure, SourceResults
from rollout.types import Episode, SampleKey
from workers.launch.group import WorkerGroup, deal, undeal

if TYPE_CHECKING:
    from configs.schema import RewardModelConfig

MODEL_SOURCE = "model"
"""Name of the reward model among the sources."""

ModelScore = float | CallFailure


class RewardError(RuntimeError):
    """Scoring failed in a way that the configuration does not allow; names samples and sources."""


class Scoring:
    """One batch on its way through all sources; see `RewardManager.begin`.

    Args:
        model: the reward model's part; None when none is served.
        submit: starts the functions on whole batches; None where they don't run.
    """

    def __init__(
        self, model: ModelScoring | None, submit: Callable[[Sequence[Episode]], Future[SourceResults]] | None
    ) -> None:
        self.model = model
        self.functions: Future[SourceResults] | None = None
        self._submit = submit

    @property
    def add(self) -> Callable[[Sequence[Episode]], None] | None:
        """Takes episodes that have finished while others are still being sampled; None when no source could use them yet."""
        return self.model.add if self.model is not None else None

    def complete(self, episodes: Sequence[Episode]) -> None:
        """The batch is these episodes, in canonical order; every source goes to work. Safe to call twice."""
        if self._submit is not None:
            # First: they work in processes of their own, and start while the reward model's tokens are made.
            self.functions = self._submit(episodes)
            self._submit = None
        if self.model is not None:
            self.model.add(episodes)


class ModelScoring:
    """The reward model's part in scoring one batch.

    Args:
        group: the reward engines.
        tokenizer: the reward model's.
        config: `reward.model`.
        context: tokens that the reward model takes; longer conversations are failures of their samples.
    """

    def __init__(self, group: WorkerGroup, tokenizer: Any, config: RewardModelConfig, context: int | None) -> None:
        self._group = group
        self._tokenizer = tokenizer
        self._config = config
        self._context = context
        self._added: set[SampleKey] = set()
        self._done: dict[SampleKey, ModelScore] = {}
        self._values: dict[tuple[int, ...], float] = {}  # of the conversations that were scored
        self._error: BaseException | None = None
        self._portions: queue.SimpleQueue[Sequence[Episode] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, episodes: Sequence[Episode]) -> None:
        """Start to score these episodes, unless they were added before; returns at once.

        Under torchrun every rank must add the same episodes in the same order.
        """
        new = [episode for episode in episodes if episode.key not in self._added]
        self._added.update(episode.key for episode in new)
        if not new:
            return
        if self._thread is None:
            # A daemon: a run that fails elsewhere does not wait for scores that nobody needs any more.
            self._thread = threading.Thread(target=self._work, name="reward-model", daemon=True)
            self._thread.start()
        self._portions.put(new)

    def scores(self, episodes: Sequence[Episode]) -> list[ModelScore]:
        """The raw logit of each episode, or why there is none; waits until all are there. The batch is complete then.

        Raises:
            RewardError: the engines returned another number of scores.
            WorkerError: a reward engine failed.
        """
        self.add(episodes)
        if self._thread is not None:
            self._portions.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return [self._done[episode.key] for episode in episodes]

    def _work(self) -> None:
        try:
            while (portion := self._portions.get()) is not None:
                self._done.update(self._score(portion))
        except BaseException as error:
            self._error = error

    def _score(self, episodes: Sequence[Episode]) -> dict[SampleKey, ModelScore]:
        from reward.model import RewardInput, reward_tokens

        found: dict[SampleKey, ModelScore] = {}
        conversations: dict[SampleKey, tuple[int, ...]] = {}
        for episode in episodes:
            ids = tuple(reward_tokens(episode.prompt, episode.text, self._tokenizer, self._config))
            try:
                RewardInput(episode.key, ids).check(self._context or len(ids))
            except ValueError as error:
                found[episode.key] = _failure(episode, "length", str(error))
            else:
                conversations[episode.key] = ids
        self._ask([ids for ids in dict.fromkeys(conversations.values()) if ids not in self._values])
        for episode in episodes:
            if episode.key in conversations:
                value = self._values[conversations[episode.key]]
                finite = math.isfinite(value)
                found[episode.key] = (
                    value if finite else _failure(episode, "not_finite", f"the reward model gave {value}")
                )
        return found

    def _ask(self, conversations: Sequence[tuple[int, ...]]) -> None:
        # Under torchrun every rank makes this call, with the same conversations, or none does.
        if not conversations:
            return
        shards = deal([list(ids) for ids in conversations], self._group.size)
        replies = undeal(self._group.run("score", shards))
        if len(replies) != len(conversations):
            raise RewardError(
                f"the reward engines returned {len(replies)} scores for {len(conversations)} conversations"
            )
        self._values.update(zip(conversations, replies, strict=True))


def sample_name(episode: Episode) -> str:
    """How messages name a sample."""
    return f"{episode.prompt.id} (task {episode.key.task}, sample {episode.key.sample})"


def _failure(episode: Episode, kind: str, message: str) -> CallFailure:
    return CallFailure(MODEL_SOURCE, sample_name(episode), kind, message)
