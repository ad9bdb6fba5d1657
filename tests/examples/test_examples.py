"""Every example is run: as written through all checks, and for one real step on the smallest models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.checks import check
from configs.compose import load_config
from configs.schema import AdvantageConfig
from trainer.algorithms.advantages import AdvantageInputs, compute_advantages

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
MICRO = ("model=micro", "data=micro", "actor=micro", "critic=micro", "rollout=micro", "rollout.sampling.n=2")
LORA = (
    *("data.prompts_per_step=2", "rollout.sampling.n=2", "rollout.sampling.max_new_tokens=4"),
    *("actor.mini_batch_size=4", "actor.fsdp.leaf_size=2", "rollout.kv_cache_mib=64"),
)


def train(example: str, run_dir: Path, *overrides: str) -> dict[str, float]:
    """One step in one rank without Ray; its metrics."""
    short = ("trainer.total_steps=1", "trainer.validate_every=0", "trainer.validate_at_start=false")
    place = ("launcher.name=torchrun", "launcher.num_ranks=1", "tracking=disabled", f"run.dir={run_dir}")
    command = [sys.executable, "-m", "trainer.main_ppo", f"examples/{example}.yaml", *overrides, *short, *place]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    (line,) = (run_dir / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("example", EXAMPLES)
def test_as_written_it_passes_every_check_without_a_warning(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, warnings = check(load_config([str(ROOT / "examples" / f"{example}.yaml")]))
    assert warnings == []


def test_tiny_grpo_replaces_groups_that_teach_nothing(tmp_path):
    metrics = train("tiny_grpo", tmp_path / "run", *MICRO)
    assert metrics["data/dynamic_sampling/rounds"] >= 2
    assert metrics["data/dynamic_sampling/replaced"] >= 1
    episodes = [json.loads(x) for x in (tmp_path / "run" / "episodes" / "step_000001.jsonl").read_text().splitlines()]
    assert [(e["task"], e["sample"]) for e in episodes] == [(task, sample) for task in range(8) for sample in (0, 1)]
    assert len({e["seed"] for e in episodes}) == 16
    flat = sum(episodes[i]["score"] == episodes[i + 1]["score"] for i in range(0, 16, 2))
    assert metrics["data/dynamic_sampling/unfilled"] == flat


def test_custom_reward_is_called_and_weighted(tmp_path):
    metrics = train("custom_reward", tmp_path / "run", *MICRO)
    assert 0.0 < metrics["reward/unlike_the_others/mean"] < 1.0
    expected = metrics["reward/correct/mean"] + 0.5 * metrics["reward/close/mean"]
    assert metrics["critic/score/mean"] == pytest.approx(expected)
    assert metrics["reward/audit_mismatches"] == metrics["reward/errors"] == 0.0


def test_custom_advantage_trains_the_policy(tmp_path):
    metrics = train("custom_advantage", tmp_path / "run", *MICRO)
    assert metrics["actor/grad_norm"] > 0.0
    assert "critic/vf_loss" not in metrics


def test_custom_advantage_subtracts_the_median_of_the_group(monkeypatch):
    monkeypatch.chdir(ROOT)
    scores = torch.tensor([0.0, 1.0, 9.0, 5.0])
    keep = torch.tensor([True, True, True, False])
    mask = torch.ones(4, 1, dtype=torch.bool)
    inputs = AdvantageInputs(scores[:, None], scores, mask, torch.zeros(4, dtype=torch.int64), keep)
    outputs = compute_advantages(inputs, AdvantageConfig(name="examples/custom_advantage.py:median_baseline"))
    assert outputs.advantages[:, 0].tolist() == [-1.0, 0.0, 8.0, 0.0]


@pytest.mark.slow
def test_smollm2_lora_trains_adapters_on_a_real_model(tmp_path):
    (tmp_path / "letters.py").write_text("def letters(response, **row):\n    return float(len(response))\n")
    # Four tokens earn nothing from the verifier, and a batch of equal rewards would leave no gradient to look at.
    reward = f"reward.functions=[{{name: letters, function: '{tmp_path / 'letters.py'}:letters'}}]"
    metrics = train("smollm2_lora", tmp_path / "run", *LORA, reward)
    assert metrics["critic/score/max"] > metrics["critic/score/min"]
    assert metrics["actor/grad_norm"] > 0.0
    assert metrics["actor/ref_kl"] == pytest.approx(0.0, abs=1e-4)
