"""Chooses what plays the episodes: an environment or an agent, by its setting."""

from __future__ import annotations

from configs.schema import RolloutConfig
from rollout.turns.answers import AnswerReader
from rollout.turns.conversation import Codec
from rollout.turns.runner import Runner


def make_runner(config: RolloutConfig, codec: Codec, reader: AnswerReader) -> Runner:
    """The runner that `rollout.environment` or `rollout.agent` names; it loads the user's code when it starts."""
    if config.environment is not None:
        from rollout.turns.environment import EnvironmentRunner

        return EnvironmentRunner(config, codec, reader)
    from rollout.turns.agent import make_agent_runner

    return make_agent_runner(config)
