"""SIGKILL at any moment, again and again: the ledger of the survivor is that of a run that was left alone (level D5)."""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from tests.e2e import runs

SETTINGS = (
    *("trainer.checkpoint_every=1", "trainer.validate_every=5", "reward=verifier"),
    "algorithm.kl.controller=adaptive",
)
pytestmark = pytest.mark.timeout(2400)


def lines(run: Path) -> int:
    ledger = run / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def wait_until(happened, process, limit: float = 180.0) -> bool:
    """True once it happened, False when the run ended first."""
    deadline = time.monotonic() + limit
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return True


def kill_at_a_moment(run: Path, process, draw: Random) -> None:
    """After some progress: in the middle of a checkpoint for every third kill, at a random moment otherwise."""
    before = lines(run)
    if not wait_until(lambda: lines(run) > before, process):
        return
    if draw.random() < 1 / 3:
        wait_until(lambda: any((run / "checkpoints").glob("*.tmp")), process)
        time.sleep(draw.random() * 0.02)
    else:
        time.sleep(draw.random() * 1.0)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_again_and_again_has_the_ledger_of_one_left_alone(tmp_path, kills):
    settings = (*SETTINGS, f"trainer.total_steps={kills + 4}")
    alone = runs.train(tmp_path / "alone", *settings, launcher="python")
    killed, draw = tmp_path / "killed", Random(kills)
    deaths = 0
    while deaths < kills:
        topology = ("rollout.replicas=2",) if deaths % 4 == 3 else ()
        process = runs.start(killed, *settings, "run.resume=auto", *topology, launcher="python")
        kill_at_a_moment(killed, process, draw)
        output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output[-4000:]
        deaths += 1
    runs.train(killed, *settings, "run.resume=auto", launcher="python")
    assert deaths > kills // 2
    runs.assert_same(alone, killed)
