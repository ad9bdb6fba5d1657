"""Digests: short names for data, equal exactly when the bits are equal.

Two kinds, both 32 hex characters (128 bits):

* `digest_tensor` and `digest_value` hash bytes (blake2b) that one process holds whole: prompts, log-probabilities, losses.
* `module_digest` names weights and optimizer state *without gathering them*, at the speed of memory. A tensor's bytes, as
  signed integers b, are laid out in pages of 4096, and each of 32 lanes is a sum over all of them,

      lane_l = sum over pages p of  weight[p, l // 8] * (sum over i of  b[p, i] * key[i, l])     in Z / 2**64

  with fixed odd keys of at most 63 and fixed odd weights of 64 bits. The inner sum is a product of int8 matrices, which CPUs
  and GPUs have instructions for, and is exact in int32. Nothing is rounded and sums have no order, so a parameter cut over
  1, 2 or 4 ranks, at any element, gives the same lanes; one all_reduce adds the ranks'. Names, shapes and lanes are then hashed.

What a `module_digest` sees: a single changed bit changes every lane, and any change within one element changes some lane, always.
Of other differences, one in about 2**128 goes unseen, as far as they have nothing to do with the keys. It finds accidents. It
is not a defence against someone who constructs a collision: the lanes are linear, so that would be easy.

Digests are of bits: 0.0 and -0.0 differ, two NaNs with one payload agree.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # its import takes more than a second, and a driver meets no DTensor
    from torch.distributed.tensor import DTensor

DIGEST_VERSION = 2
"""Raised when any digest of equal data changes, and `ledger.LEDGER_VERSION` with it."""

LANES = 32
"""64-bit sums of a shard digest: 6 bits of a key in each."""
PAGE = 4096
"""Bytes that share a weight; a power of two, so that no element lies across two pages."""

_GROUPS = 4  # lanes of one group share the page weights; two pages whose weights are alike in one are not in the others
_AT_ONCE = 128  # pages in one product: they stay in the core's cache
_RUN = 2048  # pages whose sums are weighted together; on a GPU, which wants few and large kernels, _LARGE in both
_LARGE = 32768
_FEW = 32  # pieces with fewer whole pages share a product with others; cuBLAS takes none with fewer than 17 pages


def _signed(value: int) -> int:
    """The int64 that has the bits of a 64-bit pattern."""
    return value - (1 << 64) if value >= 1 << 63 else value


# Odd constants with irregular bits: 2**64 / golden ratio, and digits of e and sqrt(2).
_INDEX_STEP = _signed(0x9E3779B97F4A7C15)
_MIXERS = (_signed(0xB7E151628AED2A6B), _signed(0x6A09E667F3BCC909))


def digest_tensor(tensor: Tensor) -> str:
    """Digest of dtype, shape and bytes; 32 hex characters. Any device, any strides; tensors of equal content agree.

    Raises:
        TypeError: a DTensor, of which this process holds only a shard (use `module_digest`).
    """
    if _is_dtensor(tensor):
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


def shard_digests(pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Contributions of contiguous pieces of tensors, to be added (mod 2**64) to those of the same tensors' other pieces.

    Args:
        pieces: of each, the piece, any shape (its elements are taken in row-major order), any dtype, all on one device;
            and the flat index of its first element in the whole tensor.

    Returns:
        [len(pieces), LANES] int64 on the pieces' device. An empty piece contributes zeros.
    """
    device = pieces[0][0].device
    at_once, run = (_AT_ONCE, _RUN) if device.type == "cpu" else (_LARGE, _LARGE)
    sums = torch.empty(run, LANES, dtype=torch.int32, device=device)
    lanes = torch.zeros(len(pieces), LANES, dtype=torch.int64, device=device)
    small: list[_Bytes] = []
    for row, (local, offset) in enumerate(pieces):
        data = local.detach().contiguous().reshape(-1).view(torch.int8)
        page, lead = divmod(offset * local.element_size(), PAGE)
        head = -lead % PAGE
        whole = (data.numel() - head) // PAGE
        if whole < _FEW:
            small.append(_Bytes(row, page, lead, data))
            continue
        end = head + whole * PAGE
        body = data[head:end].view(whole, PAGE)
        if body.data_ptr() % 16:  # matrix kernels of GPUs want aligned addresses
            body = body.clone()
        first = page + bool(lead)
        small += [_Bytes(row, page, lead, data[:head]), _Bytes(row, first + whole, 0, data[end:])]
        at = first
        for pages in body.tensor_split(-(-whole // run)):
            count = len(pages)
            products = -(-count // at_once)
            for part, out in zip(pages.tensor_split(products), sums[:count].tensor_split(products), strict=True):
                torch._int_mm(part, _keys(device), out=out)
            lanes[row] += _weighted(sums[:count], _run_of_weights(at, count, device)).sum(0)
            at += count
    _add_small(small, lanes)
    return lanes


class _Bytes(NamedTuple):
    """Too few bytes for a product of their own."""

    row: int
    """Whose they are."""
    page: int
    """The page of the first, in its tensor."""
    lead: int
    """The first's place in that page."""
    data: Tensor


def _add_small(pieces: Iterable[_Bytes], lanes: Tensor) -> None:
    """Add pieces to their rows of `lanes`, several in one product: each on pages of its own, with zeros around it, which add nothing."""
    pages = lanes.new_zeros(_AT_ONCE, PAGE, dtype=torch.int8)
    rows: list[int] = []
    numbers: list[int] = []

    def add() -> None:
        index = torch.tensor([rows, numbers], device=lanes.device)
        used = pages[: max(len(rows), _FEW)]
        sums = torch._int_mm(used, _keys(lanes.device))[: len(rows)]
        lanes.index_add_(0, index[0], _weighted(sums, _weights(index[1])))
        used.zero_()
        rows.clear()
        numbers.clear()

    for row, page, lead, data in pieces:
        count = -(-(lead + data.numel()) // PAGE) if data.numel() else 0
        if len(rows) + count > _AT_ONCE:
            add()
        start = len(rows) * PAGE + lead
        pages.view(-1)[start : start + data.numel()] = data
        rows += [row] * count
        numbers += range(page, page + count)
    if rows:
        add()


def _weighted(sums: Tensor, weights: Tensor) -> Tensor:
    """[n, LANES] int32 sums of pages by key, times the pages' weights ([n, _GROUPS] int64): [n, LANES] int64."""
    return (sums.view(-1, _GROUPS, LANES // _GROUPS) * weights[:, :, None]).view(-1, LANES)


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """[PAGE, LANES] int8 odd keys in [-63, 63], the output of an extendable hash.

    At most 63, because processors without VNNI instructions add pairs of products in 16 bits: 2 * 255 * 63 still fits.
    """
    drawn = hashlib.shake_128(b"exactrl2/shard keys").digest(PAGE * LANES)
    keys = torch.tensor(list(drawn)) % 64 * 2 - 63
    return keys.to(device, torch.int8).view(PAGE, LANES)


def _weights(numbers: Tensor) -> Tensor:
    """[n] int64 page numbers to [n, _GROUPS] int64 odd weights: a multiplication carries bits up, a xor-shift brings them down again."""
    x = (numbers[:, None] * _GROUPS + torch.arange(_GROUPS, device=numbers.device)) * _INDEX_STEP
    for factor in _MIXERS:
        # torch shifts the sign in, which is masked away.
        x.bitwise_xor_((x >> 32).bitwise_and_(0xFFFFFFFF)).mul_(factor)
    return x.bitwise_xor_((x >> 32).bitwise_and_(0xFFFFFFFF)).bitwise_or_(1)


@functools.lru_cache(maxsize=1024)  # the same few again and again: layers are alike, and so are steps
def _run_of_weights(first: int, count: int, device: torch.device) -> Tensor:
    return _weights(torch.arange(first, first + count, device=device))


def module_digest(named_tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> str:
    """One digest of weights or optimizer state, the same for plain tensors and for shards on any number of ranks.

    Every rank of `group` (None: all) must call it with the same names; every rank gets the answer. One all_reduce of
    256 bytes a tensor is the only traffic, and nothing is copied to the host but its sum.

    Args:
        named_tensors: (name, tensor) with distinct names. DTensors may be sharded on dim 0 and replicated on other mesh
            dimensions; a plain tensor is taken to be the same on every rank.

    Raises:
        ValueError: a placement that is neither `Shard(0)` nor `Replicate()`, or a repeated name.

    Example:
        >>> module_digest(model.named_parameters())  # doctest: +SKIP
        '5e0c2a...'
    """
    return module_digests({"": named_tensors}, group)[""]


def module_digests(
    modules: Mapping[str, Iterable[tuple[str, Tensor]]], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """The `module_digest` of each of several, with one all_reduce for all of them."""
    found = _digests({name: _distinct(tensors) for name, tensors in modules.items()}, group)
    return {name: digest_value(tensors) for name, tensors in found.items()}


def _distinct(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise ValueError(f"two tensors are named {name!r}; digests need distinct names")
        tensors[name] = tensor
    return tensors


@torch.no_grad()  # else each `to_local` is a node of a graph
def _digests(modules: Mapping[str, dict[str, Tensor]], group: dist.ProcessGroup | None) -> dict[str, dict[str, str]]:
    """Module -> tensor -> digest, sorted by tensor."""
    entries = [(module, name, t) for module, tensors in modules.items() for name, t in sorted(tensors.items())]
    shards = [_local_piece(name, t) for _, name, t in entries]
    lanes: list[list[int]] = [[]] * len(entries)
    by_kind: dict[tuple[bool, torch.device], list[int]] = {}
    for i, (_, _, tensor) in enumerate(entries):
        by_kind.setdefault((_is_dtensor(tensor), shards[i][0].device), []).append(i)
    for (sharded, _), indices in by_kind.items():
        total = shard_digests([shards[i] for i in indices])
        if sharded:
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        for i, row in zip(indices, total.tolist(), strict=True):
            lanes[i] = row
    result: dict[str, dict[str, str]] = {module: {} for module in modules}
    for (module, name, tensor), row in zip(entries, lanes, strict=True):
        result[module][name] = digest_value([name, str(tensor.dtype), list(tensor.shape), row])
    return result


def _local_piece(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's piece of a tensor and its place; of replicas, only the first contributes."""
    if not _is_dtensor(tensor):
        return tensor, 0
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    supported = all(type(p) is Replicate or (type(p) is Shard and p.dim == 0) for p in placements)
    if not supported or sum(type(p) is Shard for p in placements) > 1:
        raise ValueError(
            f"{name}: placements {placements}; a digest needs one Shard(0) at most and Replicate() otherwise"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(type(p) is Replicate and at for p, at in zip(placements, coordinate, strict=True)):
        return local[:0], 0
    row = 0
    for placement, at, size in zip(placements, coordinate, mesh.shape, strict=True):
        if type(placement) is Shard:  # equal chunks, rounded up, so the last ranks may hold fewer rows or none
            row = min(at * -(-tensor.shape[0] // size), tensor.shape[0])
    return local, row * math.prod(tensor.shape[1:])


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


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
