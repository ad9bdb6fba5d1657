"""Builds what the loop drives: workers, engines, data, rewards, records. Nothing here decides a number.

Order matters for speed: trainer ranks and engines take seconds to start, so everything that can be wrong is checked first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from configs.checks import episode_cap, several_turns
from configs.compose import to_dict
from configs.roles import roles_needed
from configs.schema import Config
from determinism.environment import check_facts, facts
from determinism.ledger import Ledger
from determinism.manifest import write_manifest
from reward.by_turn import EpisodeRewards
from reward.judge import JudgeModel, judge_rollout
from reward.manager import RewardManager
from rollout.engines import RolloutEngines, engine_class
from rollout.episodes import Rollout
from rollout.sampling import seeds_are_derived
from rollout.turns.rollouts import SessionHosts
from trainer.algorithms.kl import controller
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.claim import check_restored, commit
from trainer.data.sampler import PromptSampler
from trainer.engine_check import EngineCheck, check_engines
from trainer.grading import Grader
from trainer.input_digests import input_digests
from trainer.inputs import Inputs, judge_context, judge_tokenizer, policy_codec, reward_tokenizer
from trainer.ppo import PPO, Parts
from trainer.record import Record
from trainer.remote_models import RemoteModels
from trainer.run_dir import RunDirectory
from trainer.tracking import Tracker
from trainer.validation import Validation
from workers.launch.group import WorkerFactory, WorkerGroup
from workers.launch.launcher import Launcher
from workers.launch.resources import resolve_device

logger = logging.getLogger(__name__)


def trainer_group(config: Config, launcher: Launcher, roles: list[str]) -> WorkerGroup:
    """FSDP ranks with the roles that this run needs."""
    from workers.models.trainer_worker import TrainerWorker

    return launcher.trainer_group(functools.partial(TrainerWorker, config, roles), config.launcher.num_ranks)


def rollout_engine(config: Config, context: int, device: str, **more: str) -> WorkerFactory:
    """The factory of a rollout engine, to be called in its process; `context` as in `Inputs`.

    Args:
        more: `url` of a running server.
    """
    return functools.partial(
        engine_class(config.rollout.engine),
        config.model.path,
        config=config.rollout,
        max_model_len=context,
        tokenizer=config.model.tokenizer,
        **shared_settings(config, device),
        **more,
    )


def rollout_engines(config: Config, context: int, device: str) -> WorkerFactory | list[WorkerFactory]:
    """The factory of all rollout engines, or one for each where they join running servers."""
    joined = [rollout_engine(config, context, device, url=url) for url in config.rollout.urls]
    return joined or rollout_engine(config, context, device)


def shared_settings(config: Config, device: str) -> dict[str, Any]:
    """Settings that every engine is given."""
    return {
        "full_determinism": config.full_determinism,
        "threads": config.determinism.threads,
        "device": device,
        "cpu_linear": config.determinism.cpu_linear,
        "trust_remote_code": config.model.trust_remote_code,
    }


def engine_groups(config: Config, launcher: Launcher, inputs: Inputs, device: str) -> dict[str, WorkerGroup]:
    """Engines by name: `rollout`, `reward` when a reward model is set, and `judge` when there is one."""
    from reward.model import RewardModelEngine

    groups = {
        "rollout": launcher.engine_group(
            "rollout",
            rollout_engines(config, inputs.context, device),
            config.rollout.replicas,
            start_timeout_s=config.rollout.start_timeout_s,
            gpus=config.rollout.tensor_parallel_size,
        )
    }
    shared, reward, judge = shared_settings(config, device), config.reward.model, config.reward.judge
    if reward.path is not None:
        context = reward.max_model_len or inputs.context
        scoring = functools.partial(RewardModelEngine, reward.path, config=reward, max_model_len=context, **shared)
        groups["reward"] = launcher.engine_group(
            "reward", scoring, reward.replicas, start_timeout_s=reward.start_timeout_s
        )
    if judge.path is not None:
        judging = functools.partial(
            engine_class("vllm"),
            judge.path,
            config=judge_rollout(config),
            max_model_len=judge_context(config, inputs.context),
            tokenizer=judge.tokenizer,
            **shared,
        )
        groups["judge"] = launcher.engine_group("judge", judging, judge.replicas, start_timeout_s=judge.start_timeout_s)
    return groups


def total_steps(config: Config, sampler: PromptSampler) -> int:
    """`trainer.total_steps`, or fewer when `trainer.total_epochs` ends first."""
    if config.trainer.total_epochs is None:
        return config.trainer.total_steps
    return min(config.trainer.total_steps, sampler.total_steps(config.trainer.total_epochs))


@dataclass
class Engines:
    """The parts that generate and score."""

    rollout: Rollout
    reward: RewardManager
    groups: dict[str, WorkerGroup]
    """The engines by name."""

    def check(self, config: Config, inputs: Inputs) -> EngineCheck | None:
        """Wait for the engines; under full determinism prove level D3 on them (unless `determinism.engine_check` is off).

        Raises:
            WorkerError: an engine did not start.
            EngineCheckError: an engine's answer depends on which other requests it has.
        """
        if self.rollout.hosts is not None:
            self.rollout.hosts.open()
        if config.full_determinism and config.determinism.engine_check:
            return check_engines(config, self.groups, inputs.context)
        return None


def start_engines(config: Config, launcher: Launcher, run: RunDirectory, inputs: Inputs, stack: ExitStack) -> Engines:
    """Start the engines (the launcher ends them) and the reward functions' processes (`stack` ends them). They are still starting when this returns."""
    device = resolve_device(config.launcher.device)
    groups = engine_groups(config, launcher, inputs, device)
    judge = None
    if "judge" in groups:
        judge = JudgeModel(
            RolloutEngines(groups["judge"]),
            judge_tokenizer(config),
            config.reward.judge,
            context=judge_context(config, inputs.context),
            log_dir=run.logs / "judge",
            derive_seeds=seeds_are_derived(config.rollout),
        )
    reward = RewardManager(
        config.reward,
        model_group=groups.get("reward"),
        judge=judge,
        tokenizer=reward_tokenizer(config),
        log_dir=run.logs,
        model_context=config.reward.model.max_model_len or inputs.context,
        decode_all=inputs.train.codec.decode_all,
        episodes=EpisodeRewards.of(config.rollout),
    )
    stack.callback(reward.close)
    rollout_engines = RolloutEngines(groups["rollout"], keep_groups=config.rollout.serialize_group_samples)
    hosts = None
    if several_turns(config):
        groups["sessions"] = session_group(config, launcher, inputs)
        hosts = SessionHosts(
            groups["sessions"],
            rollout_engines,
            audit=config.rollout.turns.audit_episodes,
            full_determinism=config.full_determinism,
        )
    rollout = Rollout(
        rollout_engines,
        inputs.train.codec.decode,
        config.rollout.seed,
        derive_seeds=seeds_are_derived(config.rollout),
        hosts=hosts,
    )
    return Engines(rollout, reward, groups)


