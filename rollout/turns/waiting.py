"""Episodes that an agent elsewhere asks for, one after the other, by HTTP (`rollout.agent=remote`)."""

from __future__ import annotations

import asyncio
import heapq
import json
import re
from dataclasses import dataclass, field
from typing import Any

from rollout.turns.agent_values import give_rewards, row_of, seed_of
from rollout.turns.session import RequestError, Session


class NoneWaiting(RequestError):
    """No episode can begin now: the policy is being trained, or all episodes of the step have begun."""

    def __init__(self) -> None:
        super().__init__("no episode waits; ask again", status=503, code="none_waiting")


@dataclass(eq=False)
class _Episode:
    session: Session
    key: str
    begun: asyncio.Future[None]
    ended: asyncio.Future[str | None]
    """What failed, or None."""
    name: str = ""


@dataclass(order=True)
class _Place:
    rank: tuple[int, int, int]
    episode: _Episode = field(compare=False)


class WaitingEpisodes:
    """Those of one process. They are given out in canonical order, and only to who asks."""

    def __init__(self) -> None:
        self._heap: list[_Place] = []
        self._open: dict[Session, _Episode] = {}
        self._by_name: dict[str, _Episode | None] = {}
        self._count = 0

    async def wait_begin(self, session: Session, key: str) -> None:
        """Wait until somebody takes the session."""
        loop = asyncio.get_running_loop()
        episode = _Episode(session, key, loop.create_future(), loop.create_future())
        self._open[session] = episode
        self._count += 1
        heapq.heappush(self._heap, _Place((session.spec.step, session.spec.request_index, self._count), episode))
        await episode.begun

    async def wait_end(self, session: Session) -> str | None:
        """Wait until its taker ends it; what failed, or None."""
        episode = self._open[session]
        try:
            return await episode.ended
        finally:
            del self._open[session]
            self._by_name[episode.name] = None
            while len(self._by_name) > 8192 and next(iter(self._by_name.values())) is None:
                del self._by_name[next(iter(self._by_name))]

    def take(self) -> dict[str, Any]:
        """Begin the next one.

        Raises:
            NoneWaiting: ask again later.
        """
        while self._heap:
            episode = heapq.heappop(self._heap).episode
            if episode.begun.done():  # it was given up while it waited
                continue
            episode.name = self._name(episode.session)
            self._by_name[episode.name] = episode
            episode.begun.set_result(None)
            row = json.loads(row_of(episode.session).to_json(seed=seed_of(episode.session)))
            return {"id": episode.name, "api_key": episode.key, "row": row}
        raise NoneWaiting

    def reward(self, name: str, value: Any, turn: Any) -> None:
        """Give a reward.

        Raises:
            RequestError: no such episode (404), it has ended (410), no such turn, or no number.
        """
        session = self._episode(name).session
        if value is None:
            raise RequestError(f"{session.name}: there is no reward in the request", param="reward")
        give_rewards(session, value if turn is None else {turn: value}, "the reward")

    def end(self, name: str, reward: Any, error: Any) -> None:
        """End an episode; raises as `reward` does.

        Args:
            reward: a last reward, or None.
            error: what failed, or None.
        """
        episode = self._episode(name)
        if error is not None and not isinstance(error, str):
            raise RequestError(f"{episode.session.name}: error must be a text, got {error!r}", param="error")
        if episode.session.conversation.in_order():
            give_rewards(episode.session, reward, "the reward")
        episode.ended.set_result(error)
        self._by_name[name] = None

    def _episode(self, name: str) -> _Episode:
        if name not in self._by_name:
            raise RequestError(f"there is no episode {name!r}", status=404, code="episode_not_found")
        episode = self._by_name[name]
        if episode is None:
            raise RequestError(f"{name}: the episode has ended", status=410, code="session_ended")
        return episode

    def _name(self, session: Session) -> str:
        """A name for addresses. It enters nothing, and neither does the suffix that tells episodes of one identity apart."""
        spec = session.spec
        base = re.sub(r"[^A-Za-z0-9._-]", ".", f"{spec.split}-{spec.step}-{spec.prompt.id}-{spec.key.sample}")
        name, count = base, 1
        while name in self._by_name:
            count += 1
            name = f"{base}-{count}"
        return name
