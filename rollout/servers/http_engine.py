"""What rollout engines that are HTTP servers have in common.

    worker process   main thread        the methods of `rollout.engines.RolloutEngine`
                     thread "server"    an event loop with one HTTP client: requests that run together, and a look at the server's health
    the server       somewhere          tokens in, tokens and log-probabilities out; reads new weights from a file

A subclass says how its server is asked. Nothing is sent twice: a lost answer is an error, and the run goes on from its checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from rollout.sampling import check_request
from rollout.types import Generation, GenerationRequest
from rollout.weights import check_weights, checkpoint_shapes
from workers.checkpoint_files import SINGLE_FILE, tensor_files

if TYPE_CHECKING:
    from torch import Tensor

CALL_S = 600.0
"""Longest wait for an answer that is no generation (reading new weights, for example)."""
WATCH_S = 5.0
"""Seconds between two looks at a server that has requests."""
SILENT_S = 60.0
"""A server that answers no look for so long has failed."""
IDLE_S = 1.0
"""Seconds until an unused connection is closed: sooner than the servers do it (5 s), so that no request meets a closing one."""

Result = TypeVar("Result")


class ServerError(RuntimeError):
    """A rollout server is gone, silent, or does something else than it was asked; names it."""


class Connection:
    """Calls of one server.

    Args:
        address: `http://host:port`, or `unix:/path` for a socket of this machine.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=limits),
            base_url="http://server" if socket else address,
            trust_env=False,  # a proxy that is set for the internet has no business here
        )

    async def call(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = CALL_S, **query: Any
    ) -> Any:
        """The JSON of an answer; None for an empty one, the text of any other.

        Raises:
            ServerError: no answer, or one that says no.
        """
        what = f"{self.address} {method} {path}"
        try:
            response = await self._client.request(method, path, json=body, params=query or None, timeout=timeout_s)
        except httpx2.TimeoutException:
            raise ServerError(f"{what}: no answer within {timeout_s:g} s") from None
        except httpx2.TransportError as error:
            raise ServerError(f"{what}: {error or type(error).__name__}: the server is gone") from None
        if response.status_code != 200:
            raise ServerError(f"{what}: answered {response.status_code}: {response.text[:2000]}")
        if response.headers.get("content-type", "").startswith("application/json"):
            return response.json()
        return response.text or None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class HTTPEngine(ABC):
    """A rollout engine behind HTTP (see `rollout.engines.RolloutEngine`)."""

    work = "generate"

    def __init__(
        self, address: str, model_path: str | Path, *, max_model_len: int, dtype: str, weights_dir: str | None
    ) -> None:
        """Args:
        address: see `Connection`.
        model_path: checkpoint directory that the server has loaded.
        max_model_len: prompt and response tokens together.
        dtype: the server's compute type.
        weights_dir: folder that this process and the server see, for new weights; None takes the system's folder for temporary files.
        """
        self.connection = Connection(address)
        self._model_path = Path(model_path)
        self._shapes = checkpoint_shapes(model_path)
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._weights_dir = weights_dir
        self._version = 0
        # Two runs on one server would overwrite each other's weights; with a name of its own each notices.
        self._client_name = secrets.token_hex(4)
        self._failure: Exception | None = None
        self._done: deque[tuple[int, Generation]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `step` has something; see `workers.launch.service.Service`."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    # --- what a subclass says --------------------------------------------------------------------------------------

    @abstractmethod
    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """What the server is sent for a request.

        Raises:
            ValueError: it can't be served as asked.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest, body: dict[str, Any]) -> Generation:
        """Ask the server."""

    @abstractmethod
    async def update(self, folder: Path, label: str) -> None:
        """Make the server read its weights from a checkpoint folder, call them `label`, and forget its prefix cache."""

    @abstractmethod
    async def weights_label(self) -> str:
        """How the server calls the weights that it has."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What is in force in the server, as read back from it."""

    def epitaph(self) -> str:
        """What is known of a server that does not answer; empty when nothing is."""
        return ""

    # --- rollout.engines.RolloutEngine -----------------------------------------------------------------------------

    def add(self, number: int, request: GenerationRequest) -> None:
        """Take a request; see `RolloutEngine.add`."""
        if self._failure is not None:
            raise ServerError(f"the server has failed before: {self._failure}")
        check_request(request, self._max_model_len)
        body = self.body(request)
        self._loop.call_soon_threadsafe(lambda: self._start(self._ask(number, request, body)))

    def step(self) -> list[tuple[int, Generation]]:
        """What has finished; see `RolloutEngine.step`.

        Raises:
            ServerError: the server is gone or silent.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)
        if self._failure is not None:
            raise self._failure
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights; see `RolloutEngine.load_weights`.

        Raises:
            ServerError: the server did not take them, or has others afterwards.
            OSError: the file can't be written.
        """
        check_weights(tensors, self._shapes)
        with self._checkpoint(tensors) as folder:
            self.send(self.update(folder, self.label(version)))
        self._version = version
        self.send(self.check_label())

    def close(self) -> None:
        """Drop what is running and the connections."""

        async def end() -> None:
            self._watcher.cancel()
            for task in self._tasks:
                task.cancel()
            await self.connection.close()

        with contextlib.suppress(TimeoutError):
            self.send(end(), 5.0)

    # --- for subclasses --------------------------------------------------------------------------------------------

    def label(self, version: int) -> str:
        """The name of weights at the server."""
        return f"{self._client_name}-{version}"

    async def check_label(self, found: str | None = None) -> None:
        """Refuse a server whose weights are not those that this run gave it.

        Args:
            found: their name; None asks the server.
        """
        found, wanted = found or await self.weights_label(), self.label(self._version)
        if found != wanted:
            raise ServerError(
                f"{self.connection.address} has the weights {found!r} instead of {wanted!r}; does another run use it?"
            )

    def send(self, call: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Wait for a call of the server. What a dead one left behind is added to the error."""
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout_s)
        except ServerError as error:
            raise self._told(error) from None

    def load_checkpoint(self) -> None:
        """Give the server the weights of the model directory, as version 0: it may have those of another run."""
        from safetensors import safe_open

        tensors = {}
        for name, file in tensor_files(self._model_path).items():
            with safe_open(str(file), framework="pt") as opened:
                tensors[name] = opened.get_tensor(name)
        self.load_weights(tensors, 0)

    # --- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _checkpoint(self, tensors: Mapping[str, Tensor]) -> Iterator[Path]:
        """A checkpoint folder with these weights and the model's own settings and tokenizer, for as long as the block runs."""
        from safetensors.torch import save_file

        folder = Path(tempfile.mkdtemp(prefix="exactrl-weights-", dir=self._weights_dir))
        try:
            folder.chmod(0o755)  # the server may be another user's
            for file in self._model_path.iterdir():
                if file.suffix == ".json" and not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
            stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(stored, folder / SINGLE_FILE, {"format": "pt"})
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, number: int, request: GenerationRequest, body: dict[str, Any]) -> None:
        try:
            generation = await self.generate(request, body)
        except Exception as error:
            self._fail(error)
            return
        self._done.append((number, generation))
        os.eventfd_write(self.wakes, 1)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._tasks:
                try:
                    await self.connection.call("GET", "/health", timeout_s=SILENT_S)
                except ServerError as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = self._told(error) if isinstance(error, ServerError) else error
            for task in self._tasks:
                if task is not asyncio.current_task(self._loop):
                    task.cancel()
            os.eventfd_write(self.wakes, 1)

    def _told(self, error: ServerError) -> ServerError:
        epitaph = self.epitaph()
        return ServerError(f"{error}; {epitaph}") if epitaph else error
