"""The reference run's bits are those that were reviewed."""

import json

import pytest

from tests.e2e import runs
from tests.e2e.golden import environment_key, golden_file


def test_the_reference_run_keeps_the_golden_ledger(reference):
    assert_golden(reference, golden_file())


def assert_golden(run, golden):
    """The run's ledger is the committed one."""
    if not golden.exists():
        pytest.skip(f"no golden ledger for this numerics environment ({environment_key()}); `make golden` writes one")
    expected = [json.loads(line) for line in golden.read_text().splitlines()]
    for wanted, found in zip(expected, runs.ledger(run), strict=True):
        moved = [phase for phase, digest in wanted["phases"].items() if found["phases"].get(phase) != digest]
        assert not moved, (
            f"step {wanted['step']}: this change moves the bits of {moved[0]} (and of {len(moved) - 1} other phases). "
            "If that is meant, say so in the commit and renew the ledger with `make golden`."
        )
        assert list(found["phases"]) == list(wanted["phases"])
