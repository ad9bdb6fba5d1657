"""The same bits again (D1), under another launcher (D2), rollout topology (D3), trainer topology (D4), after a kill (D5)."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

from tests.e2e import runs
from trainer.tools.cli import main

pytestmark = pytest.mark.timeout(580)


def test_d1_the_same_command_gives_the_same_bits(reference, tmp_path):
    runs.assert_same(reference, runs.train(tmp_path / "again"))


def test_d2_to_d4_torchrun_with_two_ranks_two_replicas_and_other_engine_settings(reference, tmp_path):
    other = runs.train(
        tmp_path / "torchrun",
        "rollout.replicas=2",
        "rollout.max_num_seqs=4",
        "rollout.enable_prefix_caching=false",
        "rollout.serialize_group_samples=true",
        "reward.model.replicas=2",
        launcher="torchrun",
        ranks=2,
    )
    runs.assert_same(reference, other)


@pytest.mark.slow
def test_d2_accelerate_launch_is_a_third_launcher(reference, tmp_path):
    runs.assert_same(reference, runs.train(tmp_path / "accelerate", launcher="accelerate", ranks=1))


def test_another_seed_gives_other_bits_so_the_comparison_can_fail(reference, tmp_path):
    other = runs.train(tmp_path / "seed", "seed=1", "trainer.total_steps=1", launcher="python")
    result = runs.compared(reference, other)
    assert not result.same
    assert "config.seed" in [difference.field for difference in result.fields]
    assert result.divergence is not None
    # Greedy validation before training draws nothing; the first training step has another order of prompts.
    assert (result.divergence.step, result.divergence.phase) == (1, "prompts")


def wait_for(path, present: float = 240.0):
    deadline = time.monotonic() + present
    while time.monotonic() < deadline:
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear in {present} s")


def test_d5_killed_after_the_first_checkpoint_and_resumed_with_two_ranks(reference, tmp_path):
    run = tmp_path / "killed"
    process = runs.start(run, launcher="python")
    wait_for(run / "checkpoints" / "step_000001" / "COMPLETE")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(runs.ledger(run)) < 3 or not (run / "checkpoints" / "step_000002").exists()
    runs.train(run, "run.resume=auto", launcher="torchrun", ranks=2)
    runs.assert_same(reference, run)


def test_every_phase_of_a_step_is_in_the_ledger(reference):
    record = runs.ledger(reference)[1]
    expected = (
        *(
            "prompts",
            "request_seeds",
            "token_ids",
            "finish_reasons",
            "rollout_logprobs",
            "rewards/model",
            "rewards/correct",
        ),
        *(
            "rewards/total",
            "old_logprobs",
            "ref_logprobs",
            "values",
            "token_rewards",
            "advantages",
            "returns",
            "kl_coef",
        ),
        *("critic_update/0/loss", "critic_update/0/grad_norm", "actor_update/0/loss", "actor_update/0/grad_norm"),
        *("actor_weights", "actor_optimizer", "critic_weights", "critic_optimizer"),
    )
    assert set(expected) <= set(record["phases"])


def test_a_full_record_holds_samples_and_parameters(reference):
    with safe_open(reference / "ledger" / "step_000001.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"advantages", "actor_weights/model.embed_tokens.weight", "critic_weights/score.weight"} <= names


def test_a_run_directory_keeps_its_contract(reference):
    for name in ("config.yaml", "manifest.json", "ledger.jsonl", "metrics.jsonl"):
        assert (reference / name).is_file()
    for name in ("episodes", "checkpoints", "logs", "wandb"):
        assert any((reference / name).iterdir()), name


@pytest.mark.slow
def test_four_ranks_and_four_replicas_keep_the_bits_of_bf16_two_epochs_and_an_adaptive_kl(tmp_path):
    settings = (
        *("actor.fsdp.precision=bf16", "critic.fsdp.precision=bf16", "ref.fsdp.precision=bf16", "actor.ppo_epochs=2"),
        *("critic.ppo_epochs=2", "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.1", "tracking=disabled"),
    )
    one = runs.train(tmp_path / "one", *settings, launcher="torchrun", ranks=1)
    four = runs.train(tmp_path / "four", *settings, "rollout.replicas=4", launcher="torchrun", ranks=4)
    runs.assert_same(one, four)


@pytest.mark.slow
def test_replay_runs_one_step_again_and_finds_a_changed_digest(reference):
    command = [sys.executable, "-m", "trainer.tools.cli", "replay", str(reference), "--step", "2"]
    done = subprocess.run(
        [*command, "--stop-before", "actor_update"],
        input="p 'sequences', len(experience)\nc\n",
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "('sequences', 16)" in done.stdout
    assert "SAME: replayed to step 2 from the checkpoint of step 1" in done.stdout
    ledger = reference / "ledger.jsonl"
    text = ledger.read_text()
    digest = runs.ledger(reference)[2]["phases"]["advantages"]
    try:
        ledger.write_text(text.replace(digest, "0" * 32))
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    finally:
        ledger.write_text(text)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 2, phase advantages" in done.stderr


def test_resuming_another_experiment_is_refused_by_name(reference, capsys):
    code = main(["train", *runs.MICRO[:1], f"run.dir={reference}", "run.resume=auto", "algorithm.advantage.lam=0.5"])
    assert code == 2
    assert "algorithm.advantage.lam: 0.95 in the run, 0.5 now" in capsys.readouterr().err


def test_resuming_on_data_that_has_changed_under_its_name_is_refused(reference, capsys):
    manifest = reference / "manifest.json"
    text = manifest.read_text()
    digest = json.loads(text)["data"]["data/train"]
    try:
        manifest.write_text(text.replace(digest, "0" * 32))
        allowed = "run.resume_allow=[full_determinism,reward.full_determinism,rollout.full_determinism]"
        code = main(["train", *runs.MICRO[:1], f"run.dir={reference}", "run.resume=auto", allowed])
    finally:
        manifest.write_text(text)
    assert code == 2
    assert f"data.train (data/train): {'0' * 32} in the run, {digest} now" in capsys.readouterr().err
