"""Settings that don't fit together are named with the way out."""

from __future__ import annotations

import pytest

from configs.algorithms import EstimatorNeeds
from configs.checks import check, cross_check, rollout_context, warn
from configs.compose import load_config
from configs.engine_args import BREAKS_BATCH_INVARIANCE, OWNED, vllm_arguments
from configs.problems import ConfigError
from configs.roles import needs, roles_needed
from configs.validate import type_at

MICRO = "experiment=micro"
SERVED = "rollout.engine=vllm_server"


def keys(*overrides: str) -> list[str]:
    return [problem.key for problem in cross_check(load_config([MICRO, *overrides]))]


def line(key: str, *overrides: str) -> str:
    (found,) = [problem for problem in cross_check(load_config([MICRO, *overrides])) if problem.key == key]
    return str(found)


def test_a_batch_that_divides_is_fine():
    assert keys() == []
    assert keys("data.prompts_per_step=12", "actor.mini_batch_size=12", "critic.mini_batch_size=24") == []


def test_mini_batches_must_divide_the_step():
    said = line("actor.mini_batch_size", "data.prompts_per_step=9")
    assert "8 does not divide the 18 sequences" in said
    assert "such as 9" in said


def test_leaves_must_divide_the_mini_batch():
    assert "3 does not divide actor.mini_batch_size 8" in line(
        "actor.fsdp.leaf_size", "actor.fsdp.leaf_size=3", "ref.fsdp.leaf_size=2"
    )


def test_ranks_must_share_the_leaves():
    said = line("critic.mini_batch_size", "launcher.num_ranks=2", "critic.fsdp.leaf_size=8")
    assert "1 leaves of 8 sequences" in said
    assert "multiple of 16" in said


def test_the_critics_batch_is_checked_only_when_there_is_a_critic():
    assert keys("critic.mini_batch_size=7") == ["critic.mini_batch_size", "critic.fsdp.leaf_size"]
    assert keys("critic.mini_batch_size=7", "algorithm=grpo") == []


def test_the_references_leaves_are_checked_only_when_there_is_a_reference():
    assert keys("ref.fsdp.leaf_size=3") == ["ref.fsdp.leaf_size"]
    assert keys("ref.fsdp.leaf_size=3", "algorithm.kl.coef=0") == []


def test_prompt_and_response_must_fit_the_context():
    assert "to at least 40" in line("rollout.sampling.max_new_tokens", "rollout.max_model_len=39")
    assert keys("rollout.max_model_len=40") == []
    assert keys("rollout.max_model_len=40", "rollout.validation.max_new_tokens=9") == [
        "rollout.validation.max_new_tokens"
    ]


def test_the_context_holds_the_longest_response_of_all_kinds():
    config = load_config([MICRO, "rollout.validation_sampled.max_new_tokens=50"])
    assert rollout_context(config) == 32 + 50
    assert rollout_context(load_config([MICRO, "rollout.max_model_len=99"])) == 99


@pytest.mark.parametrize(
    "override",
    [
        "temperature=0",
        "top_p=0.9",
        "top_k=20",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "presence_penalty=0.5",
        "frequency_penalty=-0.5",
    ],
)
def test_training_samples_the_distribution_that_is_trained(override):
    name = override.partition("=")[0]
    assert keys(f"rollout.sampling.{override}") == [f"rollout.sampling.{name}"]
    assert keys(f"rollout.validation.{override}") == []


def test_the_sampled_validation_is_sampled():
    assert keys("rollout.validation_sampled={n: 4, temperature: 0}") == ["rollout.validation_sampled.temperature"]


@pytest.mark.parametrize("group", ["sampling", "validation", "validation_sampled"])
def test_a_temperature_that_vllm_would_raise_is_refused(group):
    key = f"rollout.{group}.temperature"
    said = line(key, f"{key}=0.009")
    assert "0.009 is below 0.01" in said
    assert "take at least 0.01" in said
    assert ("0 (greedy)" in said) == (group == "validation")
    assert keys(f"{key}=0.01") == []


