"""Two machines: ranks and engines on both, the bits of one; a machine or a worker that is lost is named, and nothing is left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import runs
from tests.two_machines import ADDRESSES, Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

RAY_PORT = 6400
"""Free: each machine has ports of its own."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
SPREAD = ("rollout.replicas=2", "tracking.wandb_mode=disabled")
ENDLESS = (*SPREAD, "trainer.total_steps=1000", "trainer.validate_every=0")
ON_FIRST, ON_SECOND = {"trainer-0", "rollout-0"}, {"trainer-1", "rollout-1"}
RAY = (f"launcher.ray_address={ADDRESSES[0]}:{RAY_PORT}",)
Machines = tuple[Machine, Machine]
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def folders() -> Iterator[list[str]]:
    """Short ones, for Ray's sockets."""
    made = [tempfile.mkdtemp(prefix="ray-") for _ in ADDRESSES]
    yield made
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(machines: Machines, folders: list[str]) -> Machines:
    """The machines with a Ray cluster of one CPU each; it ends with them."""
    for machine, folder in zip(machines, folders, strict=True):
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if machine is not machines[0]:
            role = [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={machine.address}"),
            *("--num-cpus=1", f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"),
        ]
        with open(f"{folder}/start.log", "w") as log:
            done = subprocess.run(machine.command(command), stdout=log, stderr=log, env={**os.environ, **TOKEN})
        assert done.returncode == 0, Path(log.name).read_text()
    return machines


def ray_run(machines: Machines, run: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    return [runs.start(run, *overrides, *RAY, launcher="ray", ranks=2, env=TOKEN, machine=machines[0])]


def torchrun_run(machines: Machines, run: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    return [
        runs.start(run, *overrides, launcher=f"torchrun, machine {i}", ranks=2, machine=machine)
        for i, machine in enumerate(machines)
    ]


@pytest.fixture(params=["ray", "torchrun"])
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a run on both machines."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
        return ray_run
    return torchrun_run


def workers(machine: Machine) -> dict[str, psutil.Process]:
    """The run's ranks and rollout engines on a machine, by name: a worker writes to a log of its name, a rank of torchrun has a RANK."""
    found = {}
    for process in machine.processes():
        try:
            name = Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem
            rank = process.environ().get("RANK", "")
        except (OSError, psutil.Error):
            continue
        if "trainer.main_ppo" in process.cmdline() and rank:
            name = f"trainer-{rank}"
        if name.startswith(("trainer-", "rollout-")) and name not in found:
            found[name] = process
    return found


def wait_until(happened: Callable[[], bool], processes: list[subprocess.Popen[str]], limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        for process in processes:
            assert process.poll() is None, process.communicate()[0][-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_steps(run: Path) -> bool:
    return (run / "ledger.jsonl").exists() and len(runs.ledger(run)) > 1


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each said; the driver's is the first, and it did not end well (a rank that was told to stop did)."""
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert processes[0].returncode != 0, said[0][-6000:]
    return said


def assert_left(machine: Machine, before: set[int], limit_s: float = 30.0) -> None:
    """No process but those of `before`, in a while."""
    deadline = time.monotonic() + limit_s
    while left := [process for process in machine.processes() if process.pid not in before]:
        assert time.monotonic() < deadline, [(process.pid, process.cmdline()) for process in left]
        time.sleep(0.1)


def pids(machine: Machine) -> set[int]:
    return {process.pid for process in machine.processes()}


def test_ranks_and_engines_on_both_and_the_bits_of_one(reference, machines, start, tmp_path):
    before = [pids(machine) for machine in machines]
    run = tmp_path / "run"
    processes = start(machines, run, *SPREAD)
    wait_until(lambda: has_steps(run), processes)
    seen = [set(workers(machine)) for machine in machines]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-8000:]
    assert seen == [ON_FIRST, ON_SECOND]
    runs.assert_same(reference, run)
    for machine, own in zip(machines, before, strict=True):
        assert_left(machine, own)


@pytest.mark.parametrize("start", ["ray", pytest.param("torchrun", marks=pytest.mark.long)], indirect=True)
def test_a_killed_machine_is_named_and_nothing_of_the_run_is_left(machines, start, tmp_path):
    before = pids(machines[0])
    run = tmp_path / "run"
    processes = start(machines, run, *ENDLESS)
    wait_until(lambda: has_steps(run), processes)
    machines[1].kill()
    said = ends(processes)
    assert "trainer-1" in said[0] or "rollout-1" in said[0]
    assert_left(machines[0], before)
    assert_left(machines[1], set())


@pytest.mark.parametrize("start", [pytest.param("ray", marks=pytest.mark.long), "torchrun"], indirect=True)
def test_a_stopped_worker_of_the_other_machine_is_named_after_its_silence(machines, start, tmp_path):
    before = [pids(machine) for machine in machines]
    run = tmp_path / "run"
    processes = start(machines, run, *ENDLESS, "launcher.silence_s=10")
    wait_until(lambda: has_steps(run), processes)
    workers(machines[1])["rollout-1"].send_signal(signal.SIGSTOP)
    said = ends(processes)
    assert "rollout-1" in said[0]
    for machine, own in zip(machines, before, strict=True):
        assert_left(machine, own)
