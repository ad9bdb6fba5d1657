"""Bounded staleness end to end: generation runs one step ahead under every launcher, and a run can be resumed."""

from __future__ import annotations

import math

import pytest

from tests.e2e import runs

ASYNC = (
    *("full_determinism=false", "rollout.max_head_offpolicyness=1", "rollout.replicas=2"),
    *("trainer.total_steps=4", "trainer.checkpoint_every=1", "trainer.keep_last=0"),
)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("ray", marks=pytest.mark.long)])
def test_generation_runs_one_step_ahead_and_a_resumed_run_continues_with_the_next_prompts(tmp_path, launcher):
    run = runs.train(tmp_path / "run", *ASYNC, launcher=launcher, ranks=2)
    straight, records = runs.metrics(run), runs.ledger(run)
    assert staleness(straight) == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}  # the first has nothing to run ahead of
    assert all(math.isfinite(line["reward/total/mean"]) for line in straight if line["step"])
    assert len({record["phases"]["actor_weights"] for record in records if record["step"]}) == 4

    runs.train(run, *ASYNC, "run.resume=2", launcher=launcher, ranks=2)
    resumed = runs.metrics(run)
    assert staleness(resumed) == {1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0}
    assert prompts(runs.ledger(run)) == prompts(records)
    assert len(prompts(records)) == 4


def staleness(metrics: list[dict]) -> dict[int, float]:
    return {line["step"]: line["rollout/staleness_mean"] for line in metrics if line["step"]}


def prompts(ledger: list[dict]) -> dict[int, str]:
    return {record["step"]: record["phases"]["prompts"] for record in ledger if record["step"]}
