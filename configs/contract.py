"""What full determinism refuses and what it decides by itself (docs/determinism.md: the levels D1 to D7).

A setting that breaks a level is an error, never a warning: a warning would leave the promise broken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from configs.problems import Problem
from configs.roles import fsdp_of_roles, needs, samplings
from configs.schema import Config

OFF = "or full_determinism=false"


def contract_check(config: Config) -> list[Problem]:
    """Settings that break a level, each with the level and the way out; roles that don't follow the root switch."""
    problems = list(_followers(config))
    if config.full_determinism:
        problems += [problem for check in (_topology, _kernels, _seeds, _staleness) for problem in check(config)]
    return problems


def force(config: Config) -> tuple[Config, list[Problem]]:
    """The configuration with what full determinism decides by itself, and why."""
    model = config.reward.model
    if not config.full_determinism or model.path is None or model.max_num_seqs == 1:
        return config, []
    warning = Problem(
        "reward.model.max_num_seqs",
        f"{model.max_num_seqs} is overridden to 1 by full_determinism: a score must not depend on which other responses are in its batch",
        level="D3",
    )
    reward = dataclasses.replace(config.reward, model=dataclasses.replace(model, max_num_seqs=1))
    return dataclasses.replace(config, reward=reward), [warning]


def contract_warnings(config: Config) -> list[Problem]:
    """What keeps the levels only as long as nothing goes wrong."""
    return list(_warnings(config)) if config.full_determinism else []


def _followers(config: Config) -> Iterator[Problem]:
    root = str(config.full_determinism).lower()
    for role in ("rollout", "reward"):
        value = getattr(config, role).full_determinism
        if value != config.full_determinism:
            yield Problem(
                f"{role}.full_determinism",
                f"{str(value).lower()}, but full_determinism is {root}: half a promise is none",
                f"leave {role}.full_determinism out and set full_determinism alone",
            )


def _topology(config: Config) -> Iterator[Problem]:
    ranks = config.launcher.num_ranks
    if ranks & (ranks - 1):
        yield Problem(
            "launcher.num_ranks",
            f"{ranks} ranks can't sum gradients in the same tree as 1, 2 or 4",
            f"take a power of two, {OFF}",
            level="D4",
        )


def _kernels(config: Config) -> Iterator[Problem]:
    optimizers = [("actor", config.actor.optim)]
    if needs(config).critic:
        optimizers.append(("critic", config.critic.optim))
    for role, optim in optimizers:
        if optim.fused:
            yield Problem(
                f"{role}.optim.fused",
                "the fused AdamW's bits depend on the length of the shard",
                f"set it to false, {OFF}",
                level="D4",
            )
    for role, fsdp in fsdp_of_roles(config):
        if fsdp.leaf_tokens is not None:
            yield Problem(
                f"{role}.fsdp.leaf_tokens",
                "dynamic leaves are no fixed unit of the gradient sum",
                f"use {role}.fsdp.leaf_size, {OFF}",
                level="D4",
            )
        if fsdp.attention == "flash_attention_2":
            yield Problem(
                f"{role}.fsdp.attention",
                "the backward pass of flash_attention_2 adds in no fixed order",
                f"use sdpa, {OFF}",
                level="D1",
            )


def _seeds(config: Config) -> Iterator[Problem]:
    for key, sampling in samplings(config):
        if sampling.seed is not None and sampling.n > 1:
            yield Problem(
                f"{key}.seed",
                f"one seed ({sampling.seed}) for {sampling.n} samples of a prompt makes them copies of each other",
                f"set it to null (each sample then gets its own seed, derived from rollout.seed), {OFF}",
                level="D1",
            )


def _staleness(config: Config) -> Iterator[Problem]:
    staleness = config.rollout.max_head_offpolicyness
    if staleness:
        yield Problem(
            "rollout.max_head_offpolicyness",
            f"{staleness}: which weights sample a token would depend on timing, so D1 to D5 would all be lost",
            f"set it to 0, {OFF}",
            level="D1",
        )


def _warnings(config: Config) -> Iterator[Problem]:
    if config.reward.functions and config.reward.on_error != "fail":
        yield Problem(
            "reward.on_error",
            f"{config.reward.on_error} turns a function that overruns its time limit into a result, and time is not repeatable",
            "reward.on_error=fail stops the run instead",
            level="D1",
        )
    if not config.determinism.engine_check:
        yield Problem(
            "determinism.engine_check",
            "false: that the engines keep D3 on this machine is not checked at start",
            level="D3",
        )
