"""A run directory is used once, and resumed only on request and only by the same experiment."""

import json

import pytest

from configs.schema import Config
from trainer.input_digests import check_contents, input_digests
from trainer.resume import ResumeError, check_resume
from trainer.run_dir import RunDirectory, RunDirectoryError, append_json_line, cut_jsonl


def test_a_used_directory_is_refused_without_resume(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.check("never")
    run.open()
    run.config.write_text("seed: 0\n")
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*run\.resume=auto"):
        run.check("never")
    run.check("auto")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory(tmp_path / "run").check("never")


def test_cutting_keeps_earlier_steps_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_json_line(path, {"step": step, "x": 0.1})
    with open(path, "a") as file:
        file.write('{"step": 4, "x"')
    cut_jsonl(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_metrics_keep_every_bit_of_a_float(tmp_path):
    value = 0.1 + 0.2
    append_json_line(tmp_path / "m.jsonl", {"step": 1, "x": value})
    assert json.loads((tmp_path / "m.jsonl").read_text())["x"].hex() == value.hex()


def test_resuming_cuts_episodes_of_later_steps(tmp_path):
    run = RunDirectory(tmp_path)
    run.open()
    for name in ("step_000001.jsonl", "step_000002.jsonl", "validation_000002.jsonl"):
        (run.episodes / name).write_text("")
    run.cut_after(1)
    assert [path.name for path in run.episodes.iterdir()] == ["step_000001.jsonl"]


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
