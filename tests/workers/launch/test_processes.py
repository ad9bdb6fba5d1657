"""Workers in child processes: what reaches them, what comes back, and how they end."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.workers.launch.toy import Broken, Slow, Stubborn, Toy
from workers.launch.group import WorkerError
from workers.launch.processes import ProcessGroup, import_path

ENV = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}


def start(tmp_path: Path, factory=Toy, replicas: int = 2, **options) -> ProcessGroup:
    return ProcessGroup("toy", factory, replicas, ENV, tmp_path, **options)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


def gone(pids: list[int], within_s: float = 3.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_each_worker_gets_its_argument_and_all_get_the_keywords(tmp_path):
    group = start(tmp_path, functools.partial(Toy, 100))
    assert group.run("add", [1, 2], factor=10) == [110, 120]
    assert group.run("add", [1, 2]) == [111, 122]
    group.close()


def test_dotted_names_reach_into_attributes(group):
    assert group.run("part.double", [3, 4]) == [6, 8]


def test_workers_live_in_processes_of_their_own(group):
    assert group.run("pid") == group.pids
    assert len({*group.pids, os.getpid()}) == 3


def test_variables_are_in_place_before_the_interpreter_starts(group):
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert group.run("text_hash") == [int(expected.stdout)] * 2
    assert group.run("variable", ["PYTHONHASHSEED", "OMP_NUM_THREADS"]) == ["7", "1"]


def test_a_rank_hides_its_own_identity_from_its_engines(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    group = start(tmp_path, replicas=1, member_env=lambda number: {"DEVICE": f"d{number}"}, numbers=[5])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"):
        assert group.run("variable", [name]) == [None]
    assert group.run("variable", ["DEVICE"]) == ["d5"]
    assert (tmp_path / "toy-5.log").exists()
    group.close()


def test_output_of_python_and_of_native_code_is_in_the_log(tmp_path):
    group = start(tmp_path, replicas=1)
    group.run("speak")
    text = (tmp_path / "toy-0.log").read_text()
    assert all(line in text for line in ("printed by python", "complained by python", "put by C"))
    group.close()


VALUES = [
    {"a": [1, 2.5, None, "x", b"y"], "t": (True, 10**30)},
    torch.arange(6, dtype=torch.int64).reshape(2, 3),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.arange(12).reshape(3, 4).t()[1:],
    torch.full((300_000,), float("nan")),
    torch.nn.Parameter(torch.ones(3)),
    np.arange(200_000, dtype=np.int32).reshape(-1, 4),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_went(group, value):
    for back in group.run("echo", [value, value]):
        assert type(back) is type(value)
        if isinstance(value, torch.Tensor):
            assert back.dtype == value.dtype
            assert back.shape == value.shape
            assert torch.equal(back.isnan(), value.isnan())
            assert torch.equal(back.nan_to_num(), value.nan_to_num())
        elif isinstance(value, np.ndarray):
            assert np.array_equal(back, value)
        else:
            assert back == value


def test_a_receiver_may_write_to_what_it_received(group):
    large = torch.ones(1_000_000)
    first, second = group.run("negate", [large, large])
    assert torch.equal(large, torch.ones(1_000_000))
    assert torch.equal(first, -large)
    first.zero_()
    assert torch.equal(second, -large)


def test_an_exported_value_is_passed_to_another_group(group, tmp_path):
    handle = group.export("make_weights")
    other = start(tmp_path, replicas=1)
    assert other.run("load", weights=handle) == [99_999 * 100_000 / 2 + 1]
    other.close()


def test_the_wrong_number_of_arguments_is_refused(group):
    with pytest.raises(ValueError, match="3 sharded arguments for 2 workers"):
        group.run("add", [1, 2, 3])


def test_an_exception_carries_the_workers_own_traceback_and_the_group_goes_on(group):
    with pytest.raises(WorkerError) as caught:
        group.run("fail_if", [False, True])
    message = str(caught.value)
    assert "toy-1" in message
    assert "ValueError: only one of us" in message
    assert "toy.py" in message
    assert "child.py" not in message
    assert group.run("part.double", [1, 2]) == [2, 4]


def test_a_failure_does_not_wait_for_the_others_and_their_late_answers_are_not_mistaken(tmp_path):
    group = start(tmp_path)
    with pytest.raises(WorkerError):
        group.run("sleep", [1.0, "not a number"])
    assert group.run("part.double", [1, 2]) == [2, 4]
    group.close()


def test_an_unknown_method_and_what_cannot_be_pickled_are_errors(group):
    with pytest.raises(WorkerError, match="no attribute 'nothing'"):
        group.run("nothing")
    with pytest.raises(Exception, match="pickle"):
        group.run("echo", [1, lambda: 1])
    with pytest.raises(WorkerError, match="pickle"):
        group.run("unpicklable")
    assert group.run("part.double", [1, 2]) == [2, 4]


@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [("crash", None, ["SIGSEGV", "last words", "Segmentation fault"]), ("leave", [3], ["exited with code 3"])],
)
def test_a_child_that_dies_is_named_with_its_signal_or_code_and_its_log(tmp_path, method, argument, words):
    group = start(tmp_path, replicas=1)
    with pytest.raises(WorkerError) as caught:
        group.run(method, argument)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(WorkerError):
        group.run("pid")
    group.close()


def test_a_killed_child_is_noticed_within_a_second_although_the_others_are_busy(tmp_path):
    group = start(tmp_path)
    victim = group.pids[1]
    killed = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(WorkerError, match=r"toy-1 .* was killed by SIGKILL"):
        group.run("sleep", [60.0, 60.0])
    assert time.monotonic() - killed[0] < 1.0
    group.close()


def test_a_failure_at_start_shows_the_traceback_at_once_and_leaves_nothing(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(WorkerError) as caught:
        start(tmp_path, Broken)
    assert "RuntimeError: no such model" in str(caught.value)
    assert "building" in str(caught.value)
    assert gone([child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before])


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(WorkerError, match=r"not ready after 1 s \(2 of 2 were not\)"):
        start(tmp_path, Slow, start_timeout_s=1.0)


def test_a_group_may_start_while_others_do_and_its_first_call_says_what_went_wrong(tmp_path):
    group = start(tmp_path, functools.partial(Toy, 1), wait=False)
    broken = start(tmp_path, Broken, wait=False)
    assert group.run("add", [1, 2]) == [2, 3]
    for _ in range(2):
        with pytest.raises(WorkerError):
            broken.run("pid")
    assert gone(broken.pids)
    group.close()


def test_close_ends_stubborn_children_and_their_children(tmp_path):
    group = start(tmp_path, Stubborn, replicas=1)
    (sleeper,) = group.run("spawn_sleeper")
    began = time.monotonic()
    group.close()
    group.close()
    assert time.monotonic() - began < 8
    assert gone([*group.pids, sleeper], within_s=0.5)
    with pytest.raises(WorkerError, match="after the group was closed"):
        group.run("pid")


PARENT = """
    import signal, sys, time
    from pathlib import Path
    from tests.workers.launch.toy import Toy
    from workers.launch.processes import ProcessGroup

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        group = ProcessGroup("toy", Toy, 2, {}, Path(sys.argv[1]))
        print(*group.pids, *group.run("spawn_sleeper"), flush=True)
        group.run("sleep", [100.0, 100.0])
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_and_grandchildren_die_with_their_parent(tmp_path, signum):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4
    parent.send_signal(signum)
    parent.wait(10)
    assert gone(pids)


LEFT_BEHIND = """
    import os, signal, sys
    from pathlib import Path
    from tests.workers.launch.toy import Toy
    from workers.launch.processes import ProcessGroup

    if __name__ == "__main__":
        group = ProcessGroup("toy", Toy, 1, {}, Path(sys.argv[1]))
        print(*group.pids, *group.run("spawn_sleeper"), flush=True)
        (child,) = group._children
        child.ask_to_stop()
        child.process.wait(30)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_stopped_worker_leaves_behind_ends_although_its_parent_is_killed_first(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(LEFT_BEHIND))
    env = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert gone(pids)


def test_a_hundred_megabytes_there_and_back(group):
    tensor = torch.ones(25_000_000)
    group.run("pid")
    began = time.perf_counter()
    group.run("echo", [tensor, 0])
    large = time.perf_counter() - began
    began = time.perf_counter()
    group.run("load", weights={"w": tensor, "b": tensor[0]})
    shared = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(100):
        group.run("pid")
    small = (time.perf_counter() - began) / 100
    print(
        f"processes: 100 MB there and back {large * 1e3:.0f} ms, to two at once {shared * 1e3:.0f} ms, a call {small * 1e6:.0f} us"
    )
