"""Misspelt keys and wrong types are refused, all together, with a way out (cases S5, S6, R4)."""

from __future__ import annotations

import pytest

from configs.compose import load_config
from configs.field_types import base
from configs.problems import ConfigError
from configs.schema import Config
from configs.validate import dotted_keys, type_at, validate, with_defaults

MICRO = "experiment=micro"


def problems(*overrides: str) -> dict[str, str]:
    """Key -> line of each problem."""
    with pytest.raises(ConfigError) as caught:
        load_config([MICRO, *overrides])
    return {problem.key: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("rollout.sed=1", "rollout.sed", "rollout.seed"),
        ("+rollout.sed=1", "rollout.sed", "rollout.seed"),
        ("++rollout.sed=1", "rollout.sed", "rollout.seed"),
        ("++trainer.random_seed=1", "trainer.random_seed", "seed"),
        ("sead=1", "sead", "seed"),
        ("+Seed=1", "Seed", "seed"),
        ("full_determinsm=true", "full_determinsm", "full_determinism"),
        ("deterministic=true", "deterministic", "full_determinism"),
        ("roll_out.seed=3", "roll_out.seed", "rollout.seed"),
        ("data.train.0.sede=3", "data.train.0.sede", "data.train.0.seed"),
        ("trainer.total_step=3", "trainer.total_step", "trainer.total_steps"),
        ("lr=1e-5", "lr", "actor.optim.lr"),
        ("critic.learning_rate=1e-5", "critic.learning_rate", "critic.optim.lr"),
        ("max_new_tokens=5", "max_new_tokens", "rollout.sampling.max_new_tokens"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "algorithm.advantage.name"),
        ("modle=tiny", "modle", "model"),
        ("rollout.sampling={temprature: 0.5}", "rollout.sampling.temprature", "rollout.sampling.temperature"),
        ("reward.functions=[{name: a, wieght: 2}]", "reward.functions.0.wieght", "reward.functions.0.weight"),
    ],
)
def test_a_near_miss_is_refused_with_the_key_that_was_meant(override, key, meant):
    found = problems(override)
    assert list(found) == [key]
    assert f"[from override '{override}']" in found[key]
    assert f"did you mean `{meant}`?" in found[key]


@pytest.mark.parametrize("override", ["+trainer.typo=1", "++xyzzy=1", "+xyzzy.plugh=true", "ref.fsdp.quux=[1,2]"])
def test_what_resembles_nothing_is_refused_with_the_list_of_keys(override):
    (line,) = problems(override).values()
    assert "there is no such key" in line
    assert "docs/configuration.md" in line


