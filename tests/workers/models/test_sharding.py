"""Building sharded models: rows from checkpoints, refusals, and settings that change no bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from configs.schema import FsdpConfig, OptimizerConfig
from tests.workers.models._models import RatioLoss, batch, leaves_of, mini_batch, save_checkpoint, trainer_config
from tests.workers.models._ranks import on_ranks
from workers.models.hf_config import load_config
from workers.models.optim import lr_factor
from workers.models.policy import PolicyModel
from workers.models.pretrained import PretrainedError, PretrainedFiles, bind, empty_model
from workers.models.sharding import full_weights, rank_mesh, row_range
from workers.models.trainer_worker import TrainerWorker


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("untied"), tied=False)


def policy(path: str, fsdp: FsdpConfig | None = None, **options) -> PolicyModel:
    mesh = rank_mesh(dist.get_world_size(), "cpu")
    options = {"temperature": 1.0, "full_determinism": True, "optim": OptimizerConfig(lr=1e-2), **options}
    return PolicyModel(path, mesh, torch.device("cpu"), fsdp or FsdpConfig(), **options)


def empty(path: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return empty_model(AutoModelForCausalLM, load_config(path, "sdpa"))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 101])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_ranges_cover_all_rows_once(rows, ranks):
    held = [range(*row_range(rows, rank, ranks)) for rank in range(ranks)]
    assert [row for rows_of_rank in held for row in rows_of_rank] == list(range(rows))


def load_and_gather(path: str) -> dict:
    model = policy(path)
    sizes = {name: p.to_local().numel() for name, p in model.network.named_parameters() if isinstance(p, DTensor)}
    buffers = dict(model.network.named_buffers())
    return {"weights": dict(full_weights(model.network)), "held": sizes, "buffers": buffers}


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_hold_their_rows_and_together_the_checkpoint(tied, untied, tmp_path, ranks):
    for path in (tied, untied):
        stored = load_file(Path(path) / "model.safetensors")
        results = on_ranks(ranks, tmp_path, load_and_gather, path)
        for result in results:
            assert result["weights"].keys() == stored.keys()
            assert all(torch.equal(result["weights"][name], stored[name]) for name in stored)
        for name, tensor in stored.items():
            assert sum(result["held"][name] for result in results) == tensor.numel()


def test_buffers_that_no_checkpoint_holds_are_computed(tied, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(tied).named_buffers())
    (result,) = on_ranks(1, tmp_path, load_and_gather, tied)
    assert expected.keys() == result["buffers"].keys()
    assert all(torch.equal(result["buffers"][name], value) for name, value in expected.items())


def test_building_a_model_leaves_the_global_generator_alone(tied):
    before = torch.get_rng_state()
    model = empty(tied)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_in_several_files_is_read_like_one(untied, tmp_path):
    shutil.copytree(untied, tmp_path / "split")
    tensors = load_file(Path(untied) / "model.safetensors")
    (tmp_path / "split" / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, tmp_path / "split" / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (tmp_path / "split" / "model.safetensors.index.json").write_text(json.dumps(index))
    split = PretrainedFiles(tmp_path / "split")
    assert split.names() == names
    assert all(torch.equal(split.rows(name, 1, 3), tensors[name][1:3]) for name in names)
    (tmp_path / "split" / "b.safetensors").unlink()
    with pytest.raises(PretrainedError, match=r"files that are not there: b\.safetensors"):
        PretrainedFiles(tmp_path / "split")


def test_a_bfloat16_checkpoint_gives_float32_master_weights(tmp_path):
    path = save_checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    stored = load_file(Path(path) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    (result,) = on_ranks(1, tmp_path, load_and_gather, path)
    assert all(torch.equal(result["weights"][name], value.float()) for name, value in stored.items())
    assert {value.dtype for value in result["weights"].values()} == {torch.float32}


def test_what_does_not_fit_is_named(untied, tmp_path):
    tensors = load_file(Path(untied) / "model.safetensors")
    tensors["stray.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].contiguous()
    shutil.copytree(untied, tmp_path / "odd")
    save_file(tensors, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(PretrainedError) as error:
        bind(PretrainedFiles(tmp_path / "odd"), empty(untied))
    text = str(error.value)
    assert "missing: model.norm.weight" in text
    assert "unexpected: stray.weight" in text
    assert "wrong shape: lm_head.weight is (101, 65) in the checkpoint and (101, 66) in the model" in text


def test_missing_directories_and_formats_are_named(tmp_path):
    with pytest.raises(PretrainedError, match="is not a directory"):
        PretrainedFiles(tmp_path / "absent")
    with pytest.raises(PretrainedError, match=r"has neither model\.safetensors nor"):
        PretrainedFiles(tmp_path)
    with pytest.raises(PretrainedError, match=r"has no config\.json"):
        load_config(tmp_path, "sdpa")


def test_dropout_is_off_whatever_the_checkpoint_says(tied, tmp_path):
    shutil.copytree(tied, tmp_path / "dropout")
    config = json.loads((tmp_path / "dropout" / "config.json").read_text())
    (tmp_path / "dropout" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.3}))
    assert load_config(tmp_path / "dropout", "sdpa").attention_dropout == 0.0


def refusals(path: str) -> list[str]:
    messages = []
    for call in (
        lambda: rank_mesh(dist.get_world_size() + 1, "cpu"),
        lambda: TrainerWorker(trainer_config(path, 1), ["actor", "judge"]),
        lambda: policy(path, FsdpConfig(precision="fp8")),
    ):
        with pytest.raises((RuntimeError, ValueError)) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_another_world_size_role_or_precision_is_refused(tied, tmp_path):
    ((ranks, role, precision),) = on_ranks(1, tmp_path, refusals, tied)
    assert "the process group has 1 ranks but launcher.num_ranks is 2" in ranks
    assert "unknown trainer roles ['judge']" in role
    assert "fsdp.precision is 'fp8'" in precision
    with pytest.raises(RuntimeError, match="not initialised"):
        rank_mesh(1, "cpu")


def on_three_ranks(path: str) -> tuple[str, float]:
    with pytest.raises(ValueError, match="power of two") as error:
        policy(path)
    model = policy(path, full_determinism=False)
    (result,) = model.update([mini_batch(leaves_of(batch(8, 19), 2), dist.get_rank(), 3)], RatioLoss())
    return str(error.value), result.grad_norm


def norm_on_one_rank(path: str) -> float:
    return policy(path).update([mini_batch(leaves_of(batch(8, 19), 2), 0, 1)], RatioLoss())[0].grad_norm


def test_three_ranks_train_but_not_under_full_determinism(tied, tmp_path):
    (expected,) = on_ranks(1, tmp_path, norm_on_one_rank, tied)
    for message, norm in on_ranks(3, tmp_path, on_three_ranks, tied):
        assert "launcher.num_ranks is 3" in message
        assert norm == pytest.approx(expected, rel=1e-5)


def train_with_settings(path: str) -> dict[str, tuple[str, str]]:
    found = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, change in {
        "plain": {},
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "reshard_after_forward": {"reshard_after_forward": True},
        "both": {"gradient_checkpointing": True, "reshard_after_forward": True},
        "eager": {"attention": "eager"},
    }.items():
        model = policy(path, replace(FsdpConfig(), **change))
        leaves = leaves_of(batch(8, 19), 2)
        for _ in range(2):
            model.update([mini_batch(leaves, rank, ranks)], RatioLoss())
        found[name] = model.digests()
    return found


def test_memory_settings_change_no_bits(tied, tmp_path):
    found = on_ranks(2, tmp_path, train_with_settings, tied)[0]
    assert found["gradient_checkpointing"] == found["reshard_after_forward"] == found["both"] == found["plain"]
    assert found["eager"] != found["plain"]  # the comparison can fail


def test_the_schedule_warms_up_and_falls():
    linear = OptimizerConfig(schedule="linear", warmup_steps=3, min_lr_ratio=0.2)
    assert [lr_factor(linear, step, 7) for step in range(3)] == [0.25, 0.5, 0.75]
    assert [lr_factor(linear, step, 7) for step in (3, 5, 7, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerConfig(schedule="cosine", min_lr_ratio=0.1)
    assert [lr_factor(cosine, step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.55, 0.1])
    assert lr_factor(OptimizerConfig(), 10**6, 1) == 1.0
    with pytest.raises(ValueError, match=r"optim\.schedule is 'step'"):
        lr_factor(OptimizerConfig(schedule="step"), 0, 1)
