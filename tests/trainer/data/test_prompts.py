import logging
from typing import Any

import pytest

from rollout.types import Prompt
from tests.trainer.data._tokenizers import word_tokenizer
from trainer.data.prompts import (
    PromptCodec,
    PromptError,
    apply_length_policy,
    load_tokenizer,
    max_prompt_length,
)

BOS, EOS = 1, 2


def prompts_of(codec: PromptCodec, **texts: str) -> list[Prompt]:
    rendered = codec.render(list(texts.items()))
    return [
        Prompt(f"rows/{name}", "rows", r.token_ids, r.text, r.messages) for name, r in zip(texts, rendered, strict=True)
    ]


def plain_codec(**tokenizer: Any) -> PromptCodec:
    return PromptCodec(word_tokenizer(**tokenizer), apply_chat_template=False)


@pytest.fixture
def eight_and_nine() -> tuple[PromptCodec, list[Prompt]]:
    codec = plain_codec()
    prompts = prompts_of(codec, eight="a b c d e f g h", nine="a b c d e f g h i")
    assert [len(prompt.token_ids) for prompt in prompts] == [8, 9]
    return codec, prompts


class TestRendering:
    def test_the_chat_template_is_applied_and_opens_the_assistants_turn(self) -> None:
        (rendered,) = PromptCodec(word_tokenizer()).render([("row", "a b")])
        assert rendered.text == "<bos> user : a b assistant :"
        assert rendered.messages == ({"role": "user", "content": "a b"},)

    def test_messages_and_text_of_one_user_turn_render_alike(self) -> None:
        codec = PromptCodec(word_tokenizer())
        text, messages = codec.render([("text", "a b"), ("chat", [{"role": "user", "content": "a b"}])])
        assert text == messages

    @pytest.mark.parametrize("adds_bos", [False, True])
    def test_a_templates_bos_and_the_tokenizers_never_double(self, adds_bos: bool) -> None:
        codec = PromptCodec(word_tokenizer(adds_bos=adds_bos))
        (rendered,) = codec.render([("row", "a")])
        assert rendered.token_ids.count(BOS) == 1
        assert rendered.token_ids[0] == BOS

    def test_a_template_that_writes_two_bos_is_cut_to_one(self) -> None:
        template = "{{ bos_token }} {{ bos_token }} {{ messages[0]['content'] }}"
        (rendered,) = PromptCodec(word_tokenizer(template=template)).render([("row", "a")])
        assert rendered.token_ids == (BOS, 3)

    def test_the_tokenizers_bos_is_added_where_the_template_left_it_out(self) -> None:
        template = "{{ messages[0]['content'] }}"
        with_bos = PromptCodec(word_tokenizer(template=template, adds_bos=True)).render([("row", "a")])
        without = PromptCodec(word_tokenizer(template=template, adds_bos=False)).render([("row", "a")])
        assert with_bos[0].token_ids == (BOS, 3)
        assert without[0].token_ids == (3,)

    def test_plain_text_gets_the_bos_that_its_tokenizer_adds(self) -> None:
        assert plain_codec(adds_bos=True).render([("row", "a b")])[0].token_ids == (BOS, 3, 4)
        assert plain_codec(adds_bos=True).render([("row", "<bos> a b")])[0].token_ids == (BOS, 3, 4)
        assert plain_codec(adds_bos=False).render([("row", "a b")])[0].token_ids == (3, 4)

    def test_a_system_prompt_stands_first_unless_the_row_brings_its_own(self) -> None:
        codec = PromptCodec(word_tokenizer(), system_prompt="c")
        own = [{"role": "system", "content": "d"}, {"role": "user", "content": "a"}]
        added, kept = codec.render([("text", "a"), ("chat", own)])
        assert added.text == "<bos> system : c user : a assistant :"
        assert kept.text == "<bos> system : d user : a assistant :"

    def test_a_response_decodes_without_special_tokens(self) -> None:
        codec = PromptCodec(word_tokenizer())
        assert codec.decode([3, 4, EOS]) == "a b"
        assert codec.decode([]) == ""


