"""A step's episodes as tensors: padded once, masked once, cut into leaves once.

Rows are in the canonical order (task, sample). For computing they are dealt into *leaves*: a fixed number of sequences
chosen by a seeded permutation. Every forward and backward pass of the step, old and new log-probabilities alike, sees the
same leaves, so the first ratio is exactly 1; epochs shuffle leaves, not rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from configs.schema import FsdpConfig
from determinism.seeds import derive_seed, permutation
from rollout.types import Episode, Score
from workers.models.batch import LossTotals, TokenBatch


@dataclass(frozen=True)
class Experience:
    """N episodes with everything that is computed about them; T is the number of tokens of the longest one."""

    episodes: tuple[Episode, ...]
    """The episodes, in canonical order; row i of every tensor is episode i."""
    tokens: TokenBatch
    """Ids, masks and per-token quantities, [N, T]."""
    scores: Tensor
    """[N] float32; total reward of each episode; 0 where dropped."""
    keep: Tensor
    """[N] bool; False for samples dropped by `reward.on_error=drop`."""
    group: Tensor
    """[N] int64; position of the episode's prompt in the step's batch."""
    truncated: Tensor
    """[N] bool; True when the cap ended the response, as the engine reported."""

    @classmethod
    def from_episodes(cls, episodes: Sequence[Episode], scores: Sequence[Score] | None, pad_id: int) -> Experience:
        """Pad and mask.

        Args:
            scores: None when they are not there yet (`scored` adds them).

        Raises:
            ValueError: another number of scores than episodes.
        """
        lengths = torch.tensor([len(e.prompt.token_ids) + len(e.response_ids) for e in episodes])
        count, width = len(episodes), int(lengths.max())
        ids = torch.full((count, width), pad_id, dtype=torch.int64)
        mask = torch.zeros((count, width), dtype=torch.bool)
        logprobs = torch.zeros((count, width), dtype=torch.float32)
        for row, episode in enumerate(episodes):
            start, end = len(episode.prompt.token_ids), int(lengths[row])
            ids[row, :end] = torch.tensor(episode.prompt.token_ids + episode.response_ids)
            mask[row, start:end] = torch.tensor(episode.response_mask, dtype=torch.bool)
            logprobs[row, start:end] = torch.tensor(episode.logprobs, dtype=torch.float32)
        made = cls(
            episodes=tuple(episodes),
            tokens=TokenBatch(ids, lengths, mask, rollout_logprobs=torch.where(mask, logprobs, 0.0)),
            scores=torch.zeros(count),
            keep=torch.ones(count, dtype=torch.bool),
            group=torch.tensor([e.key.task for e in episodes]),
            truncated=torch.tensor([e.truncated for e in episodes]),
        )
        return made if scores is None else made.scored(scores)

    def scored(self, scores: Sequence[Score]) -> Experience:
        """A copy with the rewards; a dropped sample has no trained token and no log-probability any more.

        Raises:
            ValueError: another number of scores than episodes.
        """
        if len(self) != len(scores):
            raise ValueError(f"{len(self)} episodes but {len(scores)} scores")
        totals = torch.tensor([score.total for score in scores], dtype=torch.float32)
        made = replace(self, scores=totals).without(torch.tensor([score.dropped for score in scores]))
        logprobs = made.tokens.rollout_logprobs
        assert logprobs is not None, "set by from_episodes"
        return made.with_tokens(rollout_logprobs=torch.where(made.tokens.mask, logprobs, 0.0))

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
            tokens=self.tokens.with_(mask=self.tokens.mask & keep[:, None]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that is a tensor, by name: the fields of `tokens` ([N] and [N, T]) that are set, and those per row ([N])."""
        found = {field.name: getattr(self.tokens, field.name) for field in fields(self.tokens)}
        found |= {name: getattr(self, name) for name in ("scores", "keep", "group", "truncated")}
        # Copies: two fields may share memory, which safetensors refuses.
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in found.items() if t is not None}

    def __len__(self) -> int:
        return len(self.episodes)


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
