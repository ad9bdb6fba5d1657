"""Several tries at a task: after a wrong answer the policy is told so and may answer again.

rollout.environment=tries rollout.turns.params.function=exact_match rollout.turns.params.tries=2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward.functions import load_function
from rollout.turns.agent_values import AgentRow
from rollout.turns.environment import Action


class Environment:
    """Scores each answer with a reward function; the episode is over with a right answer or the last try.

    Args:
        tries: answers at most.
        again: what the policy is told after a wrong answer.
        function: a reward function by name (`reasoning_gym`, `exact_match`, `math_verify`) or reference (`my_rewards.py:f`). It is not async, and scores
            one response a call.
        params: its arguments.
        threshold: an answer is right when its score is at least this.
        late: factor of the score for each try before it (0.5: a right second answer gives half).

    Each turn's reward is 0, but for the last one's: its score.
    """

    def __init__(
        self,
        tries: int = 2,
        again: str = "No. Try again.",
        function: str = "reasoning_gym",
        params: Mapping[str, Any] | None = None,
        threshold: float = 1.0,
        late: float = 1.0,
    ) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; it must be at least 1")
        self._tries, self._again, self._threshold, self._late = tries, again, threshold, late
        self._function = load_function(function, dict(params or {}))
        if self._function.batched or self._function.is_async:
            raise ValueError(
                f"function {function} scores whole batches or is async; take one that scores one response a call"
            )
        self._row: AgentRow | None = None

    def reset(self, row: AgentRow, seed: int) -> list[Mapping[str, Any]]:
        """Begin with the row's own messages."""
        self._row = row
        return []

    def step(self, action: Action) -> tuple[list[Mapping[str, Any]], float, bool]:
        """Score the answer."""
        row = self._row
        assert row is not None, "reset comes first"
        fields = {
            "prompt": row.prompt,
            "response": action.text,
            "response_with_special_tokens": action.text,
            "answer": row.answer,
            "extra": row.extra,
            "messages": row.messages,
        }
        score = float(self._function.call(**{name: fields[name] for name in self._function.wanted}))
        done = score >= self._threshold or action.turn + 1 >= self._tries
        return [{"role": "user", "content": self._again}], score * self._late**action.turn if done else 0.0, done
