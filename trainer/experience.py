"""A step's episodes as tensors: padded once, masked once, cut into leaves once.

Rows are in the canonical order (task, sample). For computing they are dealt into *leaves*: a fixed number of sequences
chosen by a seeded permutation. Every forward and backward pass of the step, old and new log-probabilities alike, sees the
same leaves, so the first ratio is exactly 1; epochs shuffle leaves, not rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from configs.schema import FsdpConfig
from determinism.seeds import derive_seed, permutation
from rollout.types import Episode, Score, end_of
from workers.models.batch import LossTotals, TokenBatch


@dataclass(frozen=True)
class Experience:
    """A step's episodes with everything that is computed about them, in N rows of T tokens (of the longest one).

    A plain response is one row. An episode of several turns may be more (`Episode.rows`). Rows without a trained token, *blanks*, fill up the last
    mini-batch where that is needed.
    """

    episodes: tuple[Episode, ...]
    """The E episodes, in canonical order."""
    tokens: TokenBatch
    """Ids, masks and per-token quantities, [N, T]."""
    scores: Tensor
    """[N] float32; total reward of each row's episode; 0 where dropped."""
    keep: Tensor
    """[N] bool; False for samples dropped by `reward.on_error=drop`."""
    group: Tensor
    """[N] int64; position of the episode's prompt in the step's batch."""
    truncated: Tensor
    """[N] bool; True when the cap ended the row, as the engine reported."""
    sample: Tensor
    """[N] int64; position of the row's episode in `episodes`, -1 for blanks."""
    first: Tensor
    """[N] int64; number of the first row of the same episode (a blank's own). Statistics of groups count first rows only."""
    placed: Tensor | None = None
    """[N, T] float32; where the scores lie, if not all of them are on the last trained token of their episode's only row."""

    @classmethod
    def from_episodes(
        cls, episodes: Sequence[Episode], scores: Sequence[Score] | None, pad_id: int, multiple: int = 1
    ) -> Experience:
        """Pad and mask.

        Args:
            scores: None when they are not there yet (`scored` adds them).
            multiple: if an episode has several rows, blanks are added until the number of rows is a multiple of this.

        Raises:
            ValueError: another number of scores than episodes.
        """
        rows = [(number, row) for number, episode in enumerate(episodes) for row in episode.rows]
        blanks = -len(rows) % multiple if any(episode.turns for episode in episodes) else 0
        count = len(rows) + blanks
        lengths = torch.tensor([len(row.prompt_ids) + len(row.response_ids) for _, row in rows] + [1] * blanks)
        width = int(lengths.max())
        ids = torch.full((count, width), pad_id, dtype=torch.int64)
        mask = torch.zeros((count, width), dtype=torch.bool)
        logprobs = torch.zeros((count, width), dtype=torch.float32)
        for number, (_, row) in enumerate(rows):
            start, end = len(row.prompt_ids), int(lengths[number])
            ids[number, :end] = torch.tensor(row.prompt_ids + row.response_ids)
            mask[number, start:end] = torch.tensor(row.mask, dtype=torch.bool)
            logprobs[number, start:end] = torch.tensor(row.logprobs, dtype=torch.float32)
        sample = torch.tensor([number for number, _ in rows] + [-1] * blanks)
        firsts: dict[int, int] = {}
        for place, (number, _) in enumerate(rows):
            firsts.setdefault(number, place)
        made = cls(
            episodes=tuple(episodes),
            tokens=TokenBatch(ids, lengths, mask, rollout_logprobs=torch.where(mask, logprobs, 0.0)),
            scores=torch.zeros(count),
            keep=sample >= 0,
            group=torch.tensor([episodes[number].key.task for number, _ in rows] + [0] * blanks),
            truncated=torch.tensor([row.truncated for _, row in rows] + [False] * blanks),
            sample=sample,
            first=torch.tensor([firsts[number] for number, _ in rows] + list(range(len(rows), count))),
        )
        return made if scores is None else made.scored(scores)

    def scored(self, scores: Sequence[Score]) -> Experience:
        """A copy with the rewards; a dropped sample has no trained token and no log-probability any more.

        Raises:
            ValueError: another number of scores than episodes.
        """
        if len(self.episodes) != len(scores):
            raise ValueError(f"{len(self.episodes)} episodes but {len(scores)} scores")
        totals = self.per_row(torch.tensor([score.total for score in scores], dtype=torch.float32))
        made = replace(self, scores=totals, placed=self._placed(scores)).without(
            self.per_row(torch.tensor([score.dropped for score in scores]))
        )
        logprobs = made.tokens.rollout_logprobs
        assert logprobs is not None, "set by from_episodes"
        return made.with_tokens(rollout_logprobs=torch.where(made.tokens.mask, logprobs, 0.0))

    def per_row(self, per_episode: Tensor) -> Tensor:
        """[E] to [N]: every row gets its episode's value, blanks get 0."""
        found = per_episode[self.sample.clamp(min=0)]
        return torch.where(self.sample >= 0, found, torch.zeros((), dtype=found.dtype))

    def per_episode(self, per_row: Tensor) -> Tensor:
        """[N] to [E]: the value of each episode's first row."""
        return per_row[self._first_rows()]

    def sum_rows(self, per_row: Tensor) -> Tensor:
        """[N]: the sum over all rows of the same episode, in every one of them."""
        if len(self.episodes) == len(self):
            return per_row
        return torch.zeros_like(per_row).index_add(0, self.first, per_row)[self.first]

    def _first_rows(self) -> Tensor:
        """[E] int64: number of each episode's first row."""
        return ((self.first == torch.arange(len(self))) & (self.sample >= 0)).nonzero().flatten()

    def _placed(self, scores: Sequence[Score]) -> Tensor | None:
        if not any(score.placed for score in scores):
            return None
        placed = torch.zeros(self.tokens.input_ids.shape, dtype=torch.float64)
        for first, episode, score in zip(self._first_rows().tolist(), self.episodes, scores, strict=True):
            rows = episode.rows
            for part in score.placed or end_of(episode, score.total):
                placed[first + part.row, len(rows[part.row].prompt_ids) + part.position] += part.value
        return placed.to(torch.float32)

    def with_tokens(self, **tensors: Tensor) -> Experience:
        """A copy with per-token tensors ([N, T]) set."""
        return replace(self, tokens=self.tokens.with_(**tensors))

    def without(self, rows: Tensor) -> Experience:
        """A copy in which the given rows ([N] bool) are dropped too: no score, no trained token, no part in any statistic."""
        keep = self.keep & ~rows
        return replace(
            self,
            keep=keep,
            scores=torch.where(keep, self.scores, 0.0),
            placed=None if self.placed is None else torch.where(keep[:, None], self.placed, 0.0),
            tokens=self.tokens.with_(mask=self.tokens.mask & keep[:, None]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that is a tensor, by name: the fields of `tokens` ([N] and [N, T]) that are set, and those per row ([N])."""
        found = {field.name: getattr(self.tokens, field.name) for field in fields(self.tokens)}
        found |= {name: getattr(self, name) for name in ("scores", "keep", "group", "truncated", "placed")}
        # Copies: two fields may share memory, which safetensors refuses.
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in found.items() if t is not None}

    def row_episodes(self) -> list[Episode]:
        """The episode of each row, without blanks."""
        return [self.episodes[number] for number in self.sample.tolist() if number >= 0]

    def token_scores(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the scores lie: [N] what is on each row's last trained token, and [N, T] what has another place (None for nothing).

        Args:
            scores: [N]; the scores after shaping. What shaping added lies on the last trained token of an episode's first row.
        """
        if self.placed is None:
            return scores, None
        is_first = self.first == torch.arange(len(self))
        return torch.where(is_first, scores - self.scores, 0.0), self.placed

    def turns_by_row(self) -> list[list[list[Any]]]:
        """For each row (without blanks) the turns that it trains, as plain values."""
        found = []
        for episode in self.episodes:
            for row in episode.rows:
                turns = [(number, episode.turns[number]) for number, _ in row.turn_ends]
                found.append(
                    [
                        [
                            i,
                            t.parent,
                            list(t.prompt_ids),
                            list(t.token_ids),
                            list(t.logprobs),
                            t.seed,
                            t.finish_reason,
                            t.reward,
                        ]
                        for i, t in turns
                    ]
                )
        return found

    def names(self) -> list[tuple[str, int, int]]:
        """(prompt id, task, sample) of each row; a blank has no prompt."""
        episodes = [None if number < 0 else self.episodes[number] for number in self.sample.tolist()]
        return [("", -1, -1) if e is None else (e.prompt.id, e.key.task, e.key.sample) for e in episodes]

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True)
class LeafPlan:
    """Which rows make up which leaf."""

    rows: tuple[Tensor, ...]
    """Per leaf: [rows of the leaf] int64 row numbers."""

    @classmethod
    def draw(
        cls, lengths: Tensor, fsdp: FsdpConfig, run_seed: int, step: int, *, bucket_by_length: bool = False
    ) -> LeafPlan:
        """Deal rows into leaves; a function of the arguments alone, the same for every role and rank count.

        Args:
            lengths: [N] int64; tokens of each row.
            fsdp: `leaf_size` rows make a leaf, or as many as fit `leaf_tokens` padded tokens when that is set.
            bucket_by_length: rows of similar length share a leaf, so that less padding is computed.

        Raises:
            ValueError: `leaf_size` does not divide the number of rows.
        """
        order = permutation(len(lengths), derive_seed(run_seed, "leaves", step))
        if bucket_by_length:
            order.sort(key=lambda row: int(lengths[row]))  # stable: rows of equal length stay shuffled
        if fsdp.leaf_tokens is not None:
            return cls(tuple(_within_budget(order, lengths, fsdp.leaf_tokens)))
        if len(order) % fsdp.leaf_size:
            raise ValueError(f"{len(order)} sequences can't be cut into leaves of {fsdp.leaf_size}")
        return cls(tuple(torch.tensor(order).split(fsdp.leaf_size)))

    def paste(self, per_leaf: Sequence[Tensor], width: int) -> Tensor:
        """One tensor per leaf ([rows of the leaf, t]) as one tensor of the batch: [N, width], zeros in the padding."""
        count = sum(len(rows) for rows in self.rows)
        whole = torch.zeros((count, width), dtype=per_leaf[0].dtype)
        for rows, values in zip(self.rows, per_leaf, strict=True):
            whole[rows, : values.shape[1]] = values
        return whole

    def epoch(self, mini_batch_size: int, run_seed: int, role: str, step: int, epoch: int) -> list[list[int]]:
        """Leaf numbers of each mini-batch of one epoch, shuffled by (seed, role, step, epoch).

        Leaves are taken until a mini-batch has `mini_batch_size` sequences; with leaves of unequal size the last one may have fewer.
        """
        batches: list[list[int]] = [[]]
        taken = 0
        for leaf in permutation(len(self.rows), derive_seed(run_seed, "mini_batches", role, step, epoch)):
            if taken >= mini_batch_size:
                batches.append([])
                taken = 0
            batches[-1].append(leaf)
            taken += len(self.rows[leaf])
        return batches


def _within_budget(order: Sequence[int], lengths: Tensor, budget: int) -> Iterator[Tensor]:
    """Consecutive rows of `order` whose padded size (rows x longest) stays within `budget` tokens; a longer row goes alone."""
    leaf: list[int] = []
    longest = 0
    for row in order:
        grown = max(longest, int(lengths[row]))
        if leaf and grown * (len(leaf) + 1) > budget:
            yield torch.tensor(leaf)
            leaf, grown = [], int(lengths[row])
        leaf.append(row)
        longest = grown
    yield torch.tensor(leaf)


def loss_totals(masks: Sequence[Tensor], max_response_tokens: int) -> LossTotals:
    """Counts over a mini-batch; at least 1 each, so that an all-masked mini-batch has loss 0, not NaN.

    Args:
        masks: of each leaf [rows of the leaf, T] bool, True for trained tokens.
    """
    tokens = sum(int(mask.sum()) for mask in masks)
    sequences = sum(int(mask.any(dim=1).sum()) for mask in masks)
    return LossTotals(max(tokens, 1), max(sequences, 1), max_response_tokens)
