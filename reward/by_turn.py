"""Where rewards lie that belong to turns and tokens: those of an environment or agent, and process rewards of functions.

Episode.turns (each with its reward) --discounted along the tree--> PlacedReward at the last token of each turn
ProcessReward (by turn and by token)                           ---> PlacedReward at those turns and tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RolloutConfig
from reward.outcomes import ProcessReward
from rollout.types import Episode, PlacedReward, Turn


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

    def place(self, episode: Episode, weight: float) -> tuple[PlacedReward, ...]:
        """What each turn earned, at its last token.

        Args:
            weight: factor of all of it.
        """
        rewards = [turn.reward for turn in episode.turns]
        if self.discount is not None:
            rewards = discounted(episode.turns, self.discount)
        return tuple(
            PlacedReward(row, position, weight * rewards[turn])
            for row, one in enumerate(episode.rows)
            for turn, position in one.turn_ends
        )


def sampled_turns(episode: Episode) -> list[tuple[int, ...]]:
    """The ids that the policy sampled in each turn; a plain response is one turn."""
    return [turn.token_ids for turn in episode.turns] if episode.turns else [episode.response_ids]


def process_places(episode: Episode, reward: ProcessReward, weight: float) -> tuple[PlacedReward, ...]:
    """Where the parts of a process reward lie that belong to turns and tokens.

    Args:
        weight: factor of all of it.

    Raises:
        ValueError: a turn that the episode does not have, or another number of tokens.
    """
    turns = sampled_turns(episode)
    ends = {turn: (row, at) for row, one in enumerate(episode.rows) for turn, at in one.turn_ends}
    if not episode.turns and turns[0]:
        ends = {0: (0, len(turns[0]) - 1)}
    missing = [turn for turn, _ in reward.turns if turn not in ends]
    if missing:
        raise ValueError(f"it rewards turn {missing[0]}; the episode has the turns {', '.join(map(str, sorted(ends)))}")
    sampled = sum(map(len, turns))
    if reward.tokens and len(reward.tokens) != sampled:
        raise ValueError(f"it has rewards for {len(reward.tokens)} tokens; {sampled} were sampled")
    placed = [PlacedReward(*ends[turn], weight * value) for turn, value in reward.turns]
    values = iter(reward.tokens)
    for turn, tokens in enumerate(turns if reward.tokens else ()):
        row, end = ends.get(turn, (0, 0))  # a turn without a token has no end
        placed += [PlacedReward(row, end - len(tokens) + 1 + at, weight * next(values)) for at in range(len(tokens))]
    return tuple(placed)


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
