"""What a configuration makes use of: trained and frozen models, kinds of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.limits import is_reference
from configs.schema import Config, FsdpConfig, SamplingConfig

CRITIC_ESTIMATORS = ("gae",)
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")
GREEDY_ESTIMATORS = ("remax",)


def roles_needed(config: Config) -> list[str]:
    """`actor`, then `critic` and `ref` where something reads them.

    Raises:
        ValueError: the advantage estimator is a user's function that can't be imported.
    """
    roles = ["actor"]
    if needs_critic(config):
        roles.append("critic")
    if needs_reference(config):
        roles.append("ref")
    return roles


def needs_critic(config: Config) -> bool:
    """Whether the advantage estimator reads values."""
    name = config.algorithm.advantage.name
    return name in CRITIC_ESTIMATORS or bool(_mark(name, "needs_critic"))


def needs_groups(config: Config) -> bool:
    """Whether the advantage estimator compares the samples of a prompt."""
    name = config.algorithm.advantage.name
    return name in GROUP_ESTIMATORS or bool(_mark(name, "needs_groups"))


def needs_greedy(config: Config) -> bool:
    """Whether the advantage estimator compares with a greedy response."""
    name = config.algorithm.advantage.name
    return name in GREEDY_ESTIMATORS or bool(_mark(name, "needs_greedy"))


def needs_reference(config: Config) -> bool:
    """Whether a KL to the reference is computed."""
    kl = config.algorithm.kl
    return kl.placement != "none" and (kl.coef > 0 or kl.controller == "adaptive")


def samplings(config: Config) -> Iterator[tuple[str, SamplingConfig]]:
    """(dotted key, settings) of every kind of sampling that takes place."""
    yield "rollout.sampling", config.rollout.sampling
    yield "rollout.validation", config.rollout.validation
    if config.rollout.validation_sampled is not None:
        yield "rollout.validation_sampled", config.rollout.validation_sampled


def fsdp_of_roles(config: Config) -> Iterator[tuple[str, FsdpConfig]]:
    """(role, settings) of every model that is built."""
    yield "actor", config.actor.fsdp
    if needs_critic(config):
        yield "critic", config.critic.fsdp
    if needs_reference(config):
        yield "ref", config.ref.fsdp


def user_function(name: str) -> Any | None:
    """The user's function that `name` refers to; None for a built-in name.

    Raises:
        ValueError: it can't be imported.
    """
    if not is_reference(name):
        return None
    # The one import from a folder that imports this one: only a user's function can say what it needs, and one loader
    # must serve every place, so that a file is one module. Inside the function, so that there is no cycle.
    from trainer.algorithms.registry import load_reference

    return load_reference(name)


def _mark(name: str, mark: str) -> Any:
    """What a user's estimator says about itself (the `needs` decorator of trainer/algorithms/advantages.py)."""
    return getattr(user_function(name), mark, False)
