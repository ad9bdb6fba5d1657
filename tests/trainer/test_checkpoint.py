"""A checkpoint is complete or not there; damage is found and named; there is always one left."""

import json
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainer.checkpoint import CheckpointError, CheckpointStore, write_checkpoint


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
    assert [checkpoint.step for checkpoint in store.complete()] == [4, 6, 7]


def test_a_failing_worker_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    store = CheckpointStore(tmp_path, 1, 0)
    save(store, 1)

    def fail(path: Path) -> None:
        (path / "shard.bin").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
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


def test_resuming_an_older_checkpoint_drops_the_other_history(tmp_path):
    store = CheckpointStore(tmp_path, 0, 0)
    for step in (1, 2, 3):
        save(store, step)
    store.remove_after(1)
    assert [checkpoint.step for checkpoint in store.complete()] == [1]
