"""The served reward model: raw logits, one at a time, of conversations in its own vocabulary."""

from __future__ import annotations

import json
import logging
import random

import pytest
import torch
from tokenizers import processors

from configs.schema import RewardModelConfig
from reward.model import (
    RewardInput,
    RewardInputTooLongError,
    check_plain_text,
    check_reward_model,
    effective_max_num_seqs,
    plain_text,
    reward_tokens,
)
from rollout.types import Prompt, SampleKey
from tests.engine_lab import VOCAB, make_reward, make_tokenizer
from trainer.data.prompts import PromptCodec
from workers.launch.group import WorkerError

PROMPT = Prompt(
    id="source/0",
    source="source",
    token_ids=(91, 92),
    text="1+1=",
    messages=({"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}),
)


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """Directory and transformers model; the head is scaled so that CONVERSATIONS[0] scores -3.28."""
    path = tmp_path_factory.mktemp("reward")
    model = make_reward(path)
    with torch.no_grad():
        model.score.weight *= -3.28 / expected(model, CONVERSATIONS[0])
    model.save_pretrained(path)
    return str(path), model


def conversations(count: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 2, 7, 33, 64, 150]))] for _ in range(count)]


CONVERSATIONS = [[5, 8, 9, 30], *conversations(11)]


def expected(model, ids: list[int]) -> float:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def test_the_score_is_the_raw_logit(lab, reward):
    """Not its softmax, 1.0, and not its sigmoid, 0.03626."""
    assert lab.score(model=reward[0], token_ids=CONVERSATIONS[:1])[0] == pytest.approx(-3.28, abs=1e-4)


def test_scores_are_those_of_transformers(lab, reward):
    path, model = reward
    scores = lab.score(model=path, token_ids=CONVERSATIONS)
    assert scores == pytest.approx([expected(model, ids) for ids in CONVERSATIONS], abs=2e-4)


def test_scores_repeat_bit_for_bit_in_any_order(lab, reward):
    first = lab.score(model=reward[0], token_ids=CONVERSATIONS)
    assert lab.score(model=reward[0], token_ids=CONVERSATIONS) == first
    assert lab.score(model=reward[0], token_ids=CONVERSATIONS[::-1]) == first[::-1]
    assert [lab.score(model=reward[0], token_ids=[ids])[0] for ids in CONVERSATIONS[:4]] == first[:4]


def test_a_configured_batch_is_forced_to_one_and_gives_the_same_bits(lab, reward):
    one = lab.score(model=reward[0], token_ids=CONVERSATIONS)
    assert lab.score(model=reward[0], token_ids=CONVERSATIONS, max_num_seqs=64) == one


def test_the_override_to_one_is_a_warning_that_says_why(caplog):
    config = RewardModelConfig(max_num_seqs=64)
    with caplog.at_level(logging.WARNING):
        assert effective_max_num_seqs(config, full_determinism=True) == 1
    assert "overridden to 1" in caplog.text
    assert "share its batch" in caplog.text
    assert effective_max_num_seqs(config, full_determinism=False) == 64


def test_one_sequence_at_a_time_needs_no_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert effective_max_num_seqs(RewardModelConfig(max_num_seqs=1), full_determinism=True) == 1
    assert not caplog.records


def test_empty_and_overlong_conversations_are_refused(lab, reward):
    with pytest.raises(WorkerError, match="a conversation of 0 tokens"):
        lab.score(model=reward[0], token_ids=[[1], []])
    with pytest.raises(WorkerError, match="a conversation of 257 tokens; the reward model takes 1 to 256"):
        lab.score(model=reward[0], token_ids=[[1] * 257])


def test_the_role_decides_some_engine_arguments(lab, reward):
    with pytest.raises(WorkerError, match=r"reward\.model\.engine_args\.enable_chunked_prefill"):
        lab.score(model=reward[0], token_ids=[[1]], engine_args={"enable_chunked_prefill": True})


@pytest.mark.parametrize("labels", [2, 5])
def test_a_model_with_several_labels_is_refused_before_an_engine_starts(tmp_path, labels):
    config = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {str(i): "x" for i in range(labels)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"num_labels={labels}"):
        check_reward_model(tmp_path)