@pytest.mark.parametrize("text", ["today", "2024-13-01", "20240103", "2024-1-3", "2024-W01-3", "2024-01-03T10:00"])
def test_a_template_date_is_an_iso_date(text):
    assert f"'{text}' is no date" in line("data.template_date", f"data.template_date='{text}'")
    assert keys("data.template_date=2024-01-03") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=grpo", "rollout.sampling.n=1", "data.prompts_per_step=16"], "rollout.sampling.n"),
        (["algorithm=rloo", "rollout.sampling.n=1", "data.prompts_per_step=16"], "rollout.sampling.n"),
        (["algorithm=grpo", "algorithm.truncated=bootstrap"], "algorithm.truncated"),
        (["algorithm.policy_loss={name: cispo, dual_clip: 3.0}"], "algorithm.policy_loss.dual_clip"),
        (["algorithm=grpo", "critic.warmup_steps=3"], "critic.warmup_steps"),
        (["algorithm.overlong_buffer=9"], "algorithm.overlong_buffer"),
        (["algorithm.kl.placement=none"], "algorithm.kl.placement"),
        (
            ["algorithm.kl.placement=none", "algorithm.kl.coef=0", "algorithm.kl.controller=adaptive"],
            "algorithm.kl.placement",
        ),
        (["algorithm.kl.coef=0", "algorithm.kl.controller=adaptive"], "algorithm.kl.coef"),
        (["algorithm.kl.estimator=full"], "algorithm.kl.estimator"),
        (["reward.functions=[]", "reward.model.path=null"], "reward"),
        (["reward.functions.0.weight=0", "reward.model.weight=0"], "reward"),
        (["reward.functions.0.name=model"], "reward.functions"),
        (["reward.functions=[{name: a},{name: a}]"], "reward.functions"),
        (["reward.functions=[{name: 'a b'}]"], "reward.functions.0.name"),
        (["data.train=[]"], "data.train"),
        (["data.train.0.size=7"], "data.prompts_per_step"),
        (["data.train=[{name: a, path: chain_sum},{name: a, path: leg_counting}]"], "data.train"),
        (["data.train.0.streaming=true"], "data"),
        (
            ["data.train=[{name: a, kind: dataset, path: p, streaming: true}]", "trainer.total_epochs=1"],
            "trainer.total_epochs",
        ),
        (["rollout.max_num_batched_tokens=8"], "rollout.max_num_batched_tokens"),
        (["rollout.engine_args.seed=1"], "rollout.engine_args.seed"),
        (["reward.model.engine_args.max_num_seqs=4"], "reward.model.engine_args.max_num_seqs"),
        (["launcher.device=cpu", "rollout.tensor_parallel_size=2"], "rollout.tensor_parallel_size"),
        (
            ["launcher.device=cpu", "actor.fsdp.attention=flash_attention_2", "ref.fsdp.attention=sdpa"],
            "actor.fsdp.attention",
        ),
        (["algorithm.advantage.name=no.such.module:estimate"], "algorithm.advantage.name"),
        (["algorithm.policy_loss.name=no/such/file.py:loss"], "algorithm.policy_loss.name"),
        (
            ["algorithm.rollout_correction={sequence_mask_low: 1, sequence_mask_high: 1}"],
            "algorithm.rollout_correction.sequence_mask_low",
        ),
        (["full_determinism=true", "rollout.full_determinism=false"], "rollout.full_determinism"),
        (["reward.full_determinism=true"], "reward.full_determinism"),
    ],
)
def test_a_contradiction_is_named(overrides, key):
    assert keys(*overrides) == [key]


def test_the_held_out_rows_must_be_others_than_the_training_rows():
    same = ["data.train.0.seed=null", "data.validation.0.seed=null", "data.validation.0.name=sums"]
    assert keys(*same) == ["data.validation.0"]
    assert keys(*same, "data.validation.0.seed=5") == []
    assert keys("data.validation.0.seed=1040579") == ["data.validation.0"]


