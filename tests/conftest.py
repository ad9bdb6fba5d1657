"""Fixtures that several folders share: engines start once a session, in processes of their own, and only when a test asks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import engine_lab
from tests.local_launcher import LocalLauncher
from tests.two_machines import Machine, NotAllowed, two_machines
from workers.launch.group import WorkerGroup
from workers.vllm_process import PRELOAD


class Lab:
    """Calls the methods of an `EngineLab` in its process, and returns their results."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda **arguments: self._group.run(method, None, **arguments)[0]


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    """Starts the labs; its fork server has imported vLLM, once for all."""
    launcher = LocalLauncher(tmp_path_factory.mktemp("labs"), engine_lab.ENV, PRELOAD, silence_s=0)
    yield launcher
    launcher.close()


def _open(laboratory: LocalLauncher, name: str, **settings: Any) -> Iterator[Lab]:
    group = laboratory.engine_group(name, functools.partial(engine_lab.EngineLab, **settings), 1)
    yield Lab(group)
    group.close()


@pytest.fixture(scope="session")
def lab(laboratory: LocalLauncher) -> Iterator[Lab]:
    """Engines under full determinism."""
    yield from _open(laboratory, "lab")


@pytest.fixture(scope="session")
def stock_lab(laboratory: LocalLauncher) -> Iterator[Lab]:
    """Engines with vLLM's own linear and attention."""
    yield from _open(laboratory, "stock_lab", full_determinism=False)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Directory and transformers model of a random policy with tied embeddings."""
    path = tmp_path_factory.mktemp("policy")
    return str(path), engine_lab.make_policy(path)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a network of their own; skips with the reason where they can't be made."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_machines())
        except NotAllowed as error:
            pytest.skip(str(error))
        yield made
