"""Workers that are forks of a process that has imported what they need."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.workers.launch.test_processes import gone
from tests.workers.launch.toy import Broken, Stubborn, Toy
from workers.launch.fork_server import ForkServer
from workers.launch.group import WorkerError
from workers.launch.node_processes import NodeProcesses
from workers.launch.processes import ProcessGroup, child_environment, import_path

NOTED = "tests.workers.launch.noted_import"
ENV = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": ""}
"""pytest's own variable changes with every test, and another environment is nothing that a fork can have."""


class Place:
    """A server and what it writes."""

    def __init__(self, path: Path, modules: list[str], **more: str) -> None:
        self.path = path
        self.notes = path / "notes"
        self.env = {**ENV, "NOTED": str(self.notes), **more}
        self.server = ForkServer(child_environment(self.env), modules, path / "server.log")

    def start(self, factory=Toy, replicas: int = 2, **options) -> ProcessGroup:
        env = {**self.env, **options.pop("env", {})}
        return ProcessGroup("toy", factory, replicas, env, self.path, fork_server=self.server, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("forks"), [NOTED])
    yield made
    made.server.close()


@pytest.fixture
def own_place(tmp_path):
    places: list[Place] = []

    def make(modules: list[str], **more: str) -> Place:
        places.append(Place(tmp_path, modules, **more))
        return places[-1]

    yield make
    for made in places:
        made.server.close()


@pytest.fixture(scope="module")
def group(place):
    made = place.start()
    yield made
    made.close()


def test_what_forks_need_is_imported_once_and_by_the_server(place, group):
    other = place.start(replicas=1)
    assert [*group.run("imported", [NOTED] * 2), *other.run("imported", [NOTED])] == [True] * 3
    assert place.notes.read_text().split() == [str(place.server.pid)]
    other.close()


def test_a_fork_is_a_process_as_any_other(place, group):
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert group.run("text_hash") == [int(expected.stdout)] * 2
    assert group.run("pid") == group.pids
    assert group.run("session") == group.pids
    assert len({*group.pids, place.server.pid, os.getpid()}) == 4
    assert group.run("echo", [b"x" * 1_000_000, 2]) == [b"x" * 1_000_000, 2]


def test_a_forks_output_is_in_its_own_log(place, group):
    group.run("speak")
    for number in range(2):
        text = (place.path / f"toy-{number}.log").read_text()
        assert all(line in text for line in ("printed by python", "complained by python", "put by C"))
    assert "printed" not in (place.path / "server.log").read_text()


def test_a_forks_late_variables_are_its_own(place):
    ranks = {f"{number}": {**place.env, "RANK": str(number), "MASTER_PORT": "7"} for number in range(2)}
    group = place.start(member_env=lambda number: ranks[str(number)])
    assert group.run("imported", [NOTED] * 2) == [True] * 2
    assert group.run("variable", ["RANK", "RANK"]) == ["0", "1"]
    assert group.run("variable", ["MASTER_PORT", "WORLD_SIZE"]) == ["7", None]
    group.close()


def test_another_environment_gets_an_interpreter_of_its_own(place):
    other = place.start(replicas=1, env={"PYTHONHASHSEED": "8"})
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "8"}, capture_output=True, text=True
    )
    assert other.run("text_hash") == [int(expected.stdout)]
    assert other.run("imported", [NOTED]) == [False]
    other.close()
    assert gone(other.pids)


def test_nothing_is_forked_where_an_import_left_threads_behind(own_place):
    module = "tests.workers.launch.threaded_import"
    place = own_place([module])
    group = place.start(replicas=1)
    assert group.run("imported", [module]) == [False]
    assert "left threads behind" in (place.path / "server.log").read_text()
    group.close()


def test_an_import_that_fails_is_left_to_the_worker(own_place):
    place = own_place(["no_such_module", "decimal"])
    group = place.start(replicas=1)
    assert group.run("imported", ["decimal"]) == [True]
    assert "No module named 'no_such_module'" in (place.path / "server.log").read_text()
    group.close()


@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [("crash", None, ["SIGSEGV", "last words", "Segmentation fault"]), ("leave", [3], ["exited with code 3"])],
)
def test_a_fork_that_dies_is_named_with_its_signal_or_code_and_its_log(place, method, argument, words):
    group = place.start(replicas=1)
    with pytest.raises(WorkerError) as caught:
        group.run(method, argument)
    assert all(word in str(caught.value) for word in words)
    group.close()


def test_a_failure_at_start_leaves_nothing_and_the_server_goes_on(place):
    with pytest.raises(WorkerError, match="RuntimeError: no such model"):
        place.start(Broken)
    group = place.start()
    assert group.run("part.double", [3, 4]) == [6, 8]
    group.close()
    assert gone(group.pids)


def test_close_ends_stubborn_forks_and_their_children(place):
    group = place.start(Stubborn, replicas=1)
    pids = [*group.pids, *group.run("spawn_sleeper")]
    group.close()
    assert gone(pids, within_s=0.5)


def test_a_group_may_be_closed_before_its_forks_exist(own_place):
    place = own_place([NOTED], SLOWLY="3")
    group = place.start(wait=False)
    assert group.pids == [None, None]
    group.close()
    later = place.start(replicas=1)
    assert later.run("part.double", [2]) == [4]
    known = {place.server.pid, *later.pids}
    children = psutil.Process(place.server.pid).children()
    assert gone([child.pid for child in children if child.pid not in known])
    later.close()


