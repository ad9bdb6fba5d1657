"""SIGKILL at any moment, again and again: the ledger of the survivor is that of a run that was left alone (level D5)."""

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from tests.e2e import runs

KILLS = 20
STEPS = KILLS + 4
SETTINGS = (
    *(f"trainer.total_steps={STEPS}", "trainer.checkpoint_every=1", "trainer.validate_every=5"),
    *("reward=verifier", "algorithm=ppo", "algorithm.kl.controller=adaptive", "tracking.wandb_mode=disabled"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


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


def test_a_run_killed_twenty_times_has_the_ledger_of_one_left_alone(tmp_path):
    alone = runs.train(tmp_path / "alone", *SETTINGS, launcher="torchrun")
    killed, draw = tmp_path / "killed", Random(20)
    deaths = 0
    while deaths < KILLS:
        topology = ("rollout.replicas=2",) if deaths % 4 == 3 else ()
        process = runs.start(killed, *SETTINGS, "run.resume=auto", *topology, launcher="torchrun")
        kill_at_a_moment(killed, process, draw)
        output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output[-4000:]
        deaths += 1
    runs.train(killed, *SETTINGS, "run.resume=auto", launcher="torchrun")
    assert deaths >= KILLS // 2
    runs.assert_same(alone, killed)
