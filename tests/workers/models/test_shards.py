"""Sharded state comes back bit for bit; what is missing is named; and reading a foreign checkpoint runs nobody's code."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from workers.models.shards import ShardsError, load_shards, read_tensors, save_shards, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

STATE = {
    "actor": {"weights/x": torch.arange(6.0).reshape(3, 2), "optimizer/counts": torch.tensor([1, 2])},
    "critic": {"weights/y": torch.tensor([0.1, -0.0], dtype=torch.bfloat16)},
}


@pytest.fixture
def saved(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_shards(STATE, tmp_path / "workers")
    return tmp_path / "workers"


def empty(*roles: str) -> dict[str, dict[str, torch.Tensor]]:
    return {role: {name: torch.zeros_like(value) for name, value in STATE[role].items()} for role in roles}


def test_what_was_saved_is_loaded(saved):
    state = empty("actor", "critic")
    load_shards(state, saved)
    assert all(torch.equal(state[role][name], value) for role in STATE for name, value in STATE[role].items())
    assert set(tensors_in(saved)) == {"actor.weights/x", "actor.optimizer/counts", "critic.weights/y"}
    assert read_tensors(saved, "actor.weights/")["x"].tolist() == STATE["actor"]["weights/x"].tolist()


def test_a_model_that_is_not_there_is_named(tmp_path):
    save_shards({"actor": STATE["actor"]}, tmp_path)
    with pytest.raises(
        ShardsError, match=r"holds no critic \(it holds: actor\).*resume with the algorithm that wrote it"
    ):
        load_shards(empty("actor", "critic"), tmp_path)


def test_a_tensor_that_is_not_there_is_named(saved):
    state = empty("actor")
    state["actor"]["weights/z"] = torch.zeros(1)
    with pytest.raises(ShardsError, match=r"has no actor\.weights/z"):
        load_shards(state, saved)


class Bomb:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_metadata_file_runs_no_code(saved, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "bang"))
    (saved / ".metadata").write_bytes(bomb)
    for read in (tensors_in, lambda path: read_tensors(path, "actor."), lambda path: load_shards(empty("actor"), path)):
        with pytest.raises(ShardsError, match=r"asks for posix\.mkdir.*could run code.*refused"):
            read(saved)
    assert not (tmp_path / "bang").exists()
    pickle.loads(bomb)
    assert (tmp_path / "bang").exists()  # the negative control: a plain unpickler runs it


def test_entries_that_are_no_tensors_are_refused_because_reading_them_would_unpickle(saved):
    metadata = dcp.FileSystemReader(saved).read_metadata()
    metadata.state_dict_metadata["actor.weights/x"] = BytesStorageMetadata()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ShardsError, match=r"'actor\.weights/x' is not a tensor"):
        load_shards(empty("actor"), saved)


def test_files_outside_of_the_checkpoint_are_not_read(saved):
    metadata = dcp.FileSystemReader(saved).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ShardsError, match="outside of the checkpoint"):
        tensors_in(saved)


@pytest.mark.parametrize("data", [None, b"", b"\xff\xfe", pickle.dumps([1])])
def test_damaged_metadata_is_told_by_name(saved, data):
    (saved / ".metadata").unlink()
    if data is not None:
        (saved / ".metadata").write_bytes(data)
    with pytest.raises(ShardsError, match=r"\.metadata (is missing|can't be read|does not describe)"):
        tensors_in(saved)


def test_damaged_shards_are_an_exception_that_handlers_expect(saved):
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(ShardsError, match="can't be read"):
        load_shards(empty("actor"), saved)
