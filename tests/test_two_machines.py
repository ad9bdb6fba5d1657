"""The two machines of `two_machines.py`: apart from all else, joined to each other, and gone with their maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import two_machines
from tests.two_machines import ADDRESSES, ROOT, Machine, NotAllowed

pytestmark = pytest.mark.timeout(120)

SERVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection, (peer, _) = server.accept()
    connection.sendall(f"{socket.gethostname()} to {peer}".encode())
"""
WAIT = """
import signal, socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    print("connected", flush=True)
    signal.pause()
"""
HEAR = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 60).recv(1))"
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 10).recv(100).decode())"


def on(machine: Machine, *words: str) -> str:
    done = subprocess.run(machine.command(words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_each_has_a_name_and_an_address_and_they_reach_each_other_by_name(machines):
    first, second = machines
    assert [on(machine, "hostname") for machine in machines] == [first.name, second.name]
    assert os.uname().nodename not in (first.name, second.name)
    server = subprocess.Popen(first.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    answer = on(second, sys.executable, "-c", ASK, first.name)
    server.communicate()
    assert answer == f"{first.name} to {ADDRESSES[1]}"


def test_they_reach_nothing_else(machines):
    with pytest.raises(AssertionError, match="Network is unreachable"):
        on(machines[0], sys.executable, "-c", ASK, "192.0.2.1")


def test_a_killed_machine_has_no_processes_and_the_other_hears_its_connections_end(machines):
    first, second = machines
    server = subprocess.Popen(first.command([sys.executable, "-c", WAIT]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    client = subprocess.Popen(
        second.command([sys.executable, "-c", HEAR, first.name]), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout.readline() == "connected\n"
    assert len(first.processes()) == 1
    first.kill()
    assert client.communicate(timeout=60)[0] == "b''\n"
    server.communicate(timeout=60)
    assert first.processes() == []
    assert on(second, "hostname") == second.name


def test_nothing_is_left_when_the_maker_is_killed(machines):
    holding = subprocess.Popen(
        [sys.executable, "-m", "tests.two_machines", "hold"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holding.stdout is not None
    names = [holding.stdout.readline().split()[0] for _ in ADDRESSES]
    keepers = [pid for name, pid in two_machines.running() if name in names]
    assert len(keepers) == 2
    holding.send_signal(signal.SIGKILL)
    holding.communicate()
    wait_until_gone(keepers)


def test_without_root_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowed, match="need root"), two_machines.two_machines():
        pass


def test_what_unshare_says_is_the_reason(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(two_machines, "_NAMESPACES", ("--net", "--no-such-namespace"))
    with pytest.raises(NotAllowed, match="no-such-namespace"), two_machines.two_machines():
        pass
