"""Workers as Ray actors, on one real local Ray."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tests.workers.launch.test_processes import gone
from tests.workers.launch.toy import Broken, Slow, Stubborn, Toy
from workers.launch.group import Modules, WorkerError
from workers.launch.ray_launcher import RayLauncher
from workers.launch.ray_values import RayHandle
from workers.launch.resources import Needs, ResourceError

NEEDS = Needs(slots=2, threads=1, gpus_per_slot=0, reason="the tests' two ranks")
ENV = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "3"}
MODULES = Modules(ranks=["colorsys"], engines=["chunk"])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def launcher(run_dir):
    before = {child.pid for child in psutil.Process().children(recursive=True)}  # other tests' engines live on
    made = RayLauncher(run_dir, NEEDS, num_cpus=3, process_env=ENV, timeout_s=60.0, modules=MODULES)
    yield made
    made.close()
    assert not [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


@pytest.fixture(scope="module")
def trainers(launcher):
    return launcher.trainer_group(functools.partial(Toy, 100), 2)


@pytest.fixture(scope="module")
def engines(launcher):
    return launcher.engine_group("engine", Toy, 2, {"EXTRA": "yes"})


def test_each_worker_gets_its_argument_and_all_get_the_keywords(trainers):
    assert trainers.run("add", [1, 2], factor=10) == [110, 120]
    assert trainers.run("add", [1, 2]) == [111, 122]
    assert trainers.run("part.double", [3, 4]) == [6, 8]


def test_trainer_ranks_are_in_one_process_group(trainers):
    assert trainers.run("all_reduce", value=10.0) == [21.0, 21.0]
    assert trainers.run("variable", ["RANK", "RANK"]) == ["0", "1"]
    assert trainers.run("variable", ["WORLD_SIZE", "MASTER_ADDR"])[0] == "2"


def test_variables_are_in_place_before_the_interpreter_starts(trainers, engines):
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert engines.run("text_hash") + trainers.run("text_hash") == [int(expected.stdout)] * 4
    assert engines.run("variable", ["EXTRA", "OMP_NUM_THREADS"]) == ["yes", "3"]
    assert engines.run("variable", ["RANK", "WORLD_SIZE"]) == [None, None]


def test_ranks_and_engines_are_forks_of_what_was_imported_while_ray_started(launcher, trainers, engines):
    assert trainers.run("imported", ["colorsys", "chunk"]) == [True, False]
    alike = launcher.engine_group("alike", Toy, 2, {})
    assert alike.run("imported", ["colorsys", "chunk"]) == [True, True]
    assert alike.run("imported", ["ray", "ray"]) == [False, False]
    assert engines.run("imported", ["colorsys", "chunk"]) == [False, False]  # another environment: no fork
    alike.close()


def test_engines_share_the_slots_of_the_ranks_and_are_processes_of_their_own(trainers, engines):
    assert len({os.getpid(), *trainers.run("pid"), *engines.run("pid")}) == 5


def test_output_of_python_and_of_native_code_is_in_the_log(engines, run_dir):
    engines.run("speak")
    for i in range(2):
        text = (run_dir / "logs" / f"engine-{i}.log").read_text()
        assert all(line in text for line in ("printed by python", "complained by python", "put by C"))


def test_an_exported_value_is_passed_to_another_group_without_coming_here(trainers, engines):
    handle = trainers.export("make_weights")
    assert isinstance(handle, RayHandle)
    assert engines.run("load", weights=handle) == [99_999 * 100_000 / 2 + 1] * 2


def test_a_receiver_may_write_to_what_it_received(engines):
    large = torch.ones(1_000_000)
    first, second = engines.run("negate", [large, large])
    assert torch.equal(large, torch.ones(1_000_000))
    first.zero_()
    assert torch.equal(second, -large)


def test_an_exception_carries_the_workers_own_traceback_and_log_and_the_group_goes_on(engines):
    with pytest.raises(WorkerError) as caught:
        engines.run("fail", message="only a test")
    message = str(caught.value)
    assert "engine-" in message
    assert "ValueError: only a test" in message
    assert "toy.py" in message
    assert "about to fail" in message
    assert "ray_group.py" not in message
    assert "child.py" not in message
    assert engines.run("part.double", [1, 2]) == [2, 4]


def test_a_rank_that_raises_is_not_waited_for_although_the_other_is_stuck(trainers):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="TypeError"):
        trainers.run("sleep", [3.0, "not a number"])
    assert time.monotonic() - began < 2.0
    assert trainers.run("part.double", [1, 2]) == [2, 4]


def test_the_wrong_number_of_arguments_is_refused(engines):
    with pytest.raises(ValueError, match="3 sharded arguments for 2 workers"):
        engines.run("add", [1, 2, 3])


def test_more_workers_than_slots_are_refused_at_once(launcher):
    with pytest.raises(ResourceError, match="3 slots needed, 2 reserved"):
        launcher.engine_group("many", Toy, 3, {})


def test_a_cluster_that_is_too_small_is_told_at_once(launcher, run_dir):
    needs = Needs(slots=64, threads=1, gpus_per_slot=0, reason="a test")
    with pytest.raises(ResourceError, match="64 CPUs needed, 3 available on the Ray cluster"):
        RayLauncher(run_dir, needs)
    with pytest.raises(ResourceError, match="1 GPUs needed, 0 available"):
        RayLauncher(run_dir, Needs(1, 1, 1, "a test"))


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "ray_address=127.0.0.1:1: no Ray cluster answers there"), ("ray://head:10001", "client is not")],
)
def test_an_address_without_a_cluster_is_told_at_once(run_dir, address, message):
    program = (
        "import sys; from pathlib import Path; from workers.launch.ray_launcher import RayLauncher; from workers.launch.resources import Needs; "
        "RayLauncher(Path(sys.argv[1]), Needs(1, 1, 0, 'one'), address=sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir), address], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_failure_at_start_shows_the_traceback_and_the_log(launcher):
    with pytest.raises(WorkerError) as caught:
        launcher.engine_group("broken", Broken, 1, {})
    assert "RuntimeError: no such model" in str(caught.value)
    assert "building" in str(caught.value)


def test_a_start_that_takes_too_long_is_ended(launcher):
    with pytest.raises(WorkerError, match=r"slow-0 \(pid \d+\) was not ready after 4 s"):
        launcher.engine_group("slow", Slow, 1, {}, start_timeout_s=4.0)


def test_a_killed_worker_is_noticed_within_seconds_although_the_others_are_busy(launcher):
    group = launcher.engine_group("victim", Toy, 2, {})
    victim = group.run("pid")[1]
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=rf"victim-1 \(pid {victim}\) was killed by SIGKILL .* during sleep"):
        group.run("sleep", [60.0, 60.0])
    assert time.monotonic() - began < 5.0
    group.close()


def test_a_host_that_is_killed_is_named_and_its_workers_end(launcher, run_dir):
    other = RayLauncher(run_dir / "other", Needs(1, 1, 0, "a test"), process_env=ENV, modules=MODULES)
    group = other.engine_group("lost", Toy, 1, {})
    pids = [*group.run("pid"), *group.run("spawn_sleeper")]
    ((_, host),) = ray.get(other._places)
    assert host not in pids
    threading.Timer(0.5, os.kill, (host, signal.SIGKILL)).start()
    with pytest.raises(WorkerError, match="the process that hosts lost died during sleep"):
        group.run("sleep", [60.0])
    assert gone(pids)
    other.close()


def test_close_ends_stubborn_workers_and_their_children(launcher):
    group = launcher.engine_group("stubborn", Stubborn, 1, {})
    pids = [*group.run("pid"), *group.run("spawn_sleeper")]
    began = time.monotonic()
    group.close()
    group.close()
    assert time.monotonic() - began < 8.0
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    with pytest.raises(WorkerError, match="after the group was closed"):
        group.run("pid")


def test_a_hundred_megabytes_there_and_back(engines):
    tensor = torch.ones(25_000_000)
    began = time.perf_counter()
    engines.run("echo", [tensor, 0])
    large = time.perf_counter() - began
    began = time.perf_counter()
    engines.run("load", weights={"w": tensor, "b": tensor[0]})
    shared = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(50):
        engines.run("pid")
    small = (time.perf_counter() - began) / 50
    print(
        f"ray: 100 MB there and back {large * 1e3:.0f} ms, to two at once {shared * 1e3:.0f} ms, a call {small * 1e6:.0f} us"
    )