class TestRefusals:
    def test_a_tokenizer_without_eos(self) -> None:
        with pytest.raises(PromptError, match="no EOS token"):
            PromptCodec(word_tokenizer(eos=None))

    def test_a_saved_tokenizer_without_eos_is_named_by_its_directory(self, tmp_path) -> None:
        word_tokenizer(eos=None).save_pretrained(tmp_path)
        with pytest.raises(PromptError, match=str(tmp_path)):
            load_tokenizer(str(tmp_path))

    def test_a_chat_template_that_is_not_there(self) -> None:
        with pytest.raises(PromptError, match=r"no chat template.*apply_chat_template=false"):
            PromptCodec(word_tokenizer(template=None))

    def test_a_system_prompt_in_plain_text(self) -> None:
        with pytest.raises(PromptError, match="system_prompt"):
            PromptCodec(word_tokenizer(), apply_chat_template=False, system_prompt="a")

    def test_a_conversation_that_ends_with_the_assistant(self) -> None:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with pytest.raises(PromptError, match="'rows/3' ends with an assistant"):
            PromptCodec(word_tokenizer()).render([("rows/3", chat)])

    def test_a_conversation_in_plain_text(self) -> None:
        chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        with pytest.raises(PromptError, match="'rows/3' is a conversation of 2 messages"):
            plain_codec().render([("rows/3", chat)])

    def test_a_conversation_that_the_template_refuses_names_the_row(self) -> None:
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(PromptError, match=r"'rows/3'.*roles must alternate"):
            PromptCodec(word_tokenizer(template=template)).render([("rows/3", "a")])

    def test_a_prompt_without_tokens(self) -> None:
        with pytest.raises(PromptError, match="'rows/3' has no tokens"):
            plain_codec().render([("rows/3", " ")])


def test_a_chat_template_from_the_config_replaces_the_tokenizers(tmp_path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("a {{ messages[0]['content'] }}")
    for template in (file.read_text(), str(file)):
        tokenizer = load_tokenizer(str(tmp_path), template)
        assert PromptCodec(tokenizer).render([("row", "b")])[0].text == "a b"


class TestLengthPolicy:
    """Prompts of 8 and 9 tokens with a limit of 8."""

    def test_error_names_the_row_its_length_and_the_limit(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        with pytest.raises(
            PromptError, match=r"1 of 2 prompts .*max_prompt_tokens=8: rows/nine \(9 tokens\)"
        ) as caught:
            apply_length_policy(prompts, 8, "error", codec)
        assert "rows/eight" not in str(caught.value)

    def test_filter_drops_it_and_reports_it(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        kept, report = apply_length_policy(prompts, 8, "filter", codec)
        assert kept == prompts[:1]
        assert (report.dropped, report.truncated, report.rows, report.longest) == (("rows/nine",), (), 2, 9)

    def test_truncate_left_keeps_the_last_tokens(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        kept, report = apply_length_policy(prompts, 8, "truncate_left", codec)
        assert kept[0] == prompts[0]
        assert kept[1].token_ids == prompts[1].token_ids[1:]
        assert kept[1].text == "b c d e f g h i"
        assert report.truncated == ("rows/nine",)

    def test_truncate_right_keeps_the_first_tokens(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        kept, _ = apply_length_policy(prompts, 8, "truncate_right", codec)
        assert kept[1].token_ids == prompts[1].token_ids[:8]
        assert kept[1].text == "a b c d e f g h"

    def test_truncate_left_keeps_the_bos(self) -> None:
        codec = plain_codec(adds_bos=True)
        prompts = prompts_of(codec, row="a b c d")
        kept, _ = apply_length_policy(prompts, 3, "truncate_left", codec)
        assert kept[0].token_ids == (BOS, 5, 6)
        assert kept[0].messages == prompts[0].messages

    def test_prompts_within_the_limit_are_left_alone_by_every_policy(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        for policy in ("error", "filter", "truncate_left", "truncate_right"):
            assert apply_length_policy(prompts, 9, policy, codec)[0] == prompts

    def test_truncate_right_of_chat_prompts_warns(self, caplog) -> None:
        codec = PromptCodec(word_tokenizer())
        with caplog.at_level(logging.WARNING):
            apply_length_policy(prompts_of(codec, row="a b"), 3, "truncate_right", codec)
        assert "cuts the end of 1 chat prompts" in caplog.text

    def test_an_unknown_policy_is_refused(self, eight_and_nine) -> None:
        codec, prompts = eight_and_nine
        with pytest.raises(PromptError, match=r"'truncate'.*truncate_left"):
            apply_length_policy(prompts, 8, "truncate", codec)

    def test_the_longest_prompt_is_known_for_the_context_check(self, eight_and_nine) -> None:
        assert max_prompt_length(eight_and_nine[1]) == 9
        assert max_prompt_length([]) == 0
