"""Full determinism fails closed: what breaks a level is refused with the level and the way out, and runs when it is off."""

from __future__ import annotations

import pytest

from configs.checks import check, cross_check
from configs.compose import load_config
from configs.contract import force

DIVISIBLE = [
    "experiment=tiny_ppo",
    "data.prompts_per_step=48",
    "actor.fsdp.leaf_size=8",
    "critic.fsdp.leaf_size=8",
    "actor.mini_batch_size=96",
    "critic.mini_batch_size=96",
]
BREAKERS = [
    ("launcher.num_ranks=3", "launcher.num_ranks", "D4"),
    ("actor.optim.fused=true", "actor.optim.fused", "D4"),
    ("critic.optim.fused=true", "critic.optim.fused", "D4"),
    ("critic.fsdp.attention=flash_attention_2", "critic.fsdp.attention", "D1"),
    ("ref.fsdp.attention=flash_attention_2", "ref.fsdp.attention", "D1"),
    ("rollout.max_head_offpolicyness=1", "rollout.max_head_offpolicyness", "D1"),
    ("rollout.sampling.seed=7", "rollout.sampling.seed", "D1"),
    ("rollout.validation={seed: 7, n: 2}", "rollout.validation.seed", "D1"),
    ("rollout.validation_sampled={seed: 7, n: 2}", "rollout.validation_sampled.seed", "D1"),
]


@pytest.mark.parametrize(("override", "key", "level"), BREAKERS)
def test_what_breaks_a_level_is_refused_with_level_and_way_out(override, key, level):
    (problem,) = cross_check(load_config([*DIVISIBLE, "full_determinism=true", override]))
    assert (problem.key, problem.level) == (key, level)
    assert f"(level {level})" in str(problem)
    assert "full_determinism=false" in problem.way_out


@pytest.mark.parametrize("override", [override for override, _, _ in BREAKERS])
def test_the_same_setting_runs_when_it_is_off(override):
    assert cross_check(load_config([*DIVISIBLE, override])) == []


@pytest.mark.parametrize("override", ["rollout.sampling.seed=7", "rollout.validation.seed=7"])
def test_one_seed_for_one_sample_is_allowed(override):
    config = load_config(
        [*DIVISIBLE, "full_determinism=true", "data.prompts_per_step=96", "rollout.sampling.n=1", override]
    )
    assert cross_check(config) == []


def test_settings_of_a_model_that_is_not_built_do_not_matter():
    config = load_config(
        [
            *DIVISIBLE,
            "full_determinism=true",
            "algorithm=dr_grpo",
            "critic.optim.fused=true",
            "ref.fsdp.attention=flash_attention_2",
        ]
    )
    assert cross_check(config) == []


def test_the_reward_model_is_forced_to_one_sequence_at_a_time_and_the_reason_is_given():
    config, warnings = check(load_config([*DIVISIBLE, "full_determinism=true", "reward.model.max_num_seqs=8"]))
    assert config.reward.model.max_num_seqs == 1
    (warning,) = warnings
    assert warning.key == "reward.model.max_num_seqs"
    assert "8 is overridden to 1" in str(warning)
    assert "must not depend on" in str(warning)


def test_nothing_is_forced_when_it_is_off_or_there_is_no_reward_model():
    assert force(load_config([*DIVISIBLE, "reward.model.max_num_seqs=8"]))[0].reward.model.max_num_seqs == 8
    off = load_config([*DIVISIBLE, "full_determinism=true", "reward.model.max_num_seqs=8", "reward.model.path=null"])
    assert force(off) == (off, [])


@pytest.mark.parametrize(
    ("override", "key"),
    [("reward.on_error=drop", "reward.on_error"), ("determinism.engine_check=false", "determinism.engine_check")],
)
def test_what_keeps_a_level_only_while_nothing_goes_wrong_is_a_warning(override, key):
    _, warnings = check(load_config([*DIVISIBLE, "full_determinism=true", override]))
    assert [warning.key for warning in warnings] == [key]
    assert check(load_config([*DIVISIBLE, override]))[1] == []
