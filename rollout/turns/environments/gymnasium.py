"""Gymnasium environments whose observations and actions are text, or can be written as text (`pip install 'exactrl[gymnasium]'`).

rollout.environment=gymnasium rollout.turns.params.id=my_package:Maze-v0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.turns.agent_values import AgentRow
from rollout.turns.environment import Action


class Environment:
    """One episode of `gymnasium.make(id, **make)`: observations are user messages, answers are actions.

    Args:
        id: as `gymnasium.make` takes it (`module:Name-v0` imports the module that registers it).
        make: further arguments of `gymnasium.make`.
        action: `text` gives the answer as it is, `int` reads a whole number from it.
        penalty: reward for an answer that is no action; the environment does not see it.
        begin: text before the first observation; null puts the row's prompt there.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        action: str = "text",
        penalty: float = 0.0,
        begin: str | None = None,
    ) -> None:
        import gymnasium

        if action not in ("text", "int"):
            raise ValueError(f"action is {action!r}; it must be text or int")
        self._environment = gymnasium.make(id, **dict(make or {}))
        self._action, self._penalty, self._begin = action, penalty, begin

    def reset(self, row: AgentRow, seed: int) -> list[Mapping[str, Any]]:
        """Begin anew; Gymnasium takes seeds of 32 bits."""
        observation, _ = self._environment.reset(seed=seed % 2**32)
        if self._begin is None:
            *before, last = row.messages
            return [*before, {**last, "content": f"{last['content']}\n{observation}"}]
        return [{"role": "user", "content": f"{self._begin}\n{observation}"}]

    def step(self, action: Action) -> tuple[list[Mapping[str, Any]], float, bool]:
        """One step; a text that is no action is answered, not raised."""
        chosen: Any = action.text
        if self._action == "int":
            try:
                chosen = int(action.text.strip())
            except ValueError:
                return [_user(f"{action.text[:40]!r} is no whole number.")], self._penalty, False
        if not self._environment.action_space.contains(chosen):
            return [_user(f"{action.text[:40]!r} is no action here.")], self._penalty, False
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        return [_user(str(observation))], float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """End it."""
        self._environment.close()


def _user(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}
