"""The ledger holds whole steps only, whatever kills the run, and continues after a resume as if nothing had happened."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from determinism.digest import digest_tensor, digest_value
from determinism.ledger import Ledger, LedgerError, read_ledger
from determinism.seeds import derive_seed, torch_generator


def fill(ledger: Ledger, step: int, seed: int = 0) -> None:
    """A step's phases, a function of the seed and the step alone."""
    logprobs = torch.randn(4, 6, generator=torch_generator(derive_seed(seed, "test", step)))
    ledger.rows([("data/0", 0, 0), ("data/0", 0, 1), ("data/1", 1, 0), ("data/1", 1, 1)])
    ledger.add("prompts", [["data/0", [1, 2]], ["data/1", [3]]])
    ledger.add("request_seeds", [derive_seed(seed, "request", step, i) for i in range(4)])
    ledger.add("rollout_logprobs", logprobs)
    ledger.add("rewards/model", [0.5, None, -0.0, 1.0])
    ledger.add("actor_update/0/loss", [float(logprobs.sum())])
    ledger.add_digest("actor_weights", digest_value(["weights", seed, step]))


def run(path, steps, record="digest", seed=0) -> bytes:
    ledger = Ledger(path, record)
    for step in steps:
        fill(ledger, step, seed)
        ledger.commit(step)
    return (path / "ledger.jsonl").read_bytes()


def test_s3_six_steps_straight_equal_two_two_two_with_restarts(tmp_path):
    straight = run(tmp_path / "a", range(1, 7))
    for steps in ([1, 2], [3, 4], [5, 6]):
        pieces = run(tmp_path / "b", steps)
    assert pieces == straight
    assert run(tmp_path / "c", range(1, 7), seed=1) != straight


def test_a_step_is_one_line_with_phases_in_the_order_they_happened(tmp_path):
    run(tmp_path, [3])
    line = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert list(line) == ["version", "step", "phases"]
    assert line["version"] == 2
    assert list(line["phases"]) == [
        "prompts",
        "request_seeds",
        "rollout_logprobs",
        "rewards/model",
        "actor_update/0/loss",
        "actor_weights",
    ]
    (record,) = read_ledger(tmp_path)
    assert record.step == 3
    assert record.phases == line["phases"]
    assert record.phases["rewards/model"] == digest_value([0.5, None, -0.0, 1.0])


def test_a_kill_at_any_byte_of_a_line_costs_that_step_only(tmp_path):
    whole = run(tmp_path / "whole", [1, 2, 3])
    two = whole[: whole[:-1].rindex(b"\n") + 1]
    for size in range(len(two), len(whole), 37):
        path = tmp_path / f"cut{size}"
        path.mkdir()
        (path / "ledger.jsonl").write_bytes(whole[:size])
        assert [record.step for record in read_ledger(path)] == [1, 2]
        assert Ledger(path).last_step == 2
        assert (path / "ledger.jsonl").read_bytes() == whole[:size]  # opening it changes nothing
        assert run(path, [3]) == whole


def test_a_line_without_its_newline_does_not_count(tmp_path):
    whole = run(tmp_path, [1, 2])
    (tmp_path / "ledger.jsonl").write_bytes(whole[:-1])
    assert [record.step for record in read_ledger(tmp_path)] == [1]


@pytest.mark.parametrize("record", ["digest", "full"])
def test_truncate_after_lets_a_resumed_run_write_the_steps_again(tmp_path, record):
    whole = run(tmp_path, range(1, 6), record)
    ledger = Ledger(tmp_path, record)
    ledger.add("prompts", ["not committed"])
    ledger.truncate_after(2)
    assert [r.step for r in read_ledger(tmp_path)] == [1, 2]
    kept = sorted(path.name for path in (tmp_path / "ledger").glob("*")) if record == "full" else []
    assert kept == ([f"step_00000{i}.{end}" for i in (1, 2) for end in ("json", "safetensors")] if kept else [])
    for step in (3, 4, 5):
        fill(ledger, step)
        ledger.commit(step)
    assert (tmp_path / "ledger.jsonl").read_bytes() == whole


def test_truncating_to_before_the_first_step_empties_the_ledger(tmp_path):
    run(tmp_path, [0, 1])
    Ledger(tmp_path).truncate_after(-1)
    assert read_ledger(tmp_path) == []
    assert Ledger(tmp_path).last_step is None