@pytest.mark.parametrize("override", ["+seed=7", "++seed=7", "seed=7"])
def test_a_right_key_may_be_given_with_any_prefix(override):
    config = load_config([MICRO, override])
    assert (config.seed, config.data.seed, config.rollout.seed) == (7, 7, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", False), ("off", False), ("false", False), ("No", False), ("yes", True), ("on", True), ("TRUE", True)],
)
def test_yaml_booleans_are_booleans(text, value):
    config = load_config([MICRO, f"full_determinism={text}"])
    assert config.full_determinism is value
    assert config.rollout.full_determinism is value
    assert config.reward.full_determinism is value


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("full_determinism=abc", "full_determinism"),
        ("full_determinism=1", "full_determinism"),
        ("full_determinism=0", "full_determinism"),
        ("full_determinism=null", "full_determinism"),
        ("full_determinism=[]", "full_determinism"),
        ("full_determinism=''", "full_determinism"),
        ("seed=1.5", "seed"),
        ("seed=null", "seed"),
        ("seed=abc", "seed"),
        ("seed='1'", "seed"),
        ("seed=true", "seed"),
        ("seed=inf", "seed"),
        ("seed=[1]", "seed"),
        ("seed=-1", "seed"),
        ("seed=9223372036854775808", "seed"),
        ("trainer.total_steps=false", "trainer.total_steps"),
        ("trainer.total_epochs=abc", "trainer.total_epochs"),
        ("actor.optim.lr=fast", "actor.optim.lr"),
        ("actor.optim.lr=nan", "actor.optim.lr"),
        ("actor.optim.lr=true", "actor.optim.lr"),
        ("actor.optim.betas=[0.9,x]", "actor.optim.betas.1"),
        ("actor.optim.betas=0.9", "actor.optim.betas"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas"),
        ("seed.deeper=3", "seed"),
        ("data.train.0.params.x=???", "data.train.0.params.x"),
        ("actor.optim=adam", "actor.optim"),
        ("run.name=null", "run.name"),
        ("run.name=[a]", "run.name"),
        ("tracking.tags={a: b}", "tracking.tags"),
        ("rollout.engine_args=[1]", "rollout.engine_args"),
        ("rollout.engine_args={1: 2}", "rollout.engine_args"),
        ("data.train=[1]", "data.train.0"),
        ("data.train=[{path: chain_sum}]", "data.train.0.name"),
        ("model.path=???", "model.path"),
        ("run.dir='${run.nam}'", "run.dir"),
        ("seed='${data.seed}'", "data.seed"),
    ],
)
def test_a_wrong_type_is_refused_and_named(override, key):
    assert list(problems(override)) == [key]


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("ledger.record=all", "ledger.record", "off, digest, full"),
        ("algorithm.advantage.name=gea", "algorithm.advantage.name", "gae, grpo"),
        ("algorithm.kl.placement=loss_term", "algorithm.kl.placement", "reward, loss, none"),
        ("rollout.dtype=float16", "rollout.dtype", "float32, bfloat16"),
        ("run.resume=always", "run.resume", "never, auto"),
        ("trainer.total_steps=0", "trainer.total_steps", "at least 1"),
        ("rollout.sampling.top_p=1.5", "rollout.sampling.top_p", "above 0 and at most 1"),
        ("actor.optim.betas=[0.9,1.0]", "actor.optim.betas.1", "at least 0 and below 1"),
        ("rollout.replicas=-1", "rollout.replicas", "at least 1"),
        ("algorithm.policy_loss.dual_clip=1", "algorithm.policy_loss.dual_clip", "above 1"),
        ("data.train.0.size=0", "data.train.0.size", "at least 1"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_the_range(override, key, allowed):
    found = problems(override)
    assert list(found) == [key]
    assert allowed in found[key]


def test_all_problems_are_reported_together_each_with_its_origin():
    found = problems("rollout.sed=1", "seed=abc", "ledger.record=all", "+trainer.typo=1", "model=tinny", "a.b=1,2")
    assert set(found) == {"rollout.sed", "seed", "ledger.record", "trainer.typo", "model", "a.b=1,2"}
    assert "did you mean model=tiny?" in found["model"]
    assert "sweep" in found["a.b=1,2"]


def test_a_wrong_seed_is_reported_once_and_not_for_those_who_follow_it():
    assert list(problems("seed=abc")) == ["seed"]
    assert list(problems("rollout.seed=abc")) == ["rollout.seed"]


def test_every_line_is_one_line():
    for line in problems("seed='a\nb'", "rollout.sed=1").values():
        assert "\n" not in line


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=2.0", 2),
        ("seed=1e3", 1000),
        ("actor.optim.lr=1", 1.0),
        ("run.name=137", "137"),
        ("run.name=1e3", "1e3"),
        ("run.name=true", "true"),
    ],
)
def test_a_number_that_loses_nothing_is_taken(override, value):
    node = load_config([MICRO, override])
    for part in override.partition("=")[0].split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_optional_groups_and_lists_of_groups_are_filled_with_defaults():
    config = load_config(
        [MICRO, "rollout.validation_sampled.n=4", "reward.functions=[{name: a},{name: b,weight: 0.5}]"]
    )
    assert config.rollout.validation_sampled.n == 4
    assert config.rollout.validation_sampled.temperature == 1.0
    assert [f.weight for f in config.reward.functions] == [1.0, 0.5]


def test_an_own_function_is_allowed_where_the_schema_says_so():
    config = load_config(
        [MICRO, "algorithm.advantage.name=my.module:estimate", "reward.functions.0.function=my/file.py:score"]
    )
    assert config.algorithm.advantage.name == "my.module:estimate"
    assert "algorithm.kl.estimator" in problems("algorithm.kl.estimator=my.module:kl")
    assert "algorithm.advantage.name" in problems("algorithm.advantage.name=my.module")


def test_a_value_from_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("actor:\n  optim:\n    lr: fast\nsed: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    lines = {problem.key: str(problem) for problem in caught.value.problems}
    assert set(lines) == {"actor.optim.lr", "sed"}
    assert all(str(path) in line for line in lines.values())


def test_missing_keys_take_the_defaults_of_the_schema():
    config = validate({"model": {"path": "somewhere"}})
    assert config == validate(with_defaults({"model": {"path": "somewhere"}}))
    assert config.rollout.validation.temperature == 0.0
    assert config.run.dir == "runs/ppo"
    assert config.critic.path == "somewhere"


def test_the_type_of_a_key_is_known():
    assert base(type_at("seed")) is int
    assert base(type_at("data.train.3.size")) is int
    assert type_at("rollout.sed") is None
    assert type_at("seed.x") is None
    assert "rollout.sampling.n" in dotted_keys()
    assert isinstance(Config().seed, int)
