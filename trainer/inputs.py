"""What is loaded and checked before any engine starts: paths, tokenizers, prompts, answers, models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.checks import rollout_context
from configs.problems import UserError
from configs.roles import roles_needed
from configs.schema import Config
from reward.answers import check_answers
from reward.judge import check_judge, judge_tokens
from reward.model import check_plain_text, check_reward_model
from rollout.sampling import find_eos_token_ids
from rollout.turns.agent import check_agent
from rollout.turns.environment import load_environment
from trainer.data.prompts import PromptCodec, load_tokenizer
from trainer.data.sampler import PromptData
from trainer.data.templates import fix_date
from trainer.tiny import resolve
from workers.checkpoint_files import weight_files
from workers.launch.resources import resolve_device


@dataclass
class Inputs:
    """What is loaded and checked before any engine starts."""

    tokenizer: Any
    eos_ids: tuple[int, ...]
    train: PromptData
    validation: PromptData
    context: int
    """Tokens of the longest prompt and response together: the engines' context."""


def resolve_paths(config: Config) -> Config:
    """The config with recipes (`tiny:policy`) replaced by the directories they were built into.

    Raises:
        UserError: a directory does not exist; names the setting.
    """

    def path_of(key: str, value: str) -> str:
        try:
            return str(resolve(value))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"{key}={value}: {error}") from None

    def optional(key: str, value: str | None) -> str | None:
        return None if value is None else path_of(key, value)

    model = replace(
        config.model,
        path=path_of("model.path", config.model.path),
        tokenizer=optional("model.tokenizer", config.model.tokenizer),
    )
    reward_model = replace(
        config.reward.model,
        path=optional("reward.model.path", config.reward.model.path),
        tokenizer=optional("reward.model.tokenizer", config.reward.model.tokenizer),
    )
    judge = replace(
        config.reward.judge,
        path=optional("reward.judge.path", config.reward.judge.path),
        tokenizer=optional("reward.judge.tokenizer", config.reward.judge.tokenizer),
    )
    roles = roles_needed(config)
    return replace(
        config,
        model=model,
        reward=replace(config.reward, model=reward_model, judge=judge),
        critic=replace(
            config.critic, path=path_of("critic.path", config.critic.path) if "critic" in roles else config.critic.path
        ),
        ref=replace(config.ref, path=path_of("ref.path", config.ref.path) if "ref" in roles else config.ref.path),
    )


def load_inputs(config: Config, training: bool = True) -> Inputs:
    """Tokenizer and prompts, with every error that they and the models' files can have.

    Args:
        training: whether there will be trainer ranks.

    Raises:
        UserError: a tokenizer without EOS, a data source without its columns, prompts over the limit, a reward model with
            a number of labels other than one, a model whose files or kind can't be used, a row that
            the reward sources can't score whatever the response is.
    """
    model = config.model
    try:
        tokenizer = load_tokenizer(model.tokenizer or model.path, model.chat_template, model.trust_remote_code)
        fix_date(tokenizer, config.data.template_date)
        check_models(config, training)
        check_agent(config.rollout)
        if config.rollout.environment is not None:
            load_environment(config.rollout.environment)
        train = PromptData(config.data, tokenizer, split="train")
        validation = PromptData(config.data, tokenizer, split="validation")
        check_answers(config.reward, [*train.prompts, *validation.prompts])
        if config.reward.model.path is not None and not config.reward.model.apply_chat_template:
            check_plain_text([*train.prompts, *validation.prompts], tokenizer, reward_tokenizer(config))
        return Inputs(
            tokenizer=tokenizer,
            eos_ids=tuple(find_eos_token_ids(model.path, tokenizer.eos_token_id)),
            train=train,
            validation=validation,
            context=rollout_context(config),
        )
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def policy_codec(config: Config) -> PromptCodec:
    """The policy's tokenizer and chat template, loaded anew: for processes that write prompts themselves."""
    model = config.model
    tokenizer = load_tokenizer(model.tokenizer or model.path, model.chat_template, model.trust_remote_code)
    return PromptCodec(
        fix_date(tokenizer, config.data.template_date),
        apply_chat_template=config.data.apply_chat_template,
        system_prompt=config.data.system_prompt,
    )


def check_models(config: Config, training: bool) -> None:
    """Refuse weight files that can't be read, models that trainer and engines would not compute alike, and types that this machine lacks.

    Raises:
        UserError: names the setting, the model and what is wrong with it.
    """
    from workers.models.policy import check_policy
    from workers.models.value import check_value
    from workers.vllm_process import check_dtype

    def check(key: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error

    trust, roles = config.model.trust_remote_code, roles_needed(config) if training else []
    check("model.path", weight_files, config.model.path)
    if "actor" in roles:
        check("model.path", check_policy, config.model.path, config.actor.fsdp.attention, trust)
    if "ref" in roles and config.ref.path != config.model.path:
        check("ref.path", check_policy, config.ref.path, config.ref.fsdp.attention, trust)
    if "critic" in roles:
        check("critic.path", check_value, config.critic.path, config.critic.fsdp.attention, trust)
    device = resolve_device(config.launcher.device)
    check("rollout.dtype", check_dtype, config.rollout.dtype, device)
    if config.reward.model.path is not None:
        check("reward.model.dtype", check_dtype, config.reward.model.dtype, device)
        check_reward_model(config.reward.model.path)
    judge = config.reward.judge
    if judge.path is not None:
        check("reward.judge.dtype", check_dtype, judge.dtype, device)
        check("reward.judge.path", check_judge, judge.path)
        check("reward.judge.tokenizer", judge_tokens, judge.prompt, judge_tokenizer(config), judge)


def judge_tokenizer(config: Config) -> Any:
    """The judge's own tokenizer; None without a judge."""
    judge = config.reward.judge
    if judge.path is None:
        return None
    tokenizer = load_tokenizer(judge.tokenizer or judge.path, None, config.model.trust_remote_code)
    return fix_date(tokenizer, config.data.template_date)


def judge_context(config: Config, context: int) -> int:
    """Tokens of the judge's context: `reward.judge.max_model_len`, or the rollout's with room for the judge's prompt and answer.

    Args:
        context: the rollout's.
    """
    judge = config.reward.judge
    if judge.max_model_len is not None:
        return judge.max_model_len
    wanted = len(judge_tokens(judge.prompt, judge_tokenizer(config), judge)) + context + judge.sampling.max_new_tokens
    settings = json.loads((Path(str(judge.path)) / "config.json").read_text(encoding="utf-8"))
    return min(wanted, int(settings.get("max_position_embeddings") or wanted))


def reward_tokenizer(config: Config) -> Any:
    """The reward model's own tokenizer; None when no reward model is served."""
    model = config.reward.model
    if model.path is None:
        return None
    from transformers import AutoTokenizer

    path = model.tokenizer or model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    return fix_date(tokenizer, config.data.template_date)
