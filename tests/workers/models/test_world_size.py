"""Level D4 and the trainer's half of D5: 1, 2 and 4 ranks compute the same bits, and load each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.schema import Config, FsdpConfig
from tests.workers.models._models import (
    RatioLoss,
    SquaredLoss,
    batch,
    leaves_of,
    mini_batch,
    save_checkpoint,
    trainer_config,
)
from tests.workers.models._ranks import on_ranks
from workers.models import optim
from workers.models.trainer_worker import TrainerWorker

STEPS = 3
SAVED_AFTER = 2


class InOrder:
    """What most trainers do: add gradients up as they come."""

    def __init__(self) -> None:
        self.total: list[torch.Tensor] | None = None

    def push(self, tensors: list[torch.Tensor]) -> None:
        if self.total is None:
            self.total = tensors
        else:
            torch._foreach_add_(self.total, tensors)

    def result(self) -> list[torch.Tensor]:
        assert self.total is not None
        return self.total


def train(worker: TrainerWorker, steps: range) -> list[dict]:
    """Updates of critic and actor on 6 leaves of 3 odd sequences, as two mini-batches of 4 and 2 leaves."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    record = []
    for step in steps:
        leaves = leaves_of(batch(18, 23, seed=step), 3)
        batches = [mini_batch(leaves[:4], rank, ranks), mini_batch(leaves[4:], rank, ranks)]
        results = {"actor": worker.actor.update(batches, RatioLoss(needs_full_kl=worker.ref is not None))}
        if worker.critic is not None:
            results["critic"] = worker.critic.update(batches, SquaredLoss())
        worker.end_step()
        record.append({"results": results, "digests": worker.digests()})
    return record


def whole_run(path: str, precision: str, save_to: str | None) -> dict:
    config = trainer_config(path, dist.get_world_size(), fsdp=FsdpConfig(precision=precision, leaf_size=3))
    worker = TrainerWorker(config, ["actor", "ref", "critic"])
    record = train(worker, range(SAVED_AFTER))
    if save_to is not None:
        worker.save(save_to)
    record += train(worker, range(SAVED_AFTER, STEPS))
    leaves = leaves_of(batch(18, 23, seed=99), 3)[dist.get_rank() :: dist.get_world_size()]
    scores = [worker.actor.logprobs(leaves), worker.ref.logprobs(leaves), worker.critic.values(leaves)]
    return {"record": record, "weights": worker.export_weights(), "scores": scores}


def resumed_run(path: str, precision: str, saved: str) -> dict:
    config = trainer_config(path, dist.get_world_size(), fsdp=FsdpConfig(precision=precision, leaf_size=3))
    worker = TrainerWorker(config, ["actor", "ref", "critic"])
    worker.load(saved)
    restored = worker.digests()
    return {"restored": restored, "record": train(worker, range(SAVED_AFTER, STEPS))}


def spoilt_run(path: str) -> dict[str, str]:
    """The actor's weights after training in ways that full determinism refuses."""

    def outcome(change) -> str:
        config: Config = trainer_config(path, dist.get_world_size())
        change(config)
        worker = TrainerWorker(config, ["actor"])
        return train(worker, range(2))[-1]["digests"]["actor_weights"]

    found = {"kept": outcome(lambda config: None)}
    found["library_reduce_scatter"] = outcome(lambda config: setattr(config, "full_determinism", False))
    found["fused_adamw"] = outcome(lambda config: setattr(config.actor.optim, "fused", True))
    optim.BinaryCounter = InOrder
    found["sum_in_arrival_order"] = outcome(lambda config: None)
    return found


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def runs(request, tmp_path_factory) -> dict:
    folder: Path = tmp_path_factory.mktemp(request.param)
    path = save_checkpoint(folder / "model")
    results = {
        ranks: on_ranks(ranks, folder, whole_run, path, request.param, str(folder / "saved") if ranks == 2 else None)
        for ranks in (1, 2, 4)
    }
    return {"path": path, "folder": folder, "precision": request.param, "results": results}


def in_leaf_order(per_rank: list[dict], role: str, field: str) -> list:
    """Per step and mini-batch: losses or metrics of all leaves, in leaf order."""
    answer = []
    for step in range(STEPS):
        for number in range(2):
            shares = [getattr(rank["record"][step]["results"][role][number], field) for rank in per_rank]
            slots = max(map(len, shares))
            answer.append([share[slot] for slot in range(slots) for share in shares if slot < len(share)])
    return answer


@pytest.mark.parametrize("ranks", [2, 4])
def test_world_size_changes_no_bit_of_training(runs, ranks):
    one, many = runs["results"][1], runs["results"][ranks]
    for role in ("actor", "critic"):
        assert in_leaf_order(many, role, "losses") == in_leaf_order(one, role, "losses")
        assert in_leaf_order(many, role, "metrics") == in_leaf_order(one, role, "metrics")
        for step in range(STEPS):
            for rank in many:
                for got, expected in zip(
                    rank["record"][step]["results"][role], one[0]["record"][step]["results"][role], strict=True
                ):
                    assert (got.grad_norm, got.lr, got.skipped) == (expected.grad_norm, expected.lr, False)
    for step in range(STEPS):
        assert all(rank["record"][step]["digests"] == one[0]["record"][step]["digests"] for rank in many)


@pytest.mark.parametrize("ranks", [2, 4])
def test_world_size_changes_no_bit_of_exported_weights_and_scores(runs, ranks):
    one, many = runs["results"][1], runs["results"][ranks]
    expected, got = one[0]["weights"], many[0]["weights"]
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert all(rank["weights"] is None for rank in many[1:])
    for kind in range(3):
        for leaf in range(6):
            mine, theirs = many[leaf % ranks]["scores"][kind][leaf // ranks], one[0]["scores"][kind][leaf]
            assert all(map(torch.equal, *((x if isinstance(x, tuple) else (x,)) for x in (mine, theirs))))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_continues_at_any_other_number(runs, ranks):
    uninterrupted = runs["results"][2][0]["record"]
    resumed = on_ranks(
        ranks, runs["folder"], resumed_run, runs["path"], runs["precision"], str(runs["folder"] / "saved")
    )
    for rank in resumed:
        assert rank["restored"] == uninterrupted[SAVED_AFTER - 1]["digests"]
        assert rank["record"][0]["digests"] == uninterrupted[SAVED_AFTER]["digests"]
        for role in ("actor", "critic"):
            lrs = [result.lr for result in rank["record"][0]["results"][role]]
            assert lrs == [result.lr for result in uninterrupted[SAVED_AFTER]["results"][role]]


def test_training_moves_weights_and_precision_matters(runs):
    record = runs["results"][1][0]["record"]
    assert len({step["digests"]["actor_weights"] for step in record}) == STEPS
    assert len({step["digests"]["critic_optimizer"] for step in record}) == STEPS


def test_each_canonical_piece_is_needed(tmp_path):
    path = save_checkpoint(tmp_path / "model")
    one, four = (on_ranks(ranks, tmp_path, spoilt_run, path)[0] for ranks in (1, 4))
    assert one["kept"] == four["kept"]
    differing = {name for name in one if one[name] != four[name]}
    assert differing == {"library_reduce_scatter", "fused_adamw", "sum_in_arrival_order"}
