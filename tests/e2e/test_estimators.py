"""Every advantage estimator and policy loss learns: four real steps, without a critic and a reward model, raise held-out accuracy.

Measured from the warm start's 0.555 at this learning rate (accuracy after 4 steps): GRPO 0.80, RLOO 0.77, REINFORCE++ 0.77 and with a
baseline 0.81, ReMax 0.76, GSPO 0.77, CISPO 0.80 (lower clip 0.2), Dr. GRPO 0.77, DAPO 0.80. One prompt in 128 is 0.008.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs

ACCURACY = "val/sums_heldout/pass@1"
SETTINGS = (
    *(
        "experiment=tiny_ppo",
        "reward=verifier",
        "full_determinism=true",
    ),
    *("trainer.total_steps=4", "trainer.validate_every=4", "trainer.checkpoint_at_end=false"),
    *("rollout.replicas=1", "launcher.name=torchrun", "launcher.num_ranks=1", "tracking=disabled"),
)
REVERSED = """
from dataclasses import replace
from configs.algorithms import needs
from trainer.algorithms.advantages import compute_advantages

@needs(groups=True)
def backwards(inputs, settings):
    outputs = compute_advantages(inputs, replace(settings, name="grpo"))
    return replace(outputs, advantages=-outputs.advantages)
"""
pytestmark = pytest.mark.timeout(580)


def accuracy(run: Path, *overrides: str) -> tuple[float, float]:
    """Held-out pass@1 before and after training."""
    command = [sys.executable, "-m", "trainer.main_ppo", *SETTINGS, *overrides, f"run.dir={run}"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    first, last = (row[ACCURACY] for row in runs.metrics(run) if ACCURACY in row)
    return first, last


@pytest.mark.parametrize(
    "algorithm",
    [
        *(pytest.param((f"algorithm={name}",), id=name, marks=pytest.mark.slow) for name in ("grpo", "remax")),
        *(
            pytest.param((f"algorithm={name}",), id=name, marks=pytest.mark.long)
            for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "dr_grpo", "dapo")
        ),
        pytest.param(
            ("algorithm=grpo", "algorithm.policy_loss.name=cispo", "algorithm.policy_loss.clip_low=1.0"),
            id="cispo",
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_raises_held_out_accuracy_by_ten_points(tmp_path, algorithm):
    first, last = accuracy(tmp_path / "run", *algorithm)
    assert 0.4 < first < 0.7, "the warm start is not mediocre"
    assert last >= first + 0.10, (first, last)


@pytest.mark.long
def test_with_the_sign_reversed_it_unlearns_so_the_rise_is_the_estimators(tmp_path):
    (tmp_path / "reversed.py").write_text(REVERSED)
    name = f"algorithm.advantage.name={tmp_path / 'reversed.py'}:backwards"
    first, last = accuracy(tmp_path / "run", "algorithm=grpo", name)
    assert last <= first - 0.10, (first, last)
