"""Rewards that an environment or agent gives by turn: their source, and the tokens on which they lie.

Episode.turns (each with its reward) --discounted along the tree--> PlacedReward at the last token of each turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RolloutConfig
from rollout.types import Episode, PlacedReward, Turn, end_of


@dataclass(frozen=True)
class EpisodeRewards:
    """How the rewards that episodes bring count."""

    source: str
    """Their name among the reward sources."""
    discount: float | None = None
    """`rollout.turns.discount`."""

    @classmethod
    def of(cls, config: RolloutConfig) -> EpisodeRewards | None:
        """None for plain responses."""
        if config.environment is None and config.agent is None:
            return None
        return cls("environment" if config.environment is not None else "agent", config.turns.discount)

    def place(self, episode: Episode, own: float, others: float) -> tuple[PlacedReward, ...]:
        """Where the parts of a reward lie: what a turn earned at its last token, the rest at the end of the last turn.

        Args:
            own: factor of what the turns earned.
            others: the other sources' sum.
        """
        if not episode.turns:
            return ()
        rewards = [turn.reward for turn in episode.turns]
        if self.discount is not None:
            rewards = discounted(episode.turns, self.discount)
        placed = [
            PlacedReward(row, position, own * rewards[turn])
            for row, one in enumerate(episode.rows)
            for turn, position in one.turn_ends
        ]
        return tuple(placed) + (end_of(episode, others) if others else ())


def discounted(turns: Sequence[Turn], discount: float) -> list[float]:
    """Each turn's reward, and `discount` times the mean of what the turns that continue it have by the same rule.

    Args:
        turns: in canonical order, parents first.

    Example:
        >>> chain = [Turn(None, (), (), (), "stop", 0, reward=0.0), Turn(0, (), (), (), "stop", 0, reward=1.0)]
        >>> discounted(chain, 0.5)
        [0.5, 1.0]
    """
    children: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        if turn.parent is not None:
            children.setdefault(turn.parent, []).append(number)
    found = [turn.reward for turn in turns]
    for number in reversed(range(len(turns))):  # children before their parents
        after = [found[child] for child in children.get(number, ())]
        if after:
            found[number] += discount * sum(after) / len(after)
    return found
