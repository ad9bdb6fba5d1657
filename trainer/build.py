"""Builds what the loop drives: workers, engines, data, rewards, records. Nothing here decides a number.

Order matters for speed: trainer ranks and engines take seconds to start, so everything that can be wrong is checked before.
"""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from configs.checks import rollout_context
from configs.compose import to_dict
from configs.problems import UserError
from configs.roles import roles_needed
from configs.schema import Config
from determinism.environment import check_facts, facts, process_env
from determinism.ledger import Ledger
from determinism.manifest import write_manifest
from reward.manager import RewardManager
from reward.model import check_reward_model
from rollout.episodes import Rollout, seeds_are_derived
from rollout.sampling import find_eos_token_ids
from trainer.algorithms.kl import controller
from trainer.async_ppo import AsyncPPO
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.claim import check_restored, commit
from trainer.data.prompts import load_tokenizer
from trainer.data.sampler import PromptData, PromptSampler
from trainer.engine_check import EngineCheck, check_engines
from trainer.input_digests import input_digests
from trainer.judge import Judge
from trainer.ppo import PPO, Parts
from trainer.record import Record
from trainer.remote_models import RemoteModels
from trainer.run_dir import RunDirectory
from trainer.tiny import resolve
from trainer.tracking import Tracker
from trainer.validation import Validation
from workers.launch.calls import BUSY
from workers.launch.group import Launcher, WorkerFactory, WorkerGroup
from workers.launch.resources import resolve_device

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
        UserError: a tokenizer without EOS, a data source without its columns, prompts over the limit, a reward model with
            another number of labels than one.
    """
    model = config.model
    try:
        tokenizer = load_tokenizer(model.tokenizer or model.path, model.chat_template, model.trust_remote_code)
        if config.reward.model.path is not None:
            check_reward_model(config.reward.model.path)
        return Inputs(
            tokenizer=tokenizer,
            eos_ids=tuple(find_eos_token_ids(model.path, tokenizer.eos_token_id)),
            train=PromptData(config.data, tokenizer, split="train"),
            validation=PromptData(config.data, tokenizer, split="validation"),
            context=rollout_context(config),
        )
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def trainer_group(config: Config, launcher: Launcher, roles: list[str]) -> WorkerGroup:
    """FSDP ranks with the roles that this run needs."""
    from workers.models.trainer_worker import TrainerWorker

    return launcher.trainer_group(functools.partial(TrainerWorker, config, roles), config.launcher.num_ranks)


def rollout_engine(config: Config, context: int, device: str) -> WorkerFactory:
    """What makes a rollout engine in its process; `context` as in `Inputs`."""
    from rollout.vllm_engine import VLLMEngine

    return functools.partial(
        VLLMEngine,
        config.model.path,
        config=config.rollout,
        max_model_len=context,
        tokenizer=config.model.tokenizer,
        **_shared_settings(config, device),
    )


def _shared_settings(config: Config, device: str) -> dict[str, Any]:
    """Settings that every engine is given."""
    return {
        "full_determinism": config.full_determinism,
        "threads": config.determinism.threads,
        "device": device,
        "cpu_linear": config.determinism.cpu_linear,
        "trust_remote_code": config.model.trust_remote_code,
    }


def engine_groups(
    config: Config, launcher: Launcher, inputs: Inputs, device: str
) -> tuple[WorkerGroup, WorkerGroup | None]:
    """Rollout engines, and reward engines when a reward model is set."""
    from reward.model import RewardModelEngine

    env = process_env(config.full_determinism, config.determinism.threads, device)
    rollout = launcher.engine_group(
        "rollout",
        rollout_engine(config, inputs.context, device),
        config.rollout.replicas,
        env,
        start_timeout_s=config.rollout.start_timeout_s,
        gpus=config.rollout.tensor_parallel_size,
        wait=False,
    )
    reward = config.reward.model
    if reward.path is None:
        return rollout, None
    context = reward.max_model_len or inputs.context
    shared = _shared_settings(config, device)
    scoring = functools.partial(RewardModelEngine, reward.path, config=reward, max_model_len=context, **shared)
    return rollout, launcher.engine_group(
        "reward", scoring, reward.replicas, env, start_timeout_s=reward.start_timeout_s, wait=False
    )


def total_steps(config: Config, sampler: PromptSampler) -> int:
    """`trainer.total_steps`, or fewer when `trainer.total_epochs` ends first."""
    if config.trainer.total_epochs is None:
        return config.trainer.total_steps
    return min(config.trainer.total_steps, sampler.total_steps(config.trainer.total_epochs))


@dataclass
class Engines:
    """What generates and scores."""

    rollout: Rollout
    reward: RewardManager
    groups: dict[str, WorkerGroup]
    """The engines by name."""

    def check(self, config: Config, inputs: Inputs) -> EngineCheck | None:
        """Wait for the engines; under full determinism prove level D3 on them (unless `determinism.engine_check` is off).

        Raises:
            WorkerError: an engine did not start.
            EngineCheckError: an answer depends on what else was asked.
        """
        if config.full_determinism and config.determinism.engine_check:
            return check_engines(config, self.groups["rollout"], self.groups.get("reward"), inputs.context)
        return None


def start_engines(config: Config, launcher: Launcher, run: RunDirectory, inputs: Inputs, stack: ExitStack) -> Engines:
    """Start the engines and the reward functions' processes, which `stack` ends. They are still starting when this returns."""
    device = resolve_device(config.launcher.device)
    rollout_group, reward_group = engine_groups(config, launcher, inputs, device)
    stack.callback(rollout_group.close)
    groups = {"rollout": rollout_group}
    if reward_group is not None:
        stack.callback(reward_group.close)
        groups["reward"] = reward_group
    reward = RewardManager(
        config.reward,
        model_group=reward_group,
        tokenizer=reward_tokenizer(config),
        launcher=launcher,
        log_dir=run.logs,
        model_context=config.reward.model.max_model_len or inputs.context,
    )
    stack.callback(reward.close)
    rollout = Rollout(
        rollout_group,
        inputs.train.codec.decode,
        config.rollout.seed,
        derive_seeds=seeds_are_derived(config.rollout),
        keep_groups=config.rollout.serialize_group_samples,
    )
    return Engines(rollout, reward, groups)


