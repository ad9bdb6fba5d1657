"""A resume reads first and changes later: what it takes out of the record is kept, whatever moment it is killed at."""

from types import SimpleNamespace

import pytest

from configs.compose import load_config, to_yaml
from determinism.files import append_json_line
from determinism.ledger import Ledger, read_ledger
from determinism.manifest import write_manifest
from trainer import claim
from trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from trainer.resume import ResumeError
from trainer.run_dir import RunDirectory
from workers.models.shards import save_shards

INPUTS = SimpleNamespace(train=SimpleNamespace(prompts=[]), validation=SimpleNamespace(prompts=[]))
DIGEST = {"actor_weights": "a" * 32}


def contents(run: RunDirectory) -> dict[str, bytes]:
    files = [path for path in run.path.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A run of three steps with a checkpoint each, and the configuration that resumes it."""
    monkeypatch.setattr(claim, "input_digests", lambda *_: {})
    monkeypatch.setattr(claim, "_check_roles", lambda *_: None)
    run = RunDirectory(tmp_path / "run")
    run.open()
    config = load_config(["experiment=micro", f"run.dir={run.path}"])
    run.config.write_text(to_yaml(config))
    write_manifest(run.manifest, {}, {}, {}, run_id="mine")
    ledger, store = Ledger(run.path), CheckpointStore(run.checkpoints, 0, 0, "mine")
    for step in (1, 2, 3):
        ledger.add_digest("actor_weights", f"{step:032x}")
        ledger.commit(step)
        append_json_line(run.metrics, {"step": step})
        (run.episodes / f"step_{step:06d}.jsonl").write_text("{}\n")
        store.finish(store.begin(step), {"step": step})
    yield run, load_config(["experiment=micro", f"run.dir={run.path}", "run.resume=1"])
    run.release()


def test_preparing_changes_nothing_and_committing_sets_aside(made, caplog):
    run, config = made
    before = contents(run)
    checkpoint = claim.prepare_directory(config, run, INPUTS)
    assert checkpoint is not None
    assert (checkpoint.step, run.id) == (1, "mine")
    ledger = Ledger(run.path)
    assert contents(run) == before
    claim.commit(config, run, checkpoint, ledger)
    after = contents(run)
    assert [record.step for record in read_ledger(run.path)] == [1]
    assert [c.step for c in CheckpointStore(run.checkpoints, 0, 0).all()] == [1]
    moved = {
        name.removeprefix("set_aside/0001_after_step_000001/"): data
        for name, data in after.items()
        if "set_aside" in name
    }
    for name, data in before.items():
        if name in ("ledger.jsonl", "metrics.jsonl"):
            assert after[name] + moved.pop(name) == data
        elif "000002" in name or "000003" in name:
            assert name not in after
            assert moved.pop(name) == data
    assert not moved
    assert "goes on after step 1" in caplog.text
    assert "(checkpoints, episodes, ledger.jsonl, metrics.jsonl;" in caplog.text
    ledger.add_digest("actor_weights", "0" * 32)
    ledger.commit(2)


def test_a_kill_in_the_middle_leaves_a_run_that_can_be_resumed(made, monkeypatch):
    run, config = made
    checkpoint = claim.prepare_directory(config, run, INPUTS)
    real, moves = claim.move_file, []

    def killed_at_the_second(path, target):
        moves.append(path.name)
        if len(moves) == 2:
            raise KeyboardInterrupt
        real(path, target)

    monkeypatch.setattr(claim, "move_file", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        claim.commit(config, run, checkpoint, Ledger(run.path))
    assert moves == ["step_000003", "step_000002"]  # the newest first: what is left has no gap
    config.run.resume = "auto"
    checkpoint = claim.prepare_directory(config, run, INPUTS)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert [record.step for record in read_ledger(run.path)] == [1, 2, 3]


def test_a_run_that_is_resumed_at_its_end_has_nothing_set_aside(made):
    run, config = made
    config.run.resume = "auto"
    claim.commit(config, run, claim.prepare_directory(config, run, INPUTS), Ledger(run.path))
    assert not run.set_aside.exists()


def test_a_config_that_was_allowed_to_differ_is_kept(made):
    run, config = made
    old = run.config.read_text()
    config.run.resume, config.seed, config.run.resume_allow = "auto", 5, ["seed"]
    checkpoint = claim.prepare_directory(config, run, INPUTS)
    assert run.config.read_text() == old
    claim.commit(config, run, checkpoint, Ledger(run.path))
    assert run.config.read_text() == to_yaml(config)
    assert (run.set_aside / "0001_after_step_000003" / "config.yaml").read_text() == old


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ledger.jsonl", "{]\n{}\n", r"ledger\.jsonl, line 1: not JSON"),
        ("metrics.jsonl", "{]\n{}\n", r"metrics\.jsonl, line 1: not JSON"),
        ("manifest.json", "{", r"manifest\.json is not a manifest.*Restore"),
    ],
)
def test_records_that_cannot_be_continued_refuse_the_resume(made, file, text, message):
    run, config = made
    (run.path / file).write_text(text)
    before = contents(run)
    with pytest.raises(ValueError, match=message):
        claim.prepare_directory(config, run, INPUTS)
    assert contents(run) == before


def test_another_runs_checkpoint_is_refused(made):
    run, config = made
    write_manifest(run.manifest, {}, {}, {}, run_id="other")
    with pytest.raises(CheckpointError, match=r"of the run with the id mine, and this run's id is other"):
        claim.prepare_directory(config, run, INPUTS)


def test_a_critic_that_is_not_in_the_checkpoint_is_named_before_anything_starts(tmp_path):
    import torch

    save_shards({"actor": {"weights/x": torch.zeros(2)}}, tmp_path / "step_000001" / "workers")
    with pytest.raises(CheckpointError, match=r"holds no critic \(it holds: actor\)"):
        claim._check_roles(Checkpoint(tmp_path / "step_000001"), ["actor", "critic"])


def test_weights_are_held_against_the_ledger(made):
    run, config = made
    checkpoint = claim.prepare_directory(config, run, INPUTS)
    claim.check_restored(run, checkpoint, {"actor_weights": f"{1:032x}", "not_recorded": "b" * 32})
    with pytest.raises(
        CheckpointError, match=r"not what this run had after step 1: actor_weights has the digest a{32}"
    ):
        claim.check_restored(run, checkpoint, DIGEST)


def test_every_new_run_has_an_id_of_its_own(tmp_path):
    ids = []
    for name in "ab":
        run = RunDirectory(tmp_path / name)
        claim.prepare_directory(load_config(["experiment=micro", f"run.dir={run.path}"]), run, INPUTS)
        ids.append(run.id)
        run.release()
    assert len(set(ids)) == 2
    assert all(ids)


def test_a_resume_of_another_experiment_is_still_refused(made):
    run, config = made
    config.seed = 9
    with pytest.raises(ResumeError, match="seed: 0 in the run, 9 now"):
        claim.prepare_directory(config, run, INPUTS)
