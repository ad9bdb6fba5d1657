"""Actor, reference and critic as the loop sees them: a batch and its leaves in, per-leaf tensors out, whatever the number of ranks.

Leaves are dealt to ranks like cards (leaf `slot * ranks + rank`), so that the canonical sum over leaves has the same
shape at 1, 2 and 4 ranks; results come back in leaf order. The batch itself is placed on the ranks once per step. A call names
rows, and sends only columns that are new (old log-probabilities, advantages) or have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.experience import LeafPlan, loss_totals
from trainer.metrics import combine_metrics
from workers.launch.group import WorkerGroup, deal, undeal
from workers.launch.transport import Blob
from workers.models.batch import TokenBatch


@dataclass(frozen=True)
class MiniBatchResult:
    """What one optimizer step did, summed over its leaves in leaf order."""

    loss: float
    """The global loss."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    """Learning rate used."""
    skipped: bool
    """True when the loss or the norm was not finite and nothing was updated."""
    metrics: dict[str, float]
    """The loss's own metrics."""


class RemoteModels:
    """The trainer group's roles.

    Args:
        group: one `workers.models.trainer_worker.TrainerWorker` on every rank.
        temperature: sampling temperature; log-probabilities and entropy are those of the sampled distribution.
        max_response_tokens: the response cap, for constant-length normalisation.
    """

    def __init__(self, group: WorkerGroup, temperature: float, max_response_tokens: int) -> None:
        self.group = group
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self._placed: dict[str, Tensor] = {}

    def logprobs(self, role: str, tokens: TokenBatch, plan: LeafPlan) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities and entropies of `actor` or `ref`, per leaf [rows of the leaf, t]."""
        self._place(tokens)
        shares = deal(plan.rows, self.group.size)
        results = undeal(self.group.run("logprobs", shares, role=role, temperature=self.temperature))
        return [logprobs for logprobs, _ in results], [entropy for _, entropy in results]

    def values(self, tokens: TokenBatch, plan: LeafPlan, with_end: bool = False) -> list[Tensor]:
        """The critic's values, per leaf [rows of the leaf, t].

        Args:
            with_end: adds one column, with the value after each sequence's last token.
        """
        self._place(tokens)
        return undeal(self.group.run("values", deal(plan.rows, self.group.size), with_end=with_end))

    def update(
        self, role: str, tokens: TokenBatch, plan: LeafPlan, batches: Sequence[Sequence[int]], loss: Callable[..., Any]
    ) -> list[MiniBatchResult]:
        """One pass of `role` (`actor` or `critic`) over `batches` (leaf numbers of each mini-batch)."""
        self._place(tokens)
        chosen = [[plan.rows[i] for i in numbers] for numbers in batches]
        totals = [loss_totals([tokens.mask[rows] for rows in batch], self.max_response_tokens) for batch in chosen]
        dealt = [deal(batch, self.group.size) for batch in chosen]
        sharded = [
            [(shares[rank], total) for shares, total in zip(dealt, totals, strict=True)]
            for rank in range(self.group.size)
        ]
        per_rank = self.group.run("update", sharded, role=role, loss=loss)
        return [_merge([results[i] for results in per_rank]) for i in range(len(chosen))]

    def end_step(self) -> None:
        """Advance the learning-rate schedules; to be called once per training step."""
        self._placed = {}
        self.group.run("end_step")

    def weights(self) -> Blob:
        """The actor's whole weights by Hugging Face name, packed for the engines."""
        return self.group.fetch("export_weights")

    def save(self, path: Path) -> None:
        """Write trained weights and optimizer states into the directory `path`; each rank writes its shards."""
        self.group.run("save", path=str(path))

    def saved_bytes(self) -> int:
        """Bytes that `save` will write, over all ranks."""
        return self.group.run("saved_bytes")[0]

    def load(self, path: Path) -> None:
        """Load what `save` wrote, with any number of ranks."""
        self.group.run("load", path=str(path))

    def digests(self) -> dict[str, str]:
        """Digests of weights and optimizer states, the same for any sharding."""
        return self.group.run("digests")[0]

    def whole_weights(self, roles: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Raw weights of the trained roles, by ledger phase (`actor_weights`) and parameter name."""
        trained = [role for role in roles if role != "ref"]
        return {f"{role}_weights": self.group.run("whole_weights", role=role)[0] for role in trained}

    def _place(self, tokens: TokenBatch) -> None:
        """Send the columns that the ranks don't have yet."""
        columns = {field.name: value for field in fields(tokens) if (value := getattr(tokens, field.name)) is not None}
        if not _same(self._placed.get("input_ids"), tokens.input_ids):
            self._placed = {}  # another batch
        new = {name: value for name, value in columns.items() if not _same(self._placed.get(name), value)}
        if new:
            self.group.run("place", columns=new, fresh=not self._placed)
            self._placed.update(new)


def _same(sent: Tensor | None, value: Tensor) -> bool:
    return sent is value or (sent is not None and torch.equal(sent, value))


def _merge(per_rank: Sequence[Any]) -> MiniBatchResult:
    """One mini-batch's results of all ranks. Shares are added in leaf order, so the bits of the sum do not depend on the number of ranks."""
    losses = undeal([result.losses for result in per_rank])
    metrics = undeal([result.metrics for result in per_rank])
    loss = 0.0
    for share in losses:
        loss += share
    first = per_rank[0]
    return MiniBatchResult(loss, first.grad_norm, first.lr, first.skipped, combine_metrics(metrics))
