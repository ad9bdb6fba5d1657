"""The records that travel between data, engines, rewards and the trainer.

    Prompt --(n samples)--> GenerationRequest --engine--> Generation --> Episode --> trainer/experience.py

Everything is keyed on the canonical identity (task id, sample index, turn); lists are ordered by it, never by completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SampleKey(NamedTuple):
    """Canonical identity of one generation; tuples of it sort into the canonical order."""

    task: int
    """Position of the prompt in the step's batch, from 0."""
    sample: int
    """Index of the sample in the prompt's group, from 0."""
    turn: int = 0
    """Turn of the conversation, from 0."""


@dataclass(frozen=True)
class Prompt:
    """A row of a data source, ready for the engine."""

    id: str
    """Stable identity `source/row`; two rows with equal text have different ids."""
    source: str
    """Name of the data source."""
    token_ids: tuple[int, ...]
    """The rendered prompt, with exactly one BOS when the tokenizer has one; no padding."""
    text: str
    """The rendered prompt as text."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation in chat form; plain text is one user message."""
    answer: Any = None
    """Reference answer for verifiers."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's remaining columns (what a reasoning-gym task needs to score an answer, for example)."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request, all explicit. Field meanings: `configs.schema.SamplingConfig`."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """Tokens in: one call of an engine."""

    key: SampleKey
    """Canonical identity."""
    prompt_token_ids: tuple[int, ...]
    """Everything the model sees before the first new token."""
    seed: int | None
    """63-bit seed of this request alone; None draws from the engine's own stream, which can't be repeated."""
    sampling: Sampling
    """Parameters, all of them sent."""
    priority: int = 0
    """Unique within a batch; at a tie, a scheduler would decide by arrival time."""


@dataclass(frozen=True)
class Generation:
    """Tokens out: what the engine sampled, never re-encoded from text."""

    key: SampleKey
    """Identity of the request."""
    token_ids: tuple[int, ...]
    """Sampled ids, the ending EOS included when there is one."""
    logprobs: tuple[float, ...]
    """log-probability of each sampled id under the sampling distribution (temperature applied), nats; same length as `token_ids`."""
    finish_reason: str
    """`stop` (EOS or a stop condition) or `length` (the cap)."""
    weight_version: int
    """Number of weight updates the engine had taken."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{self.key}: {len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities")


@dataclass(frozen=True)
class Turn:
    """One answer of the policy in an episode of several turns. An episode's turns make a tree; they are in canonical order."""

    parent: int | None
    """Position, in `Episode.turns`, of the turn that this one continues; None for the first turn of a path."""
    prompt_ids: tuple[int, ...]
    """Everything that the model saw."""
    token_ids: tuple[int, ...]
    """What it sampled."""
    logprobs: tuple[float, ...]
    """As in `Generation`; same length as `token_ids`."""
    finish_reason: str
    """`stop` or `length`."""
    seed: int | None
    """The request's seed."""
    weight_version: int = 0
    """As in `Generation`."""
    reward: float = 0.0
    """What an agent or environment gave for this turn alone."""


@dataclass(frozen=True)
class Row:
    """One sequence to train on: a path through an episode's turns, from a first turn to a last one."""

    prompt_ids: tuple[int, ...]
    """Tokens before the first sampled one."""
    response_ids: tuple[int, ...]
    """Every token after them, those of tools and users between the turns too."""
    mask: tuple[bool, ...]
    """True where the policy sampled the token and this is the row that trains it; same length as `response_ids`."""
    logprobs: tuple[float, ...]
    """Rollout log-probabilities, 0.0 where the mask is False."""
    turn_ends: tuple[tuple[int, int], ...] = ()
    """(turn, position in `response_ids` of its last sampled token) for each turn that this row trains, in order."""
    truncated: bool = False
    """Whether a cap ended the last turn."""


@dataclass(frozen=True)
class Episode:
    """One sample of one prompt, complete: what is scored and trained on.

    An episode of a single turn is one row. One of several turns has `turns` and one row for each path through them; the fields from
    `response_ids` to `logprobs` are then those of the first row.
    """

    key: SampleKey
    """Canonical identity (the last turn's)."""
    prompt: Prompt
    """The prompt that it answers."""
    seed: int | None
    """Seed of its (first) request; None without one."""
    response_ids: tuple[int, ...]
    """Every token after the prompt; with several turns also those that the environment wrote."""
    response_mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """Rollout log-probabilities, 0.0 where the mask is False."""
    finish_reason: str
    """Of the last turn: `stop` or `length`."""
    text: str
    """Decoded response without special tokens."""
    weight_version: int = 0
    """Version of the weights that sampled it (the oldest, where turns differ)."""
    turns: tuple[Turn, ...] = ()
    """The turns of an agent's or environment's episode; empty for a plain response."""
    paths: tuple[Row, ...] = ()
    """Its rows, where there are turns; see `rows`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """With turns: the conversation after the prompt's messages, along the path of the last turn, tool calls and results included."""
    reward: float | None = None
    """What the agent or environment gave in all (the sum over `turns`); None when it gives none."""
    failure: str | None = None
    """Why the agent or environment failed on this sample; what becomes of it is `reward.on_error`'s choice."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What was counted, by metric name (`rollout/forked_turns`)."""

    @property
    def truncated(self) -> bool:
        """Whether the cap ended it: from the engine's finish reason, never from a padded width."""
        return self.finish_reason == "length"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The sequences to train on, at least one (a failed episode may have one without a trained token)."""
        if self.paths:
            return self.paths
        prompt = self.prompt.token_ids
        return (Row(prompt, self.response_ids, self.response_mask, self.logprobs, truncated=self.truncated),)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, in all turns."""
        return sum(len(turn.token_ids) for turn in self.turns) if self.turns else len(self.response_ids)

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """The whole conversation: the prompt's messages and what followed."""
        return (*self.prompt.messages, *(self.messages or ({"role": "assistant", "content": self.text},)))


class PlacedReward(NamedTuple):
    """A part of a reward, at a token."""

    row: int
    """Position in `Episode.rows`."""
    position: int
    """Position in `Row.response_ids`."""
    value: float
    """The reward, weights applied."""


@dataclass(frozen=True)
class Score:
    """Reward of one episode."""

    total: float
    """Weighted sum over the sources, never NaN. Meaningless when `dropped`."""
    by_source: Mapping[str, float]
    """Raw score of each source, before its weight; a source that failed on this sample is absent."""
    dropped: bool = False
    """The sample takes no part in group statistics, loss or metrics (reward.on_error=drop)."""
    error: str | None = None
    """What failed, with the source's name; None when nothing did."""
    placed: tuple[PlacedReward, ...] = ()
    """Where the total lies, if not all of it is on the last trained token of the first row; these then add up to `total`."""


def end_of(episode: Episode, value: float) -> tuple[PlacedReward, ...]:
    """The reward at the last token of the episode's last turn; nowhere when no token was sampled."""
    ends = [(turn, row, position) for row, one in enumerate(episode.rows) for turn, position in one.turn_ends]
    if ends:
        _, row, position = max(ends)
        return (PlacedReward(row, position, value),)
    mask = episode.rows[0].mask
    last = max((i for i, mine in enumerate(mask) if mine), default=None)
    return () if last is None else (PlacedReward(0, last, value),)
