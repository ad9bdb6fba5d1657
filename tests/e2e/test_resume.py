"""A resume changes nothing before it can work, and nobody else writes into the directory of a run that is at work."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from determinism.ledger import read_ledger
from tests.e2e import runs

pytestmark = pytest.mark.timeout(580)


@pytest.fixture
def finished(reference, tmp_path) -> Path:
    """A copy of the reference run, with a checkpoint that somebody keeps."""
    run = shutil.copytree(reference, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "step_000001", run / "checkpoints" / "step_000001.bak")
    return run


def contents(run: Path) -> dict[str, bytes]:
    """Every file of the run but logs and the lock."""
    files = [path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] != "logs"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files if path.name != "run.lock"}


def failing(run: Path, *overrides: str) -> str:
    """What a run that must fail printed."""
    process = runs.start(run, *overrides, launcher="python")
    output, _ = process.communicate(timeout=400)
    assert process.returncode != 0, output[-4000:]
    return output


def test_a_resume_that_fails_leaves_the_run_as_it_was(finished):
    before = contents(finished)
    allowed = ("run.resume=1", "run.resume_allow=[rollout.engine_args,rollout.temperature]")
    failing(finished, *allowed, "rollout.engine_args={no_such_argument: 1}")
    assert contents(finished) == before


def test_a_resume_from_an_older_step_sets_the_later_ones_aside_and_reaches_the_same_bits(reference, finished):
    recorded = read_ledger(finished)
    process = runs.start(finished, "run.resume=1", launcher="python")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]
    runs.assert_same(reference, finished)
    aside = finished / "set_aside" / "0001_after_step_000001"
    assert f"set aside in {aside}" in output
    assert [record.step for record in read_ledger(aside)] == [record.step for record in recorded if record.step > 1]
    assert (aside / "checkpoints" / "step_000002" / "COMPLETE").is_file()
    assert {row["step"] for row in runs.metrics(finished)} == {row["step"] for row in runs.metrics(reference)}
    assert (finished / "checkpoints" / "step_000001.bak").is_dir()


def test_weights_of_another_run_are_refused_by_their_digests(finished):
    """The checkpoint of step 1 under the name, the step and the run id of step 2."""
    from trainer.checkpoint import CheckpointStore

    checkpoints = finished / "checkpoints"
    shutil.rmtree(checkpoints / "step_000002")
    store = CheckpointStore(checkpoints, 0, 0)
    state = store.all()[-1].state()
    temporary = store.begin(2)
    shutil.rmtree(temporary / "workers")
    shutil.copytree(checkpoints / "step_000001" / "workers", temporary / "workers")
    store.finish(temporary, {**state, "step": 2})
    before = contents(finished)
    output = failing(finished, "run.resume=auto")
    assert "is not what this run had after step 2" in output
    assert contents(finished) == before


def test_a_second_resume_is_refused_while_the_first_is_at_work(tmp_path):
    run = tmp_path / "run"
    process = runs.start(run, "trainer.total_steps=500", launcher="python")
    try:
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / "step_000001" / "COMPLETE").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGSTOP)
        before = contents(run)
        output = failing(run, "run.resume=auto", "trainer.total_steps=500")
        assert f"run.dir={run} is in use by process" in output
        assert contents(run) == before
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
