"""The actor in a checkpoint, put together without any rank, is bit for bit what training would give the engines."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.problems import UserError
from configs.schema import LoraConfig
from determinism.manifest import write_manifest
from tests.workers.models._models import RatioLoss, batch, leaves_of, mini_batch, save_checkpoint, trainer_config
from tests.workers.models._ranks import on_ranks
from trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from trainer.input_digests import model_digest
from trainer.tools.cli import main
from trainer.tools.saved_actor import actor_weights, find_checkpoint, run_of, verify
from workers.models.trainer_worker import TrainerWorker

LORA = LoraConfig(rank=3, alpha=6.0)
KINDS = {"whole": None, "adapters": LORA}


def train_and_save(path: str, folder: str) -> dict:
    """Two ranks, one update, for each kind; what they would export, and the ledger's digest."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaves = leaves_of(batch(8, 15), 2)
    found = {}
    for kind, lora in KINDS.items():
        config = trainer_config(path, ranks)
        config.actor.lora = lora
        worker = TrainerWorker(config, ["actor"])
        worker.actor.update([mini_batch(leaves, rank, ranks)], RatioLoss())
        worker.save(f"{folder}/{kind}/checkpoints/step_000003.tmp/workers")
        found[kind] = (worker.export_weights(), worker.digests()["actor_weights"])
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("saved")
    path = save_checkpoint(folder / "model")
    for kind in KINDS:
        CheckpointStore(folder / kind / "checkpoints", 0, 0).begin(3)
    first, _ = on_ranks(2, folder, train_and_save, path, str(folder))
    for kind in KINDS:
        root = folder / kind / "checkpoints"
        CheckpointStore(root, 0, 0).finish(root / "step_000003.tmp", {"step": 3})
        (folder / kind / "config.yaml").touch()
    return {"folder": folder, "model": path, **first}


@pytest.mark.parametrize("kind", KINDS)
def test_the_shards_of_two_ranks_become_the_tensors_that_training_exports(saved, kind):
    checkpoint = find_checkpoint(saved["folder"] / kind)
    verify(checkpoint)
    exported, digest = saved[kind]
    actor = actor_weights(checkpoint, saved["model"], KINDS[kind])
    assert actor.tensors.keys() == exported.keys()
    assert all(torch.equal(actor.tensors[name], value) for name, value in exported.items())
    assert actor.digest == digest
    assert checkpoint.step == 3
    assert run_of(checkpoint) == saved["folder"] / kind


def test_a_model_of_other_shapes_is_refused_by_parameter(saved, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(saved["model"])
    config.intermediate_size += 8
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the model .*wrong shape: .*mlp\..*\(91, 66\) instead of"):
        actor_weights(find_checkpoint(saved["folder"] / "whole"), tmp_path, None)


@pytest.mark.parametrize(
    ("lora", "message"), [(None, "actor.lora is not set"), (replace(LORA, rank=4), "rank 3 .*actor.lora.rank is 4")]
)
def test_adapters_are_merged_with_their_own_settings_or_not_at_all(saved, lora, message):
    with pytest.raises(CheckpointError, match=message):
        actor_weights(find_checkpoint(saved["folder"] / "adapters"), saved["model"], lora)


@pytest.fixture
def recorded(saved, tmp_path):
    """A run of the given kind that has a manifest, and a copy of its model."""

    def make(kind: str) -> tuple[Checkpoint, Path]:
        shutil.copytree(saved["folder"] / kind, tmp_path / kind)
        shutil.copytree(saved["model"], tmp_path / "model")
        digests = {"model/actor": model_digest(saved["model"])}
        write_manifest(tmp_path / kind / "manifest.json", {"model": {"path": saved["model"]}}, {}, digests)
        return find_checkpoint(tmp_path / kind), tmp_path / "model"

    return make


def flip(model: Path) -> None:
    """Change a bit of the last weight."""
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)


def test_adapters_are_merged_into_the_model_that_the_run_recorded_wherever_it_lies_now(saved, recorded):
    checkpoint, model = recorded("adapters")
    exported, _ = saved["adapters"]
    tensors = actor_weights(checkpoint, model, LORA).tensors
    assert all(torch.equal(tensors[name], value) for name, value in exported.items())


