"""A single rank without torchrun, in this process; several ranks are in `test_launch.py`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from configs.schema import LauncherConfig
from tests.workers.launch.conftest import ENV
from tests.workers.launch.toy import Broken, Toy, ToyEngine
from workers.launch.group import WorkerError, WorkerGroup
from workers.launch.node_host import worker_environment
from workers.launch.service import BUSY
from workers.launch.torchrun_launcher import TorchrunLauncher, follow, follows


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[TorchrunLauncher]:
    undo = contextlib.ExitStack()
    config = LauncherConfig(name="torchrun", timeout_s=60.0)
    made = TorchrunLauncher(config, tmp_path_factory.mktemp("logs"), "cpu", ENV, [], undo)
    made.own(undo, lambda: None)
    yield made
    made.close()
    made.close()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


@pytest.fixture(scope="module")
def trainers(alone) -> WorkerGroup:
    return alone.trainer_group(functools.partial(Toy, 100), 1)


def test_a_plain_start_is_a_single_rank_that_drives(trainers):
    assert trainers.size == 1
    assert trainers.run("pid") == [os.getpid()]
    assert trainers.run("add", [1], factor=10) == [110]
    assert trainers.run("all_reduce", value=10.0) == [10.0]
    assert trainers.run("variable", ["WORLD_SIZE"]) == ["1"]
    assert not follows()


def test_its_own_worker_has_a_clock_too(trainers):
    trainers.run(BUSY)
    trainers.run("sleep", [0.01])
    ((busy),) = trainers.run(BUSY)
    assert list(busy) == ["sleep"]
    assert busy["sleep"] >= 0.01


def test_what_its_own_worker_gives_reaches_an_engine_as_a_copy(alone, trainers):
    engines = alone.engine_group("engine", ToyEngine, 1)
    weights = trainers.fetch("make_weights")
    opened = weights.value()["w"]
    opened.zero_()
    assert engines.run("load", weights=weights) == [99_999 * 100_000 / 2 + 1]
    assert engines.run("variable", ["RANK"]) == [None]
    assert trainers.run("load", weights=weights) == [99_999 * 100_000 / 2 + 1]
    assert torch.equal(opened, torch.zeros(100_000, dtype=torch.float64))


def test_failures_of_its_own_worker_have_the_workers_traceback(alone, trainers):
    with pytest.raises(
        WorkerError, match=r"(?s)trainer-0 \(pid \d+\) raised in fail\nTraceback.*toy\.py.*ValueError: here"
    ) as caught:
        trainers.run("fail", message="here")
    assert "service.py" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert trainers.run("part.double", [4]) == [8]


def test_another_number_of_ranks_and_of_arguments_is_refused(alone, trainers):
    with pytest.raises(ValueError, match="2 trainer ranks were asked for, but 1 were started"):
        alone.trainer_group(Toy, 2)
    with pytest.raises(ValueError, match=r"trainer\.add: 2 sharded arguments for 1 workers"):
        trainers.run("add", [1, 2])


def test_a_worker_of_its_own_that_cannot_be_built_says_so_each_time():
    group = WorkerGroup("broken", [], lambda: None, here=Broken)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"(?s)broken-0 .*raised in its start.*no such model"):
            group.ready()


def test_engines_see_nothing_of_the_rank_that_starts_them(monkeypatch):
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ACCELERATE_USE_CPU",
        "GROUP_RANK",
    )
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = worker_environment({"EXTRA": "too"})
    assert not set(names) & set(environment)
    assert (environment["KEPT"], environment["EXTRA"]) == ("yes", "too")


def test_ranks_that_would_each_wait_at_a_port_of_their_own_are_refused(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    assert follows()
    with pytest.raises(ValueError, match=r"MASTER_PORT=0: .*name a port"):
        follow()
