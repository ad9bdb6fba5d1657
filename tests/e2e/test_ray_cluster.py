"""A Ray cluster that is there already: joined by its address, with the same bits, and left as it was found."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

SHORT = ("trainer.total_steps=1", "trainer.validate_every=0", "trainer.validate_at_start=false")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
"""Ray guards a cluster with a token where it finds one; the tests' cluster has one of its own wherever it runs."""
LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
groups = ray.util.placement_group_table().values()
print(json.dumps({
    "cpus": ray.cluster_resources()["CPU"],
    "free": ray.available_resources().get("CPU", 0),
    "placements": [group["state"] for group in groups],
}))
"""


@pytest.fixture
def cluster(tmp_path) -> Iterator[str]:
    """`ray start --head` in a process group of its own, from another folder, with an environment of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-")  # tmp_path is too long for Ray's sockets
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=8"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"),
        "--object-store-memory=100000000",
    ]
    environment = {**os.environ, **TOKEN, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5"}
    head = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        wait_for(port, head)
        yield f"127.0.0.1:{port}"
    finally:
        family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        os.killpg(head.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=3)
        for process in alive:
            process.kill()
        head.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(port: int, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, head.communicate()[0].decode()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the cluster did not start")


def look(address: str) -> dict:
    """What another driver sees of the cluster."""
    command, env = [sys.executable, "-c", LOOK, address], {**os.environ, **TOKEN}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_joins_it_has_the_bits_of_a_local_ray_and_leaves_it_alive_and_free(reference, cluster, tmp_path):
    settings = (*SHORT, f"launcher.ray_address={cluster}", "tracking.wandb_mode=disabled")
    run = runs.train(tmp_path / "run", *settings, env=TOKEN)
    (step,) = runs.ledger(run)
    assert step == runs.ledger(reference)[1]
    left = look(cluster)
    assert left["cpus"] == left["free"] == 8
    assert set(left["placements"]) == {"REMOVED"}
