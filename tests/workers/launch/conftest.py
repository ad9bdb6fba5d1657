"""Toy workers in processes of this machine, started once for the files of this folder."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.local_launcher import LocalLauncher
from tests.workers.launch.toy import Toy, ToyEngine
from workers.launch.group import WorkerGroup

ENV = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": ""}


@pytest.fixture(scope="package")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    made = LocalLauncher(tmp_path_factory.mktemp("toys"), ENV)
    yield made
    made.close()


@pytest.fixture(scope="package")
def toys(launcher: LocalLauncher) -> WorkerGroup:
    """Two workers that are called; whoever uses them leaves them as they were."""
    return launcher.engine_group("toy", functools.partial(Toy, 100), 2)


@pytest.fixture(scope="package")
def engines(launcher: LocalLauncher) -> WorkerGroup:
    """Two engines that take requests."""
    return launcher.engine_group("engine", ToyEngine, 2)


@pytest.fixture
def start(launcher: LocalLauncher) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts groups for one test, which may do to them what it likes."""
    made: list[WorkerGroup] = []

    def begin(name: str, factory: Callable[[], object] = Toy, replicas: int = 1, **options: float) -> WorkerGroup:
        made.append(launcher.engine_group(name, factory, replicas, **options))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for group in made:
        group.close()


def gone(pids: list[int], within_s: float = 3.0) -> bool:
    """Whether these processes end in time."""
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
