"""A real chat model: three PPO steps of SmolLM2-135M with a verifier's reward and the KL to the reference."""

import subprocess
import sys

import pytest

from tests.e2e import runs


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_three_steps_on_smollm2(tmp_path):
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "experiment=smollm2", "launcher.name=torchrun"),
        *(f"run.dir={run}", "tracking=disabled"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    steps = runs.metrics(run)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["actor/grad_norm"] > 0 and row["actor/ref_kl"] == row["actor/ref_kl"] for row in steps)
    assert steps[0]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-4)  # the policy starts as the reference


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_steps_with_a_calculator(tmp_path):
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "experiment=smollm2_tools", "launcher.name=torchrun"),
        *("full_determinism=true", f"run.dir={run}", "tracking=disabled"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    steps = runs.metrics(run)
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[0]["rollout/turns/max"] > 1, "no answer called the tool"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_tools_have_the_same_bits_on_more_processes_replicas_and_ranks(tmp_path):
    def train(name, *settings):
        command = [
            *(sys.executable, "-m", "trainer.main_ppo", "experiment=smollm2_tools", "full_determinism=true"),
            *("tracking=disabled", "trainer.total_steps=1", f"run.dir={tmp_path / name}", *settings),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=700, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return tmp_path / name

    one = train("one", "launcher.name=torchrun")
    two = train(
        "two",
        *("launcher.name=ray", "launcher.num_ranks=2", "rollout.replicas=2", "rollout.proxy.processes=2"),
        "rollout.turns.audit_episodes=4",
    )
    assert runs.metrics(one)[0]["rollout/turns/max"] > 1, "no answer called the tool"
    runs.assert_same(one, two)
