"""A process that plays episodes of several turns: it owns their sessions, runs the environment's or agent's code, and serves the address for agents.

    driver --SessionSpec--> SessionHost: Session + Runner --SessionResult--> driver
           <--Ask--                          --Answer-->          (what the engines are asked, and what they answered)

The driver speaks to the engines; a host only says what it wants from them. `Pull` is how the driver waits for that.

    thread "sessions"   an event loop: sessions, the HTTP server, the runner
    thread "user-loop"  the users' code (`runner.py`)
    main thread         messages from and to the driver
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.schema import RolloutConfig
from determinism.environment import facts, pin_process
from rollout.turns.answers import AnswerReader
from rollout.turns.conversation import Codec
from rollout.turns.runner import EpisodeError, OpenSessions, Runner
from rollout.turns.session import RequestError, Session, SessionResult, SessionSpec
from rollout.types import Generation, GenerationRequest


@dataclass(frozen=True)
class Pull:
    """The driver's question: what do you want from the engines? Answered as soon as there is something (a list of `Ask`), or with an empty list when no
    session is open."""


@dataclass(frozen=True)
class Ask:
    """A request for the engines."""

    number: int
    """The host's own; `Answer` repeats it."""
    request: GenerationRequest


@dataclass(frozen=True)
class Answer:
    """What the engines made of an `Ask`."""

    number: int
    generation: Generation


class SessionHost:
    """One process of `rollout.proxy.processes`; takes `SessionSpec`, `Pull` and `Answer` as requests.

    Args:
        config: the rollout group.
        context: tokens of the engines' context.
        make_codec: makes the policy's tokenizer and chat template in this process.
        make_runner: makes what plays the episodes.
        threads: `determinism.threads`.
    """

    work = "episodes"

    def __init__(
        self,
        *,
        config: RolloutConfig,
        context: int,
        make_codec: Callable[[], Codec],
        make_runner: Callable[[RolloutConfig, Codec, AnswerReader], Runner],
        threads: int = 1,
    ) -> None:
        pin_process(config.full_determinism, threads)
        self._config, self._context = config, context
        self._codec = make_codec()
        turns = config.turns
        self._reader = AnswerReader(self._codec, turns.tool_parser, turns.reasoning_parser)
        self._runner = make_runner(config, self._codec, self._reader)
        self._sessions = OpenSessions()
        self._server: Any = None
        self._asks: list[Ask] = []
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._number = 0
        self._pull: int | None = None
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: deque[tuple[int, Any]] = deque()
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `step` has something; see `workers.launch.service.Service`."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sessions", daemon=True).start()

    def open(self, number: int) -> str | None:
        """Load the user's code and, for agents, begin to serve; called once, before the first session.

        Args:
            number: this process's, from 0.

        Returns:
            The address that agents speak to, or None.

        Raises:
            ValueError: the code can't be used. OSError: the port is in use.
        """
        return asyncio.run_coroutine_threadsafe(self._open(number), self._loop).result()

    def add(self, number: int, request: SessionSpec | Pull | Answer) -> None:
        """Take a request; see `workers.launch.service.Engine`."""
        self._loop.call_soon_threadsafe(self._take, number, request)

    def step(self) -> list[tuple[int, Any]]:
        """What has finished."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def facts(self) -> dict[str, Any]:
        """The settings in force in this process."""
        return {**facts(), "device": "cpu"}

    def close(self) -> None:
        """End the server and the user's code; what hangs ends with the process."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await self._runner.close()
            if self._server is not None:
                await self._server.close()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(5.0)
        except Exception:
            traceback.print_exc()  # into this process's log; there is nobody left to tell

    async def _open(self, number: int) -> str | None:
        url = None
        if self._config.agent is not None:
            from rollout.turns.proxy.server import ProxyServer

            self._server = ProxyServer(self._sessions, self._config.proxy, number)
            url = await self._server.start()
        await self._runner.start(self._sessions, url)
        return url

    def _take(self, number: int, request: SessionSpec | Pull | Answer) -> None:
        if isinstance(request, SessionSpec):
            self._running += 1
            task = self._loop.create_task(self._play(number, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(request, Pull):
            self._pull = number
            self._tell_asks()
        else:
            waiting = self._waiting.pop(request.number)
            if not waiting.done():
                waiting.set_result(request.generation)
            self._finish(number, None)

    async def _play(self, number: int, spec: SessionSpec) -> None:
        session = Session(spec, self._config.turns, self._context, self._codec, self._reader, self._send)
        self._sessions.add(session)
        failure = None
        try:
            await self._runner.admit(session)
            await asyncio.wait_for(self._runner.run(session), self._config.turns.timeout_s)
        except TimeoutError:
            failure = f"timeout: it took longer than rollout.turns.timeout_s={self._config.turns.timeout_s:g} s"
        except (EpisodeError, RequestError) as error:
            failure = str(error)
        except Exception:
            failure = f"playing the episode failed\n{traceback.format_exc()}"
        result: SessionResult = await session.end(failure)
        self._sessions.remove(session)
        self._running -= 1
        self._finish(number, result)
        self._tell_asks()

    async def _send(self, request: GenerationRequest) -> Generation:
        number, self._number = self._number, self._number + 1
        self._waiting[number] = self._loop.create_future()
        self._asks.append(Ask(number, request))
        self._tell_asks()
        return await self._waiting[number]

    def _tell_asks(self) -> None:
        if self._pull is not None and (self._asks or not self._running):
            number, self._pull = self._pull, None
            asks, self._asks = self._asks, []
            self._finish(number, asks)

    def _finish(self, number: int, result: Any) -> None:
        self._done.append((number, result))
        os.eventfd_write(self.wakes, 1)
