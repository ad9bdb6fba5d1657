"""The value model: values stand where their token is chosen, heads are reused or seeded, exports are plain checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.schema import FsdpConfig, OptimizerConfig
from tests.workers.models._models import (
    SquaredLoss,
    batch,
    leaves_of,
    mini_batch,
    save_checkpoint,
    save_classifier,
    trainer_config,
)
from tests.workers.models._ranks import on_ranks
from workers.models.pretrained import PretrainedError
from workers.models.sharding import full_weights, rank_mesh
from workers.models.trainer_worker import TrainerWorker
from workers.models.value import HEAD, ValueModel


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("causal"))


def critic(path: str, *, seed: int = 0, precision: str = "fp32") -> ValueModel:
    mesh = rank_mesh(dist.get_world_size(), "cpu")
    return ValueModel(
        path,
        mesh,
        torch.device("cpu"),
        FsdpConfig(precision=precision),
        seed=seed,
        full_determinism=True,
        optim=OptimizerConfig(lr=1e-2),
        total_steps=3,
    )


def values(path: str, precision: str) -> tuple:
    leaf = leaves_of(batch(5, 21), 5)[0]
    (plain,) = critic(path, precision=precision).values([leaf])
    return leaf, plain


def test_the_value_of_a_token_is_the_head_one_token_earlier(classifier, tmp_path):
    from transformers import AutoModelForSequenceClassification

    ((leaf, got),) = on_ranks(1, tmp_path, values, classifier, "fp32")
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        for row in range(5):
            for place in leaf.mask[row].nonzero().flatten().tolist():
                # A classifier scores the last token: exactly the state in which the next one is chosen.
                expected = model(leaf.input_ids[row : row + 1, :place]).logits[0, 0]
                assert got[row, place].item() == pytest.approx(expected.item(), abs=1e-5)
    assert (got[~leaf.mask] == 0).all()


def test_values_are_float32_also_with_bfloat16_compute(classifier, tmp_path):
    ((leaf, fine),) = on_ranks(1, tmp_path, values, classifier, "fp32")
    ((_, coarse),) = on_ranks(1, tmp_path, values, classifier, "bf16")
    assert coarse.dtype == torch.float32
    trained = coarse[leaf.mask]
    assert not torch.equal(trained, trained.bfloat16().float())  # the head's output was never rounded
    torch.testing.assert_close(coarse, fine, atol=0.1, rtol=0.1)


def heads(path: str) -> list[torch.Tensor]:
    return [dict(full_weights(critic(path, seed=seed).network))[HEAD] for seed in (0, 1)]


def test_a_new_head_follows_the_seed_not_the_ranks(causal, tmp_path):
    (one,) = on_ranks(1, tmp_path, heads, causal)
    for rank in on_ranks(4, tmp_path, heads, causal):
        assert all(map(torch.equal, rank, one))
    assert not torch.equal(one[0], one[1])
    assert one[0].std().item() == pytest.approx(1 / 67, rel=0.3)


def two_labels(path: str) -> str:
    with pytest.raises(PretrainedError) as error:
        critic(path)
    return str(error.value)


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    path = save_classifier(tmp_path / "two", labels=2)
    (message,) = on_ranks(1, tmp_path, two_labels, path)
    assert "is a classifier of 2 labels" in message


def learn(path: str) -> list[float]:
    model = critic(path)
    leaves = leaves_of(batch(8, 15), 4)
    return [sum(model.update([mini_batch(leaves, 0, 1)], SquaredLoss())[0].losses) for _ in range(15)]


def test_the_critic_learns_its_returns(causal, tmp_path):
    (losses,) = on_ranks(1, tmp_path, learn, causal)
    assert losses[-1] < 0.5 * losses[0]


def export(path: str, critic_path: str, folder: str) -> dict | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = TrainerWorker(trainer_config(path, ranks, critic=critic_path), ["actor", "critic"])
    leaves = leaves_of(batch(4, 15), 2)
    worker.critic.update([mini_batch(leaves, rank, ranks)], SquaredLoss())
    worker.export_hf(f"{folder}/actor")
    worker.export_hf(f"{folder}/critic", role="critic")
    facts = worker.facts()
    assert facts["num_ranks"] == ranks
    assert facts["parameters"]["actor"] > 0
    assert worker.ref is None
    with pytest.raises(ValueError, match="trains no 'ref'"):
        worker.export_hf(f"{folder}/ref", role="ref")
    whole = dict(full_weights(worker.critic.network))
    return whole if rank == 0 else None


def test_exports_load_with_transformers(causal, classifier, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    trained = on_ranks(2, tmp_path, export, causal, classifier, str(tmp_path))[0]
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert exported.config.num_labels == 1
    assert {name: value.shape for name, value in exported.named_parameters()} == {
        n: v.shape for n, v in trained.items()
    }
    assert all(torch.equal(value, trained[name]) for name, value in exported.named_parameters())
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    before = AutoModelForCausalLM.from_pretrained(causal)
    assert all(map(torch.equal, actor.parameters(), before.parameters()))
    assert actor.config.attention_dropout == before.config.attention_dropout
    assert (tmp_path / "actor" / "config.json").read_text().count('"use_cache": true') == 1
    assert not list(Path(tmp_path / "actor").glob("*.bin"))
