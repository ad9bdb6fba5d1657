"""How values travel between processes: pickle protocol 5, with the bytes of tensors and arrays beside the pickle.

    Blob       a packed value: sizes, pickle, buffers (aligned) as one block. Small ones are bytes, large ones a memory file
    Channel    messages of blobs over a socket. On one machine a memory file's descriptor is sent, so that nothing is copied
               through the socket and one file serves every receiver; between machines its bytes are copied

A process that only passes a value on leaves its blob packed. Torch's own pickling copies a tensor several times (it writes a file
format into memory); this path copies it once. Tensors arrive on the CPU, whole and contiguous, whatever device they were on: another
process may see other devices.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
from typing import Any

INLINE_LIMIT = 64 * 1024
"""Bytes. Larger blobs go through a memory file; smaller ones fit the socket's buffer, so that sending never blocks."""
ALIGNMENT = 64
"""Bytes; a cache line, so that vector loads on received tensors are aligned."""
_WRITE_LIMIT = 1 << 30
_MOST_FILES = 8
"""Most memory files in one message."""


class Blob:
    """A packed value, made here or received; it can be opened, and sent on as it is. `close` frees it."""

    data: bytes | bytearray | None = None
    fd: int | None = None

    def __init__(self, value: Any) -> None:
        """Pack `value`.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: something in it can't be pickled (a lambda, a local class).
        """
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [stream.getvalue(), *(buffer.raw() for buffer in buffers)]
        table = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(len(part) for part in parts))
        self.size = sum(_aligned(len(part)) for part in (table, *parts))
        if self.size <= INLINE_LIMIT:
            self.data = b"".join(bytes(part).ljust(_aligned(len(part)), b"\0") for part in (table, *parts))
        else:
            self.fd = os.memfd_create("exactrl", os.MFD_CLOEXEC)
            os.truncate(self.fd, self.size)
            offset = 0
            for part in (table, *parts):
                _write(self.fd, part, offset)
                offset += _aligned(len(part))

    @classmethod
    def received(cls, size: int, data: bytearray | None = None, fd: int | None = None) -> Blob:
        """Make a blob of what came through a channel."""
        blob = cls.__new__(cls)
        blob.size, blob.data, blob.fd = size, data, fd
        return blob

    def value(self) -> Any:
        """The value. Tensors are views of this blob's memory, private to the caller: writing to one copies its pages."""
        if self.fd is not None:
            view = memoryview(mmap.mmap(self.fd, self.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
        else:
            assert self.data is not None, "not closed"
            view = memoryview(bytearray(self.data))
        (count,) = struct.unpack_from("<Q", view, 0)
        offset, parts = _aligned(8 + 8 * count), []
        for size in struct.unpack_from(f"<{count}Q", view, 8):
            parts.append(view[offset : offset + size])
            offset = _aligned(offset + size)
        return pickle.loads(parts[0], buffers=parts[1:])

    def close(self) -> None:
        """Free the memory file. Receivers, and values that were opened, keep what they have mapped."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Channel:
    """Messages of a few blobs over a connected stream socket; sending is safe from several threads, receiving from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._passes_files = sock.family == socket.AF_UNIX
        if not self._passes_files:
            # Nagle's algorithm would hold a small message back, 40 ms at worst, until the one before it is acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self.sock.fileno()

    def send(self, *blobs: Blob) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or takes nothing within the socket's time limit.
        """
        files = [blob.fd for blob in blobs if blob.fd is not None] if self._passes_files else []
        table = struct.pack("<Q", len(blobs))
        table += b"".join(struct.pack("<QQ", blob.size, bool(files) and blob.fd is not None) for blob in blobs)
        with self._sending:
            sent = socket.send_fds(self.sock, [table], files) if files else 0
            inline = [blob for blob in blobs if not files or blob.fd is None]
            small = b"".join(blob.data for blob in inline if blob.data is not None)
            if all(blob.data is not None for blob in inline):
                self.sock.sendall(table[sent:] + small)
                return
            self.sock.sendall(table[sent:])
            for blob in inline:
                if blob.data is not None:
                    self.sock.sendall(blob.data)
                else:
                    with open(os.dup(blob.fd), "rb") as file:  # type: ignore[arg-type]
                        self.sock.sendfile(file, 0, blob.size)

    def receive(self) -> list[Blob]:
        """The blobs of the next message.

        Raises:
            EOFError: the other end is gone.
            OSError: the same, or a message was not finished within the socket's time limit.
        """
        head, fds, _, _ = socket.recv_fds(self.sock, 8, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        if not head:
            raise EOFError
        head += self._exactly(bytearray(8 - len(head)))
        (count,) = struct.unpack("<Q", head)
        table = struct.unpack(f"<{2 * count}Q", self._exactly(bytearray(16 * count)))
        blobs = []
        for size, is_file in zip(table[::2], table[1::2], strict=True):
            if is_file:
                blobs.append(Blob.received(size, fd=fds.pop(0)))
            elif size <= INLINE_LIMIT:
                blobs.append(Blob.received(size, data=self._exactly(bytearray(size))))
            else:
                blobs.append(self._into_file(size))
        return blobs

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _into_file(self, size: int) -> Blob:
        blob = Blob.received(size, fd=os.memfd_create("exactrl", os.MFD_CLOEXEC))
        os.truncate(blob.fd, size)  # type: ignore[arg-type]
        with mmap.mmap(blob.fd, size) as shared, memoryview(shared) as view:  # type: ignore[arg-type]
            self._exactly(view)
        return blob

    def _exactly(self, data: Any) -> Any:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                got = self.sock.recv_into(view[done:])
                if not got:
                    raise EOFError
                done += got
        return data


class _Pickler(pickle.Pickler):
    """Plain CPU or CUDA tensors become (dtype, shape, bytes); everything else is pickled as usual."""

    def reducer_override(self, obj: Any) -> Any:
        # A process that has not imported torch, or is just doing so in another thread, holds no tensors.
        torch = sys.modules.get("torch")
        if type(obj) is not getattr(torch, "Tensor", None):
            return NotImplemented
        assert torch is not None
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


def _write(fd: int, part: Any, offset: int) -> None:
    view = memoryview(part)
    while view:
        written = os.pwrite(fd, view[:_WRITE_LIMIT], offset)
        view, offset = view[written:], offset + written
