"""Parts of the loop that need no worker: what is masked and dropped, what is counted, what is saved when a run stops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from configs.schema import Config
from determinism.ledger import Ledger
from rollout.types import Episode, Prompt, SampleKey, Score
from trainer.algorithms.kl import controller
from trainer.experience import Experience
from trainer.ppo import PPO, NonFiniteError, update_metrics
from trainer.record import Record
from trainer.remote_models import MiniBatchResult
from trainer.run_dir import RunDirectory


def episode(task: int, sample: int, length: int, finish: str = "stop") -> Episode:
    return Episode(
        SampleKey(task, sample),
        Prompt(f"rows/{task}", "rows", (9,), "", ()),
        0,
        tuple(range(1, length + 1)),
        (True,) * length,
        (-0.5,) * length,
        finish,
        "",
    )


def loop(tmp_path: Path, estimator: str, save_episodes: bool = False, rewards=None, **algorithm) -> PPO:
    config = Config()
    config.rollout.sampling.max_new_tokens = 4
    config.algorithm = replace(config.algorithm, **algorithm)
    config.algorithm.advantage.name = estimator
    config.algorithm.kl.placement = "none"
    run = RunDirectory(tmp_path)
    run.open()
    parts = SimpleNamespace(
        sampler=SimpleNamespace(),
        eos_ids=(0,),
        ledger=Ledger(tmp_path, "off"),
        record=Record(run, SimpleNamespace(), save_episodes, 0),
        kl=controller(config.algorithm.kl),
        rollout=SimpleNamespace(
            start=lambda prompts, *_, **__: SimpleNamespace(
                result=lambda: [episode(t, 0, 2) for t in range(len(prompts))]
            )
        ),
        reward=SimpleNamespace(evaluate=lambda episodes: rewards),
    )
    return PPO(config, parts, total_steps=9)  # type: ignore[arg-type]


def experience(scores: list[float], cut: tuple[int, ...] = ()) -> Experience:
    """Groups of two, two tokens each; rows `cut` end by the cap."""
    episodes = [episode(i // 2, i % 2, 2, "length" if i in cut else "stop") for i in range(len(scores))]
    made = Experience.from_episodes(episodes, [Score(score, {}) for score in scores], pad_id=0)
    return made.with_tokens(old_logprobs=made.tokens.rollout_logprobs)


def advantages(ppo: PPO, made: Experience, greedy: torch.Tensor | None = None) -> tuple[Experience, list[float]]:
    """The experience with advantages, and each row's first advantage."""
    done, _ = ppo.add_advantages(made, None, greedy)
    assert done.tokens.advantages is not None
    return done, done.tokens.advantages[:, 1].tolist()


# --- truncated responses that are masked -----------------------------------------------------------------------------


def test_a_masked_response_is_not_in_the_whitening_but_stays_in_its_group(tmp_path):
    scores = [1.0, 0.0, 2.0, 8.0]
    done, found = advantages(
        loop(tmp_path, "reinforce_plus_plus_baseline", truncated="mask"), experience(scores, cut=(3,))
    )
    assert done.tokens.mask.any(dim=1).tolist() == [True, True, True, False]
    # Group means are those of all four: centred 0.5, -0.5, -3; whitening sees these three rows, two tokens each.
    centred = torch.tensor([0.5, -0.5, -3.0], dtype=torch.float64)
    expected = (centred - centred.mean()) / (centred.repeat(2).var() + 1e-8).sqrt()
    assert found[3] == 0.0
    assert torch.allclose(torch.tensor(found[:3], dtype=torch.float64), expected, atol=1e-6)
    assert math.isclose(sum(found[:3]), 0.0, abs_tol=1e-5)


def test_kept_responses_are_all_in_the_whitening(tmp_path):
    _, found = advantages(loop(tmp_path, "reinforce_plus_plus_baseline"), experience([1.0, 0.0, 2.0, 8.0], cut=(3,)))
    assert found[3] > 0.0
    assert math.isclose(sum(found), 0.0, abs_tol=1e-5)


def test_masking_changes_no_advantage_of_the_others_when_nothing_is_whitened(tmp_path):
    scores = [1.0, 0.0, 2.0, 8.0]
    _, kept = advantages(loop(tmp_path / "a", "rloo"), experience(scores, cut=(3,)))
    _, masked = advantages(loop(tmp_path / "b", "rloo", truncated="mask"), experience(scores, cut=(3,)))
    assert masked == [*kept[:3], 0.0]


