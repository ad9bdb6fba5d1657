"""A run directory is used once, and resumed only on request and only by the same experiment."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress

import pytest

from configs.schema import Config
from determinism.files import append_json_line, json_lines
from trainer.input_digests import check_contents, input_digests
from trainer.resume import ResumeError, check_resume
from trainer.run_dir import RunDirectory, RunDirectoryError, check_temporary_folder


def test_a_used_directory_is_refused_without_resume(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.check("never")
    run.claim("never")
    run.release()
    run.config.write_text("seed: 0\n")
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*run\.resume=auto"):
        run.check("never")
    run.check("auto")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory(tmp_path / "run").check("never")


def names(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def claimed(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.claim("auto")
    yield run
    run.release()


def test_later_steps_are_taken_out_and_kept_aside(claimed):
    for step in (1, 2, 3):
        append_json_line(claimed.metrics, {"step": step, "x": 0.1})
    torn = '{"step": 4, "x"'
    with open(claimed.metrics, "a") as file:
        file.write(torn)
    for name in ("step_000001.jsonl", "step_000002.jsonl", "validation_000002.jsonl"):
        (claimed.episodes / name).write_text(name)
    aside = claimed.next_aside(1)
    claimed.take_out_after(1, aside)
    assert aside.name == "0001_after_step_000001"
    assert [line.record["step"] for line in json_lines(claimed.metrics)] == [1]
    assert names(claimed.episodes) == ["step_000001.jsonl"]
    kept = (aside / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept[:-1]] == [2, 3]
    assert kept[-1] == torn
    assert (aside / "episodes" / "step_000002.jsonl").read_text() == "step_000002.jsonl"
    assert names(aside / "episodes") == ["step_000002.jsonl", "validation_000002.jsonl"]
    assert claimed.next_aside(-1).name == "0002_everything"


def test_names_that_people_give_to_episodes_are_left_alone(claimed):
    theirs = ["favourites.jsonl", "step_000009 (copy).jsonl", "step_9.jsonl", "step_000009.jsonl.bak"]
    for name in theirs:
        (claimed.episodes / name).write_text("")
    claimed.take_out_after(1, claimed.next_aside(1))
    assert names(claimed.episodes) == sorted(theirs)
    assert not claimed.set_aside.exists()


def test_damaged_metrics_refuse_a_resume_by_line(claimed):
    claimed.metrics.write_text('{"step": 1}\n{"step": 2, "x{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: not JSON"):
        claimed.check_records()


HOLD = """
import os, sys, time
from trainer.run_dir import RunDirectory
run = RunDirectory(sys.argv[1])
run.claim("auto")
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_second_process_is_refused_until_the_holder_is_gone_even_killed(tmp_path, how):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), how]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        before = names(tmp_path / "run")
        for ask in (RunDirectory(tmp_path / "run").check, RunDirectory(tmp_path / "run").claim):
            with pytest.raises(RunDirectoryError) as error:
                ask("auto")
            assert f"in use by process {holder.pid} on {platform.node()}" in str(error.value)
        assert names(tmp_path / "run") == before
        os.kill(holder.pid, signal.SIGKILL)  # a forked child of it lives on, and holds nothing
        holder.wait()
        run = RunDirectory(tmp_path / "run")
        run.claim("auto")
        run.release()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_is_given_back(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.claim("never")
    first.claim("never")  # a second time by the same object is nothing new
    with pytest.raises(RunDirectoryError, match="in use by process"):
        second.claim("never")
    first.release()
    second.claim("never")
    second.release()


def test_a_failed_start_leaves_a_directory_that_can_be_used(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.claim("never")
    run.release()
    run.check("never")


@pytest.mark.parametrize("where", ["link", "below_a_file", "/proc/nowhere"])
def test_a_directory_that_cannot_be_made_is_an_error_that_names_the_setting(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    path = tmp_path / {"below_a_file": "file/run"}.get(where, where)
    with pytest.raises(
        RunDirectoryError, match=rf"run\.dir={path} (is a link to .*gone, which does not exist|can't be used)"
    ):
        RunDirectory(path).claim("never")


@pytest.mark.parametrize("length", [70, 71])
def test_a_temporary_folder_that_leaves_no_room_for_sockets_is_refused(monkeypatch, length):
    folder = "/" + "x" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    message = rf"TMPDIR={folder} has 71 bytes; at most 70 leave room"
    with pytest.raises(RunDirectoryError, match=message) if length == 71 else nullcontext():
        check_temporary_folder()


BASE = {
    "seed": 0,
    "model": {"path": "a"},
    "data": {"train": [{"path": "x"}]},
    "rollout": {"replicas": 1},
    "launcher": {"num_ranks": 1},
}


def changed(**groups):
    return {**BASE, **groups}


def test_topology_may_change_on_resume():
    check_resume(BASE, changed(rollout={"replicas": 4}, launcher={"num_ranks": 2}), [], "run")


@pytest.mark.parametrize(
    ("new", "key"),
    [
        (changed(model={"path": "b"}), "model.path: 'a' in the run, 'b' now"),
        (changed(data={"train": [{"path": "y"}]}), "data.train.0.path"),
        (changed(seed=1), "seed: 0 in the run, 1 now"),
    ],
)
def test_another_experiment_is_refused_by_name_unless_allowed(new, key):
    with pytest.raises(ResumeError, match=key):
        check_resume(BASE, new, [], "run")
    check_resume(BASE, new, ["model", "data", "seed"], "run")


READ = {"data/train": "1", "data/validation": "2", "model/actor": "3"}


@pytest.mark.parametrize(
    ("name", "setting", "allowed"),
    [
        ("model/actor", "model.path", ["model.path"]),
        ("model/actor", "model.path", ["model"]),
        ("data/train", "data.train", ["data.train.0.path"]),
    ],
)
def test_the_same_names_with_other_contents_are_refused_unless_allowed(name, setting, allowed):
    found = {**READ, name: "9"}
    with pytest.raises(ResumeError, match=rf"{setting} \({name}\): {READ[name]} in the run, 9 now"):
        check_contents(READ, found, ["data.validation", "models"], "run")
    check_contents(READ, found, allowed, "run")
    check_contents(READ, READ, [], "run")


def test_contents_that_were_not_recorded_are_not_compared():
    check_contents({"model/actor": "3"}, READ, [], "run")


def test_models_of_the_critic_and_the_reference_are_recorded_where_they_are_others(tmp_path):
    config = Config()
    for name in ("policy", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    config.model.path = config.critic.path = config.ref.path = str(tmp_path / "policy")
    config.reward.model.path = None
    plain = input_digests(config, ["actor", "critic", "ref"], [], [])
    assert plain.keys() == {"data/train", "data/validation", "model/actor"}
    config.critic.path = config.ref.path = str(tmp_path / "other")
    found = input_digests(config, ["actor", "critic"], [], [])
    assert found.keys() == plain.keys() | {"model/critic"}
    assert found["model/critic"] != found["model/actor"]
    (tmp_path / "other" / "config.json").write_text("changed")
    assert input_digests(config, ["actor", "critic"], [], [])["model/critic"] != found["model/critic"]
