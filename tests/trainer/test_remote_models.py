"""What travels to the ranks: each column of a step's batch once, rows by their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import FsdpConfig
from trainer.experience import LeafPlan
from trainer.remote_models import RemoteModels
from workers.models.batch import LossTotals, TokenBatch, UpdateResult

ROWS, WIDTH = 8, 6


class Ranks:
    """A trainer group in this process. Each rank keeps the placed columns, and answers with the ids of the rows that it was given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.placed: list[tuple[list[str], bool]] = []
        self.columns: dict[str, Tensor] = {}

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        if sharded is not None:
            assert len(sharded) == self.size
        return [
            getattr(self, method)(*([] if sharded is None else [sharded[rank]]), rank, **common)
            for rank in range(self.size)
        ]

    def place(self, rank: int, columns: Mapping[str, Tensor], fresh: bool) -> None:
        if rank == 0:
            self.placed.append((sorted(columns), fresh))
            self.columns = {**({} if fresh else self.columns), **columns}

    def ids(self, rows: Tensor) -> Tensor:
        return TokenBatch(**self.columns).select(rows).input_ids.float()

    def logprobs(
        self, leaves: Sequence[Tensor], rank: int, role: str, temperature: float
    ) -> list[tuple[Tensor, Tensor]]:
        return [(self.ids(rows), -self.ids(rows)) for rows in leaves]

    def values(self, leaves: Sequence[Tensor], rank: int, with_end: bool) -> list[Tensor]:
        return [self.ids(rows) for rows in leaves]

    def update(
        self, batches: Sequence[tuple[Sequence[Tensor], LossTotals]], rank: int, role: str, loss: Any
    ) -> list[UpdateResult]:
        """The loss is the sum of the advantages of the rows, and the metric the number of trained tokens that the totals say."""
        return [
            UpdateResult(
                [float(self.columns["advantages"][rows].sum()) for rows in leaves],
                [{"tokens": totals.tokens / self.size / len(leaves)} for _ in leaves],
                1.0,
                0.5,
                False,
            )
            for leaves, totals in batches
        ]

    def end_step(self, rank: int) -> None:
        self.columns = {}


def batch(first: int = 0) -> TokenBatch:
    ids = torch.arange(first, first + ROWS * WIDTH).reshape(ROWS, WIDTH)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[:, 0] = False
    return TokenBatch(ids, torch.full((ROWS,), WIDTH), mask, rollout_logprobs=torch.zeros(ROWS, WIDTH))


def step(models: RemoteModels, tokens: TokenBatch) -> TokenBatch:
    """The calls of a PPO step: roles with leaves of two sizes, then advantages, then updates over two epochs."""
    small, large = (LeafPlan.draw(tokens.lengths, FsdpConfig(leaf_size=size), 1, 1) for size in (1, 2))
    for role, plan in (("actor", small), ("ref", large)):
        logprobs, entropy = models.logprobs(role, tokens, plan)
        assert torch.equal(plan.paste(logprobs, WIDTH), tokens.input_ids.float())
        assert torch.equal(plan.paste(entropy, WIDTH), -tokens.input_ids.float())
        tokens = tokens.with_(
            **{"actor": {"old_logprobs": plan.paste(logprobs, WIDTH)}}.get(
                role, {"ref_logprobs": torch.ones(ROWS, WIDTH)}
            )
        )
    assert torch.equal(large.paste(models.values(tokens, large), WIDTH), tokens.input_ids.float())
    tokens = tokens.with_(
        old_values=torch.zeros(ROWS, WIDTH), advantages=torch.rand(ROWS, WIDTH), returns=torch.ones(ROWS, WIDTH)
    )
    for role in ("critic", "actor"):
        for epoch in range(2):
            (result,) = models.update(role, tokens, large, large.epoch(ROWS, 1, role, 1, epoch), loss=None)
            assert tokens.advantages is not None
            assert abs(result.loss - float(tokens.advantages.sum())) < 1e-4
            assert result.metrics == {"tokens": ROWS * (WIDTH - 1)}
    models.end_step()
    return tokens


def models(size: int) -> tuple[RemoteModels, Ranks]:
    ranks = Ranks(size)
    return RemoteModels(ranks, 1.0, WIDTH), ranks  # type: ignore[arg-type]


def test_each_column_is_sent_once_a_step_whatever_calls_and_leaves_use_it():
    for size in (1, 2, 4):
        remote, ranks = models(size)
        step(remote, batch())
        assert ranks.placed == [
            (["input_ids", "lengths", "mask", "rollout_logprobs"], True),
            (["old_logprobs"], False),
            (["ref_logprobs"], False),
            (["advantages", "old_values", "returns"], False),
        ]


def test_the_next_step_begins_anew_though_its_ids_are_the_same():
    remote, ranks = models(2)
    step(remote, batch())
    ranks.placed.clear()
    step(remote, batch())
    assert ranks.placed[0] == (["input_ids", "lengths", "mask", "rollout_logprobs"], True)


def test_a_column_that_has_changed_is_sent_again_alone():
    remote, ranks = models(2)
    tokens = batch()
    plan = LeafPlan.draw(tokens.lengths, FsdpConfig(leaf_size=2), 1, 1)
    remote.logprobs("actor", tokens, plan)
    ranks.placed.clear()
    mask = tokens.mask.clone()
    mask[3] = False
    remote.logprobs("actor", tokens.with_(mask=mask), plan)
    remote.logprobs("actor", tokens.with_(mask=mask.clone()), plan)  # equal, if not the same
    assert ranks.placed == [(["mask"], False)]
    assert torch.equal(ranks.columns["mask"], mask)


def test_a_batch_of_other_rows_takes_the_place_of_the_one_before():
    remote, ranks = models(2)
    tokens = batch().with_(old_logprobs=torch.ones(ROWS, WIDTH))
    plan = LeafPlan.draw(tokens.lengths, FsdpConfig(leaf_size=2), 1, 1)
    remote.logprobs("actor", tokens, plan)
    logprobs, _ = remote.logprobs("actor", batch(100), plan)
    assert ranks.placed[-1] == (["input_ids", "lengths", "mask", "rollout_logprobs"], True)
    assert "old_logprobs" not in ranks.columns
    assert torch.equal(plan.paste(logprobs, WIDTH), batch(100).input_ids.float())
