"""`exactrl eval` on the real engines: the same bits again, with other replicas, and as training's own validation at that step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.timeout(580)

SAMPLED = "rollout.validation_sampled={n: 4, temperature: 1.0, max_new_tokens: 8}"


def evaluate(out: Path, *overrides: str) -> str:
    """Evaluate micro's model; what was printed."""
    settings = ("experiment=micro", "full_determinism=true", "launcher.name=torchrun", "tracking=disabled")
    return run_eval(*settings, SAMPLED, "--out", str(out), *overrides)


def run_eval(*arguments: str) -> str:
    """Run it to the end; what it printed."""
    command = [sys.executable, "-m", "trainer.tools.cli", "eval", *arguments]
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
    with pytest.raises(AssertionError, match="already holds results; choose another directory with --out"):
        evaluate(tmp_path)


def test_the_actor_of_a_checkpoint_has_the_bits_of_the_runs_own_validation_at_that_step(reference, tmp_path):
    # The run's own configuration is the base; only where things run differs.
    where = ("launcher.name=torchrun", "tracking.wandb_mode=disabled", "--out", str(tmp_path / "two"))
    printed = run_eval("--checkpoint", str(reference), "--step", "2", *where)
    (line,) = runs.ledger(tmp_path / "two")
    start, first, second = runs.ledger(reference)
    validated = {name: digest for name, digest in second["phases"].items() if name.startswith("validation/")}
    assert line["step"] == 2
    assert validated.keys() == {"validation/token_ids", "validation/rollout_logprobs", "validation/rewards"}
    assert {name: line["phases"][name] for name in validated} == validated
    assert line["phases"]["actor_weights"] == second["phases"]["actor_weights"]
    # Not by chance: the model before training and the checkpoint before it are others.
    assert start["phases"]["validation/rollout_logprobs"] != validated["validation/rollout_logprobs"]
    assert first["phases"]["actor_weights"] != second["phases"]["actor_weights"]

    (metrics,) = runs.metrics(tmp_path / "two")
    (trained,) = [row for row in runs.metrics(reference) if row["step"] == 2]
    assert metrics["step"] == 2
    assert {name: trained[name] for name in metrics} == metrics
    assert f"actor of {reference / 'checkpoints' / 'step_000002'}" in printed
    episodes = Path("episodes") / "validation_000002.jsonl"
    assert (tmp_path / "two" / episodes).read_bytes() == (reference / episodes).read_bytes()


@pytest.mark.slow
def test_an_exported_model_gives_in_vllm_the_bits_of_the_runs_own_validation(reference, tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainer.tools.cli",
        "export",
        str(reference),
        "--step",
        "2",
        "--to",
        str(tmp_path / "hf"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = ("experiment=micro", "full_determinism=true", "launcher.name=torchrun", "tracking=disabled")
    run_eval(*settings, f"model.path={tmp_path / 'hf'}", "--out", str(tmp_path / "eval"))
    (line,) = runs.ledger(tmp_path / "eval")
    trained = runs.ledger(reference)[2]["phases"]
    # Greedy validation draws nothing, so only the weights matter; the reward model is the same.
    names = [name for name in trained if name.startswith("validation/")]
    assert names
    assert {name: line["phases"][name] for name in names} == {name: trained[name] for name in names}


def test_a_flipped_byte_in_a_checkpoint_is_named_before_anything_starts(reference, tmp_path):
    shutil.copy(reference / "config.yaml", tmp_path)
    shutil.copytree(reference / "checkpoints", tmp_path / "checkpoints")
    shard = sorted((tmp_path / "checkpoints" / "step_000002" / "workers").glob("*.distcp"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    message = (
        rf"step_000002 is damaged: workers/{shard.name} .*step 1: take it with --checkpoint of the run and --step 1"
    )
    with pytest.raises(AssertionError, match=message):
        run_eval("--checkpoint", str(tmp_path))
    assert not (tmp_path / "eval").exists()