def test_an_owned_engine_argument_names_the_setting_that_decides_it():
    assert "follows from rollout.kv_cache_mib" in line(
        "rollout.engine_args.kv_cache_memory_bytes", "rollout.engine_args.kv_cache_memory_bytes=1"
    )
    assert "follows from model.path" in line("rollout.engine_args.model", "rollout.engine_args.model=x")
    assert "follows from reward.model.path" in line(
        "reward.model.engine_args.model", "reward.model.engine_args.model=x"
    )
    assert "role; leave it out" in line("reward.model.engine_args.runner", "reward.model.engine_args.runner=x")
    assert keys("rollout.engine_args.enable_chunked_prefill=true") == []


@pytest.mark.parametrize("key", ["rollout.engine_args", "reward.model.engine_args"])
def test_an_engine_argument_that_breaks_batch_invariance_is_refused_under_full_determinism_alone(key):
    quantized = f"{key}.quantization=fp8"
    assert keys(quantized) == []
    said = line(f"{key}.quantization", quantized, "full_determinism=true")
    assert "quantized kernels are not batch-invariant (level D3)" in said
    assert "full_determinism=false" in said


@pytest.mark.parametrize("key", ["rollout.engine_args", "reward.model.engine_args"])
def test_a_misspelt_engine_argument_is_refused_before_anything_starts(key):
    assert "did you mean `block_size`?" in line(f"{key}.blok_size", f"{key}.blok_size=16")


def test_the_settings_that_own_engine_arguments_exist():
    owners = {owner for pair in OWNED.values() for owner in pair if owner is not None and "." in owner}
    assert {owner for owner in owners if type_at(owner) is None} == set()
    assert vllm_arguments() is not None
    assert set(OWNED) | set(BREAKS_BATCH_INVARIANCE) <= vllm_arguments()


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], ["actor", "critic", "ref"]),
        (["algorithm.kl.coef=0"], ["actor", "critic"]),
        (["algorithm.kl.placement=none"], ["actor", "critic"]),
        (["algorithm.kl.controller=adaptive"], ["actor", "critic", "ref"]),
        (["algorithm=grpo"], ["actor", "ref"]),
        (["algorithm=dr_grpo"], ["actor"]),
        (["algorithm=remax"], ["actor", "ref"]),
    ],
)
def test_only_the_models_that_something_reads_are_built(overrides, roles):
    assert roles_needed(load_config([MICRO, *overrides])) == roles


def test_a_users_estimator_says_itself_what_it_needs(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs.algorithms import needs\ndef plain(): ...\n@needs(critic=True, groups=True)\ndef marked(): ...\n",
        encoding="utf-8",
    )
    plain = load_config([MICRO, f"algorithm.advantage.name={path}:plain"])
    marked = load_config([MICRO, f"algorithm.advantage.name={path}:marked"])
    assert (roles_needed(plain), needs(plain)) == (["actor", "ref"], EstimatorNeeds())
    assert (roles_needed(marked), needs(marked)) == (
        ["actor", "critic", "ref"],
        EstimatorNeeds(critic=True, groups=True),
    )
    assert keys(f"algorithm.advantage.name={path}:absent") == ["algorithm.advantage.name"]


def test_check_raises_every_contradiction_at_once():
    with pytest.raises(ConfigError) as caught:
        check(
            load_config(
                [MICRO, "rollout.sampling.top_p=0.5", "actor.mini_batch_size=7", "reward.functions.0.name=model"]
            )
        )
    assert {problem.key for problem in caught.value.problems} == {
        "rollout.sampling.top_p",
        "actor.mini_batch_size",
        "actor.fsdp.leaf_size",
        "reward.functions",
    }


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.validation=[]", "trainer.validate_every=1"], "data.validation"),
        (["reward.model.max_model_len=10"], "reward.model.max_model_len"),
        (["rollout.seed=5"], "rollout.seed"),
        (["algorithm.kl.placement=loss", "algorithm.kl.coef=0.01"], "algorithm.kl.estimator"),
        (["rollout.validation.n=4"], "rollout.validation.n"),
    ],
)
def test_what_is_allowed_but_odd_is_a_warning(overrides, key):
    config = load_config([MICRO, *overrides])
    assert cross_check(config) == []
    assert [problem.key for problem in warn(config)] == [key]


