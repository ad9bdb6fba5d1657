"""Actor, reference and critic as the loop sees them: leaves in, per-leaf tensors out, whatever the number of ranks.

Leaves are dealt to ranks like cards (leaf `slot * ranks + rank`), so that the canonical sum over leaves has the same
shape at 1, 2 and 4 ranks; results come back in leaf order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.experience import loss_totals
from trainer.metrics import combine_metrics
from workers.launch.group import WorkerGroup, deal, undeal
from workers.models.batch import MiniBatch, TokenBatch


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
        group: `workers.models.trainer_worker.TrainerWorker` on every rank.
        temperature: sampling temperature; log-probabilities and entropy are those of the sampled distribution.
        max_response_tokens: the response cap, for constant-length normalisation.
    """

    def __init__(self, group: WorkerGroup, temperature: float, max_response_tokens: int) -> None:
        self.group = group
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens

    def logprobs(self, role: str, leaves: Sequence[TokenBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities and entropies of `actor` or `ref`, per leaf [leaf_size, t]."""
        results = self._on_leaves(f"{role}.logprobs", leaves, temperature=self.temperature)
        return [logprobs for logprobs, _ in results], [entropy for _, entropy in results]

    def values(self, leaves: Sequence[TokenBatch]) -> list[Tensor]:
        """The critic's values, per leaf [leaf_size, t]."""
        return self._on_leaves("critic.values", leaves)

    def update(
        self, role: str, leaves: Sequence[TokenBatch], batches: Sequence[Sequence[int]], loss: Callable[..., Any]
    ) -> list[MiniBatchResult]:
        """One pass of `role` (`actor` or `critic`) over `batches` (leaf numbers of each mini-batch)."""
        chosen = [[leaves[i] for i in numbers] for numbers in batches]
        totals = [loss_totals(batch, self.max_response_tokens) for batch in chosen]
        dealt = [deal(batch, self.group.size) for batch in chosen]
        sharded = [
            [MiniBatch(shares[rank], total) for shares, total in zip(dealt, totals, strict=True)]
            for rank in range(self.group.size)
        ]
        per_rank = self.group.run(f"{role}.update", sharded, loss=loss)
        return [_merge([results[i] for results in per_rank]) for i in range(len(chosen))]

    def end_step(self) -> None:
        """Advance the learning-rate schedules; once a training step."""
        self.group.run("end_step")

    def digests(self) -> dict[str, str]:
        """Digests of weights and optimizer states, the same for any sharding."""
        return self.group.run("digests")[0]

    def whole_weights(self, roles: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Raw weights of the trained roles, by ledger phase (`actor_weights`) and parameter name."""
        trained = [role for role in roles if role != "ref"]
        return {f"{role}_weights": self.group.run("whole_weights", role=role)[0] for role in trained}

    def _on_leaves(self, method: str, leaves: Sequence[TokenBatch], **common: Any) -> list[Any]:
        return undeal(self.group.run(method, deal(leaves, self.group.size), **common))


def _merge(per_rank: Sequence[Any]) -> MiniBatchResult:
    """One mini-batch's results of all ranks. Shares are added in leaf order, so the sum's bits do not depend on ranks."""
    losses = undeal([result.losses for result in per_rank])
    metrics = undeal([result.metrics for result in per_rank])
    loss = 0.0
    for share in losses:
        loss += share
    first = per_rank[0]
    return MiniBatchResult(loss, first.grad_norm, first.lr, first.skipped, combine_metrics(metrics))
