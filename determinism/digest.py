"""Digests: short names for data, equal exactly when the bits are equal.

Two kinds, both 32 hex characters (128 bits):

* `digest_tensor` and `digest_value` hash bytes (blake2b) that one process holds whole: prompts, log-probabilities, losses.
* `module_digest` names weights and optimizer state *without gathering them*. Every element contributes

      lane_0(bits, global flat index, parameter name)   and   lane_1(...)        in Z / 2**64

  and contributions are added. Integer addition has no rounding and no order, so a parameter cut over 1, 2 or 4 ranks, or
  walked in chunks of any size, gives the same sums; one all_reduce adds the ranks'. The mix is a bijection of an element's
  bits, so a single changed bit always changes the sums; other differences go unseen with a chance near 2**-128.
  It finds accidents. It is not a defence against someone who constructs a collision.

Digests are of bits: 0.0 and -0.0 differ, two NaNs with one payload agree.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DIGEST_VERSION = 1
"""Raised when any digest of equal data changes; part of the ledger's version."""

LANES = 2
"""Independent 64-bit sums of a shard digest."""

_CHUNK = 1 << 15  # words worked on at once: their int64 copies stay in the core's cache
_WORD_BYTES = 4  # wider elements are seen as several words, so a sign bit never is the top bit of the sum


def _signed(value: int) -> int:
    """The int64 that has the bits of a 64-bit pattern."""
    return value - (1 << 64) if value >= 1 << 63 else value


# Odd constants with irregular bits: 2**64 / golden ratio, and digits of e and sqrt(2).
_INDEX_STEP = _signed(0x9E3779B97F4A7C15)
_MUL_FIRST = _signed(0xB7E151628AED2A6B)
_MUL_SECOND = _signed(0x6A09E667F3BCC909)


