"""Workers in processes of their own: what reaches them, what comes back, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from tests.workers.launch.conftest import gone
from tests.workers.launch.toy import Broken, Slow, Stubborn, Toy
from workers.launch.group import WorkerError, WorkerGroup
from workers.launch.node_host import import_path
from workers.launch.service import BUSY


def test_each_worker_gets_its_argument_and_all_get_the_keywords(start):
    group = start("adders", Toy, 2)
    assert group.run("add", [1, 2], factor=10) == [10, 20]
    assert group.run("add", [1, 2]) == [11, 22]


def test_dotted_names_reach_into_attributes(toys):
    assert toys.run("part.double", [3, 4]) == [6, 8]


def test_workers_live_in_processes_of_their_own(toys):
    assert len({*toys.run("pid"), os.getpid()}) == 3


def test_variables_are_in_place_before_the_interpreter_starts(toys):
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert toys.run("text_hash") == [int(expected.stdout)] * 2
    assert toys.run("variable", ["PYTHONHASHSEED", "OMP_NUM_THREADS"]) == ["7", "1"]


def test_output_of_python_and_of_native_code_is_in_the_log(start, launcher):
    start("speaker").run("speak")
    text = (launcher.logs / "speaker-0.log").read_text()
    assert all(line in text for line in ("printed by python", "complained by python", "put by C"))


def test_a_large_value_goes_to_all_and_each_may_write_to_its_own(toys):
    large = torch.ones(1_000_000)
    first, second = toys.run("negate", tensor=large)
    assert torch.equal(large, torch.ones(1_000_000))
    first.zero_()
    assert torch.equal(second, -large)


def test_a_fetched_value_is_passed_to_another_group_unopened(toys, engines):
    blob = toys.fetch("make_weights")
    assert engines.run("load", weights=blob) == [99_999 * 100_000 / 2 + 1] * 2
    assert [future.result().value() for future in engines.send("load", weights=blob)] == [99_999 * 100_000 / 2 + 1] * 2


def test_the_wrong_number_of_arguments_is_refused(toys):
    with pytest.raises(ValueError, match=r"toy\.add: 3 sharded arguments for 2 workers"):
        toys.run("add", [1, 2, 3])


def test_an_exception_carries_the_workers_own_traceback_and_log_and_the_group_goes_on(toys):
    with pytest.raises(WorkerError) as caught:
        toys.run("fail_if", [False, True])
    message = str(caught.value)
    assert message.startswith(f"toy-1 (pid {toys.run('pid')[1]}) raised in fail_if\n")
    assert "ValueError: only one of us" in message
    assert "toy.py" in message
    assert "service.py" not in message
    with pytest.raises(WorkerError, match=r"(?s)ValueError: me.*the end of .*toy-\d\.log\nabout to fail\n---"):
        toys.run("fail", message="me")
    assert toys.run("part.double", [1, 2]) == [2, 4]


def test_what_is_raised_need_not_be_an_exception(toys):
    with pytest.raises(WorkerError, match=r"(?s)toy-\d .*toy\.py.*Unusual: no Exception"):
        toys.run("fail_unusually")
    with pytest.raises(WorkerError, match=r"(?s)trainer-0 .*toy\.py.*Unusual: no Exception"):
        WorkerGroup("trainer", [], lambda: None, here=Toy).run("fail_unusually")
    assert toys.run("part.double", [1, 2]) == [2, 4]


def test_a_failure_does_not_wait_for_the_others_and_their_late_answers_are_not_mistaken(toys):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="TypeError"):
        toys.run("sleep", [2.0, "not a number"])
    assert time.monotonic() - began < 2.0
    assert toys.run("part.double", [1, 2]) == [2, 4]


def test_what_cannot_be_pickled_is_refused_before_anyone_is_called(toys):
    before = toys.run("add", [0, 0])
    with pytest.raises(Exception, match="pickle"):
        toys.run("add", [1, lambda: 1])
    with pytest.raises(Exception, match="pickle"):
        toys.run("add", [1, 1], factor=lambda: 1)
    assert toys.run("add", [0, 0]) == before
    with pytest.raises(WorkerError, match="pickle"):
        toys.run("unpicklable")


def test_an_unknown_method_is_an_error(toys):
    with pytest.raises(WorkerError, match="no attribute 'nothing'"):
        toys.run("nothing")


def test_threads_may_call_at_the_same_time(toys):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: toys.run("echo", [i, -i]), range(200)))
    assert found == [[i, -i] for i in range(200)]


def test_seconds_inside_each_method_are_counted_until_they_are_asked_for(toys):
    toys.run(BUSY)
    toys.run("sleep", [0.2, 0.0])
    first, second = toys.run(BUSY)
    assert set(first) == set(second) == {"sleep"}
    assert first["sleep"] >= 0.2 > second["sleep"]
    assert toys.run(BUSY) == [{}, {}]


@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [
        ("crash", None, ["dies-0 (pid ", "was killed by SIGSEGV", "during crash", "last words", "Segmentation fault"]),
        ("leave", [3], ["exited with code 3 during leave"]),
    ],
)
def test_a_worker_that_dies_is_named_with_its_signal_or_code_and_its_log(start, method, argument, words):
    group = start("dies")
    with pytest.raises(WorkerError) as caught:
        group.run(method, argument)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(WorkerError, match=words[-1] if method == "leave" else "SIGSEGV"):
        group.run("pid")


def test_a_killed_worker_is_noticed_at_once_although_the_others_are_busy_and_it_has_children(start):
    group = start("victim", Toy, 2)
    victim = group.run("pid")[1]
    group.run("spawn_sleeper")  # a child that lives on must not hold the line open
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=rf"victim-1 \(pid {victim}\) was killed by SIGKILL .* during sleep"):
        group.run("sleep", [60.0, 60.0])
    assert time.monotonic() - began < 5.0


def test_a_failure_at_start_shows_traceback_and_log_and_leaves_nothing(start):
    group = start("broken", Broken, 2)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for _ in range(2):
        with pytest.raises(
            WorkerError, match=r"(?s)broken-\d \(pid \d+\) raised in its start.*toy.py.*no such model.*building"
        ):
            group.run("pid")
    assert gone([child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before])


def test_a_start_that_takes_too_long_is_ended(start):
    group = start("slow", Slow, start_timeout_s=3.0)
    with pytest.raises(WorkerError, match=r"slow-0 .*was not ready after 3 s"):
        group.ready()


def test_a_factory_that_cannot_be_pickled_starts_nothing(launcher):
    before = launcher.host.pids()
    with pytest.raises(Exception, match="pickle"):
        launcher.engine_group("local", lambda: 1, 1)
    assert launcher.host.pids() == before


def test_groups_start_while_others_work_and_take_about_as_long_as_they_say(start):
    groups = [start(f"starting{i}") for i in range(2)]
    assert [group.run("part.double", [i]) for i, group in enumerate(groups)] == [[0], [2]]
    assert all(0 < seconds < 60 for group in groups for seconds in group.start_s)


def test_close_ends_stubborn_workers_and_their_children(start):
    group = start("stubborn", Stubborn)
    pids = [*group.run("pid"), *group.run("spawn_sleeper")]
    began = time.monotonic()
    group.close()
    group.close()
    assert time.monotonic() - began < 10
    assert gone(pids, within_s=0.5)
    with pytest.raises(WorkerError, match="stubborn-0 was called after the group was closed"):
        group.run("pid")


def test_close_does_not_wait_for_a_call_whose_caller_hears_of_it(start):
    group = start("busy")
    (future,) = group.send("sleep", seconds=60.0)
    group.close()
    with pytest.raises(WorkerError):
        future.result(10)


def program(tmp_path: Path, body: str) -> list[str]:
    """A program of its own that starts a group."""
    script = tmp_path / "parent.py"
    head = """
        import os, signal, sys, time
        from pathlib import Path
        from tests.local_launcher import LocalLauncher
        from tests.workers.launch.toy import Toy

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            launcher = LocalLauncher(Path(sys.argv[1]))
    """
    script.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
    return [sys.executable, str(script), str(tmp_path)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": import_path()}
WAITING = """
    group = launcher.engine_group("toy", Toy, 2)
    print(*group.run("pid"), *group.run("spawn_sleeper"), flush=True)
    group.run("sleep", [100.0, 100.0])
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_and_their_children_die_with_the_driver(tmp_path, signum):
    with subprocess.Popen(
        program(tmp_path, WAITING), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        server = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert len(pids) == 4
        parent.send_signal(signum)
        parent.wait(10)
        assert gone([*pids, *server], within_s=5.0)


LEFT_BEHIND = """
    group = launcher.engine_group("toy", Toy, 1)
    (worker,) = group.run("pid")
    print(worker, *group.run("spawn_sleeper"), flush=True)
    group._lines[0].stop()
    while worker in launcher.host.pids().values() and not launcher.host.describe_end("toy-0", 0.1)[0]:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_stopped_worker_leaves_behind_ends_although_its_parent_is_killed_first(tmp_path):
    done = subprocess.run(
        program(tmp_path, LEFT_BEHIND), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert gone(pids, within_s=5.0)


STUCK = """
    import threading
    from tests.workers.launch.toy import HalfStuck
    from workers.launch import group as module
    from workers.launch.service import Service, connect
    from workers.launch.switchboard import Line, Switchboard
    from workers.launch.transport import Blob

    module.UNSTUCK_S = 1.0
    board = Switchboard(0)
    line = board.expect(Line("trainer-1", lambda patience_s: ("", ""), 30.0))
    line.build(Blob(HalfStuck))
    threading.Thread(target=lambda: Service(connect(board.addresses, board.key, "trainer-1")).serve(), daemon=True).start()
    trainers = module.WorkerGroup("trainer", [line], board.close, here=HalfStuck)
    print(trainers.run("echo", [1, 2]), flush=True)
    trainers.run("work", [True, False])
"""


def test_a_driver_that_is_stuck_in_its_own_share_ends_with_the_failure_of_another(tmp_path):
    command = program(tmp_path, STUCK)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.stdout == "[1, 2]\n"
    assert done.returncode == -signal.SIGTERM
    assert "exactrl: trainer-1 (pid " in done.stderr
    assert "ValueError: half of us" in done.stderr