# --- ReMax's greedy response -----------------------------------------------------------------------------------------


def greedy(tmp_path: Path, **algorithm) -> tuple[PPO, torch.Tensor]:
    scores = [Score(0.5, {}), Score(0.0, {}, dropped=True, error="failed")]
    ppo = loop(tmp_path, "remax", rewards=scores, **algorithm)
    found = ppo.greedy_scores([Prompt("rows/0", "rows", (9,), "", ()), Prompt("rows/1", "rows", (9,), "", ())], step=1)
    assert found is not None
    return ppo, found


def test_a_greedy_response_without_a_reward_takes_its_prompts_samples_out_instead_of_being_a_baseline_of_0(tmp_path):
    ppo, baseline = greedy(tmp_path)
    done, found = advantages(ppo, experience([1.0, 0.0, 2.0, 8.0]), baseline)
    assert found == [0.5, -0.5, 0.0, 0.0]
    assert done.keep.tolist() == [True, True, False, False]
    assert done.tokens.mask.any(dim=1).tolist() == [True, True, False, False]
    _, metrics = ppo.add_advantages(experience([1.0, 0.0, 2.0, 8.0]), None, baseline)
    assert metrics["reward/greedy_dropped"] == 1.0
    assert metrics["critic/score/max"] == 1.0


def test_the_baseline_has_the_length_penalties_of_the_samples(tmp_path):
    assert greedy(tmp_path, overlong_buffer=4, overlong_penalty=2.0)[1][0] == 0.5 - 1.0


# --- updates that are not finite -------------------------------------------------------------------------------------


def result(skipped: bool, value: float = 2.0) -> MiniBatchResult:
    number = math.nan if skipped else value
    return MiniBatchResult(number, number, 1e-3, skipped, {"actor/pg_loss": number})


OK, BAD = result(False), result(True)


def test_a_run_stops_at_the_limit_of_updates_in_a_row_and_not_before(tmp_path):
    ppo = loop(tmp_path, "grpo")
    made = experience([1.0, 0.0])
    ppo.count_skipped("actor", 1, [BAD, BAD, OK, BAD], made)
    ppo.count_skipped("actor", 2, [BAD], made)
    assert list(tmp_path.glob("nonfinite*")) == []
    with pytest.raises(NonFiniteError, match=r"step 3: 3 updates of the actor in a row .*nonfinite_step_000003"):
        ppo.count_skipped("actor", 3, [BAD], made)


def test_the_critics_failures_are_not_forgiven_by_the_actors_successes(tmp_path):
    ppo = loop(tmp_path, "grpo")
    made = experience([1.0, 0.0])
    for step in (1, 2):
        ppo.count_skipped("critic", step, [BAD], made)
        ppo.count_skipped("actor", step, [OK], made)
    with pytest.raises(NonFiniteError, match="of the critic in a row"):
        ppo.count_skipped("critic", 3, [BAD], made)


def test_the_batch_is_saved_with_its_tensors_though_episodes_are_not(tmp_path):
    ppo = loop(tmp_path, "grpo", save_episodes=False)
    made = experience([1.0, 0.0, 2.0, 8.0], cut=(3,))
    with pytest.raises(NonFiniteError):
        ppo.count_skipped("actor", 12, [BAD] * 3, made)
    assert list((tmp_path / "episodes").iterdir()) == []
    with safe_open(tmp_path / "nonfinite_step_000012.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        rows = json.loads(file.metadata()["rows"])
    assert rows == [["rows/0", 0, 0], ["rows/0", 0, 1], ["rows/1", 1, 0], ["rows/1", 1, 1]]
    assert torch.equal(saved["input_ids"], made.tokens.input_ids)
    assert torch.equal(saved["old_logprobs"], made.tokens.rollout_logprobs)
    assert torch.equal(saved["scores"], made.scores)
    assert saved["truncated"].tolist() == [False, False, False, True]
    assert "old_values" not in saved


def test_metrics_are_those_of_the_updates_that_were_made():
    assert update_metrics("actor", [result(False, 1.0), BAD, result(False, 3.0)]) == {
        "actor/pg_loss": 2.0,
        "actor/grad_norm": 2.0,
        "actor/lr": 1e-3,
        "actor/skipped_updates": 1.0,
    }
    assert update_metrics("critic", [BAD]) == {"critic/lr": 1e-3, "critic/skipped_updates": 1.0}
