"""The same loop under Ray, torchrun and accelerate: the same results, and a clean end when it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.schema import LauncherConfig
from workers.launch.launcher import LaunchError, SignalWatch, choose_launcher

SECONDS = 25
"""Until everything has ended: the deadline of 10 s, and room for a busy test machine."""
ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
STARTS = {
    "ray": [sys.executable],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"],
    # On a CPU too: `--cpu` would start a single process.
    "accelerate": [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes=2", "--main_process_port=PORT"],
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def start():
    """Starts; whatever is still running at the end (a failed test) is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: Any, **env: str) -> subprocess.Popen[str]:
        started.append(start_loop(*arguments, **env))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            for below in psutil.Process(process.pid).children(recursive=True):
                below.kill()
            process.kill()


def start_loop(launcher: str, run_dir: Path, scenario: str, ranks: int = 2, **env: str) -> subprocess.Popen[str]:
    """`toy_loop` under the launcher, in a session of its own; its output goes to `run_dir/output`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [part.replace("PORT", free_port()) for part in STARTS[launcher]]
    with (run_dir / "output").open("w") as output:
        return subprocess.Popen(
            [*command, "-m", "tests.workers.launch.toy_loop", "auto", str(ranks), str(run_dir), scenario],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def started_pids(process: subprocess.Popen[str], run_dir: Path) -> list[psutil.Process]:
    """Everything below `process`, and what the loop said it had started, once it is in its long call."""
    path = run_dir / "pids.json"
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, (run_dir / "output").read_text()
        assert time.monotonic() < deadline, (run_dir / "output").read_text()
        time.sleep(0.1)
    known = [psutil.Process(pid) for pid in json.loads(path.read_text()) if psutil.pid_exists(pid)]
    return [*known, *psutil.Process(process.pid).children(recursive=True)]


def ended(process: subprocess.Popen[str], within_s: float) -> int | None:
    """The return code, or None when it is still running."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def alive(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that have not ended in time."""
    deadline = time.monotonic() + within_s
    while True:
        left = []
        for process in processes:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
            except psutil.NoSuchProcess:
                pass
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, start):
    """What each rank saw, by launcher."""
    found = {}
    for launcher in STARTS:
        run_dir = tmp_path_factory.mktemp(launcher)
        process = start(launcher, run_dir, "agree")
        assert ended(process, 200) == 0, (run_dir / "output").read_text()
        found[launcher] = [json.loads(path.read_text()) for path in sorted(run_dir.glob("seen-*.json"))]
    return found


def test_every_process_that_runs_the_loop_sees_the_same(seen):
    assert [len(seen[launcher]) for launcher in ("ray", "torchrun", "accelerate")] == [1, 2, 2]
    assert seen["torchrun"][0] == seen["torchrun"][1]


def test_the_launchers_agree(seen):
    assert seen["ray"][0] == seen["torchrun"][0] == seen["accelerate"][0]


def test_what_they_agree_on_is_right(seen):
    found = seen["ray"][0]
    assert found["sharded"] == [100, 110]
    assert found["dealt"] == list(range(9))
    assert found["collective"] == [21.0, 21.0]
    assert found["forked"] == [True, True, False, False, False]  # the last three have a variable more than the server
    assert found["environment"] == ["0", "yes", None]
    assert found["weights"] == [99_999 * 100_000 / 2 + 1] * 3
    assert found["failure"] == ["WorkerError", True, True]
    assert found["main_failure"] == "invalid literal for int() with base 10: 'not a number'"
    assert len(set(found["hash"])) == 1


