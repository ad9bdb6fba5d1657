"""PPO learns: held-out accuracy of the tiny model rises by at least 20 points over its warm start."""

import os
import subprocess
import sys

import pytest

from tests.e2e import runs

ACCURACY = "val/sums_heldout/pass@1"


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2))]
)
@pytest.mark.timeout(580)
def test_ppo_raises_held_out_accuracy_by_twenty_points(tmp_path, seed):
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "launcher.num_ranks=1", "rollout.replicas=1"),
        *("experiment=tiny_ppo", "full_determinism=true", f"seed={seed}", f"run.dir={run}", "tracking=disabled"),
        *("trainer.total_steps=16", "trainer.validate_every=16", "launcher.name=torchrun"),
    ]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    accuracy = [row[ACCURACY] for row in runs.metrics(run) if ACCURACY in row]
    assert accuracy[0] < 0.75, "the warm start is not mediocre"
    assert accuracy[-1] >= accuracy[0] + 0.20, accuracy


@pytest.mark.parametrize(
    ("experiment", "seed"),
    [
        pytest.param("tiny_turns", 0, marks=pytest.mark.slow),
        *(pytest.param("tiny_turns", seed, marks=pytest.mark.long) for seed in (1, 2)),
        *(pytest.param("tiny_agent", seed, marks=pytest.mark.long) for seed in (0, 1, 2)),
    ],
)
@pytest.mark.timeout(580)
def test_a_second_try_is_learned_and_held_out_accuracy_rises_by_ten_points(tmp_path, experiment, seed):
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "launcher.num_ranks=1", "rollout.replicas=1"),
        *(f"experiment={experiment}", "full_determinism=true", f"seed={seed}", f"run.dir={run}", "tracking=disabled"),
        *("trainer.total_steps=6", "trainer.validate_every=6", "launcher.name=torchrun"),
    ]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    accuracy = [row[ACCURACY] for row in runs.metrics(run) if ACCURACY in row]
    assert accuracy[-1] >= accuracy[0] + 0.10, accuracy
