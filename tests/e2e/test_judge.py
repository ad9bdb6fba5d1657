"""A judge in a real run: its judgements have the same bits on any number of engines, and its prompt counts."""

from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.timeout(300)

JUDGE = (
    "reward.judge.path=micro:policy",
    "reward.judge.prompt='{prompt} {response}'",
    "reward.judge.parser=tests.reward._functions:length",
    "reward.judge.sampling={n: 2, temperature: 1.0, max_new_tokens: 8}",
    "trainer.validate_every=0",
    "trainer.validate_at_start=false",
    "trainer.checkpoint_every=0",
)


def test_judgements_depend_on_nothing_but_what_is_judged(tmp_path: Path) -> None:
    one = runs.train(tmp_path / "one", *JUDGE, launcher="python")
    two = runs.train(
        tmp_path / "two", *JUDGE, "reward.judge.replicas=2", "reward.judge.max_num_seqs=3", launcher="python"
    )
    runs.assert_same(one, two)
    assert "rewards/judge" in runs.ledger(one)[1]["phases"]
    assert runs.metrics(one)[0]["reward/judge/std"] > 0
    other = runs.train(
        tmp_path / "other", *JUDGE, "reward.judge.prompt='{response}'", "trainer.total_steps=1", launcher="python"
    )
    found = runs.compared(one, other)
    assert found.divergence is not None
    assert found.divergence.phase == "rewards/judge"