def test_a_checkpoint_that_names_no_labels_has_two(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    with pytest.raises(ValueError, match="num_labels=2"):
        check_reward_model(tmp_path)


def test_a_causal_model_is_no_reward_model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "num_labels": 1}')
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        check_reward_model(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        check_reward_model(tmp_path / "absent")


def test_a_one_label_checkpoint_is_accepted(reward):
    check_reward_model(reward[0])


def test_the_conversation_is_rebuilt_with_the_reward_models_own_template_and_vocabulary():
    tokenizer = make_tokenizer(shift=7)
    ids = reward_tokens(PROMPT, "2", tokenizer, RewardModelConfig())
    assert tokenizer.decode(ids) == "[s]add;[u]1+1=;[a]2;"
    assert ids != make_tokenizer().encode("[s]add;[u]1+1=;[a]2;")


PLAIN = RewardModelConfig(apply_chat_template=False)


def conversation(*contents: object, text: str = "rendered") -> Prompt:
    return Prompt("a/0", "a", (1,), text, tuple({"role": "user", "content": content} for content in contents))


def test_without_a_template_what_the_messages_say_and_the_response_are_joined():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(reward_tokens(conversation("1+1="), "2", tokenizer, PLAIN)) == "1+1=2"
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    assert tokenizer.decode(reward_tokens(conversation(parts), "2", tokenizer, PLAIN)) == "1+1=2"
    assert plain_text(PROMPT) == "add\n1+1="


def policy_and_reward_tokenizer():
    """A policy that writes `<s>[u]hi[a]`, and a reward model with `<bos>`."""
    policy, reward = make_tokenizer(), make_tokenizer(shift=7)
    policy.add_special_tokens({"bos_token": "<s>"})
    policy.chat_template = "<s>{% for m in messages %}[u]{{ m['content'] }}{% endfor %}[a]"
    reward.add_special_tokens({"bos_token": "<bos>"})
    reward._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", reward.bos_token_id)]
    )
    return policy, reward


def test_the_policys_markup_does_not_reach_a_reward_model_without_a_template():
    policy, reward = policy_and_reward_tokenizer()
    codec = PromptCodec(policy)
    (rendered,) = codec.render([("a/0", "hi")])
    assert rendered.text == "<s>[u]hi[a]"
    response = codec.decode([*policy("yo", add_special_tokens=False)["input_ids"], policy.eos_token_id])
    prompt = Prompt("a/0", "a", rendered.token_ids, rendered.text, rendered.messages)
    assert reward.decode(reward_tokens(prompt, response, reward, PLAIN)) == "<bos>hiyo"


def test_a_row_with_the_policys_markup_written_into_it_is_refused_unless_the_reward_model_has_it_too():
    policy, reward = policy_and_reward_tokenizer()
    rows = [conversation("hi"), conversation("<s>[u]hi[a]")]
    with pytest.raises(ValueError, match=r"prompt 'a/0' holds '<s>', a special token of the policy"):
        check_plain_text(rows, policy, reward)
    check_plain_text(rows[:1], policy, reward)
    reward.add_special_tokens({"additional_special_tokens": ["<s>"]})
    check_plain_text(rows, policy, reward)


@pytest.mark.parametrize("content", [None, [{"type": "image"}]])
def test_a_message_that_is_no_text_is_refused_without_a_template(content):
    policy, reward = policy_and_reward_tokenizer()
    with pytest.raises(ValueError, match=r"prompt 'a/0': a message of role 'user' holds .*, which is not text"):
        check_plain_text([conversation(content)], policy, reward)


def test_a_missing_template_is_an_error_that_says_what_to_set():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template"):
        reward_tokens(PROMPT, "2", tokenizer, RewardModelConfig(path="some/model"))


class WithBos:
    """A tokenizer that puts a BOS before everything unless told not to."""

    bos_token = "<s>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [len(text)]}


def test_there_is_exactly_one_bos():
    config = RewardModelConfig(apply_chat_template=False)
    assert reward_tokens(conversation("hi"), "!", WithBos(), config) == [0, 3]
    assert reward_tokens(conversation("<s>hi"), "!", WithBos(), config) == [6]


def test_an_overlong_conversation_names_its_sample_and_lengths():
    RewardInput(SampleKey(3, 1), (1,) * 10).check(10)
    with pytest.raises(RewardInputTooLongError, match=r"task 3, sample 1, turn 0.*11 tokens.*is 10") as caught:
        RewardInput(SampleKey(3, 1), (1,) * 11).check(10)
    assert (caught.value.key, caught.value.length, caught.value.limit) == (SampleKey(3, 1), 11, 10)
    with pytest.raises(ValueError, match="both empty"):
        RewardInput(SampleKey(0, 0), ()).check(10)