def test_forks_end_with_the_server_and_the_next_call_says_so(own_place):
    place = own_place([])
    group = place.start()
    pids = [*group.pids, *group.run("spawn_sleeper")]
    os.kill(place.server.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        group.run("sleep", [60.0, 60.0])
    assert gone(pids)
    group.close()
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        place.start(replicas=1)


def test_a_server_that_is_a_fork_imports_the_rest_and_ends_with_its_base(own_place):
    place = own_place([NOTED])
    more = ForkServer(child_environment(place.env), [NOTED, "decimal"], place.path / "more.log", place.server)
    group = ProcessGroup("more", Toy, 2, place.env, place.path, fork_server=more)
    assert [*group.run("imported", [NOTED] * 2), *group.run("imported", ["decimal"] * 2)] == [True] * 4
    assert place.notes.read_text().split() == [str(place.server.pid)]
    assert len({more.pid, place.server.pid, *group.pids}) == 4
    pids = [more.pid, *group.pids, *group.run("spawn_sleeper")]
    os.kill(place.server.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        group.run("sleep", [60.0, 60.0])
    assert gone(pids)
    group.close()
    more.close()


def test_a_server_without_a_base_that_can_fork_is_an_interpreter_of_its_own(own_place):
    place = own_place(["tests.workers.launch.threaded_import"])
    more = ForkServer(child_environment(place.env), ["decimal"], place.path / "more.log", place.server)
    group = ProcessGroup("more", Toy, 1, place.env, place.path, fork_server=more)
    assert group.run("imported", ["decimal"]) == [True]
    pids = [more.pid, *group.pids]
    more.close()
    assert gone(pids)
    group.close()


def handed_over(device: str, path: Path) -> tuple[NodeProcesses, NodeProcesses]:
    """Servers in the hands of who started them, and of who took them over."""
    before, after = NodeProcesses(path, 0, device), NodeProcesses(path, 0, device)
    before.prepare([["decimal"], ["decimal", "colorsys"]], ENV)
    here, there = socket.socketpair()
    with here, there:
        before.hand_over(here)
        after.take_over(there)
    return before, after


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_that_were_handed_over_fork_for_their_new_owner_and_end_with_the_old(tmp_path, monkeypatch, device):
    before, after = handed_over(device, tmp_path)
    monkeypatch.setenv("OF_THE_NEW_OWNER", "yes")
    groups = [
        after.start(f"toy{len(preload)}", Toy, {0: ENV, 1: ENV}, start_timeout_s=60.0, preload=preload)
        for preload in (["decimal"], ["decimal", "colorsys"])
    ]
    assert [group.run("imported", ["decimal", "colorsys"]) for group in groups] == (
        [[True, False], [True, True]] if device == "cpu" else [[False, False]] * 2
    )
    assert groups[0].run("variable", ["OF_THE_NEW_OWNER", "PYTHONHASHSEED"]) == [None, "7"]
    before.close()
    if device == "cpu":
        assert gone([pid for group in groups for pid in group.pids])
    for group in groups:
        group.close()
    after.close()


def test_servers_that_were_handed_over_end_when_their_new_owner_lets_them_go(tmp_path):
    before, after = handed_over("cpu", tmp_path)
    group = after.start("toy", Toy, {0: ENV}, start_timeout_s=60.0, preload=["decimal", "colorsys"])
    (pid,) = group.run("pid")
    servers = psutil.Process(pid).parents()[:2]
    assert os.getpid() not in {server.pid for server in servers}
    after.close()
    assert gone([pid, *(server.pid for server in servers)])
    group.close()
    before.close()


@pytest.mark.parametrize(
    ("device", "preload", "forked"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_engines_are_forked_on_cpu_only_and_only_when_they_name_what_to_import(tmp_path, device, preload, forked):
    processes = NodeProcesses(tmp_path, 0, device)
    envs = {0: {"PYTEST_CURRENT_TEST": ""}, 2: {"PYTEST_CURRENT_TEST": ""}}
    group = processes.start("toy", Toy, envs, start_timeout_s=60.0, preload=["decimal"] if preload else [])
    assert group.run("imported", ["decimal"] * 2) == [forked] * 2
    assert (tmp_path / "toy-2.log").exists()
    group.close()
    processes.close()
    assert gone(group.pids)


PARENT = """
    import sys
    from pathlib import Path
    from tests.workers.launch.toy import Toy
    from workers.launch.fork_server import ForkServer
    from workers.launch.processes import ProcessGroup, child_environment

    if __name__ == "__main__":
        logs = Path(sys.argv[1])
        server = ForkServer(child_environment({}), ["decimal"], logs / "server.log")
        group = ProcessGroup("toy", Toy, 2, {}, logs, fork_server=server)
        print(server.pid, *group.run("pid"), *group.run("spawn_sleeper"), flush=True)
        group.run("sleep", [100.0, 100.0])
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_server_forks_and_grandchildren_die_with_their_owner(tmp_path, signum):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    owner = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 5
    owner.send_signal(signum)
    owner.wait(10)
    assert gone(pids)
