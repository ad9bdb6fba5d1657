"""The tensors that travel from the trainer to the FSDP workers.

One alignment for everything: position t of a per-token tensor belongs to token t of `input_ids`. A log-probability at t is
that of token t given the tokens before it; a value at t is the value of the state in which token t is chosen (the value
head's output at t-1). Sequences start at column 0 and are padded on the right, so causal attention never sees padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Sequences with their per-token quantities; N sequences, T columns. A *leaf* is a TokenBatch of `leaf_size` sequences."""

    input_ids: Tensor
    """[N, T] int64; prompt then response, padded on the right."""
    lengths: Tensor
    """[N] int64; real tokens of each sequence."""
    mask: Tensor
    """[N, T] bool; True at tokens the policy sampled and that are trained on. Column 0 is never True."""
    rollout_logprobs: Tensor | None = None
    """[N, T] float32, nats, 0 outside the mask; from the engine."""
    old_logprobs: Tensor | None = None
    """[N, T] float32; the actor's before the step's first update."""
    ref_logprobs: Tensor | None = None
    """[N, T] float32; the reference's."""
    old_values: Tensor | None = None
    """[N, T] float32; the critic's before the step's first update."""
    advantages: Tensor | None = None
    """[N, T] float32."""
    returns: Tensor | None = None
    """[N, T] float32; the value targets."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def select(self, rows: Tensor) -> TokenBatch:
        """The given rows ([M] int64) in the given order, cut to the longest of them.

        The width depends only on which sequences are chosen, never on the batch they came from.
        """
        width = int(self.lengths[rows].max())

        def take(value: Tensor) -> Tensor:
            chosen = value[rows]
            return chosen[:, :width].contiguous() if chosen.dim() == 2 else chosen

        return self._map(take)

    def with_end(self) -> TokenBatch:
        """Ids and mask with one column more, True at the position after each sequence's last token: where a return may continue.

        The appended id is a copy of column 0; nothing before it can see it.
        """
        ids = torch.cat([self.input_ids, self.input_ids[:, :1]], dim=1)
        mask = torch.cat([self.mask, torch.zeros_like(self.mask[:, :1])], dim=1)
        rows = torch.arange(len(self), device=mask.device)
        mask[rows, self.lengths] = True
        return TokenBatch(ids, self.lengths + 1, mask)

    def to(self, device: torch.device) -> TokenBatch:
        """A copy on `device`."""
        return self._map(lambda value: value.to(device))

    def with_(self, **tensors: Tensor) -> TokenBatch:
        """A copy with the named tensors set."""
        return replace(self, **tensors)

    def _map(self, function) -> TokenBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenBatch(**{name: None if value is None else function(value) for name, value in values.items()})


@dataclass(frozen=True)
class LossTotals:
    """Global counts of a mini-batch, known before its first backward pass, so that a leaf's loss is a plain share of the whole."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""
    max_response_tokens: int
    """The configured response cap, for constant-length normalisation."""


@dataclass(frozen=True)
class PolicyOutputs:
    """What a policy forward pass gives a loss."""

    logprobs: Tensor
    """[N, T] float32 with gradient; temperature applied; 0 outside the mask."""
    entropy: Tensor
    """[N, T] float32 with gradient when the loss asked for entropy; 0 outside the mask."""
    full_kl: Tensor | None = None
    """[N, T] float32 with gradient; KL to the reference over the whole vocabulary, when the loss asked for it."""


@dataclass(frozen=True)
class ValueOutputs:
    """What a value forward pass gives a loss."""

    values: Tensor
    """[N, T] float32 with gradient; 0 outside the mask."""


@dataclass(frozen=True)
class MiniBatch:
    """One rank's part of one optimizer step."""

    leaves: list[TokenBatch]
    """This rank's leaves in slot order: global leaf `slot * ranks + rank`."""
    totals: LossTotals
    """Counts of the whole mini-batch, over all ranks."""


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did, as one rank saw it."""

    losses: list[float]
    """Per slot: the leaf's share of the mini-batch's loss."""
    metrics: list[dict[str, float]]
    """Per slot: the leaf's shares of the metrics. Left per leaf, so that their sum can be taken in leaf order."""
    grad_norm: float
    """Global L2 norm before clipping; the same on every rank. May be non-finite when skipped."""
    lr: float
    """Learning rate used."""
    skipped: bool
    """True when a loss or the norm was not finite on any rank: weights and optimizer state were left alone."""