def test_adapters_are_refused_over_a_changed_base_model(saved, recorded):
    checkpoint, model = recorded("adapters")
    before = model_digest(str(model))
    flip(model)
    with pytest.raises(UserError) as error:
        actor_weights(checkpoint, model, LORA)
    message = str(error.value)
    assert f"adapters of the model {saved['model']} with the digest {before}" in message
    assert f"{model} has the digest {model_digest(str(model))}" in message
    assert "with model.path=DIR" in message


def test_whole_weights_do_not_depend_on_the_base_models(saved, recorded):
    checkpoint, model = recorded("whole")
    flip(model)
    tensors = actor_weights(checkpoint, model, None).tensors
    assert all(torch.equal(tensors[name], value) for name, value in saved["whole"][0].items())


def test_adapters_without_a_manifest_cannot_be_checked_which_is_said(saved, caplog):
    actor_weights(find_checkpoint(saved["folder"] / "adapters"), saved["model"], LORA)
    assert "it can't be checked" in caplog.text


def test_a_flipped_byte_is_named(saved, tmp_path):
    shutil.copytree(saved["folder"] / "whole" / "checkpoints", tmp_path / "checkpoints")
    checkpoint = find_checkpoint(tmp_path)
    shard = sorted(checkpoint.workers.glob("*.distcp"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"workers/{shard.name} does not have its recorded digest"):
        verify(checkpoint)


def make(root: Path, *steps: int) -> Path:
    store = CheckpointStore(root / "checkpoints", 0, 0)
    for step in steps:
        store.finish(store.begin(step), {"step": step})
    (root / "checkpoints").mkdir(parents=True, exist_ok=True)
    return root


def test_a_run_means_its_newest_checkpoint_and_a_step_chooses(tmp_path):
    run = make(tmp_path, 2, 10)
    assert find_checkpoint(run).step == 10
    assert find_checkpoint(run, 2) == find_checkpoint(run / "checkpoints" / "step_000002")
    assert run_of(find_checkpoint(run)) is None  # there is no config.yaml


def refused(capsys, *arguments: str) -> str:
    """Exit code 2, no traceback; the message."""
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_what_is_no_checkpoint_is_said_in_a_line(capsys, tmp_path, saved):
    run = make(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints" / "step_000003.tmp" / "workers").mkdir(parents=True)
    for path, message in (
        (tmp_path / "none", "there is no such directory"),
        (tmp_path, "neither a run directory"),
        (Path(saved["model"]), "is a model, not a training checkpoint; evaluate it with model.path"),
        (run / "checkpoints", "holds several checkpoints; give the run directory"),
        (run / "checkpoints" / "step_000003.tmp", "its save was cut short"),
        (make(tmp_path / "empty"), "no complete checkpoint (there are: none)"),
        (run, "there is no config.yaml of its run two folders above; name the experiment"),
    ):
        assert message in refused(capsys, "--checkpoint", str(path))
    assert "checkpoint of step 4 (there are: 2)" in refused(capsys, "--checkpoint", str(run), "--step", "4")
    single = run / "checkpoints" / "step_000002"
    assert "is a single checkpoint" in refused(capsys, "--checkpoint", str(single), "--step", "1")
    assert "give the run with --checkpoint" in refused(capsys, "--step", "1")


def test_a_groups_file_cannot_be_laid_over_a_runs_complete_configuration(capsys, tmp_path):
    from configs.compose import load_config, to_yaml

    run = make(tmp_path, 2)
    (run / "config.yaml").write_text(to_yaml(load_config(["experiment=micro"])))
    message = refused(capsys, "--checkpoint", str(run), "reward=verifier", "sed=1")
    assert "reward: =verifier chooses a file of a group" in message
    assert "reward.KEY=VALUE" in message
    assert "did you mean `seed`?" in message
    assert "--config-dir has no effect" in refused(capsys, "--checkpoint", str(run), "--config-dir", str(tmp_path))


def test_a_renamed_copy_has_no_step(tmp_path):
    path = make(tmp_path, 2) / "checkpoints" / "step_000002"
    path.rename(tmp_path / "best")
    with pytest.raises(UserError, match="named after its step"):
        find_checkpoint(tmp_path / "best")
    assert Checkpoint(path).step == 2
