"""`exactrl eval` on the real engines: the same bits again, with other replicas, and as training's own first validation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.timeout(580)

SAMPLED = "rollout.validation_sampled={n: 4, temperature: 1.0, max_new_tokens: 8}"


def evaluate(out: Path, *overrides: str) -> str:
    """Run it to the end; what it printed."""
    settings = ("experiment=micro", "full_determinism=true", "launcher.name=torchrun", "tracking=disabled")
    command = [sys.executable, "-m", "trainer.cli", "eval", *settings, SAMPLED, "--out", str(out), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_evaluation_repeats_bit_for_bit_and_is_the_validation_before_training(reference, tmp_path):
    printed = evaluate(tmp_path / "one")
    evaluate(tmp_path / "two", "rollout.replicas=2", "reward.model.replicas=2")
    runs.assert_same(tmp_path / "one", tmp_path / "two")

    (line,) = runs.ledger(tmp_path / "one")
    (before,) = [step for step in runs.ledger(reference) if step["step"] == 0]
    assert {name: line["phases"][name] for name in before["phases"]} == before["phases"]
    assert len(line["phases"]) == 1 + 2 * len(before["phases"])

    (metrics,) = runs.metrics(tmp_path / "one")
    assert 0.0 <= metrics["val_sampled/sums_heldout/pass@1"] <= metrics["val_sampled/sums_heldout/pass@4"] <= 1.0
    assert ["pass@4", f"{metrics['val_sampled/sums_heldout/pass@4']:.4f}"] in [
        row.split() for row in printed.splitlines()
    ]
    samples = (tmp_path / "one" / "episodes" / "validation_000000.jsonl").read_text().splitlines()
    assert len(samples) == 16 + 64
    assert {json.loads(sample)["sample"] for sample in samples} == {0, 1, 2, 3}


def test_a_directory_with_results_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(AssertionError, match="already holds a run"):
        evaluate(tmp_path)
