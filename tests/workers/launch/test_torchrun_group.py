"""A single rank without a launcher, in this process; several ranks are in `test_launch.py`."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist

from tests.workers.launch.toy import Broken, Toy
from workers.launch.group import WorkerError
from workers.launch.torchrun_group import TorchrunLauncher


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    made = TorchrunLauncher(tmp_path_factory.mktemp("run"), process_env={"PYTHONHASHSEED": "7"}, timeout_s=60.0)
    yield made
    made.close()
    made.close()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


@pytest.fixture(scope="module")
def trainers(launcher):
    return launcher.trainer_group(functools.partial(Toy, 100), 1)


@pytest.fixture(scope="module")
def engines(launcher):
    return launcher.engine_group("engine", Toy, 2, {"EXTRA": "yes"})


def test_a_plain_start_is_a_single_rank(launcher, trainers):
    assert launcher.is_main
    assert trainers.size == 1
    assert trainers.run("all_reduce", value=10.0) == [10.0]
    assert trainers.run("add", [1], factor=10) == [110]
    assert trainers.run("pid") == [os.getpid()]


def test_another_number_of_ranks_is_refused(launcher):
    with pytest.raises(ValueError, match="2 trainer ranks were asked for, but 1 were started"):
        launcher.trainer_group(Toy, 2)


def test_engines_are_processes_of_their_own_with_their_variables(engines):
    assert len({os.getpid(), *engines.run("pid")}) == 3
    assert engines.run("variable", ["PYTHONHASHSEED", "EXTRA"]) == ["7", "yes"]
    assert engines.run("variable", ["RANK", "MASTER_PORT"]) == [None, None]


def test_results_are_copies_so_that_the_loop_cannot_touch_a_workers_tensors(trainers):
    kept = torch.zeros(3)
    (given,) = trainers.run("echo", [kept])
    given.fill_(1.0)
    assert torch.equal(kept, torch.zeros(3))


def test_an_exported_value_is_passed_to_engines(trainers, engines):
    assert engines.run("load", weights=trainers.export("make_weights")) == [99_999 * 100_000 / 2 + 1] * 2


def test_failures_carry_the_workers_own_traceback(launcher, trainers, engines):
    with pytest.raises(WorkerError, match=r"(?s)trainer-0 .*toy.py.*ValueError: here"):
        trainers.run("fail", message="here")
    with pytest.raises(WorkerError, match=r"(?s)engine-\d .*toy.py.*ValueError: there"):
        engines.run("fail", message="there")
    with pytest.raises(WorkerError, match="no such model"):
        launcher.engine_group("broken", Broken, 2, {})
    with pytest.raises(WorkerError, match="no such model"):
        launcher.trainer_group(Broken, 1)


def test_the_main_process_runs_what_is_meant_for_it(launcher):
    assert launcher.on_main(lambda: "result") == "result"
    with pytest.raises(ValueError, match="not a number"):
        launcher.on_main(lambda: int("not a number"))


def test_the_wrong_number_of_arguments_is_refused(trainers, engines):
    with pytest.raises(ValueError, match="2 sharded arguments for 1 ranks"):
        trainers.run("add", [1, 2])
    with pytest.raises(ValueError, match="1 sharded arguments for 2 workers"):
        engines.run("add", [1])
