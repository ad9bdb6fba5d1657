"""What a configuration makes use of: trained and frozen models, kinds of sampling."""

from __future__ import annotations

from collections.abc import Iterator

from configs.algorithms import EstimatorNeeds, estimator_needs
from configs.schema import Config, FsdpConfig, SamplingConfig


def needs(config: Config) -> EstimatorNeeds:
    """What the advantage estimator needs.

    Raises:
        UserCodeError: it is a user's function that can't be loaded.
    """
    return estimator_needs(config.algorithm.advantage.name)


def needs_reference(config: Config) -> bool:
    """Whether a KL to the reference is computed."""
    kl = config.algorithm.kl
    return kl.placement != "none" and (kl.coef > 0 or kl.controller == "adaptive")


def fsdp_of_roles(config: Config) -> Iterator[tuple[str, FsdpConfig]]:
    """(role, settings) of every model that is built: the actor, then critic and reference where something reads them."""
    yield "actor", config.actor.fsdp
    if needs(config).critic:
        yield "critic", config.critic.fsdp
    if needs_reference(config):
        yield "ref", config.ref.fsdp


def roles_needed(config: Config) -> list[str]:
    """Names of the models that are built; see `fsdp_of_roles`."""
    return [role for role, _ in fsdp_of_roles(config)]


def samplings(config: Config) -> Iterator[tuple[str, SamplingConfig]]:
    """(dotted key, settings) of every kind of sampling that takes place."""
    yield "rollout.sampling", config.rollout.sampling
    yield "rollout.validation", config.rollout.validation
    if config.rollout.validation_sampled is not None:
        yield "rollout.validation_sampled", config.rollout.validation_sampled
