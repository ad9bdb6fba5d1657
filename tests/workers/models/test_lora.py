"""Adapters: they start at the base model, only they are trained, exports merge them, the reference is the base."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from configs.schema import Config, LoraConfig
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
from workers.models.hf_config import load_config
from workers.models.lora import add_adapters, merged
from workers.models.policy import BaseOfAdapters
from workers.models.pretrained import empty_model
from workers.models.trainer_worker import TrainerWorker

LORA = LoraConfig(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


def adapted(path: str) -> Config:
    config = trainer_config(path, dist.get_world_size())
    config.actor.lora = config.critic.lora = LORA
    return config


def train(path: str, folder: str) -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = TrainerWorker(adapted(path), ["actor", "ref", "critic"])
    leaves = leaves_of(batch(8, 15), 2)
    mine = leaves[rank::ranks]
    first = worker.export_weights()
    before = [worker.actor.logprobs(mine), worker.ref.logprobs(mine)]
    for _ in range(2):
        worker.actor.update([mini_batch(leaves, rank, ranks)], RatioLoss(needs_full_kl=True))
        worker.critic.update([mini_batch(leaves, rank, ranks)], SquaredLoss())
    after = [worker.actor.logprobs(mine), worker.ref.logprobs(mine)]
    worker.save(f"{folder}/{ranks}")
    again = TrainerWorker(adapted(path), ["actor", "ref", "critic"])
    again.load(f"{folder}/{ranks}")
    worker.export_hf(f"{folder}/hf-{ranks}")
    return {
        "shared": isinstance(worker.ref, BaseOfAdapters),
        "trained": [name for name, _ in worker.actor.updater.named + worker.critic.updater.named],
        "first": first,
        "weights": worker.export_weights(),
        "before": before,
        "after": after,
        "digests": worker.digests(),
        "loaded": again.digests(),
    }


@pytest.fixture(scope="module")
def runs(path, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("runs")
    return {"folder": folder, **{ranks: on_ranks(ranks, folder, train, path, str(folder)) for ranks in (1, 2)}}


def test_only_adapters_and_the_value_head_are_trained(runs):
    (one,) = runs[1]
    heads = [name for name in one["trained"] if ".lora_" not in name]
    assert heads == ["score.weight"]
    assert len(one["trained"]) == 1 + 2 * 2 * 2 * 4  # head; actor and critic, A and B, layers, projections


def test_training_starts_at_the_base_model_and_the_reference_stays_there(runs, path):
    from transformers import AutoModelForCausalLM

    (one,) = runs[1]
    base = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert one["shared"]
    assert one["first"].keys() == base.keys()
    assert all(torch.equal(one["first"][name], value) for name, value in base.items())
    for (actor, _), (reference, _) in zip(*one["before"], strict=True):
        torch.testing.assert_close(actor, reference, atol=1e-6, rtol=0)
    for then, now in zip(one["before"][1], one["after"][1], strict=True):
        assert all(map(torch.equal, then, now))
    assert not torch.equal(one["after"][0][0][0], one["before"][0][0][0])


def test_exports_are_merged(runs):
    from transformers import AutoModelForCausalLM

    (one,) = runs[1]
    model = AutoModelForCausalLM.from_pretrained(runs["folder"] / "hf-1")
    assert all(torch.equal(one["weights"][name], value) for name, value in model.named_parameters())
    changed = {name for name, value in one["weights"].items() if not torch.equal(value, one["first"][name])}
    assert {name.rsplit(".", 2)[1] for name in changed} == set(LORA.target_modules)
    for leaf, (logprobs, _) in zip(leaves_of(batch(8, 15), 2), one["after"][0], strict=True):
        expected = model(leaf.input_ids).logits[:, :-1].log_softmax(-1)
        chosen = expected.gather(2, leaf.input_ids[:, 1:, None])[..., 0] * leaf.mask[:, 1:]
        torch.testing.assert_close(logprobs[:, 1:], chosen.detach(), atol=5e-5, rtol=0)


def test_world_size_changes_no_bit_of_adapters(runs):
    (one,) = runs[1]
    assert all(rank["digests"] == one["digests"] for rank in runs[2])
    assert all(torch.equal(runs[2][0]["weights"][name], value) for name, value in one["weights"].items())


def test_adapters_are_restored_from_a_checkpoint(runs):
    for rank in (*runs[1], *runs[2]):
        assert rank["loaded"] == rank["digests"]


def test_merging_adds_the_scaled_product():
    a, b, base = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]), torch.eye(2)
    weights = [("q.base_layer.weight", base), ("q.base_layer.bias", a), ("q.lora_A.default.weight", a)]
    weights += [("q.lora_B.default.weight", b), ("norm.weight", b)]
    result = dict(merged(weights, LoraConfig(rank=1, alpha=2.0)))
    assert list(result) == ["q.bias", "q.weight", "norm.weight"]
    assert result["q.weight"].tolist() == [[7.0, 12.0], [8.0, 17.0]]


def fresh(path: str):
    from transformers import AutoModelForCausalLM

    return empty_model(AutoModelForCausalLM, load_config(path, "sdpa"))


def test_first_values_follow_seed_role_and_name(path):
    before = torch.get_rng_state()
    one, again = (add_adapters(fresh(path), LORA, 0, "actor") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if ".lora_A." in name]
    assert all(one[name].abs().max() <= 1 / math.sqrt(one[name].shape[1]) for name in drawn)
    assert all(value.any() == (name in drawn) for name, value in one.items())
    for seed, role in ((1, "actor"), (0, "critic")):
        other = add_adapters(fresh(path), LORA, seed, role)
        assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert len({one[name].sum().item() for name in drawn}) == len(drawn)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("q_porj", "names no layer"),
        ("embed_tokens", "is a Embedding, not a linear layer"),
        ("lm_head", "shares its weight"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(path, target, message):
    with pytest.raises(ValueError, match=message):
        add_adapters(fresh(path), LoraConfig(rank=2, target_modules=["q_proj", target]), 0, "actor")
