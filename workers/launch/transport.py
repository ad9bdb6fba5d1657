"""Values on their way between processes: pickle protocol 5 with the bytes of tensors and arrays beside the pickle.

    pack(value)   -> Packed(header, buffers)      header: the pickle; buffers: one block of bytes per tensor or array
    to_blob       -> one bytes-like: sizes, header, buffers (aligned)      what travels over gloo
    Channel       -> blobs over a Unix socket; a large one is a memory file whose descriptor is sent, so that nothing is
                     copied through the socket and the same file serves every receiver

Torch's own pickling copies a tensor several times (it writes a file format into memory); this path copies it once.
Tensors arrive on the CPU, whole and contiguous, whatever device they left from: another process may see other devices.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

INLINE_LIMIT = 64 * 1024
"""Bytes. Larger blobs go through a memory file; smaller ones fit the socket's buffer, so that sending never blocks."""
ALIGNMENT = 64
"""Bytes; a cache line, so that vector loads on received tensors are aligned."""
_WRITE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Packed:
    """A pickled value."""

    header: bytes | memoryview
    """The pickle without the large data."""
    buffers: Sequence[memoryview]
    """Contiguous bytes of each tensor or array, in the order in which the pickle refers to them."""

    @property
    def nbytes(self) -> int:
        """Size of header and buffers in bytes."""
        return len(self.header) + sum(len(buffer) for buffer in self.buffers)


def pack(value: Any) -> Packed:
    """Pickle `value`; plain tensors and numpy arrays leave their bytes outside the pickle.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in `value` can't be pickled (a lambda, a local class).
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return Packed(stream.getvalue(), [buffer.raw() for buffer in buffers])


def unpack(header: bytes | memoryview, buffers: Iterable[Any]) -> Any:
    """Inverse of `pack`. Received tensors share memory with `buffers`, which must be writable."""
    return pickle.loads(header, buffers=buffers)


def to_blob(value: Any) -> bytes:
    """`value` as one block of bytes; `from_blob` reads it."""
    return b"".join(_pieces(pack(value)))


def from_blob(blob: memoryview | bytearray) -> Any:
    """Inverse of `to_blob`. `blob` is writable; received tensors are views of it and keep it alive."""
    packed = parts_of(blob)
    return unpack(packed.header, packed.buffers)


def parts_of(blob: memoryview | bytearray) -> Packed:
    """What was packed into a blob, still packed: to be passed on by a process that has no use for the value."""
    view = memoryview(blob)
    (count,) = struct.unpack_from("<Q", view, 0)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    offset = _aligned(8 + 8 * count)
    parts = []
    for size in sizes:
        parts.append(view[offset : offset + size])
        offset = _aligned(offset + size)
    return Packed(parts[0], parts[1:])


class Blob:
    """A value (or what `pack` made of it) ready to be sent, once or to many; `close` frees it."""

    def __init__(self, value: Any) -> None:
        packed = value if isinstance(value, Packed) else pack(value)
        self.size = _blob_size(packed)
        self.data: bytes | None = None
        self.fd: int | None = None
        if self.size <= INLINE_LIMIT:
            self.data = b"".join(_pieces(packed))
        else:
            self.fd = os.memfd_create("exactrl", os.MFD_CLOEXEC)
            for piece in _pieces(packed):
                _write(self.fd, piece)

    def close(self) -> None:
        """Free the memory file; receivers keep what they mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Channel:
    """Messages of a few blobs over a connected Unix stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self.sock.fileno()

    def send(self, blobs: Sequence[Blob]) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        table = struct.pack("<Q", len(blobs))
        table += b"".join(struct.pack("<QQ", blob.size, blob.fd is not None) for blob in blobs)
        fds = [blob.fd for blob in blobs if blob.fd is not None]
        sent = socket.send_fds(self.sock, [table], fds)
        self.sock.sendall(table[sent:] + b"".join(blob.data for blob in blobs if blob.data is not None))

    def receive(self) -> list[memoryview]:
        """The blobs of the next message, each to be read by `from_blob`.

        Raises:
            EOFError: the other end is gone.
        """
        head, fds, _, _ = socket.recv_fds(self.sock, 8, 8, socket.MSG_CMSG_CLOEXEC)
        if not head:
            raise EOFError
        head += self._exactly(8 - len(head))
        (count,) = struct.unpack("<Q", head)
        table = struct.unpack(f"<{2 * count}Q", self._exactly(16 * count))
        blobs = []
        for size, is_file in zip(table[::2], table[1::2], strict=True):
            blobs.append(_map_file(fds.pop(0), size) if is_file else memoryview(self._exactly(size)))
        return blobs

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self.sock.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data


class _Pickler(pickle.Pickler):
    """Plain CPU or CUDA tensors become (dtype, shape, bytes); everything else is pickled as usual."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # a process that has not imported torch holds no tensors
        if torch is None or type(obj) is not torch.Tensor:
            return NotImplemented
        if obj.layout != torch.strided or obj.is_quantized or obj.is_complex() or obj.is_meta:
            return NotImplemented
        # Flattened first: a 0-dimensional tensor can't be viewed as bytes.
        data = obj.detach().cpu().contiguous().reshape(-1)
        return _tensor, (pickle.PickleBuffer(data.view(torch.uint8).numpy()), str(data.dtype), tuple(obj.shape))


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not len(memoryview(buffer)):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(kind).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _blob_size(packed: Packed) -> int:
    sizes = [len(packed.header), *(len(buffer) for buffer in packed.buffers)]
    return _aligned(8 + 8 * len(sizes)) + sum(_aligned(size) for size in sizes)


def _pieces(packed: Packed) -> Iterator[bytes | memoryview]:
    parts: list[bytes | memoryview] = [packed.header, *packed.buffers]
    table = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(len(part) for part in parts))
    for part in (table, *parts):
        yield part
        padding = _aligned(len(part)) - len(part)
        if padding:
            yield bytes(padding)


def _write(fd: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view[:_WRITE_LIMIT]) :]


def _map_file(fd: int, size: int) -> memoryview:
    # Private: a receiver may write to its tensors, and its copy of a page is made only then.
    try:
        return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
