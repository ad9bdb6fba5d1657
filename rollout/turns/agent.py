"""Agents: programs that call the policy through an OpenAI-compatible address, one run for each episode.

rollout.agent = my_agent.py:run   an async function, in this process      FunctionRunner
                program:COMMAND   started for each sample                 program.py
                remote            elsewhere; asks for episodes by HTTP    RemoteRunner
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.schema import RolloutConfig
from configs.user_code import load_reference
from rollout.turns.agent_values import AgentRow, give_rewards, row_of, seed_of
from rollout.turns.program import PROGRAM, ProgramRunner, command_of
from rollout.turns.proxy.fields import MODEL
from rollout.turns.runner import EpisodeError, OpenSessions, Runner, UserLoop
from rollout.turns.session import Session
from rollout.turns.waiting import WaitingEpisodes

if TYPE_CHECKING:
    import httpx2
    import openai

REMOTE = "remote"
_FRAMES = 8
"""Lines of code of a traceback that are told."""


def make_agent_runner(config: RolloutConfig) -> Runner:
    """What plays the episodes of `rollout.agent`."""
    assert config.agent is not None
    if config.agent == REMOTE:
        return RemoteRunner()
    if config.agent.startswith(PROGRAM):
        return ProgramRunner(config)
    return FunctionRunner(config)


def check_agent(config: RolloutConfig) -> None:
    """Find out, before anything starts, whether the agent can be used.

    Raises:
        ValueError: there is no such function or command, or it does not take its arguments.
    """
    agent = config.agent
    if agent is None or agent == REMOTE:
        return
    if agent.startswith(PROGRAM):
        command_of(agent)
    else:
        _load(agent, config.turns.params)


@dataclass(frozen=True)
class AgentSession:
    """What an agent's function is given: the address of the policy, for one episode."""

    id: str
    """Names the sample in logs."""
    seed: int
    """For the agent's own random numbers: the same for all samples of a prompt."""
    base_url: str
    """`http://127.0.0.1:port/v1`."""
    api_key: str
    """The episode's own. It ends with the episode."""
    model: str
    """Name of the policy at that address."""
    client: openai.AsyncOpenAI
    """The official client with this address and key."""
    _session: Session
    _loop: asyncio.AbstractEventLoop

    def set_reward(self, value: float, turn: str | int | None = None) -> None:
        """Give a reward to a turn (an answer's id, or its position in canonical order; the last turn when none is named). A second call
        replaces the first. May be called from any thread.

        Raises:
            ValueError: no finite number, no such turn, no turn yet, or the episode has ended.
        """

        async def give() -> None:
            give_rewards(self._session, value if turn is None else {turn: value}, "the reward")

        asyncio.run_coroutine_threadsafe(give(), self._loop).result()


class FunctionRunner:
    """Plays episodes with an async function of the user's, in a thread of its own (`UserLoop`).

    Args:
        config: `agent`, and `turns.params`, which are given to the function by name.
    """

    def __init__(self, config: RolloutConfig) -> None:
        assert config.agent is not None
        self._name, self._turns = config.agent, config.turns
        self._function: Any = None
        self._user: UserLoop | None = None
        self._pool: Any = None
        self._url = ""

    async def start(self, sessions: OpenSessions, base_url: str | None) -> None:
        """See `Runner`."""
        assert base_url is not None
        self._sessions, self._url = sessions, base_url
        self._function = _load(self._name, self._turns.params)
        self._user = UserLoop()
        self._pool = await self._user.run(_connections())

    async def admit(self, session: Session) -> None:
        """See `Runner`; all begin at once."""

    async def run(self, session: Session) -> None:
        """See `Runner`."""
        assert self._user is not None
        key, loop = self._sessions.key_of(session), asyncio.get_running_loop()
        try:
            value = await self._user.run(self._call(session, row_of(session), key, loop))
        except EpisodeError:
            if session.budget_ended:
                return  # that is how an episode may end, and few agents expect it
            raise
        # Without a turn there is nothing to reward, and the episode's end says so.
        if session.conversation.in_order():
            give_rewards(session, value, f"the agent's return value ({self._name})")

    async def close(self) -> None:
        """See `Runner`."""
        if self._user is not None:
            await self._user.run(self._pool.aclose())
            self._user.close()

    async def _call(self, session: Session, row: AgentRow, key: str, loop: asyncio.AbstractEventLoop) -> Any:
        client = _client(self._url, key, self._pool, self._turns.timeout_s)
        given = AgentSession(session.name, seed_of(session), self._url, key, MODEL, client, session, loop)
        try:
            return await self._function(given, row, **self._turns.params)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise EpisodeError(f"the agent {self._name} failed\n{_own_traceback(error)}") from None


class RemoteRunner:
    """Lets episodes wait for a program elsewhere."""

    async def start(self, sessions: OpenSessions, base_url: str | None) -> None:
        """See `Runner`."""
        self._sessions, self._waiting = sessions, WaitingEpisodes()
        sessions.waiting = self._waiting

    async def admit(self, session: Session) -> None:
        """See `Runner`; waits until somebody takes it."""
        await self._waiting.wait_begin(session, self._sessions.key_of(session))

    async def run(self, session: Session) -> None:
        """See `Runner`."""
        failure = await self._waiting.wait_end(session)
        if failure is not None and not session.budget_ended:
            raise EpisodeError(f"the agent that runs elsewhere reports: {failure}")

    async def close(self) -> None:
        """See `Runner`."""


def _load(name: str, params: Mapping[str, Any]) -> Any:
    function = load_reference(name)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(
            f"rollout.agent={name}: it must be an async function; blocking work in it can go through asyncio.to_thread"
        )
    try:
        inspect.signature(function).bind(None, None, **params)
    except TypeError as error:
        raise ValueError(
            f"rollout.agent={name}: it is called with (session, row, **rollout.turns.params), and the parameters are "
            f"{', '.join(params) or 'none'}: {error}"
        ) from None
    return function


async def _connections() -> httpx2.AsyncHTTPTransport:
    """Connections that all sessions' clients share: making some for each would take longer than many an episode."""
    import httpx2

    # No certificates are loaded for an address without TLS, and no proxy of the environment stands between.
    return httpx2.AsyncHTTPTransport(
        verify=False, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=600.0)
    )


def _client(url: str, key: str, pool: httpx2.AsyncHTTPTransport, timeout_s: float) -> openai.AsyncOpenAI:
    import httpx2
    import openai

    class Shared(httpx2.AsyncBaseTransport):
        """Passes requests on. That a user closes the client must not close other sessions' connections."""

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            return await pool.handle_async_request(request)

    http = httpx2.AsyncClient(transport=Shared(), trust_env=False, timeout=timeout_s)
    return openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, timeout=timeout_s)


def _own_traceback(error: BaseException) -> str:
    """The traceback from the user's own code on."""
    begin = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, begin, limit=-_FRAMES, chain=False)).rstrip()
