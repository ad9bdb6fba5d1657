"""Which files are a model's weights: one list, and whatever else lies beside them is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.weights import checkpoint_shapes
from workers.checkpoint_files import PretrainedError, is_stored_buffer, tensor_files, tensor_shapes, weight_files

A, B = {"a.weight": torch.zeros(2, 3)}, {"b.weight": torch.zeros(4)}


def single(path: Path) -> Path:
    save_file(A | B, path / "model.safetensors")
    return path


def sharded(path: Path, **changes: str) -> Path:
    save_file(A, path / "model-1.safetensors")
    save_file(B, path / "model-2.safetensors")
    weight_map = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"} | changes
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("make", [single, sharded])
def test_a_file_and_shards_are_listed_alike(tmp_path, make):
    make(tmp_path)
    assert tensor_shapes(tmp_path) == {"a.weight": (2, 3), "b.weight": (4,)}
    assert sorted(set(tensor_files(tmp_path).values())) == weight_files(tmp_path)
    assert {file.suffix for file in weight_files(tmp_path)} == {".safetensors"}


@pytest.mark.parametrize("make", [single, sharded])
@pytest.mark.parametrize("stray", ["ema.safetensors", "consolidated.safetensors", "adapter_model.safetensors"])
def test_a_weight_file_beside_them_is_refused_by_name(tmp_path, make, stray):
    save_file(A, make(tmp_path) / stray)
    for read in (weight_files, tensor_shapes, checkpoint_shapes):
        with pytest.raises(PretrainedError, match=rf"do not belong to model\.safetensors.*{stray}.*move them"):
            read(tmp_path)


def test_an_index_and_a_single_file_are_refused(tmp_path):
    single(sharded(tmp_path))
    with pytest.raises(PretrainedError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        weight_files(tmp_path)


def test_an_index_of_one_file_is_no_contradiction(tmp_path):
    single(tmp_path)
    index = {"weight_map": dict.fromkeys(A | B, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    assert tensor_shapes(tmp_path).keys() == (A | B).keys()


def test_missing_shards_are_named(tmp_path):
    (sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(PretrainedError, match=r"names files that are not there: model-2\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not an index of weights"),
        ("[]", "is not an index of weights"),
        ("{}", "is not an index of weights"),
        ('{"weight_map": []}', "is not an index of weights"),
        ('{"weight_map": {}}', "it names none"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"it names \['../x\.safetensors'\]"),
    ],
)
def test_an_index_that_says_nothing_is_refused(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PretrainedError, match=message):
        weight_files(tmp_path)


def test_an_index_must_describe_its_files(tmp_path):
    sharded(tmp_path, **{"b.weight": "model-1.safetensors", "c.weight": "model-2.safetensors"})
    with pytest.raises(PretrainedError, match=r"does not describe its files; it is wrong about b\.weight, c\.weight"):
        tensor_files(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save_file(A | B, sharded(tmp_path) / "model-2.safetensors")
    with pytest.raises(PretrainedError, match=r"a\.weight is in two files"):
        tensor_files(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    file = single(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(PretrainedError, match=r"model\.safetensors can't be read as safetensors"):
        tensor_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no weights in another format"),
        (["pytorch_model.bin"], r"only pytorch_model\.bin; load the model with transformers and save it again"),
        (["pytorch_model-00001-of-00002.bin"], r"only pytorch_model-00001-of-00002\.bin"),
        (["weights.gguf"], r"only weights\.gguf"),
        (["adapter_model.safetensors"], "an adapter; merge it"),
        (["policy.safetensors"], r"but policy\.safetensors; rename a single file to model\.safetensors"),
    ],
)
def test_a_directory_without_weights_says_what_it_has(tmp_path, names, message):
    for name in names:
        save_file(A, tmp_path / name)
    with pytest.raises(PretrainedError, match=message):
        weight_files(tmp_path)


def test_a_path_that_is_no_directory_is_named(tmp_path):
    with pytest.raises(PretrainedError, match=r"absent' is not a directory"):
        weight_files(tmp_path / "absent")


def test_another_format_beside_the_weights_is_not_read_and_that_is_said(tmp_path, caplog):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.bin"):
        (single(tmp_path) / name).write_bytes(b"")
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    assert "pytorch_model.bin is not read; the weights are those of model.safetensors" in caplog.text
    assert "training_args" not in caplog.text


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("gpt_neox.layers.1.attention.bias", True),
        ("gpt_neox.layers.1.attention.masked_bias", True),
        ("h.0.attn.bias", True),
        ("transformer.h.0.attn.c_attn.bias", False),
        ("gpt_neox.layers.1.attention.dense.bias", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
    ],
)
def test_constants_that_old_files_hold_are_no_weights(tmp_path, name, stored):
    assert is_stored_buffer(name) == stored
    save_file({name: torch.zeros(1), **A}, tmp_path / "model.safetensors")
    assert (name in checkpoint_shapes(tmp_path)) == (not stored)
