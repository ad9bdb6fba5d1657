"""Every YAML file that is shipped loads, validates and is free of contradictions."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from configs.checks import check
from configs.compose import load_config
from configs.files import CONFIG_DIR, group_options
from configs.schema import Config
from configs.validate import hints

OPTIONS = [(group, name) for group, names in group_options().items() for name in names]
EXPERIMENTS = group_options()["experiment"]
GROUPS = [
    "model",
    "data",
    "actor",
    "critic",
    "ref",
    "rollout",
    "reward",
    "algorithm",
    "launcher",
    "tracking",
    "experiment",
]


def test_the_groups_are_those_of_the_design():
    assert sorted(group_options()) == sorted(GROUPS)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_of_every_group_loads(group, name):
    assert isinstance(load_config([f"{group}={name}"]), Config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_fits_together(name):
    _, warnings = check(load_config([f"experiment={name}"]))
    assert warnings == []


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if not name.endswith("async")])
def test_every_synchronous_experiment_can_be_fully_deterministic(name):
    config, warnings = check(load_config([f"experiment={name}", "full_determinism=true"]))
    assert config.rollout.full_determinism
    assert config.reward.full_determinism
    assert warnings == []


@pytest.mark.parametrize("name", group_options()["algorithm"])
def test_every_algorithm_runs_on_the_tiny_default(name):
    assert check(load_config([f"algorithm={name}"]))[1] == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["micro", "tiny_ppo", "tiny_grpo"])
def test_the_small_experiments_divide_among_the_ranks_of_level_d4(name, ranks):
    check(load_config([f"experiment={name}", "full_determinism=true", f"launcher.num_ranks={ranks}"]))


def test_the_default_is_the_tiny_ppo_experiment():
    assert load_config([]) == load_config(["experiment=tiny_ppo"])


def test_the_tiny_default_has_the_promised_sizes():
    config = load_config([])
    assert (config.data.prompts_per_step, config.rollout.sampling.n) == (64, 4)
    assert (config.launcher.num_ranks, config.rollout.replicas) == (2, 2)
    assert (config.actor.mini_batch_size, config.actor.fsdp.leaf_size) == (128, 32)


def test_the_micro_experiment_has_the_promised_sizes():
    config = load_config(["experiment=micro"])
    assert (config.data.prompts_per_step, config.rollout.sampling.n, config.trainer.total_steps) == (8, 2, 2)
    assert (config.launcher.num_ranks, config.rollout.replicas, config.rollout.sampling.max_new_tokens) == (1, 1, 8)


def test_no_root_key_of_the_schema_is_left_to_chance():
    """Each field of `Config` is either a group or is set in ppo.yaml."""
    root = OmegaConf.load(CONFIG_DIR / "ppo.yaml")
    assert set(hints(Config)) == {name for name in GROUPS if name != "experiment"} | (set(root) - {"defaults"})


@pytest.mark.parametrize(
    "path", sorted(CONFIG_DIR.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_every_file_says_what_it_is(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line.startswith("# ") and not line.startswith("# @package")]
    assert said
    assert (path.parent.name == "experiment") == (lines[0] == "# @package _global_")
