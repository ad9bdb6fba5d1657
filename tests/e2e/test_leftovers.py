"""What a killed process leaves behind: nothing that runs, listens or lies in the temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow
LONG = ("trainer.total_steps=200", "trainer.validate_every=0", "trainer.validate_at_start=false")


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    """Generous: the machine may be busy. A failure says what did not happen."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def started(run_dir: Path, temporary: Path, launcher: str, **kwargs) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A run that has made a step, and all of its processes."""
    process = runs.start(run_dir, *LONG, launcher=launcher, env={"TMPDIR": str(temporary)}, **kwargs)
    ledger = run_dir / "ledger.jsonl"
    wait_for(lambda: process.poll() is not None or (ledger.exists() and ledger.read_text() != ""), "no first step", 240)
    assert process.poll() is None, process.communicate()[0]
    return process, [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def temporary(tmp_path_factory) -> Path:
    """Short, since Ray has sockets there."""
    folder = Path("/tmp") / f"left-{os.getpid()}"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.parametrize("launcher", ["ray", pytest.param("torchrun", marks=pytest.mark.long)])
def test_nothing_is_left_of_a_run_whose_first_process_was_killed(tmp_path, temporary, launcher):
    process, everyone = started(tmp_path / "run", temporary, launcher)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not alive(everyone), f"still there: {alive(everyone)}", 60)
    wait_for(lambda: not list(temporary.glob("exactrl-ray-*")), "Ray's folder is still there", 60)


@pytest.mark.long  # Ray's own end takes its time without its head
def test_a_run_ends_in_order_although_the_head_of_its_ray_is_gone(tmp_path, temporary):
    """It needs Ray for its places only. (Disconnecting from a Ray without a head would wait for ever.)"""
    overrides = ("trainer.total_steps=6",)
    process = runs.start(tmp_path / "run", *overrides, launcher="ray", env={"TMPDIR": str(temporary)})
    ledger = tmp_path / "run" / "ledger.jsonl"
    wait_for(lambda: process.poll() is not None or (ledger.exists() and ledger.read_text() != ""), "no first step", 240)
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    (head,) = (child for child in everyone if child.name() == "gcs_server")
    head.kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert runs.ledger(tmp_path / "run")[-1]["step"] == 6
    wait_for(lambda: not alive(everyone), f"still there: {alive(everyone)}", 60)
    wait_for(lambda: not list(temporary.glob("exactrl-*")), "folders are still there", 60)


def test_the_death_of_the_fork_server_is_told_as_such(tmp_path, temporary):
    process, everyone = started(tmp_path / "run", temporary, "python")
    server = next(child for child in everyone if any("forkserver import main" in word for word in child.cmdline()))
    server.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "the server that forked it, which is gone" in output
    wait_for(lambda: not alive(everyone), f"still there: {alive(everyone)}", 60)