def test_steps_only_grow(tmp_path):
    run(tmp_path, [1, 2])
    ledger = Ledger(tmp_path)
    fill(ledger, 2)
    with pytest.raises(LedgerError, match=r"step 2 is committed after step 2.*truncate_after"):
        ledger.commit(2)
    assert [record.step for record in read_ledger(tmp_path)] == [1, 2]


def test_a_phase_has_one_digest_a_step(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add("values", torch.zeros(2))
    with pytest.raises(LedgerError, match="'values' is recorded twice"):
        ledger.add("values", torch.zeros(2))
    ledger.commit(1)
    ledger.add("values", torch.zeros(2))
    ledger.commit(2)


@pytest.mark.parametrize("digest", ["", "5e0c", "G" * 32, "A" * 32, "0" * 33])
def test_only_digests_pass_for_digests(tmp_path, digest):
    with pytest.raises(LedgerError, match="is not a digest"):
        Ledger(tmp_path).add_digest("actor_weights", digest)


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path):
    lines = run(tmp_path, [1, 2, 3]).splitlines(keepends=True)
    path = tmp_path / "ledger.jsonl"
    for damaged, message in [
        (lines[0] + b"{]\n" + lines[2], "line 2: not JSON"),
        (lines[0] + b'{"step": 2}\n', "line 2: not a ledger record"),
        (lines[0] + lines[0], "line 2: step 1 follows step 1"),
        (lines[0].replace(b'"version": 2', b'"version": 9'), "line 1: version 9"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=message):
            read_ledger(tmp_path)
        with pytest.raises(LedgerError, match=message):
            Ledger(tmp_path)


def test_full_record_keeps_the_values_and_changes_no_digest(tmp_path):
    digests = run(tmp_path / "digest", [1, 2])
    assert run(tmp_path / "full", [1, 2], record="full") == digests
    tensors = load_file(tmp_path / "full" / "ledger" / "step_000002.safetensors")
    beside = json.loads((tmp_path / "full" / "ledger" / "step_000002.json").read_text())
    record = read_ledger(tmp_path / "full")[1]
    assert digest_tensor(tensors["rollout_logprobs"]) == record.phases["rollout_logprobs"]
    for phase in ("request_seeds", "actor_update/0/loss"):
        assert digest_value(tensors[phase].tolist()) == record.phases[phase]
    for phase in ("prompts", "rewards/model"):
        assert digest_value(beside["values"][phase]) == record.phases[phase]
    assert beside["rows"][1] == ["data/0", 0, 1]
    assert not (tmp_path / "digest" / "ledger").exists()


def test_full_record_keeps_what_was_there_when_it_was_added(tmp_path):
    ledger = Ledger(tmp_path, "full")
    value, weight = torch.ones(3), torch.ones(2, 2)
    ledger.add("values", value)
    ledger.add_digest("actor_weights", "0" * 32, {"layer.weight": weight})
    value.add_(1), weight.add_(1)
    ledger.commit(1)
    tensors = load_file(tmp_path / "ledger" / "step_000001.safetensors")
    assert torch.equal(tensors["values"], torch.ones(3))
    assert torch.equal(tensors["actor_weights/layer.weight"], torch.ones(2, 2))


def test_off_writes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "run", record="off")
    fill(ledger, 1)
    ledger.commit(1)
    ledger.truncate_after(0)
    assert not (tmp_path / "run").exists()


def test_an_unknown_record_mode_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="'ful'; it must be one of off, digest, full"):
        Ledger(tmp_path, "ful")


def test_a_file_that_may_not_grow_leaves_whole_lines(tmp_path):
    """The disk fills up in the middle of a line: an error, and the ledger is as it was."""
    before = run(tmp_path, [1])
    ledger = Ledger(tmp_path)
    fill(ledger, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (len(before) + 50, hard)
    )  # Python ignores SIGXFSZ, so writes fail instead
    try:
        with pytest.raises(OSError, match="only 50 of"):
            ledger.commit(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    ledger.commit(2)
    assert [record.step for record in read_ledger(tmp_path)] == [1, 2]


def test_reading_a_ledger_does_not_import_torch():
    program = "import sys, determinism.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
