"""Builds what the loop drives: workers, engines, data, rewards, records. Nothing here decides a number.

Order matters for speed: trainer ranks and engines take seconds to start, so everything that can be wrong is checked before.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from determinism.environment import process_env
from determinism.ledger import Ledger
from reward.manager import RewardManager

from configs.compose import to_dict
from configs.schema import Config
from configs.validate import roles_needed
from rollout.engine import find_eos_token_ids
from rollout.episodes import Rollout
from trainer.checkpoint import CheckpointStore
from trainer.data import PromptData, PromptSampler
from trainer.kl import controller
from trainer.models import Models
from trainer.ppo import Parts
from trainer.record import Record
from trainer.run_dir import RunDirectory
from trainer.tiny import resolve
from trainer.tracking import Tracker
from trainer.validation import Validation
from workers.group import Launcher, WorkerGroup

logger = logging.getLogger(__name__)


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
        FileNotFoundError: a directory does not exist; names the setting.
    """

    def path_of(key: str, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return str(resolve(value))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{key}={value}: {error}") from None

    model = replace(
        config.model,
        path=path_of("model.path", config.model.path) or "",
        tokenizer=path_of("model.tokenizer", config.model.tokenizer),
    )
    reward_model = replace(
        config.reward.model,
        path=path_of("reward.model.path", config.reward.model.path),
        tokenizer=path_of("reward.model.tokenizer", config.reward.model.tokenizer),
    )
    roles = roles_needed(config)
    return replace(
        config,
        model=model,
        reward=replace(config.reward, model=reward_model),
        critic=replace(
            config.critic, path=path_of("critic.path", config.critic.path) if "critic" in roles else config.critic.path
        ),
        ref=replace(config.ref, path=path_of("ref.path", config.ref.path) if "ref" in roles else config.ref.path),
    )


def load_inputs(config: Config) -> Inputs:
    """Tokenizer and prompts, with every error that they can have.

    Raises:
        ValueError: a tokenizer without EOS, a data source without its columns, prompts over the limit, too few rows.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        config.model.tokenizer or config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    if config.model.chat_template is not None:
        tokenizer.chat_template = config.model.chat_template
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {config.model.tokenizer or config.model.path} has no EOS token, so no response could ever end; "
            "set eos_token in its tokenizer_config.json, or model.tokenizer to one that has it"
        )
    context = config.rollout.max_model_len or (
        config.data.max_prompt_tokens
        + max(
            s.max_new_tokens
            for s in (config.rollout.sampling, config.rollout.validation, config.rollout.validation_sampled)
            if s
        )
    )
    return Inputs(
        tokenizer=tokenizer,
        eos_ids=tuple(find_eos_token_ids(Path(config.model.path), tokenizer.eos_token_id)),
        train=PromptData(config.data, tokenizer, split="train"),
        validation=PromptData(config.data, tokenizer, split="validation"),
        context=context,
    )


def trainer_group(config: Config, launcher: Launcher, roles: list[str]) -> WorkerGroup:
    """FSDP ranks with the roles that this run needs."""
    from workers.trainer_worker import TrainerWorker

    return launcher.trainer_group(functools.partial(TrainerWorker, config, roles), config.launcher.num_ranks)


def engine_groups(
    config: Config, launcher: Launcher, inputs: Inputs, device: str
) -> tuple[WorkerGroup, WorkerGroup | None]:
    """Rollout engines, and reward engines when a reward model is set."""
    from reward.model import RewardModelEngine
    from rollout.vllm_engine import VLLMEngine

    shared: dict[str, Any] = {
        "full_determinism": config.full_determinism,
        "threads": config.determinism.threads,
        "device": device,
    }
    env = process_env(config.full_determinism, config.determinism.threads, device)
    rollout = functools.partial(
        VLLMEngine,
        config.model.path,
        config=config.rollout,
        max_model_len=inputs.context,
        tokenizer=config.model.tokenizer,
        **shared,
    )
    reward = config.reward.model
    scoring = functools.partial(
        RewardModelEngine, reward.path, config=reward, max_model_len=reward.max_model_len or inputs.context, **shared
    )
    return (
        launcher.engine_group("rollout", rollout, config.rollout.replicas, env),
        launcher.engine_group("reward", scoring, reward.replicas, env) if reward.path else None,
    )


def total_steps(config: Config, sampler: PromptSampler) -> int:
    """`trainer.total_steps`, or fewer when `trainer.total_epochs` ends first."""
    if config.trainer.total_epochs is None:
        return config.trainer.total_steps
    return min(config.trainer.total_steps, sampler.total_steps(config.trainer.total_epochs))


def assemble(
    config: Config,
    launcher: Launcher,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    inputs: Inputs,
    stack: ExitStack,
) -> PPO:
    """Start the workers and engines and hand them to the loop, restored from `checkpoint` when there is one."""
    roles = roles_needed(config)
    device = resolve_device(config.launcher.device)
    rollout_group, reward_group = engine_groups(config, launcher, inputs, device)
    stack.callback(rollout_group.close)
    if reward_group is not None:
        stack.callback(reward_group.close)
    trainers = trainer_group(config, launcher, roles)
    stack.callback(trainers.close)

    reward = RewardManager(
        config.reward, model_group=reward_group, tokenizer=reward_tokenizer(config), launcher=launcher, log_dir=run.logs
    )
    stack.callback(reward.close)
    rollout = Rollout(rollout_group, inputs.decode, config.rollout.seed)
    sampler = PromptSampler(inputs.train.prompts, config.data.prompts_per_step, config.data.seed, config.data.shuffle)
    state = checkpoint.state() if checkpoint else None
    steps = total_steps(config, sampler)
    tracker = None
    if launcher.is_main:
        tracker = Tracker(
            config.tracking,
            run,
            config.run.name,
            to_dict(config),
            steps,
            run_id=state["tracker_run_id"] if state else None,
            first_step=checkpoint.step if checkpoint else 0,
        )
    parts = Parts(
        sampler=sampler,
        rollout=rollout,
        reward=reward,
        models=Models(trainers, config.rollout.sampling.temperature, config.rollout.sampling.max_new_tokens),
        validation=Validation(rollout, reward, config.rollout, inputs.validation.prompts, inputs.eos_ids),
        ledger=Ledger(run.path, config.ledger.record, is_main=launcher.is_main),
        record=Record(run, tracker, config.tracking.save_episodes, config.tracking.log_samples),
        store=CheckpointStore(run.checkpoints, config.trainer.keep_last, config.trainer.keep_every),
        kl=controller(config.algorithm.kl),
        on_main=launcher.on_main,
        pad_id=inputs.pad_id,
        eos_ids=inputs.eos_ids,
        roles=roles,
    )
    ppo = PPO(config, parts, steps)
    if checkpoint and state:
        trainers.run("load", path=str(checkpoint.workers))
        ppo.load_state_dict(state)
    launcher.on_main(lambda: None)
    record_manifest(
        config, launcher, run, inputs, {"trainer": trainers, "rollout": rollout_group, "reward": reward_group}
    )
    return ppo
