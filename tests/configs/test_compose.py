"""Composition, precedence, files of one's own, and the way to YAML and back."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.compose import escape, from_yaml, load_config, to_dict, to_yaml
from configs.files import group_options
from configs.problems import ConfigError

MICRO = "experiment=micro"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def messages(error) -> str:
    return str(error.value)


@pytest.mark.parametrize("name", group_options()["experiment"])
def test_yaml_and_back_is_the_same_configuration(name, tmp_path):
    config = load_config([f"experiment={name}"])
    assert from_yaml(write(tmp_path / "config.yaml", to_yaml(config))) == config


def test_awkward_values_survive_yaml(tmp_path):
    config = load_config([MICRO])
    texts = [
        "no",
        "1e3",
        "null",
        "${seed}",
        "\\${seed}",
        "a\\\\${b}",
        "{{ x }}",
        "ü\n\ttab",
        " lead",
        "0x10",
        "# no",
        "1_000",
        "~",
        "",
    ]
    config = replace(
        config,
        actor=replace(config.actor, optim=replace(config.actor.optim, lr=math.nextafter(1e-5, 1), eps=1e-300)),
        tracking=replace(config.tracking, tags=texts),
        rollout=replace(config.rollout, engine_args={"on": "off", "x": {"y": [1, 2.0, None, True, "${a.b}"]}}),
    )
    assert from_yaml(write(tmp_path / "config.yaml", to_yaml(config))) == config


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="\\${}a", max_size=12))
def test_any_text_survives_being_written_as_a_literal(text):
    assert OmegaConf.to_container(OmegaConf.create({"x": escape(text)}), resolve=True) == {"x": text}


def test_a_saved_configuration_can_be_trained_again_as_an_experiment(tmp_path):
    config = load_config(["experiment=micro", "seed=5"])
    assert load_config([str(write(tmp_path / "config.yaml", to_yaml(config)))]) == config


def test_values_may_be_put_over_a_saved_configuration(tmp_path):
    path = write(tmp_path / "config.yaml", to_yaml(load_config([MICRO])))
    assert from_yaml(path, ["run.dir=elsewhere"]).run.dir == "elsewhere"
    with pytest.raises(ConfigError, match="did you mean `seed`"):
        from_yaml(path, ["sed=1"])


def test_a_saved_file_that_is_no_configuration_is_refused(tmp_path):
    for text in ("[1, 2]", "a: [", "seed: 1\nseed: 2\n"):
        with pytest.raises(ConfigError):
            from_yaml(write(tmp_path / "config.yaml", text))
    with pytest.raises(FileNotFoundError):
        from_yaml(tmp_path / "none.yaml")


def test_to_dict_is_a_copy_of_plain_values():
    config = load_config([MICRO])
    to_dict(config)["data"]["train"][0]["params"]["min_terms"] = 99
    assert config.data.train[0].params["min_terms"] != 99


def test_the_command_line_wins_over_the_experiment_and_the_experiment_over_the_groups():
    config = load_config(["experiment=micro", "trainer.total_steps=5", "reward=verifier"])
    assert config.trainer.total_steps == 5
    assert config.reward.model.path is None
    assert config.launcher.num_ranks == 1


def test_the_order_of_options_and_values_does_not_matter():
    assert load_config(["seed=4", "experiment=micro"]) == load_config(["experiment=micro", "seed=4"])


def test_of_two_values_the_last_wins():
    assert load_config([MICRO, "seed=1", "seed=2"]).seed == 2


def test_roles_follow_the_root_by_interpolation():
    config = load_config([MICRO, "seed=9", "full_determinism=true", "model.path=elsewhere"])
    assert (config.data.seed, config.rollout.seed) == (9, 9)
    assert (config.rollout.full_determinism, config.reward.full_determinism) == (True, True)
    assert (config.critic.path, config.ref.path) == ("elsewhere", "elsewhere")


def test_the_reference_computes_as_the_actor_unless_told_otherwise():
    config = load_config([MICRO, "actor.fsdp.precision=bf16"])
    assert config.ref.fsdp.precision == "bf16"
    assert load_config([MICRO, "actor.fsdp.precision=bf16", "ref.fsdp.precision=fp32"]).ref.fsdp.precision == "fp32"


def test_lists_and_mappings_can_be_reached_into():
    config = load_config(
        [MICRO, "data.train.0.params.max_terms=3", "reward.functions.0.weight=0.5", "rollout.engine_args.swap=1"]
    )
    assert config.data.train[0].params["max_terms"] == 3
    assert config.data.train[0].params["min_terms"] == 2
    assert config.reward.functions[0].weight == 0.5
    assert config.rollout.engine_args == {"swap": 1}


def test_an_entry_of_a_free_mapping_can_be_taken_out_but_no_setting():
    assert "max_terms" not in load_config([MICRO, "~data.train.0.params.max_terms"]).data.train[0].params
    for override in ("~seed", "~rollout.sampling", "~data.train.0.params.none", "~rollout.sed"):
        with pytest.raises(ConfigError):
            load_config([MICRO, override])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train.7.size=3", "no such element"),
        ("data.train.first.size=3", "no such element"),
        ("seed.deeper=3", "must be a whole number"),
        ("seed", "not an override"),
        ("seed=", "must be a whole number"),
        ("seed=1,2", "sweep"),
        ("hydra.run.dir=x", "Hydra's own settings"),
        ("model@critic=tiny", "not a choice"),
        ("model/x=tiny", "not a choice"),
        ("run.name=a}b", "can't be read"),
        ("experiment=tiny_pop", "did you mean experiment=tiny_ppo?"),
        ("nowhere.yaml", "not an override"),
    ],
)
def test_what_cannot_be_used_is_said(override, said):
    with pytest.raises(ConfigError) as caught:
        load_config([MICRO, override])
    assert said in messages(caught)


def test_an_experiment_file_may_be_the_first_argument(tmp_path):
    path = write(
        tmp_path / "mine.yaml",
        "# @package _global_\ndefaults:\n  - micro\n  - override /algorithm: grpo\n  - _self_\nrun:\n  name: mine\n",
    )
    config = load_config([str(path), "seed=3"])
    assert (config.run.name, config.algorithm.advantage.name, config.seed, config.model.path) == (
        "mine",
        "grpo",
        3,
        "micro:policy",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# @package model\npath: x\n", "_global_"),
        ("defaults:\n  - override /model: nosuch\n", "can't be composed"),
        ("a: [", "not readable"),
    ],
)
def test_an_experiment_file_that_cannot_be_used_is_named(tmp_path, text, said):
    path = write(tmp_path / "mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    assert said in messages(caught)
    assert str(path) in messages(caught)


def test_a_missing_experiment_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such experiment file"):
        load_config([str(tmp_path / "none.yaml")])


def test_an_experiment_file_beside_an_experiment_is_refused(tmp_path):
    path = write(tmp_path / "mine.yaml", "seed: 1\n")
    with pytest.raises(ConfigError, match="choose one"):
        load_config([str(path), MICRO])


def test_a_folder_of_ones_own_adds_options(tmp_path):
    write(tmp_path / "my dir, 'odd'" / "model" / "mine.yaml", "path: elsewhere\n")
    write(
        tmp_path / "my dir, 'odd'" / "experiment" / "mine.yaml",
        "# @package _global_\ndefaults:\n  - micro\n  - override /model: mine\n",
    )
    folder = tmp_path / "my dir, 'odd'"
    assert load_config(["model=mine"], config_dir=folder).model.path == "elsewhere"
    assert load_config(["experiment=mine"], config_dir=[folder]).model.path == "elsewhere"
    with pytest.raises(ConfigError, match="Options: micro, smollm2, tiny"):
        load_config(["model=mine"])


def test_an_option_that_would_be_hidden_by_a_packaged_one_is_refused(tmp_path):
    path = write(tmp_path / "model" / "tiny.yaml", "path: elsewhere\n")
    with pytest.raises(ConfigError, match="rename it") as caught:
        load_config(config_dir=tmp_path)
    assert str(path) in messages(caught)


def test_composing_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load_config([str(write(tmp_path / "mine.yaml", "seed: 1\n"))])
    assert os.getcwd() == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert not GlobalHydra.instance().is_initialized()
    assert "experiment" not in ConfigStore.instance().repo or ConfigStore.instance().repo["experiment"] == {}