def session_group(config: Config, launcher: Launcher, inputs: Inputs) -> WorkerGroup:
    """The processes that play episodes of several turns."""
    from rollout.turns.host import SessionHost
    from rollout.turns.players import make_runner

    host = functools.partial(
        SessionHost,
        config=config.rollout,
        context=inputs.context,
        make_codec=functools.partial(policy_codec, config),
        make_runner=make_runner,
        threads=config.determinism.threads,
    )
    return launcher.local_group(
        "sessions", host, config.rollout.proxy.processes, start_timeout_s=config.rollout.start_timeout_s
    )


def validation_of(config: Config, engines: Engines, inputs: Inputs) -> Validation:
    """The validation on the held-out prompts."""
    grader = Grader(config.reward, config.trainer.eval_source, config.trainer.eval_threshold)
    return Validation(
        engines.rollout, engines.reward, config.rollout, inputs.validation.prompts, inputs.eos_ids, grader
    )


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
    trainers.ready()
    checked = engines.check(config, inputs)
    sampler = PromptSampler(inputs.train, config.data.prompts_per_step, config.data.seed, config.data.shuffle)
    state = checkpoint.state() if checkpoint else None
    steps = total_steps(config, sampler)
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
        models=RemoteModels(trainers, config.rollout.sampling.temperature, episode_cap(config)),
        validation=validation_of(config, engines, inputs),
        ledger=Ledger(run.path, config.ledger.record),
        record=Record(run, tracker, config.tracking.save_episodes, config.tracking.log_samples),
        store=CheckpointStore(run.checkpoints, config.trainer.keep_last, config.trainer.keep_every, run.id),
        kl=controller(config.algorithm.kl),
        pad_id=inputs.tokenizer.pad_token_id if inputs.tokenizer.pad_token_id is not None else inputs.eos_ids[0],
        eos_ids=inputs.eos_ids,
        roles=roles,
        groups={"trainer": trainers, **engines.groups},
    )
    ppo = PPO(config, parts, steps)
    if checkpoint and state:
        parts.models.load(checkpoint.workers)
        ppo.load_state_dict(state)
        if config.ledger.record != "off":
            check_restored(run, checkpoint, parts.models.digests())
    processes = check_processes(config, parts.groups)
    commit(config, run, checkpoint, parts.ledger)  # up to here the run directory was only read
    record_manifest(config, run, inputs, parts.groups, processes, checked)
    return ppo


def record_manifest(
    config: Config,
    run: RunDirectory,
    inputs: Inputs,
    groups: Mapping[str, WorkerGroup],
    processes: Mapping[str, Mapping[str, Any]],
    checked: EngineCheck | None,
) -> None:
    """Write the run's manifest.

    Args:
        groups: every worker group by name.
        processes: see `check_processes`.
        checked: the engine check at start, for people to read; None when there was none.
    """
    digests = input_digests(config, roles_needed(config), inputs.train.prompts, inputs.validation.prompts)
    # For people to read: how long each process took to make its worker, and on which machine it is.
    informative = {
        "engine_check": checked.as_dict() if checked else None,
        "start_s": {name: group.start_s for name, group in groups.items()},
        "hosts": {name: group.hosts for name, group in groups.items()},
    }
    write_manifest(run.manifest, to_dict(config), processes, digests, informative, run.id)


def check_processes(config: Config, groups: Mapping[str, WorkerGroup]) -> dict[str, dict[str, Any]]:
    """The settings in force in each process by its name (`trainer/0`), this one (`driver`) included; checked under full determinism.

    Raises:
        EnvironmentNotPinned: a process does not have what full determinism asked for; names it.
    """
    named = {f"{name}/{i}": found for name, group in groups.items() for i, found in enumerate(group.run("facts"))}
    for name, found in named.items():
        for text in found.get("engine", {}).get("warnings", ()):
            logger.warning("%s: %s", name, text)
    named["driver"] = facts()
    if config.full_determinism:
        for name, found in named.items():
            check_facts(name, found, config.determinism.threads)
    return named
