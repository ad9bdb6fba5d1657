"""How values travel between the driver and the nodes' hosts: packed by `transport.py`, since Ray would pickle a tensor the slow way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.launch.transport import Packed, pack, unpack

Wire = tuple[bytes, list[np.ndarray]]
"""A packed value as Ray carries it: arrays travel beside the pickle without a copy."""

PUT_LIMIT = 100 * 1024
"""Bytes. Keywords larger than this go to the object store once instead of to each node."""


@dataclass(frozen=True)
class RayHandle:
    """A result that stayed in the object store; pass it as a keyword to another group's `run`."""

    ref: Any
    """Ray's reference to the wire of worker 0's result."""


def split_handles(common: dict[str, Any], receivers: int) -> tuple[dict[str, Any], Any]:
    """Keywords of a call: (keyword -> reference of an exported result, the others as a wire or, when large, a reference to it)."""
    import ray

    handles = {key: value.ref for key, value in common.items() if isinstance(value, RayHandle)}
    plain = pack({key: value for key, value in common.items() if key not in handles})
    keywords: Any = as_wire(plain)
    if plain.nbytes > PUT_LIMIT and receivers > 1:
        keywords = ray.put(keywords)
    return handles, keywords


def as_wire(packed: Packed) -> Wire:
    """What `pack` made, as Ray carries it."""
    return bytes(packed.header), [np.frombuffer(buffer, dtype=np.uint8) for buffer in packed.buffers]


def as_packed(wire: Wire) -> Packed:
    """Inverse of `as_wire`, without a copy: to be passed on."""
    header, arrays = wire
    return Packed(header, [array.data for array in arrays])


def to_wire(value: Any) -> Wire:
    """Pack a value."""
    return as_wire(pack(value))


def from_wire(wire: Wire) -> Any:
    """Unpack; copies, since the object store's memory is shared and must not be written to."""
    header, arrays = wire
    return unpack(header, [bytearray(array) for array in arrays])