def validation_of(config: Config, engines: Engines, inputs: Inputs) -> Validation:
    """The validation on the held-out prompts."""
    judge = Judge(config.reward, config.trainer.eval_source, config.trainer.eval_threshold)
    return Validation(engines.rollout, engines.reward, config.rollout, inputs.validation.prompts, inputs.eos_ids, judge)


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
    engines = start_engines(config, launcher, run, inputs, stack)
    trainers = trainer_group(config, launcher, roles)
    stack.callback(trainers.close)
    checked = engines.check(config, inputs)
    sampler = PromptSampler(inputs.train, config.data.prompts_per_step, config.data.seed, config.data.shuffle)
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
        rollout=engines.rollout,
        reward=engines.reward,
        models=RemoteModels(trainers, config.rollout.sampling.temperature, config.rollout.sampling.max_new_tokens),
        validation=validation_of(config, engines, inputs),
        ledger=Ledger(run.path, config.ledger.record, is_main=launcher.is_main),
        record=Record(run, tracker, config.tracking.save_episodes, config.tracking.log_samples),
        store=CheckpointStore(run.checkpoints, config.trainer.keep_last, config.trainer.keep_every, run.id),
        kl=controller(config.algorithm.kl),
        on_main=launcher.on_main,
        pad_id=inputs.tokenizer.pad_token_id if inputs.tokenizer.pad_token_id is not None else inputs.eos_ids[0],
        eos_ids=inputs.eos_ids,
        roles=roles,
        groups={"trainer": trainers, **engines.groups},
    )
    loop = AsyncPPO if config.rollout.max_head_offpolicyness > 0 else PPO
    ppo = loop(config, parts, steps)
    if checkpoint and state:
        trainers.run("load", path=str(checkpoint.workers))
        ppo.load_state_dict(state)
        if config.ledger.record != "off":
            digests = parts.models.digests()
            launcher.on_main(lambda: check_restored(run, checkpoint, digests))
    groups = parts.groups
    processes = {name: group.run("facts") for name, group in groups.items()}
    starts = {name: [busy["start"] for busy in group.run(BUSY)] for name, group in groups.items()}
    launcher.on_main(lambda: check_processes(config, processes))
    launcher.on_main(
        lambda: commit(config, run, checkpoint, parts.ledger)
    )  # until here the run's directory was only read
    launcher.on_main(lambda: record_manifest(config, run, inputs, processes, checked, starts))
    return ppo


def reward_tokenizer(config: Config) -> Any:
    """The reward model's own tokenizer; None when no reward model is served."""
    model = config.reward.model
    if model.path is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer or model.path, trust_remote_code=config.model.trust_remote_code
    )


def record_manifest(
    config: Config,
    run: RunDirectory,
    inputs: Inputs,
    processes: dict[str, list[dict[str, Any]]],
    checked: EngineCheck | None = None,
    starts: dict[str, list[float]] | None = None,
) -> None:
    """Write what was in force in each process, as read back there; under full determinism also insist on it.

    Args:
        checked: the engine check at start, for people to read; None when there was none.
        starts: seconds that each process took to make its worker, for people to read.

    Raises:
        EnvironmentNotPinned: see `check_processes`.
    """
    named = check_processes(config, processes)
    digests = input_digests(config, roles_needed(config), inputs.train.prompts, inputs.validation.prompts)
    informative = {"engine_check": checked.as_dict() if checked else None, "start_s": starts}
    write_manifest(run.manifest, to_dict(config), named, digests, informative, run.id)


def check_processes(config: Config, processes: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What is in force in each process by its name (`trainer/0`), this one (`driver`) included; pinned under full determinism.

    Raises:
        EnvironmentNotPinned: a process does not have what full determinism asked for; names it.
    """
    named = {f"{name}/{i}": found for name, group in processes.items() for i, found in enumerate(group)}
    named["driver"] = facts()
    if config.full_determinism:
        for name, found in named.items():
            check_facts(name, found, config.determinism.threads)
    return named