def digest_tensor(tensor: Tensor) -> str:
    """Digest of dtype, shape and bytes; 32 hex characters. Any device, any strides; tensors of equal content agree.

    Raises:
        TypeError: a DTensor, of which this process holds only a shard (use `module_digest`).
    """
    if isinstance(tensor, DTensor):
        raise TypeError("digest_tensor: got a DTensor, of which this process may hold a shard only; use module_digest")
    value = tensor.detach().to("cpu").contiguous()
    hasher = hashlib.blake2b(digest_size=16, person=b"exactrl1/tensor")
    hasher.update(_tensor_header(value.dtype, value.shape))
    hasher.update(value.reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def digest_value(value: Any) -> str:
    """Digest of nested plain data: None, bool, int, float, str, bytes, list, tuple, dict, and tensors as leaves.

    A tuple and a list of the same items agree (JSON knows no tuples); True and 1 and 1.0 do not; floats count by their bits;
    a dict counts by its items, not by their order.

    Raises:
        TypeError: a value of another type, named with the path that leads to it.

    Example:
        >>> digest_value([1, 2]) == digest_value((1, 2)) != digest_value([1, 2.0])
        True
    """
    parts: list[bytes] = []
    _encode(value, "value", parts)
    hasher = hashlib.blake2b(digest_size=16, person=b"exactrl1/value")
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def shard_digest(name: str, local: Tensor, offset: int) -> Tensor:
    """The contribution of a contiguous piece of a tensor: [2] int64, to be added (mod 2**64) to those of the other pieces.

    Args:
        name: the tensor's name; equal values under two names give unrelated lanes.
        local: the piece, any shape (its elements are taken in row-major order), any real dtype, any device.
        offset: flat index of the piece's first element in the whole tensor.

    Returns:
        Lanes on `local`'s device. An empty piece contributes zeros.
    """
    words = _words(local.detach())
    per_element = max(1, local.element_size() // _WORD_BYTES)
    key = int.from_bytes(
        hashlib.blake2b(name.encode("utf-8"), digest_size=8, person=b"exactrl1/shard").digest(), "little"
    )
    sums = [torch.zeros(LANES, dtype=torch.int64, device=local.device)]
    chunk = _CHUNK if local.device.type == "cpu" else _CHUNK << 7  # a GPU wants fewer, larger kernels
    steps = torch.arange(min(chunk, words.numel()), device=local.device) * _INDEX_STEP
    x, scratch = torch.empty_like(steps), torch.empty_like(steps)
    for start in range(0, words.numel(), chunk):
        piece = words[start : start + chunk]
        first = key + (offset * per_element + start) * (_INDEX_STEP % (1 << 64))
        sums.append(_mix_chunk(piece, steps, _signed(first % (1 << 64)), x[: piece.numel()], scratch[: piece.numel()]))
    return torch.stack(sums).sum(0)


def _mix_chunk(words: Tensor, steps: Tensor, first: int, x: Tensor, scratch: Tensor) -> Tensor:
    """Mix each word with its index; both lanes' sums, [2] int64.

    The index spreads over all 64 bits and a word sits in the low 32 of them; a multiplication carries it up, a xor-shift
    brings it down again, once for lane 0 and once more for lane 1.
    """
    torch.add(steps[: x.numel()], first, out=x)
    x.bitwise_xor_(scratch.copy_(words))
    x.mul_(_MUL_FIRST)
    _xor_shift(x, scratch)
    lane_0 = x.sum()
    x.mul_(_MUL_SECOND)
    _xor_shift(x, scratch)
    return torch.stack([lane_0, x.sum()])


def _xor_shift(x: Tensor, scratch: Tensor) -> None:
    """x ^= x >> 32 as unsigned; torch shifts the sign in, which would not be a bijection, so it is masked away."""
    torch.bitwise_right_shift(x, 32, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_(0xFFFFFFFF))


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as a flat tensor of integers of at most 32 bits, in row-major order."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def combine(named_lanes: Iterable[tuple[str, torch.dtype, Sequence[int], Tensor]]) -> str:
    """One digest for tensors given as (name, dtype, global shape, summed lanes), in any order.

    Raises:
        ValueError: two tensors share a name.
    """
    per_tensor = {}
    for name, dtype, shape, lanes in named_lanes:
        if name in per_tensor:
            raise ValueError(f"combine: two tensors are named {name!r}; digests need distinct names")
        per_tensor[name] = _lane_digest(name, dtype, shape, lanes)
    return digest_value(per_tensor)


def module_digest(named_tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> str:
    """One digest of weights or optimizer state, the same for plain tensors and for shards on any number of ranks.

    Every rank of `group` (None: all) must call it with the same names; every rank gets the answer. One all_reduce of
    16 bytes a tensor is the only traffic.

    Args:
        named_tensors: (name, tensor) with distinct names. DTensors may be sharded on dim 0 and replicated on other mesh
            dimensions; a plain tensor is taken to be the same on every rank.

    Raises:
        ValueError: a placement that is neither `Shard(0)` nor `Replicate()`, or a repeated name.

    Example:
        >>> module_digest(model.named_parameters())  # doctest: +SKIP
        '5e0c2a...'
    """
    return digest_value(tensor_digests(named_tensors, group))


def tensor_digests(
    named_tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """Like `module_digest`, but a digest a tensor, by name: says *which* parameter differs."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise ValueError(f"tensor_digests: two tensors are named {name!r}; digests need distinct names")
        tensors[name] = tensor
    lanes = {name: _local_lanes(name, tensor) for name, tensor in tensors.items()}
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded:
        device = torch.device(tensors[sharded[0]].device.type)
        total = torch.stack([lanes[name].to(device) for name in sharded])
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        lanes.update(zip(sharded, total.cpu(), strict=True))
    return {name: _lane_digest(name, t.dtype, t.shape, lanes[name]) for name, t in sorted(tensors.items())}


def _local_lanes(name: str, tensor: Tensor) -> Tensor:
    """This rank's share of a tensor's lanes; of replicas, only the first contributes."""
    if not isinstance(tensor, DTensor):
        return shard_digest(name, tensor, 0)
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    supported = all(type(p) is Replicate or (type(p) is Shard and p.dim == 0) for p in placements)
    if not supported or sum(type(p) is Shard for p in placements) > 1:
        raise ValueError(
            f"{name}: placements {placements}; a digest needs one Shard(0) at most and Replicate() otherwise"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(type(p) is Replicate and at for p, at in zip(placements, coordinate, strict=True)):
        return torch.zeros(LANES, dtype=torch.int64, device=local.device)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    row_size = 1
    for size in tensor.shape[1:]:
        row_size *= size
    return shard_digest(name, local, offsets[0] * row_size if offsets else 0)


def _lane_digest(name: str, dtype: torch.dtype, shape: Sequence[int], lanes: Tensor) -> str:
    return digest_value([name, str(dtype), list(shape), lanes.tolist()])


def _tensor_header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return f"{dtype}{tuple(shape)}\0".encode("ascii")


def _encode(value: Any, path: str, parts: list[bytes]) -> None:
    """Append an injective, self-delimiting encoding of `value`."""
    kind = type(value)
    if value is None:
        parts.append(b"n")
    elif kind is bool:
        parts.append(b"t" if value else b"f")
    elif kind is int:
        text = str(value).encode("ascii")
        parts.append(b"i" + len(text).to_bytes(8, "little") + text)
    elif kind is float:
        parts.append(b"d" + struct.pack("<d", value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"s" + len(text).to_bytes(8, "little") + text)
    elif isinstance(value, bytes):
        parts.append(b"b" + len(value).to_bytes(8, "little") + value)
    elif isinstance(value, (list, tuple)):
        _encode_items(value, path, parts)
    elif isinstance(value, Mapping):
        _encode_mapping(value, path, parts)
    elif isinstance(value, Tensor):
        parts.append(b"T" + bytes.fromhex(digest_tensor(value)))
    else:
        raise TypeError(
            f"digest_value: {path} is a {kind.__name__}; digests are of plain data and tensors (convert it)"
        )


def _encode_items(items: Sequence[Any], path: str, parts: list[bytes]) -> None:
    """A list; one that holds only floats, or only ints of 64 bits, is packed at once (token ids and log-probabilities are long)."""
    kinds = set(map(type, items))
    packed = None
    if kinds == {float}:
        packed = b"D" + struct.pack("<Q", len(items)) + struct.pack(f"<{len(items)}d", *items)
    elif kinds == {int} and min(items) >= -(1 << 63) and max(items) < 1 << 63:
        packed = b"I" + struct.pack("<Q", len(items)) + struct.pack(f"<{len(items)}q", *items)
    if packed is not None:
        parts.append(packed)
        return
    parts.append(b"l" + struct.pack("<Q", len(items)))
    for index, item in enumerate(items):
        _encode(item, f"{path}[{index}]", parts)


def _encode_mapping(mapping: Mapping[Any, Any], path: str, parts: list[bytes]) -> None:
    """A dict, ordered by its encoded keys."""
    entries = []
    for key, item in mapping.items():
        if type(key) is not int and not isinstance(key, str):
            raise TypeError(f"digest_value: a key of {path} is {key!r}; keys must be str or int")
        entry: list[bytes] = []
        _encode(key, path, entry)
        head = b"".join(entry)
        _encode(item, f"{path}[{key!r}]", entry)
        entries.append((head, b"".join(entry)))
    parts.append(b"m" + struct.pack("<Q", len(entries)))
    parts.extend(entry for _, entry in sorted(entries))
