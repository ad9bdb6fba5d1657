"""Which replica serves which request.

Placement is a function of the canonical identities in the batch: it does not depend on load, on arrival or on the order in
which requests are listed. With batch-invariant engines it could not change results anyway; it makes engine logs and
timings repeatable too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rollout.types import GenerationRequest, SampleKey


def assign(
    requests: Sequence[GenerationRequest], replicas: int, *, keep_groups: bool = False
) -> list[list[GenerationRequest]]:
    """Place requests on replicas: in the order of a digest of their keys, dealt like cards.

    Dealing keeps the counts within one of each other; the digest spreads a group's members, whose prompt is shared and
    whose lengths are alike, over all replicas.

    Args:
        keep_groups: `rollout.serialize_group_samples`; whole groups are dealt instead of requests, so that a group's members are submitted
            to one engine, one after the other in member order. The counts may then differ by one group.

    Returns:
        `replicas` lists that together hold every request once; each in canonical order, possibly empty.

    Raises:
        ValueError: no replica, or a key or a priority that occurs twice.
    """
    if replicas < 1:
        raise ValueError(f"rollout.replicas must be at least 1, got {replicas}")
    repeated = _repeated([request.key for request in requests])
    if repeated:
        raise ValueError(f"requests with the same key in one batch: {_names(repeated)}")
    priorities = [request.priority for request in requests]
    if len(set(priorities)) < len(priorities):
        raise ValueError(
            "requests with the same priority in one batch: the scheduler would break the tie by arrival time"
        )
    units: dict[SampleKey, list[GenerationRequest]] = {}
    for request in requests:
        units.setdefault(SampleKey(request.key.task, 0) if keep_groups else request.key, []).append(request)
    shuffled = sorted(units, key=lambda key: (_digest(key), key))
    dealt = [[request for key in shuffled[rank::replicas] for request in units[key]] for rank in range(replicas)]
    return [sorted(share, key=lambda request: request.key) for share in dealt]


def replica_of(key: SampleKey, replicas: int, keep_groups: bool = False) -> int:
    """The replica for all turns of a sample; with `keep_groups` for all samples of a prompt."""
    whole = SampleKey(key.task, 0 if keep_groups else key.sample)
    return int.from_bytes(_digest(whole), "little") % replicas


def _digest(key: SampleKey) -> bytes:
    text = f"exactrl/placement/v1/{key.task}/{key.sample}/{key.turn}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _repeated(keys: Sequence[SampleKey]) -> list[SampleKey]:
    seen: set[SampleKey] = set()
    twice: set[SampleKey] = set()
    for key in keys:
        (twice if key in seen else seen).add(key)
    return sorted(twice)


def _names(keys: Sequence[SampleKey], limit: int = 5) -> str:
    shown = ", ".join(f"(task {k.task}, sample {k.sample}, turn {k.turn})" for k in keys[:limit])
    return shown if len(keys) <= limit else f"{shown} and {len(keys) - limit} more"
