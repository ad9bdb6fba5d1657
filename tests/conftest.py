"""Fixtures that several folders share: engines start once a session, in processes of their own, and only when a test asks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import engine_lab
from workers.launch.fork_server import ForkServer
from workers.launch.processes import ProcessGroup, child_environment
from workers.vllm_process import PRELOAD


class Lab:
    """Calls the methods of an `EngineLab` in its process, and returns their results."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda **arguments: self._group.run(method, None, **arguments)[0]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Has imported vLLM, once for all labs."""
    server = ForkServer(child_environment(engine_lab.ENV), PRELOAD, tmp_path_factory.mktemp("forks") / "server.log")
    yield server
    server.close()


def _open(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, name: str, **settings: Any
) -> Iterator[Lab]:
    factory = functools.partial(engine_lab.EngineLab, **settings)
    group = ProcessGroup(name, factory, 1, engine_lab.ENV, tmp_path_factory.mktemp(name), fork_server=fork_server)
    yield Lab(group)
    group.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Lab]:
    """Engines under full determinism."""
    yield from _open(tmp_path_factory, fork_server, "lab")


@pytest.fixture(scope="session")
def stock_lab(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Lab]:
    """Engines with vLLM's own linear and attention."""
    yield from _open(tmp_path_factory, fork_server, "stock_lab", full_determinism=False)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Directory and transformers model of a random policy with tied embeddings."""
    path = tmp_path_factory.mktemp("policy")
    return str(path), engine_lab.make_policy(path)
