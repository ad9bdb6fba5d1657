"""What goes through a channel arrives as it was: within a machine by memory file, between machines by its bytes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from workers.launch.transport import INLINE_LIMIT, Blob, Channel

VALUES = {
    "plain": {"a": [1, 2.5, None, "x", b"y"], "t": (True, 10**30)},
    "int64": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "bfloat16, 0-dim": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "strided": torch.arange(12).reshape(3, 4).t()[1:],
    "large, nan": torch.full((300_000,), float("nan")),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "complex": torch.tensor([1 + 2j]),
    "numpy": np.arange(200_000, dtype=np.int32).reshape(-1, 4),
    "bytes": os.urandom(3 * INLINE_LIMIT),
}
Ends = tuple[Channel, Channel]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


@pytest.fixture(params=["unix", "tcp"])
def ends(request) -> Iterator[Ends]:
    pair = socket.socketpair() if request.param == "unix" else tcp_pair()
    channels = Channel(pair[0]), Channel(pair[1])
    yield channels
    for channel in channels:
        channel.close()


def across(ends: Ends, *blobs: Blob) -> list[Blob]:
    """Sent at one end, received at the other; a large message over TCP needs both at once."""
    sender = threading.Thread(target=ends[0].send, args=blobs)
    sender.start()
    received = ends[1].receive()
    sender.join()
    return received


def assert_equal(back: object, value: object) -> None:
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert isinstance(back, torch.Tensor)
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back.isnan(), value.isnan())
        assert torch.equal(torch.where(back.isnan(), 0, back), torch.where(value.isnan(), 0, value))
    elif isinstance(value, np.ndarray):
        assert np.array_equal(back, value)
    else:
        assert back == value


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_arrive_as_they_were(ends, value):
    (blob,) = across(ends, Blob(value))
    assert_equal(blob.value(), value)


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_a_small_message_waits_for_no_acknowledgement(ends):
    for channel in ends:
        assert channel.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_message_of_several_blobs_large_and_small_keeps_their_order(ends):
    values = list(VALUES.values())[:8]
    for back, value in zip(across(ends, *map(Blob, values)), values, strict=True):
        assert_equal(back.value(), value)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_blob_is_passed_on_unopened_from_any_kind_of_socket_to_any(ends, size):
    value = torch.arange(size)
    (first,) = across(ends, Blob(value))
    for pair in (socket.socketpair(), tcp_pair()):
        further = Channel(pair[0]), Channel(pair[1])
        (second,) = across(further, first)
        assert torch.equal(second.value(), value)
        for channel in further:
            channel.close()


def test_what_is_opened_is_private_to_who_opened_it(ends):
    value = torch.ones(1_000_000)
    (blob,) = across(ends, Blob(value))
    first, second = blob.value(), blob.value()
    first.zero_()
    blob.close()
    assert torch.equal(second, value)
    assert torch.equal(value, torch.ones(1_000_000))


def test_threads_may_send_at_the_same_time(ends):
    def send(thread: int) -> None:
        for i in range(50):
            ends[0].send(Blob((thread, i)), Blob(torch.full((1 + 700 * (i % 30),), float(thread))))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(4)}
    for _ in range(200):
        control, tensor = (blob.value() for blob in ends[1].receive())
        assert torch.equal(tensor, torch.full((1 + 700 * (control[1] % 30),), float(control[0])))
        seen[control[0]].append(control[1])
    assert list(seen.values()) == [list(range(50))] * 4
    for thread in threads:
        thread.join()


def test_the_end_of_the_other_side_is_noticed(ends):
    ends[0].close()
    with pytest.raises((EOFError, OSError)):
        ends[1].receive()


def test_a_message_that_is_begun_and_not_finished_ends_with_the_time_limit(ends):
    ends[1].sock.settimeout(0.2)
    ends[0].sock.sendall(b"\x01\0\0\0\0")
    with pytest.raises(TimeoutError):
        ends[1].receive()


def test_nothing_stays_open_when_blobs_are_dropped():
    before = len(os.listdir("/proc/self/fd"))
    pair = socket.socketpair()
    ends = Channel(pair[0]), Channel(pair[1])
    for _ in range(20):
        across(ends, Blob(torch.ones(100_000)))
    ends[0].close()
    ends[1].close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("error")  # the half-made blob is dropped without a sound
def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(Exception, match="pickle"):
        Blob(lambda: 1)
