"""The small models: their tokenizer, their builder, and their cache."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from trainer import tiny
from trainer.tiny import build, recipe, tokenizer

PRINTABLE = "".join(chr(code) for code in range(32, 127))
CONFIGS = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture(scope="module")
def chars():
    return tokenizer.build_tokenizer(512)


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """A freshly built micro entry: the directory that holds `policy` and `reward`."""
    return tiny.resolve("micro:policy", cache_dir=tmp_path_factory.mktemp("cache"), quiet=True).parent


@pytest.fixture(scope="module")
def asked_twice(tmp_path_factory):
    """(stdout, stderr) of two processes that ask for the same model in one empty cache at the same time."""
    code = "import sys; from trainer import tiny; print(tiny.resolve('micro:reward', cache_dir=sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path_factory.mktemp("shared"))]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in asking]
    assert [process.returncode for process in asking] == [0, 0], outputs
    return outputs


# --- tokenizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [PRINTABLE, "a  b ,  c . don 't\n\n x ", " leading", "trailing ", "Calculate 57 + 65.", ""],
)
def test_every_printable_text_survives_the_round_trip_with_a_token_per_character(chars, text):
    ids = chars(text)["input_ids"]
    assert len(ids) == len(text)
    assert chars.decode(ids) == text


def test_a_saved_tokenizer_loads_by_directory_and_gives_the_same_ids(chars, tmp_path):
    from transformers import AutoTokenizer

    chars.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(PRINTABLE)["input_ids"] == chars(PRINTABLE)["input_ids"]
    assert loaded.decode(loaded("a . b")["input_ids"]) == "a . b"
    assert (loaded.eos_token, loaded.pad_token) == ("<eos>", "<pad>")
    assert loaded.chat_template == tokenizer.CHAT_TEMPLATE


def test_the_chat_template_writes_each_special_token_exactly_once(chars):
    question = {"role": "user", "content": "Calculate 7 + 5."}
    prompt = chars.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    whole = chars.apply_chat_template([question, {"role": "assistant", "content": "12"}], tokenize=False)
    assert prompt == "<user>Calculate 7 + 5.<assistant>"
    assert whole == prompt + "12<eos>"
    ids = chars(whole)["input_ids"]
    for token in ("<user>", "<assistant>", "<eos>"):
        assert ids.count(chars.convert_tokens_to_ids(token)) == 1
    assert ids[-1] == chars.eos_token_id
    assert chars.unk_token_id not in ids


def test_the_chat_template_refuses_an_unknown_role(chars):
    with pytest.raises(Exception, match="unknown role critic"):
        chars.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


# --- task -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(recipe.RECIPES))
def test_no_held_out_question_is_a_training_question(name):
    task = recipe.RECIPES[name].task
    assert recipe.shared_questions(task) == []
    assert len(recipe.heldout_questions(task)) == task.heldout_size


def test_the_overlap_count_finds_an_overlap():
    task = recipe.additions(1, train_seed=0, train_size=50, heldout_seed=50, heldout_size=50)
    assert recipe.shared_questions(task)


@pytest.mark.parametrize("name", sorted(recipe.RECIPES))
def test_the_shipped_data_configuration_names_the_rows_of_the_recipe(name):
    task = recipe.RECIPES[name].task
    data = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    for source, seed, size in (
        (data["train"][0], task.train_seed, task.train_size),
        (data["validation"][0], task.heldout_seed, task.heldout_size),
    ):
        assert source["kind"] == "reasoning_gym"
        assert (source["path"], source["params"], source["seed"], source["size"]) == (
            task.name,
            task.params,
            seed,
            size,
        )


def test_the_builder_never_trains_on_held_out_questions():
    task = recipe.RECIPES["micro"].task
    rows = recipe.builder_rows(task)
    seen = {next(rows)["question"] for _ in range(3000)}
    assert seen
    assert not seen & recipe.heldout_questions(task)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Calculate 57 + 65.", "12"),
        ("Calculate 12 + 34.", "46"),
        ("Calculate 5 + 5.", "0"),
        ("Calculate 100 + 9.", "109"),
    ],
)
def test_the_careless_demonstrator_forgets_carries(question, answer):
    assert recipe.careless_answer(question) == answer


def test_the_careless_demonstrator_refuses_what_is_no_sum():
    with pytest.raises(ValueError, match=r"'Calculate 3 - 2\.' has no two-term addition"):
        recipe.careless_answer("Calculate 3 - 2.")


def test_rejected_answers_are_wrong():
    rng = random.Random(0)
    for row in recipe.task_rows(recipe.RECIPES["tiny"].task, 0, 300):
        assert build.wrong_answer(row, rng) != row["answer"]


# --- builder --------------------------------------------------------------------------------------------------------


def test_computing_the_common_beginning_once_changes_the_states_by_rounding_only(chars):
    model = build.new_policy(recipe.RECIPES["micro"].shape, chars, torch.Generator().manual_seed(0))
    ids, _ = build.encode([("Calculate 57 + 6.", "63"), ("Calculate 5 + 65.", "70"), ("Calculate 1 + 1.", "2")], chars)
    with torch.no_grad():
        torch.testing.assert_close(
            build.trunk_states(model.model, ids), model.model(ids).last_hidden_state, rtol=1e-5, atol=1e-5
        )


def test_a_learning_rate_rises_stays_and_falls_to_zero():
    factors = [build.rate_factor(step, 100) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[10:60] == [1.0] * 50
    assert factors[100] == 0.0


@pytest.mark.long
def test_two_builds_give_the_same_bytes(micro, asked_twice):
    again = Path(asked_twice[0][0].strip()).parent
    assert again != micro
    files = sorted(path.relative_to(micro) for path in micro.rglob("*") if path.is_file())
    assert Path("policy/model.safetensors") in files
    assert Path("reward/model.safetensors") in files
    for file in files:
        assert (micro / file).read_bytes() == (again / file).read_bytes(), file


def test_another_seed_gives_other_weights(chars):
    shape = recipe.RECIPES["micro"].shape
    first, again, other = (
        build.new_policy(shape, chars, torch.Generator().manual_seed(seed)).lm_head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_callers_generators_and_threads_alone(tmp_path):
    torch.manual_seed(1)
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    tiny.cache_entry("micro", tmp_path).mkdir(parents=True)
    tiny.resolve("micro:policy", cache_dir=tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())


def test_the_policy_stops_at_its_end_token_and_inherits_no_sampling_setting(micro):
    from transformers import GenerationConfig

    config = GenerationConfig.from_pretrained(micro / "policy")
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)
    assert not {"temperature", "top_p", "top_k", "repetition_penalty"} & set(
        json.loads((micro / "policy" / "generation_config.json").read_text())
    )


def test_the_reward_model_prefers_right_answers_of_held_out_questions(micro):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(micro / "reward")
    chars = AutoTokenizer.from_pretrained(micro / "reward")
    task = recipe.RECIPES["micro"].task
    rows = recipe.task_rows(task, task.heldout_seed, task.heldout_size)
    assert build.pair_accuracy(model, chars, build.preferences(rows, 3, random.Random(1))) > 0.65  # chance: 0.5

    # The builder's own forward pass and the one that an engine or a trainer makes agree.
    ids, _ = build.encode([(row["question"], row["answer"]) for row in rows], chars)
    with torch.no_grad():
        whole = model(ids, attention_mask=(ids != chars.pad_token_id).long()).logits.squeeze(-1)
        own = build.reward_logits(model, chars, [(row["question"], row["answer"]) for row in rows])
    torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-4)


def test_teacher_forced_accuracy_is_the_accuracy_of_greedy_generation(micro):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(micro / "policy")
    chars = AutoTokenizer.from_pretrained(micro / "policy")
    task = recipe.RECIPES["micro"].task
    rows = recipe.task_rows(task, task.heldout_seed, task.heldout_size)
    right = 0
    for row in rows:
        message = [{"role": "user", "content": row["question"]}]
        prompt = chars.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = policy.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
        right += chars.decode(ids) == row["answer"] + "<eos>"
    assert build.greedy_accuracy(policy, chars, rows) == right / len(rows)


@pytest.mark.slow
def test_the_tiny_models_start_mediocre_and_their_reward_model_knows_better():
    figures = json.loads((tiny.resolve("tiny:policy").parent / "build.json").read_text())
    # The builder's bits are the processor's: 0.555 with AVX-512, 0.633 with AVX2.
    assert 0.2 <= figures["policy_greedy_accuracy"] <= 0.7
    assert figures["reward_pair_accuracy"] > 0.8


# --- names and cache ------------------------------------------------------------------------------------------------


def test_a_directory_stands_for_itself(tmp_path):
    assert tiny.resolve(str(tmp_path)) == tmp_path


def test_a_missing_directory_is_an_error_that_names_the_recipes():
    with pytest.raises(FileNotFoundError, match=r"'no/such/model'.*tiny:policy"):
        tiny.resolve("no/such/model")


@pytest.mark.parametrize("name", ["huge:policy", "tiny:critic", "smollm2:reward", "tiny:"])
def test_an_unknown_recipe_is_an_error_that_names_the_known_ones(name):
    with pytest.raises(ValueError, match=f"'{name}'.*micro:policy"):
        tiny.resolve(name)


def test_every_name_is_described():
    assert all(tiny.describe(name) for name in tiny.names())


def test_the_environment_variable_moves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EXACTRL_CACHE", str(tmp_path))
    assert tiny.cache_entry("micro").parent == tmp_path


def test_the_digest_covers_the_recipe():
    import dataclasses

    micro = recipe.RECIPES["micro"]
    assert recipe.recipe_digest(micro) != recipe.recipe_digest(dataclasses.replace(micro, seed=1))
    shorter = dataclasses.replace(micro, reward=dataclasses.replace(micro.reward, steps=1))
    assert recipe.recipe_digest(micro) != recipe.recipe_digest(shorter)


def test_a_cache_hit_builds_nothing(micro, monkeypatch):
    monkeypatch.setattr(tiny, "_build", lambda *_: pytest.fail("built again"))
    assert tiny.resolve("micro:reward", cache_dir=micro.parent) == micro / "reward"


def test_what_a_killed_build_left_is_swept_and_never_taken_for_a_model(tmp_path, monkeypatch):
    entry = tiny.cache_entry("micro", tmp_path)
    leftover = entry.with_name(entry.name + ".tmp-1")
    (leftover / "policy").mkdir(parents=True)
    monkeypatch.setitem(tiny._BUILD_ENV, "PYTHONHOME", "/nonexistent")  # the builder cannot even start
    with pytest.raises(RuntimeError, match="building the micro models failed with exit code"):
        tiny.resolve("micro:policy", cache_dir=tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == [entry.name + ".lock"]


@pytest.mark.long
def test_two_processes_that_ask_at_once_build_once(asked_twice):
    directories = {output.strip() for output, _ in asked_twice}
    assert len(directories) == 1
    assert sum("building micro models" in errors for _, errors in asked_twice) == 1
    assert sorted(os.listdir(Path(directories.pop()).parent)) == ["build.json", "policy", "reward"]
