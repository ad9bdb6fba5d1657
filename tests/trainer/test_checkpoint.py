"""A checkpoint is complete or not there; damage is found and named; there is always one left."""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainer.checkpoint import CheckpointError, CheckpointStore, SaveError, write_checkpoint


def save(store: CheckpointStore, step: int, content: bytes = b"weights") -> None:
    write_checkpoint(store, step, {"step": step}, lambda path: (path / "shard.bin").write_bytes(content) and None)


def test_what_is_saved_is_found_whole(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=0, keep_every=0)
    save(store, 3)
    found = store.find()
    assert found is not None
    assert found.step == 3
    assert found.state() == {"step": 3}
    assert (found.workers / "shard.bin").read_bytes() == b"weights"


def test_no_checkpoint_is_none_but_a_named_one_must_exist(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    assert store.find() is None
    save(store, 3)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 4 .*there are: 3"):
        store.find(4)


def test_a_flipped_byte_is_named_and_the_older_checkpoint_is_offered(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    save(store, 3)
    save(store, 6)
    shard = tmp_path / "step_000006" / "workers" / "shard.bin"
    data = bytearray(shard.read_bytes())
    data[2] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"workers/shard.bin.*run.resume=3"):
        store.find()
    assert store.find(3) is not None


def test_a_changed_digest_list_is_noticed_too(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    save(store, 3)
    listed = tmp_path / "step_000003" / "digests.json"
    digests = json.loads(listed.read_text())
    digests["workers/shard.bin"] = "0" * 64
    listed.write_text(json.dumps(digests))
    with pytest.raises(CheckpointError, match=r"digests\.json"):
        store.find()


def test_keep_last_and_keep_every(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 8):
        save(store, step)
    assert [checkpoint.step for checkpoint in store.all()] == [4, 6, 7]


def test_a_failing_worker_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    store = CheckpointStore(tmp_path, 1, 0)
    save(store, 1)

    def fail(path: Path) -> None:
        (path / "shard.bin").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(SaveError, match="step 2 could not be saved: disk full; the checkpoint of step 1 is intact"):
        write_checkpoint(store, 2, {}, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert store.find().step == 1


CHILD = """
import os, signal, resource, sys
from pathlib import Path
from trainer.checkpoint import CheckpointStore, write_checkpoint
store = CheckpointStore(Path(sys.argv[1]), 1, 0)
def workers(path):
    (path / "shard.bin").write_bytes(b"x" * 2000)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    (path / "large.bin").write_bytes(b"y" * 9000)
if sys.argv[2] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_checkpoint(store, 2, {}, workers)
"""


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("limit", 1)])
def test_a_kill_or_a_full_disk_while_writing_leaves_the_newest_complete_one(tmp_path, how, code):
    store = CheckpointStore(tmp_path, 1, 0)
    save(store, 1)
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), how], capture_output=True, text=True, check=False
    )
    assert child.returncode == code, child.stderr
    assert store.find().step == 1
    save(store, 2)  # and the leftovers do not stand in the way
    assert store.find().step == 2
    assert not list(tmp_path.glob("*.tmp"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


@pytest.mark.parametrize("name", ["step_000002_best", "step_000002 (copy)", "step_000001.bak", "step_2", "best"])
def test_names_that_people_give_are_neither_read_nor_removed(tmp_path, name):
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    save(store, 1)
    shutil.copytree(tmp_path / "step_000001", tmp_path / name)
    for step in (2, 3):
        save(store, step)
    assert store.find().step == 3
    assert [checkpoint.step for checkpoint in store.all()] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "step_000003"])
    assert (tmp_path / name / "workers" / "shard.bin").read_bytes() == b"weights"


def test_a_step_that_is_saved_again_replaces_the_old_one_whole(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    save(store, 1)
    save(store, 1, b"new")
    assert (store.find().workers / "shard.bin").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_checkpoint_of_another_run_or_step_is_refused(tmp_path):
    mine, theirs = CheckpointStore(tmp_path / "a", 0, 0, "mine"), CheckpointStore(tmp_path / "b", 0, 0, "theirs")
    for step in (1, 2):
        save(mine, step)
    save(theirs, 8)
    shutil.copytree(tmp_path / "b" / "step_000008", tmp_path / "a" / "step_000008")
    with pytest.raises(CheckpointError, match=r"step_000008 is not this run's: .*id theirs.* is mine.*run\.resume=2"):
        mine.find()
    shutil.rmtree(tmp_path / "a" / "step_000008")
    (tmp_path / "a" / "step_000002").rename(tmp_path / "a" / "step_000009")
    with pytest.raises(
        CheckpointError, match=r"step_000009 .*checkpoint of step 2, so the directory was renamed.*resume=1"
    ):
        mine.find()
    assert mine.newest_good(before=99).step == 1


def test_too_little_room_is_said_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    save(store, 40)
    with pytest.raises(SaveError) as error:
        write_checkpoint(store, 41, {}, lambda path: pytest.fail("written"), size=1 << 60)
    assert re.search(
        r"no space left on .*: 1152921504606\.8 MB needed, [0-9.]+ MB free; the checkpoint of step 40 is intact",
        str(error.value),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000040"]


FULL = """
import sys
import torch
from pathlib import Path
from trainer.checkpoint import CheckpointStore, SaveError, write_checkpoint
from workers.models.shards import save_shards
store = CheckpointStore(Path(sys.argv[1]), 0, 0)
def save(step, count, size=0):
    state = {"actor": {"weights/x": torch.zeros(count)}}
    write_checkpoint(store, step, {}, lambda path: save_shards(state, path), size)
save(1, 1000)
for size in (4 << 20, 0):
    try:
        save(2, 1 << 20, size)
    except SaveError as error:
        print(error)
print(store.find().step)
"""


def test_a_full_disk_is_told_as_a_full_disk(tmp_path):
    """A tmpfs of 1 MiB in a mount namespace of its own; torch's writer alone says `unexpected pos`."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    before, during, found = done.stdout.splitlines()
    assert re.search(
        r"step 2 could not be saved: no space left on .*: 4\.2 MB needed, 1\.0 MB free; the checkpoint of step 1 is",
        before,
    )
    assert re.search(
        r"step 2 could not be saved: no space left on .*: [0-9.]+ MB free; the checkpoint of step 1 is", during
    )
    assert found == "1"


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "flipped": flip,
    "a directory": directory,
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 9),
    "other JSON": lambda path: path.write_text("[1]"),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
}


@pytest.mark.parametrize("file", ["COMPLETE", "digests.json", "state.json", "workers/shard.bin", "workers/.metadata"])
@pytest.mark.parametrize("how", DAMAGE)
def test_every_damage_is_told_by_the_name_of_its_file(tmp_path, file, how):
    store = CheckpointStore(tmp_path, 0, 0, "run")

    def shards(path: Path) -> None:
        (path / "shard.bin").write_bytes(b"weights")
        (path / ".metadata").write_bytes(b"where they lie")

    for step in (3, 6, 9):
        write_checkpoint(store, step, {"step": step}, shards)
    DAMAGE[how](tmp_path / "step_000006" / file)
    with pytest.raises(CheckpointError, match=rf"step_000006 is damaged: {re.escape(file)} .*run\.resume=3"):
        store.find(6)
    assert store.find().step == 9
    flip(tmp_path / "step_000009" / "state.json")
    with pytest.raises(CheckpointError, match=r"step_000009 is damaged: state\.json .*run\.resume=3"):
        store.find()  # the search for a good one goes past the other damaged one
    assert store.newest_good(before=9).step == 3
