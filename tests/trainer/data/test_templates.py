"""Chat templates that ask for the date get a fixed one; the others nothing that changes."""

import datetime
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.compose import load_config, to_yaml
from configs.problems import UserError
from configs.schema import Config
from rollout.types import Prompt
from tests.trainer.data._tokenizers import TEMPLATE, word_tokenizer
from trainer.data.prompts import PromptCodec, PromptError
from trainer.data.templates import asks_for_date, earlier_date, fix_date, settle_date
from trainer.inputs import load_inputs, reward_tokenizer

DATED = "{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0]['content'] }}"
GUARDED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}{{ date_string }} {{ messages[0]['content'] }}"
)
IN_A_MACRO = "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }} {{ messages[0]['content'] }}"


def rendered(tokenizer: Any) -> str:
    return PromptCodec(tokenizer).render([("row", "a")])[0].text


class TestOneTemplate:
    @pytest.mark.parametrize("template", [DATED, GUARDED, IN_A_MACRO])
    def test_the_date_that_is_set_is_today(self, template: str) -> None:
        tokenizer = word_tokenizer(template=template)
        assert asks_for_date(tokenizer)
        time = " 00:00" if template is DATED else ""
        assert rendered(fix_date(tokenizer, "2019-02-03")) == f"03 Feb 2019{time} a"

    def test_without_a_date_it_reads_the_clock(self) -> None:
        assert rendered(fix_date(word_tokenizer(template=GUARDED), None)) == f"{datetime.date.today():%d %b %Y} a"

    @pytest.mark.parametrize(
        "template",
        [TEMPLATE, "{# strftime_now #} strftime_now {{ 'strftime_now' }}", "{% generation %}a{% endgeneration %}"],
    )
    def test_others_do_not_ask(self, template: str) -> None:
        assert not asks_for_date(word_tokenizer(template=template))

    @pytest.mark.parametrize("template", ["{{ ['a', 'b'] | random }}", "{{ lipsum(1) }}"])
    def test_a_template_that_draws_is_refused(self, template: str) -> None:
        with pytest.raises(PromptError, match="draws from a global generator"):
            asks_for_date(word_tokenizer(template=template))

    def test_a_template_that_is_no_jinja_is_refused(self) -> None:
        with pytest.raises(PromptError, match="can't be read: TemplateSyntaxError"):
            asks_for_date(word_tokenizer(template="{% if %}"))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def make(policy: str = DATED, reward: str = DATED, *overrides: str) -> Config:
        paths = {}
        for name, template in (("policy", policy), ("reward", reward)):
            paths[name] = str(tmp_path / name)
            word_tokenizer(template=template).save_pretrained(paths[name])
        lines = [f"model.path={paths['policy']}", f"reward.model.path={paths['reward']}", *overrides]
        return load_config(["experiment=micro", *lines])

    return make


class TestTheRunsDate:
    def test_todays_is_taken_once_and_stands_in_the_config(self, config, monkeypatch) -> None:
        settled = settle_date(config(), None)
        assert settled.data.template_date == datetime.date.today().isoformat()
        assert settled == replace(config(), data=replace(config().data, template_date=settled.data.template_date))

    def test_a_resumed_run_keeps_its_own(self, config, tmp_path) -> None:
        assert earlier_date(tmp_path / "config.yaml") is None
        (tmp_path / "config.yaml").write_text(to_yaml(settle_date(config(), "2019-02-03")))
        recorded = earlier_date(tmp_path / "config.yaml")
        assert settle_date(config(), recorded).data.template_date == "2019-02-03"

    def test_the_one_that_is_set_goes_first(self, config) -> None:
        asked = config(DATED, DATED, "data.template_date=2020-01-01")
        assert settle_date(asked, "2019-02-03").data.template_date == "2020-01-01"

    @pytest.mark.parametrize(
        ("policy", "reward", "named"),
        [(DATED, TEMPLATE, "model.path"), (TEMPLATE, DATED, "reward.model.path"), (DATED, DATED, "and of reward")],
    )
    def test_under_full_determinism_it_must_be_set(self, config, policy: str, reward: str, named: str) -> None:
        with pytest.raises(UserError, match=rf"data\.template_date is null.*{named}.*level D1.*data\.template_date="):
            settle_date(config(policy, reward, "full_determinism=true"), "2019-02-03")
        asked = config(policy, reward, "full_determinism=true", "data.template_date=2020-01-01")
        assert settle_date(asked, None) == asked

    @pytest.mark.parametrize(
        "unread",
        [("data.apply_chat_template=false", "reward.model.apply_chat_template=false"), ("model.chat_template=a",)],
    )
    def test_a_template_that_is_not_read_does_not_count(self, config, unread: tuple[str, ...]) -> None:
        asked = config(DATED, TEMPLATE, "full_determinism=true", *unread)
        assert settle_date(asked, None) == asked

    def test_a_date_without_effect_is_said(self, config, caplog) -> None:
        with caplog.at_level(logging.WARNING):
            settle_date(config(TEMPLATE, TEMPLATE, "data.template_date=2020-01-01"), None)
        assert "data.template_date=2020-01-01 has no effect" in caplog.text

    def test_prompts_and_reward_inputs_carry_it(self, config, monkeypatch) -> None:
        from reward.model import reward_tokens

        monkeypatch.setattr("trainer.inputs.check_models", lambda config, training: None)  # there are tokenizers only
        reward = "{{ 'a' if strftime_now('%Y') == '2020' else 'b' }}"
        asked = config(GUARDED, reward, "data.template_date=2020-01-02")
        inputs = load_inputs(asked)
        assert inputs.train.prompts[0].text.startswith("02 Jan 2020 ")
        prompt = Prompt("p/0", "p", (3,), "a", ({"role": "user", "content": "a"},))
        assert reward_tokens(prompt, "c", reward_tokenizer(asked), asked.reward.model) == [3]  # "a"
