"""What a chat template may read besides the conversation: a fixed date, but never a clock or a random generator.

Some templates write today's date into every conversation (`strftime_now`). The same command would then train on other prompts tomorrow, and
a run could not be resumed after midnight. `data.template_date` is the date that such templates get instead.
"""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.problems import UserError
from configs.schema import Config
from trainer.data.prompts import PromptError, load_tokenizer, template_tree

logger = logging.getLogger(__name__)

CLOCK = "strftime_now"
"""The function that `transformers` gives to templates: the current time in a format."""


def asks_for_date(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template reads the clock.

    Raises:
        PromptError: the template is not valid Jinja, or draws random numbers (`|random`, `lipsum()`). Those come from a global
            generator, so the same conversation would be rendered differently each time.
    """
    import jinja2
    from jinja2 import nodes

    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    try:
        tree = template_tree(tokenizer)
    except jinja2.TemplateError as error:
        raise PromptError(f"{where} can't be read: {type(error).__name__}: {error}") from error
    names = {node.name for node in tree.find_all(nodes.Name)}
    random = "|random" if any(node.name == "random" for node in tree.find_all(nodes.Filter)) else ""
    random = random or ("lipsum" if "lipsum" in names else "")
    if random:
        raise PromptError(
            f"{where} uses {random}, which draws from a global generator: one conversation would have many texts. Take it out, or set "
            "model.chat_template to another one"
        )
    return CLOCK in names


def fix_date(tokenizer: Any, date: str | None) -> Any:
    """The same tokenizer, whose chat template from now on takes `date` (ISO, at midnight) for today; with None it reads the clock."""
    if date is not None:
        now = datetime.datetime.fromisoformat(date).strftime
        # A variable of the rendering has precedence over the environment's function of that name.
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **{CLOCK: now})
    return tokenizer


def settle_date(config: Config, recorded: str | None) -> Config:
    """The config with the date that its chat templates get, if one asks for a date: `data.template_date`, or else `recorded`, or else
    today's.

    Args:
        recorded: the date of the run that is resumed; None for a new run.

    Raises:
        UserError: under full determinism a template asks for the date and none is set; a template that can't be used.
    """
    try:
        asking = [name for name, tokenizer in _rendering(config) if asks_for_date(tokenizer)]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    date = config.data.template_date
    if date is not None:
        if not asking:
            logger.warning("data.template_date=%s has no effect: no chat template asks for the date", date)
        return config
    if not asking:
        return config
    if config.full_determinism:
        raise UserError(
            f"data.template_date is null, and the chat template of {' and of '.join(asking)} writes the current date into every "
            f"conversation ({CLOCK}), so the run could not repeat on another day (level D1). Set it, such as "
            "data.template_date=2024-07-26, or full_determinism=false, or give a template without a clock (model.chat_template)"
        )
    date = recorded or datetime.date.today().isoformat()
    logger.info("the chat template of %s asks for the date; data.template_date is %s", " and of ".join(asking), date)
    return replace(config, data=replace(config.data, template_date=date))


def earlier_date(config: Path) -> str | None:
    """`data.template_date` of the run whose `config.yaml` this is; None where there is no such file, or no date in it."""
    from configs.compose import from_yaml

    return from_yaml(config).data.template_date if config.exists() else None


def _rendering(config: Config) -> Iterator[tuple[str, Any]]:
    """(setting, tokenizer) of each model whose conversations are rendered with a chat template, if it has one."""
    model, reward, trust = config.model, config.reward.model, config.model.trust_remote_code
    if config.data.apply_chat_template:
        tokenizer = load_tokenizer(model.tokenizer or model.path, model.chat_template, trust)
        if tokenizer.chat_template:
            yield "model.path", tokenizer
    if reward.path is not None and reward.apply_chat_template:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(reward.tokenizer or reward.path, trust_remote_code=trust)
        if tokenizer.chat_template:
            yield "reward.model.path", tokenizer
