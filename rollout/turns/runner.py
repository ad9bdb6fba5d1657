"""What plays an episode: an environment or an agent, and where its code runs.

SessionHost (event loop of the sessions) --Runner.run(session)--> environment.py | agent.py --UserLoop--> the user's code
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from rollout.turns.session import RequestError, Session
from rollout.turns.waiting import WaitingEpisodes

T = TypeVar("T")


class EpisodeError(RuntimeError):
    """An environment or agent failed on one sample; the message says how. What becomes of the sample is `reward.on_error`'s choice."""


class Runner(Protocol):
    """Plays episodes; one for all sessions of a process."""

    async def start(self, sessions: OpenSessions, base_url: str | None) -> None:
        """Load the user's code, once, before the first episode.

        Args:
            sessions: the process's.
            base_url: of the address that agents speak to (`http://127.0.0.1:port/v1`); None where nothing is served (environments).

        Raises:
            ValueError: the code can't be used.
        """
        ...

    async def admit(self, session: Session) -> None:
        """Wait until the episode may begin; `rollout.turns.timeout_s` counts from then. May return at once."""
        ...

    async def run(self, session: Session) -> None:
        """Play one episode: make turns with `session.generate`, give rewards with `session.set_reward`. Called in the sessions' event loop.

        Raises:
            EpisodeError: the episode failed.
        """
        ...

    async def close(self) -> None:
        """Free what `start` made."""
        ...


class OpenSessions:
    """The sessions of a process by their keys, which are secrets that enter nothing else."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._keys: dict[Session, str] = {}
        self._ended: dict[str, str] = {}
        self.waiting: WaitingEpisodes | None = None
        """Those that wait for a program elsewhere; set where `rollout.agent=remote`."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, session: Session) -> str:
        """Take a session in; returns its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._by_key[key] = session
        self._keys[session] = key
        return key

    def key_of(self, session: Session) -> str:
        """The key of an open session."""
        return self._keys[session]

    def get(self, key: str) -> Session:
        """The session with this key.

        Raises:
            RequestError: there is none (status 401), or it has ended (410).
        """
        if key in self._by_key:
            return self._by_key[key]
        if key in self._ended:
            raise RequestError(f"{self._ended[key]}: the episode has ended", status=410, code="session_ended")
        raise RequestError("no episode has this key", status=401, code="invalid_api_key")

    def remove(self, session: Session) -> None:
        """Forget an ended session; its key is remembered for a while, so that late requests are told what happened."""
        key = self._keys.pop(session)
        del self._by_key[key]
        self._ended[key] = session.name
        while len(self._ended) > 4096:
            del self._ended[next(iter(self._ended))]


class UserLoop:
    """A thread with an event loop of its own for the users' code: what blocks there does not block the sessions. Functions that are not async run in
    further threads.
    """

    def __init__(self, threads: int = 256) -> None:
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(threads, "user-code")
        self._thread = threading.Thread(target=self._loop.run_forever, name="user-loop", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here; a cancelled wait cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function or an async function there. A function that is not async and never returns keeps its thread."""
        bound = functools.partial(function, *arguments, **named)
        if inspect.iscoroutinefunction(function):
            return await self.run(bound())
        return await asyncio.wrap_future(self._threads.submit(bound))

    def close(self) -> None:
        """Stop the loop. Threads that are stuck end with the process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)
