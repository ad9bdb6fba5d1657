"""The HTTP server; it runs in the event loop of the sessions.

agent --POST /v1/chat/completions, /v1/responses--> Session.generate      (the bearer key says which session)
a program elsewhere --POST /v1/episodes/...--> WaitingEpisodes            (rollout.agent=remote)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from configs.schema import ProxyConfig
from rollout.turns.proxy.chat import chat_completion
from rollout.turns.proxy.fields import MODEL
from rollout.turns.proxy.responses import Responses
from rollout.turns.runner import OpenSessions
from rollout.turns.session import RequestError, Session
from rollout.turns.waiting import NoneWaiting, WaitingEpisodes

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KINDS = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error", 429: "rate_limit_error"}
_KEEP_ALIVE_S = 3600
"""A server that closes idle connections closes some that a client is about to use."""

Answer = Callable[[Session, dict[str, Any], bool, str | None], Awaitable[dict[str, Any] | Iterator[str]]]


class ProxyServer:
    """See the module.

    Args:
        sessions: who may ask, by key.
        config: where to listen.
        process: this process's number, from 0; it listens on the configured port plus this.
    """

    def __init__(self, sessions: OpenSessions, config: ProxyConfig, process: int) -> None:
        self._sessions, self._config, self._process = sessions, config, process
        self._responses = Responses()
        self._admin_key = admin_key(config)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns the address for agents on this machine (`http://127.0.0.1:port/v1`).

        Raises:
            OSError: the port is in use, or there is no such address here. ValueError: the admin key is missing.
        """
        listener = self._listen()
        port = listener.getsockname()[1]
        settings = uvicorn.Config(
            self._app(),
            lifespan="off",
            log_level="warning",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(settings)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError(f"the server at {self._config.host}:{port} ended at once; its log says why")
            await asyncio.sleep(0.005)
        host = self._config.host
        # What listens everywhere is reached from here through loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening and end what is being answered."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._server = None

    def _listen(self) -> socket.socket:
        host, port = self._config.host, self._config.port
        port = port + self._process if port else 0
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # Named, because asyncio turns Nagle's algorithm off for sockets that say TCP only; with it each answer may wait 40 ms.
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            # A bound socket does not yet keep others from listening there.
            listener.listen(2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = (
                    f"rollout.proxy.port={self._config.port}: port {port} of {host} (process {self._process}) is in use; "
                    "choose another, or 0 for free ones"
                )
            else:
                text = f"rollout.proxy.host={host}: can't listen on port {port}: {error}"
            raise OSError(error.errno, text) from None
        return listener

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

        async def chat(request: Request) -> Response:
            return await self._answer(request, chat_completion)

        async def responses(request: Request) -> Response:
            return await self._answer(request, self._responses.create)

        async def models(request: Request) -> Response:
            self._sessions.get(_bearer(request))
            return _json({"object": "list", "data": [_MODEL]})

        async def model(request: Request, name: str) -> Response:
            self._sessions.get(_bearer(request))
            if name != MODEL:
                raise RequestError(f"there is no model {name!r} here; the policy is {MODEL!r}", status=404)
            return _json(_MODEL)

        async def begin(request: Request) -> Response:
            waiting = self._waiting(request)
            await _body(request)
            # The address by which the program elsewhere reaches this process, which is not the one it has for itself.
            url = f"{request.url.scheme}://{request.headers.get('host') or request.url.netloc}/v1"
            return _json({**waiting.take(), "base_url": url, "model": MODEL})

        async def reward(request: Request, name: str) -> Response:
            waiting, body = self._waiting(request), await _body(request)
            _only(body, "reward", "turn")
            waiting.reward(name, body.get("reward"), body.get("turn"))
            return _json({"id": name})

        async def end(request: Request, name: str) -> Response:
            waiting, body = self._waiting(request), await _body(request)
            _only(body, "reward", "error")
            waiting.end(name, body.get("reward"), body.get("error"))
            return _json({"id": name})

        app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", responses, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models/{name}", model, methods=["GET"], response_model=None)
        app.add_api_route("/v1/episodes/start", begin, methods=["POST"], response_model=None)
        app.add_api_route("/v1/episodes/{name}/reward", reward, methods=["POST"], response_model=None)
        app.add_api_route("/v1/episodes/{name}/end", end, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestError, _on_request_error)  # type: ignore[arg-type]
        app.add_exception_handler(StarletteHTTPException, _on_http_error)  # type: ignore[arg-type]
        app.add_exception_handler(Exception, _on_error)
        return app

    async def _answer(self, request: Request, answer: Answer) -> Response:
        session = self._sessions.get(_bearer(request))
        headers = request.headers
        try:
            body = await _body(request)
            retries = headers.get("x-stainless-retry-count", "0")
            found = await answer(session, body, retries.isdigit() and int(retries) > 0, headers.get("idempotency-key"))
        except RequestError as error:
            if session.name not in str(error):
                error.args = (f"{session.name}: {error}",)
            raise
        if isinstance(found, dict):
            return _json(found)
        return StreamingResponse(found, media_type="text/event-stream")

    def _waiting(self, request: Request) -> WaitingEpisodes:
        if self._sessions.waiting is None:
            raise RequestError("episodes are started from elsewhere only where rollout.agent=remote", status=404)
        if self._admin_key is not None and not hmac.compare_digest(_bearer(request).encode(), self._admin_key.encode()):
            raise RequestError("this is not the admin key", status=401, code="invalid_api_key")
        return self._sessions.waiting


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process, which ends this server itself."""
        yield


def admin_key(config: ProxyConfig) -> str | None:
    """The key for starting and ending episodes by HTTP.

    Raises:
        ValueError: the variable is not set, or there is none and other machines can reach the address.
    """
    if config.admin_key_env is None:
        if config.host not in LOOPBACK:
            raise ValueError(
                f"rollout.proxy.host={config.host}: other machines can reach this, so rollout.proxy.admin_key_env must name an "
                "environment variable with a key"
            )
        return None
    key = os.environ.get(config.admin_key_env, "")
    if not key:
        raise ValueError(f"rollout.proxy.admin_key_env={config.admin_key_env}: this environment variable is not set")
    return key


_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "exactrl"}


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _body(request: Request) -> dict[str, Any]:
    text = await request.body()
    try:
        body = json.loads(text or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object", code="invalid_json")
    return body


def _only(body: dict[str, Any], *names: str) -> None:
    for name in body:
        if name not in names:
            raise RequestError(f"{name}: unknown field; known: {', '.join(names)}", param=name)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, "application/json")


def _error(message: str, status: int, code: str, param: str | None = None, **headers: str) -> Response:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # A refusal stays one: the official clients would otherwise ask again after 429 and 5xx.
    headers = {"x-should-retry": "false", **headers}
    return _json({"error": {"message": message, "type": kind, "code": code, "param": param}}, status, headers)


async def _on_request_error(request: Request, error: RequestError) -> Response:
    if isinstance(error, NoneWaiting):
        return _error(str(error), error.status, error.code, **{"retry-after": "1", "x-should-retry": "true"})
    return _error(str(error), error.status, error.code, error.param)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _error(f"{what}; docs/agents.md lists what is served", error.status_code, "unknown_url")


async def _on_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error(f"{type(error).__name__}: {error}", 500, "internal_error")
