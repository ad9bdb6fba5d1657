"""Who may connect, and who is given up: strangers disturb nothing, the silent are named, the busy are left alone."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client

import pytest
import torch

from tests.local_launcher import LocalLauncher
from tests.workers.launch.conftest import ENV
from tests.workers.launch.toy import Toy, ToyEngine
from workers.launch import switchboard
from workers.launch.group import WorkerError, WorkerGroup
from workers.launch.service import Service, connect
from workers.launch.switchboard import Line, Switchboard
from workers.launch.transport import Blob, Channel


def knock(address: object) -> socket.socket:
    """A connection of somebody who knows nothing."""
    if isinstance(address, str):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(address)
        return raw
    return socket.create_connection(address)  # type: ignore[arg-type]


def closed(raw: socket.socket) -> bool:
    """Whether the other side hangs up, whatever it says before."""
    raw.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while raw.recv(4096):
            pass
    return True


def serve_here(address: object, key: bytes, label: str) -> None:
    """A worker's side in a thread of this process, connected by any socket."""

    def work() -> None:
        with contextlib.suppress(EOFError, OSError):
            Service(connect([address], key, label)).serve()  # type: ignore[list-item]

    threading.Thread(target=work, daemon=True).start()


@pytest.fixture
def board() -> Iterator[Switchboard]:
    made = Switchboard(silence_s=0, host="127.0.0.1")
    yield made
    made.close()


def expected(board: Switchboard, label: str, factory: object = Toy) -> WorkerGroup:
    line = board.expect(Line(label, lambda patience_s: ("", ""), 30.0))
    line.build(Blob(factory))
    return WorkerGroup(label, [line], functools.partial(board.forget, [line]))


@pytest.mark.parametrize("kind", [0, 1], ids=["unix", "tcp"])
def test_who_has_another_key_is_refused_and_disturbs_nothing(board, kind):
    address = board.addresses[kind]
    with pytest.raises(multiprocessing.AuthenticationError):
        connect([address], b"another key", "worker")
    junk = knock(address)
    junk.sendall(os.urandom(300))
    assert closed(junk)
    group = expected(board, "worker")
    serve_here(address, board.key, "worker")
    assert group.run("part.double", [4]) == [8]


def test_a_stranger_who_says_nothing_keeps_nobody_out_and_is_hung_up_on(board, monkeypatch):
    monkeypatch.setattr(switchboard, "ADMIT_S", 1.0)
    silent = [knock(address) for address in board.addresses]
    group = expected(board, "worker")
    serve_here(board.addresses[0], board.key, "worker")
    assert group.run("part.double", [4]) == [8]
    assert all(closed(raw) for raw in silent)


def test_one_that_nobody_expects_is_hung_up_on(board):
    with Client(board.addresses[0], authkey=board.key) as connection:
        channel = Channel(socket.socket(fileno=os.dup(connection.fileno())))
    channel.send(Blob(("rollout-9", 1, "here")))
    channel.sock.settimeout(30)
    with pytest.raises((EOFError, ConnectionError)):
        channel.receive()
    group = expected(board, "worker")
    serve_here(board.addresses[0], board.key, "worker")
    assert group.run("part.double", [4]) == [8]


def test_without_another_machine_only_this_one_can_connect():
    made = Switchboard(silence_s=0)
    assert [type(address) for address in made.addresses] == [str]
    made.close()


def test_large_values_reach_a_worker_of_another_machine_and_come_back(board, toys):
    group = expected(board, "far")
    serve_here(board.addresses[1], board.key, "far")
    value = torch.arange(1_000_000).reshape(1000, 1000)
    assert torch.equal(group.run("echo", [value])[0], value)
    near = toys.fetch("make_weights")
    assert group.run("load", weights=near) == [99_999 * 100_000 / 2 + 1]
    assert toys.run("load", weights=group.fetch("make_weights")) == [99_999 * 100_000 / 2 + 1] * 2


def test_a_worker_that_hangs_up_fails_what_it_was_asked(board):
    group = expected(board, "gone")
    channel = connect([board.addresses[1]], board.key, "gone")
    channel.receive()
    channel.send(Blob(("ready",)))
    (future,) = group.send("pid")
    channel.close()
    with pytest.raises(WorkerError, match=rf"gone \(pid {os.getpid()}\) closed its connection during pid"):
        future.result(30)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory) -> Iterator[LocalLauncher]:
    made = LocalLauncher(tmp_path_factory.mktemp("impatient"), ENV, silence_s=3.0)
    yield made
    made.close()


def test_a_stopped_worker_is_named_and_everything_asked_of_it_fails(impatient):
    group = impatient.engine_group("still", ToyEngine, 2)
    stopped, other = group.run("pid")
    futures = group.submit(0, [("until", "/nowhere"), ("count", 10**6)])
    futures += group.send("load_weights", version=1)[:1]
    os.kill(stopped, signal.SIGSTOP)
    for future in futures:
        with pytest.raises(WorkerError, match=rf"still-0 \(pid {stopped}\) has given no sign of life for 3 s"):
            future.result(60)
    with pytest.raises(WorkerError, match="no sign of life"):
        group.run("pid")
    assert group.submit(1, [("count", 1)])[0].result(30)[0] == "count"
    group.close()
    assert not os.path.exists(f"/proc/{stopped}/exe")
    assert not os.path.exists(f"/proc/{other}/exe")


def test_a_worker_that_is_busy_for_longer_than_that_is_left_alone(impatient):
    group = impatient.engine_group("working", Toy, 2)
    assert group.run("sleep_somehow", [False, True]) == ["awake", "awake"]
    group.close()
