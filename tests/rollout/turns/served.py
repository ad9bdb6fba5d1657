"""What tests of agents share: a real server on sessions whose policy is scripted, and the host's way of playing an episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from configs.schema import ProxyConfig, RolloutConfig, TurnsConfig
from rollout.turns.agent import make_agent_runner
from rollout.turns.answers import AnswerReader
from rollout.turns.proxy.server import ProxyServer
from rollout.turns.runner import EpisodeError, OpenSessions
from rollout.turns.session import RequestError, Session, SessionResult, SessionSpec
from rollout.types import GenerationRequest
from tests.rollout.turns.scripted import TOOLS_TEMPLATE, codec, digits, policy_of, spec_of

PLAIN = codec()
TOOLS = codec(TOOLS_TEMPLATE)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def calls_then_answers(request: GenerationRequest) -> str:
    """Calls `add` until a tool has spoken."""
    if "<tool>" in TOOLS.decode_all(request.prompt_token_ids):
        return "It is 5."
    return '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def roomy(with_codec: Any) -> SessionSpec:
    """A session whose answers have room for a call."""
    spec = spec_of(with_codec)
    return replace(spec, sampling=replace(spec.sampling, max_new_tokens=128))


@dataclass
class Served:
    sessions: OpenSessions
    url: str
    new: Callable[..., Session]

    def client(self, session: Session, **settings: Any) -> AsyncOpenAI:
        if "http_client" not in settings:
            # Certificates take a client most of its start, and a busy machine some time to connect.
            limits = httpx2.Limits(max_connections=None)
            transport = httpx2.AsyncHTTPTransport(verify=False, limits=limits)
            settings["http_client"] = httpx2.AsyncClient(transport=transport, timeout=300.0)
            settings["timeout"] = 300.0
        return AsyncOpenAI(base_url=self.url, api_key=self.sessions.key_of(session), **settings)


@contextlib.asynccontextmanager
async def served(
    with_codec: Any = PLAIN,
    say: Callable[[GenerationRequest], str] = digits,
    delay: Callable[[int], float] | None = None,
    parser: str | None = None,
    context: int = 1024,
    admin_key_env: str | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    """A server, and a maker of sessions."""
    sessions = OpenSessions()
    reader = AnswerReader(with_codec, parser)
    server = ProxyServer(sessions, ProxyConfig(admin_key_env=admin_key_env), 0)

    def new(spec: SessionSpec | None = None) -> Session:
        spec = spec or roomy(with_codec)
        send = policy_of(with_codec, say, delay)
        session = Session(spec, TurnsConfig(**limits), context, with_codec, reader, send)
        sessions.add(session)
        return session

    try:
        yield Served(sessions, await server.start(), new)
    finally:
        await server.close()


async def play(served_: Served, runner: Any, session: Session, timeout_s: float = 60.0) -> SessionResult:
    """As the host does."""
    failure = None
    try:
        await runner.admit(session)
        await asyncio.wait_for(runner.run(session), timeout_s)
    except TimeoutError:
        failure = "timeout"
    except (EpisodeError, RequestError) as error:
        failure = str(error)
    result = await session.end(failure)
    served_.sessions.remove(session)
    return result


async def play_agent(
    agent: str, *specs: SessionSpec, params: dict[str, Any] | None = None, timeout_s: float = 60.0, **settings: Any
) -> list[SessionResult]:
    """The results of an agent on some sessions at once; none is open afterwards."""
    async with served(**settings) as here:
        runner = make_agent_runner(RolloutConfig(agent=agent, turns=TurnsConfig(params=params or {})))
        await runner.start(here.sessions, here.url)
        try:
            sessions = [here.new(spec) for spec in specs or (roomy(settings.get("with_codec", PLAIN)),)]
            found = await asyncio.gather(*(play(here, runner, one, timeout_s) for one in sessions))
            assert len(here.sessions) == 0
            return list(found)
        finally:
            await runner.close()


def agent_file(folder: Path, body: str) -> str:
    """Write `async def run(session, row)` with this body; returns the reference to it."""
    path = folder / f"agent_{abs(hash(body)) % 10**8}.py"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path.write_text(f"import asyncio, json\n\nasync def run(session, row, **params):\n{lines}\n")
    return f"{path}:run"


def body_of(error: Any) -> dict[str, Any]:
    """The error object of an answer of the official client."""
    return json.loads(error.response.text)["error"]
