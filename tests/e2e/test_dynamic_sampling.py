"""Dynamic sampling on the real engines: several rounds in a step, and the same bits with another number of replicas."""

from __future__ import annotations

import pytest

from tests.e2e import runs

OVERRIDES = (
    *("algorithm=grpo", "reward=verifier", "algorithm.dynamic_sampling.enable=true"),
    *("trainer.total_steps=1", "trainer.validate_every=0", "trainer.validate_at_start=false"),
)


@pytest.mark.long
@pytest.mark.timeout(580)
def test_which_groups_are_replaced_does_not_depend_on_replicas(tmp_path):
    one = runs.train(tmp_path / "one", *OVERRIDES, launcher="torchrun")
    two = runs.train(tmp_path / "two", *OVERRIDES, "rollout.replicas=2", launcher="torchrun")
    runs.assert_same(one, two)
    (metrics,) = runs.metrics(one)
    assert metrics["data/dynamic_sampling/rounds"] >= 2.0
    assert metrics["data/dynamic_sampling/replaced"] >= 1.0
