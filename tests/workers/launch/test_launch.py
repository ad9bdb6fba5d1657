"""The same driver under Ray, torchrun and accelerate: the same results, one account of a failure, and nothing left behind."""

from __future__ import annotations

import contextlib
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
from tests.workers.launch.conftest import gone
from workers.launch.launcher import LaunchError, SignalWatch, choose_launcher

SECONDS = 30
"""Until everything has ended: the deadline of 10 s, and room for a busy test machine; far from the 120 s of a collective."""
ROOT = Path(__file__).parents[3]
STARTS = {
    "ray": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    # On a CPU too: `--cpu` would start a single process.
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--multi_gpu", "--num_processes=2", "--main_process_port=PORT"),
    ],
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Run:
    """A `toy_run` under a launcher, in a session of its own; its output goes to a file."""

    def __init__(self, launcher: str, run_dir: Path, scenario: str, ranks: int = 2, **env: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        command = [part.replace("PORT", free_port()) for part in STARTS[launcher]]
        with (run_dir / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*command, "-m", "tests.workers.launch.toy_run", str(ranks), str(run_dir), scenario],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.run_dir / "output").read_text()

    def pids(self) -> dict[str, list[int]]:
        """`ranks` and `others`, once the driver is about to wait; everything below the launcher's process is among the others."""
        path = self.run_dir / "pids.json"
        deadline = time.monotonic() + 120
        while not path.exists():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        found = json.loads(path.read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            found["others"] += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        return found

    def assert_ended(self, pids: dict[str, list[int]], began: float) -> None:
        """It has failed in time, and nothing of it is left."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        assert code not in (0, None), self.output
        assert time.monotonic() - began < SECONDS
        assert gone([*pids["ranks"], *pids["others"]], within_s=5.0), self.output

    def clean_up(self) -> None:
        """Nothing of a failed test runs on."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            for process in [*below, self.process]:
                process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def start():
    started: list[Run] = []

    def begin(*arguments: Any, **env: str) -> Run:
        started.append(Run(*arguments, **env))
        return started[-1]

    yield begin
    for run in started:
        run.clean_up()


REFUSED = (
    "many: 4 slots needed, 3 reserved",
    "64 CPUs needed, 4 available on the Ray cluster",
    "1 GPUs needed, 0 available on the Ray cluster",
)


@pytest.fixture(scope="module", params=["ray", "torchrun", pytest.param("accelerate", marks=pytest.mark.long)])
def agreed(request, tmp_path_factory, start) -> tuple[str, dict[str, Any], Run]:
    """What the driver saw."""
    run = start(request.param, tmp_path_factory.mktemp(request.param), "agree")
    assert run.process.wait(200) == 0, run.output
    return request.param, json.loads((run.run_dir / "seen.json").read_text()), run


def test_the_driver_sees_the_same_under_every_launcher(agreed):
    launcher, seen, _ = agreed
    expected_hash = subprocess.run(
        [sys.executable, "-c", "print(hash('exactrl'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True
    )
    refused = seen.pop("refused", [])
    assert seen == {
        "sizes": [2, 3],
        "sharded": [100, 110],
        "dotted": [2, 4, 6],
        "dealt": list(range(9)),
        "collective": [21.0, 21.0],
        "hash": [int(expected_hash.stdout)] * 3,
        "forked": [True] * 3,
        "environment": ["0", None, None],
        "ranks": ["0", "1"],
        "processes": 6 if launcher == "ray" else 5,  # under torchrun the driver has rank 0's worker in its own process
        "weights": [99_999 * 100_000 / 2 + 1] * 3,
        "again": [99_999 * 100_000 / 2 + 1] * 3,
        "requests": [[0, 0], [1, 0], [2, 0]],
        "large": [0.0, 1e6, 2e6],
        "failure": ["WorkerError", True, True],
    }
    assert [words in text for words, text in zip(REFUSED, refused, strict=launcher == "ray")] == [True] * len(refused)


def test_a_clean_end_is_a_quiet_one_and_every_rank_has_exit_code_0(agreed):
    _, _, run = agreed
    assert "Traceback" not in run.output
    assert "exitcode" not in run.output
    assert "is gone" not in run.output


def test_a_rank_that_fails_while_the_driver_is_in_a_collective_ends_the_run_with_its_own_traceback(start, tmp_path):
    run = start("torchrun", tmp_path, "stuck", FAIL="1")
    pids = run.pids()
    run.assert_ended(pids, time.monotonic())
    # The last word is not the broken collective's, which says nothing.
    assert f"WorkerError: trainer-1 (pid {pids['ranks'][1]}) raised in fail_on_rank" in run.output
    assert "ValueError: rank 1 fails" in run.output
    assert "toy.py" in run.output


def test_a_failure_of_the_drivers_own_rank_ends_the_others(start, tmp_path):
    run = start("torchrun", tmp_path, "stuck", FAIL="0")
    pids = run.pids()
    run.assert_ended(pids, time.monotonic())
    assert f"WorkerError: trainer-0 (pid {pids['ranks'][0]}) raised in fail_on_rank" in run.output
    assert "ValueError: rank 0 fails" in run.output


def test_a_failing_rank_under_ray_is_told_although_the_other_is_in_a_collective(start, tmp_path):
    run = start("ray", tmp_path, "stuck", FAIL="1")
    pids = run.pids()
    run.assert_ended(pids, time.monotonic())
    assert f"WorkerError: trainer-1 (pid {pids['ranks'][1]}) raised in fail_on_rank" in run.output
    assert "ValueError: rank 1 fails" in run.output


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("torchrun", 0), ("torchrun", 1), pytest.param("ray", 1, marks=pytest.mark.long)],
)
def test_a_killed_rank_ends_the_run(start, tmp_path, launcher, rank):
    run = start(launcher, tmp_path, "stuck", COLLECTIVE="1")
    pids = run.pids()
    began = time.monotonic()
    os.kill(pids["ranks"][rank], signal.SIGKILL)
    run.assert_ended(pids, began)
    if launcher == "ray":
        assert f"trainer-1 (pid {pids['ranks'][1]}) was killed by SIGKILL" in run.output


def test_a_stopped_rank_is_named_although_the_driver_is_in_a_collective_with_it(start, tmp_path):
    run = start("torchrun", tmp_path, "stuck", COLLECTIVE="1", SILENCE_S="3")
    pids = run.pids()
    os.kill(pids["ranks"][1], signal.SIGSTOP)
    run.assert_ended(pids, time.monotonic())
    assert f"trainer-1 (pid {pids['ranks'][1]}) has given no sign of life for 3 s" in run.output


@pytest.mark.parametrize(
    ("launcher", "signum", "collective"),
    [
        ("ray", signal.SIGTERM, ""),
        ("torchrun", signal.SIGTERM, "1"),
        pytest.param("ray", signal.SIGKILL, "", marks=pytest.mark.long),
        pytest.param("torchrun", signal.SIGKILL, "", marks=pytest.mark.long),
        pytest.param("ray", signal.SIGTERM, "1", marks=pytest.mark.long),
        pytest.param("ray", signal.SIGINT, "", marks=pytest.mark.long),
        pytest.param("torchrun", signal.SIGINT, "", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_every_process_within_seconds(start, tmp_path, launcher, signum, collective):
    run = start(launcher, tmp_path, "stuck", **({"COLLECTIVE": collective} if collective else {}))
    pids = run.pids()
    began = time.monotonic()
    run.process.send_signal(signum)
    run.assert_ended(pids, began)


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
        assert gone([sleeper.pid], within_s=1.0)
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