def test_k1_in_the_loss_is_no_matter_where_it_is_in_the_reward_or_another_estimator_is_used():
    for overrides in (["algorithm.kl.placement=reward"], ["algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"]):
        assert warn(load_config([MICRO, "algorithm.kl.coef=0.01", *overrides])) == []


def test_dynamic_sampling_needs_several_samples_and_a_synchronous_loop():
    enable = "algorithm.dynamic_sampling.enable=true"
    assert keys(enable) == []
    assert "with rollout.sampling.n 1" in line(
        "algorithm.dynamic_sampling.enable", enable, "rollout.sampling.n=1", "data.prompts_per_step=16"
    )
    assert "generation runs ahead" in line(
        "algorithm.dynamic_sampling.enable", enable, "rollout.max_head_offpolicyness=1"
    )


def test_a_greedy_baseline_cannot_be_compared_with_normalised_rewards():
    assert keys("algorithm=remax") == []
    assert "remax subtracts" in line("reward.normalise", "algorithm=remax", "reward.normalise=true")
    assert keys("reward.normalise=true") == []


def test_the_source_that_judges_validation_must_exist():
    for name in ("correct", "model", "total", "null"):
        assert keys(f"trainer.eval_source={name}") == []
    assert "take correct, model, total, or null" in line("trainer.eval_source", "trainer.eval_source=corect")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.agent=run"], "rollout.agent"),
        (["rollout.agent='program: '"], "rollout.agent"),
        (["rollout.agent=remote", "rollout.turns.params.tries=2"], "rollout.turns.params.tries"),
        (["rollout.agent=remote", "rollout.proxy.host=0.0.0.0"], "rollout.proxy.host"),
        (["rollout.agent=remote", "rollout.proxy.admin_key_env=EXACTRL_NO_SUCH_KEY"], "rollout.proxy.admin_key_env"),
        (["rollout.agent=remote", "rollout.proxy.port=65535", "rollout.proxy.processes=2"], "rollout.proxy.port"),
    ],
)
def test_agents_that_cannot_be_played_or_reached_are_named(overrides: list[str], key: str):
    assert keys("rollout.turns.max_tokens=64", *overrides) == [key]


@pytest.mark.parametrize("agent", ["a.py:run", "program:python a.py", "remote"])
def test_the_three_kinds_of_agents_are_fine(agent: str):
    assert keys("rollout.turns.max_tokens=64", f"rollout.agent='{agent}'") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.urls=[http://127.0.0.1:1]"], "rollout.urls"),
        (["rollout.weights_dir=/tmp"], "rollout.weights_dir"),
        ([SERVED, "rollout.replicas=2", "rollout.urls=[http://127.0.0.1:1]"], "rollout.urls"),
        ([SERVED, "rollout.urls=[127.0.0.1:1]"], "rollout.urls.0"),
        (["rollout.engine=sglang_server"], "rollout.urls"),
        (
            [
                "rollout.engine=sglang_server",
                "rollout.urls=[http://127.0.0.1:1]",
                "rollout.sampling.ignore_eos=true",
                "rollout.sampling.stop_token_ids=[3]",
            ],
            "rollout.sampling.stop_token_ids",
        ),
        (
            [SERVED, "rollout.replicas=2", "rollout.urls=[http://h:1,http://h:1]", "rollout.weights_dir=/tmp"],
            "rollout.urls.1",
        ),
        ([SERVED, "rollout.urls=[http://10.0.0.2:1]"], "rollout.weights_dir"),
        ([SERVED, "rollout.urls=[http://127.0.0.1:1]", "+rollout.engine_args.max_logprobs=3"], "rollout.engine_args"),
        (
            [SERVED, "rollout.urls=[http://127.0.0.1:1]", "rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size",
        ),
    ],
)
def test_servers_that_cannot_be_used_are_named(overrides: list[str], key: str):
    assert keys(*overrides) == [key]
