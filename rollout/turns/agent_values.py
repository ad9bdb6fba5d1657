"""What agents are given and what they give back: the row, and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from determinism.seeds import environment_seed
from rollout.turns.session import RequestError, Session


@dataclass(frozen=True)
class AgentRow:
    """The row of the data source that an episode is about."""

    id: str
    """Stable identity, `source/row`."""
    source: str
    """Name of the data source."""
    messages: list[dict[str, Any]]
    """The conversation so far, in chat form: what the first request usually sends."""
    prompt: str
    """The same, rendered with the chat template."""
    answer: Any
    """Reference answer."""
    extra: dict[str, Any]
    """The row's remaining columns."""

    def to_json(self, **more: Any) -> str:
        """As a JSON object; what JSON has no form for (arrays, dates) becomes a list or a text."""
        return json.dumps({**asdict(self), **more}, default=_plain)


def row_of(session: Session) -> AgentRow:
    """The row of a session, a copy of its own."""
    prompt = session.spec.prompt
    messages = [dict(message) for message in prompt.messages]
    return AgentRow(prompt.id, prompt.source, messages, prompt.text, prompt.answer, dict(prompt.extra))


def seed_of(session: Session) -> int:
    """For an agent's own random numbers: the same for all samples of a prompt, another in each step."""
    spec = session.spec
    return environment_seed(run_seed=spec.run_seed, split=spec.split, step=spec.step, prompt_id=spec.prompt.id)


def give_rewards(session: Session, value: Any, what: str) -> None:
    """Give a session what an agent returned.

    Args:
        value: None; a number, for the last turn; or a mapping from turns (ids, or positions in canonical order) to numbers.
        what: names the value in errors.

    Raises:
        RequestError: it is none of these, a number is not finite, or there is no such turn. Then no reward was given.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        session.set_reward(_number(session, value, what))
        return
    turns = session.conversation.in_order()
    ids = [turn.id for turn in turns]
    rewards: dict[str, float] = {}
    for turn, reward in value.items():
        name = turn
        if (isinstance(turn, int) and not isinstance(turn, bool)) or (isinstance(turn, str) and turn.isdecimal()):
            name = ids[int(turn)] if 0 <= int(turn) < len(ids) else None
        if name not in ids:
            known = f"0 to {len(ids) - 1}, or {', '.join(ids)}" if ids else "none"
            raise RequestError(f"{session.name}: {what} names the turn {turn!r}; known: {known}", param="turn")
        rewards[name] = _number(session, reward, f"{what}, for the turn {turn!r},")
    for name, reward in rewards.items():
        session.set_reward(reward, name)


def _number(session: Session, value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) < float("inf"):
        raise RequestError(
            f"{session.name}: {what} is {value!r} ({type(value).__name__}); a reward must be a finite number",
            param="reward",
        )
    return float(value)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