@pytest.mark.parametrize(
    ("launcher", "signum", "collective"),
    [
        ("ray", signal.SIGTERM, ""),
        ("torchrun", signal.SIGTERM, "1"),
        pytest.param("ray", signal.SIGTERM, "1", marks=pytest.mark.long),
        pytest.param("ray", signal.SIGINT, "", marks=pytest.mark.long),
        pytest.param("torchrun", signal.SIGINT, "", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_every_process_within_seconds(start, tmp_path, launcher, signum, collective):
    process = start(launcher, tmp_path, "stuck", **({"COLLECTIVE": collective} if collective else {}))
    pids = started_pids(process, tmp_path)
    began = time.monotonic()
    process.send_signal(signum)
    assert ended(process, 30) not in (0, None), (tmp_path / "output").read_text()
    assert alive(pids, 2.0) == []
    assert time.monotonic() - began < SECONDS


def test_a_rank_that_fails_ends_the_job_with_its_traceback(start, tmp_path):
    process = start("torchrun", tmp_path, "stuck", FAIL="1")
    while not (tmp_path / "pids.json").exists() and process.poll() is None:
        time.sleep(0.05)
    began = time.monotonic()
    assert ended(process, 30) not in (0, None), (tmp_path / "output").read_text()
    assert time.monotonic() - began < SECONDS
    output = (tmp_path / "output").read_text()
    assert "ValueError: the last rank fails" in output
    assert "trainer-1" in output
    pids = json.loads((tmp_path / "pids.json").read_text())
    assert alive([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 3.0) == []


def test_an_environment_without_ranks_means_ray():
    assert choose_launcher(LauncherConfig(num_ranks=4), {}) == "ray"
    assert choose_launcher(LauncherConfig(name="torchrun"), {}) == "torchrun"
    assert choose_launcher(LauncherConfig(num_ranks=2), {"RANK": "1", "WORLD_SIZE": "2"}) == "torchrun"
    assert choose_launcher(LauncherConfig(), {"ACCELERATE_MIXED_PRECISION": "no"}) == "torchrun"


@pytest.mark.parametrize(
    ("config", "environment", "words"),
    [
        (LauncherConfig(num_ranks=1), {"RANK": "0", "WORLD_SIZE": "2"}, "launcher.num_ranks=1, but torchrun started 2"),
        (LauncherConfig(name="torchrun", num_ranks=2), {}, "this process was started alone"),
        (LauncherConfig(name="ray", num_ranks=2), {"RANK": "0", "WORLD_SIZE": "2"}, "Ray starts its own ranks"),
        (LauncherConfig(num_ranks=2), {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate started a single process"),
        (LauncherConfig(name="slurm"), {}, "'slurm' is not known"),
    ],
)
def test_a_start_that_contradicts_the_config_is_refused(config, environment, words):
    with pytest.raises(LaunchError, match=words):
        choose_launcher(config, environment)


DEAF = """
import subprocess, sys, time
from workers.launch.launcher import SignalWatch

SignalWatch(deadline_s=1.0).install()
try:
    print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
    time.sleep(100)
finally:
    {clean_up}
"""


@pytest.mark.parametrize("clean_up", ["time.sleep(0.5); print('cleaned up')", "time.sleep(100)"])
def test_a_clean_up_runs_undisturbed_but_not_for_ever(clean_up):
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF.format(clean_up=clean_up)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    sleeper = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # a second one must not break into the clean-up
    assert process.wait(10) == 128 + signal.SIGTERM
    if "print" in clean_up:
        sleeper.kill()  # it holds the pipe open
        assert process.stdout.read() == "cleaned up\n"
    else:
        assert alive([sleeper], 1.0) == []
    process.stdout.close()


def test_the_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    watch = SignalWatch()
    watch.install()
    watch.install()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    watch.restore()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


CLOSING = """
import os, signal
from workers.launch.launcher import SignalWatch

watch = SignalWatch(deadline_s=5.0)
watch.install()
{start_of_end}
os.kill(os.getpid(), signal.SIGTERM)
print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(("start_of_end", "printed"), [("watch.start_of_end()", "cleaned up\n"), ("", "")])
def test_a_signal_does_not_cut_short_a_clean_up_that_something_else_began(start_of_end, printed):
    program = CLOSING.format(start_of_end=start_of_end)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == printed
