"""The thread count is pinned and recorded: what the user exported does not get through, and another count is named (case S8)."""

from pathlib import Path

import pytest

from determinism.compare import describe
from determinism.manifest import read_manifest
from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SHORT = ("trainer.total_steps=1", "trainer.validate_every=0", "trainer.validate_at_start=false")


def processes(run: Path) -> dict[str, dict]:
    """Process name -> what was read back in it."""
    return read_manifest(run / "manifest.json")["processes"]


@pytest.fixture(scope="module")
def tampered(tmp_path_factory) -> Path:
    """One thread in the configuration, two in the environment of the person who starts it."""
    run = tmp_path_factory.mktemp("tampered") / "run"
    return runs.train(run, *SHORT, launcher="python", env=dict.fromkeys(VARIABLES, "2"))


def test_an_exported_thread_count_reaches_no_process_and_no_bit(reference, tampered):
    found = processes(tampered)
    assert found.keys() == {"driver", "trainer/0", "rollout/0", "reward/0"}
    for facts in found.values():
        assert facts["threads"] == 1
        assert {facts["environment"][name] for name in VARIABLES} == {"1"}
    (step,) = runs.ledger(tampered)
    assert step == runs.ledger(reference)[1]


def test_another_thread_count_is_named_whatever_it_does_to_the_bits(tampered, tmp_path):
    two = runs.train(tmp_path / "two", *SHORT, "determinism.threads=2", launcher="python")
    assert {facts["threads"] for facts in processes(two).values()} == {2}
    assert "threads behind" not in (two / "logs" / "imports.log").read_text()  # nothing stands in the way of forks

    comparison = runs.compared(tampered, two)
    fields = {difference.field: (difference.a, difference.b) for difference in comparison.fields}
    assert fields["config.determinism.threads"] == (1, 2)
    for process in processes(two):
        assert fields[f"processes.{process}.threads"] == (1, 2)
        assert fields[f"processes.{process}.environment.OMP_NUM_THREADS"] == ("1", "2")
    lines = describe(comparison).splitlines()
    verdict = next(i for i, line in enumerate(lines) if line.split()[0] in ("SAME:", "DIFFERENT:"))
    named = [i for i, line in enumerate(lines) if "config.determinism.threads: 1 | 2" in line]
    assert named
    assert named[0] < verdict
    if not comparison.same:  # where two threads sum in another order, this shows in what the models compute
        assert comparison.divergence.step == 1
        assert comparison.divergence.phase not in ("prompts", "request_seeds")
