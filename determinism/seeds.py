"""Where every random number comes from: one documented, versioned derivation.

A seed is a function of *logical identity* only (run seed, purpose, step, prompt, sample, ...), never of placement, arrival
order, time, or a generator that others also draw from. So a request keeps its seed when it moves to another replica, when a
batch is cut into other chunks, and when a run is resumed.

Derivation, version 1:

    message = encode(run_seed) || encode(domain) || encode(part_1) || ... || encode(part_n)
    seed    = first 8 bytes (little endian) of blake2b-64(message, person="exactrl1/seed"), top bit cleared

`encode` is injective and self-delimiting (a type tag, the length, the bytes), so ("ab", "c") and ("a", "bc"), 1 and "1",
cannot meet. `domain` keeps purposes apart: equal parts in two domains give unrelated seeds. Seeds have 63 bits because
engines and torch take signed 64-bit integers and some read negative ones as "no seed".

A change of any of this changes every run: raise `SEED_VERSION`, which is part of the hash.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SEED_VERSION = 1
"""Version of the derivation; recorded in manifests."""

_MASK_63 = (1 << 63) - 1
_WORDS_PER_BLOCK = 8  # a blake2b digest of 64 bytes is eight 64-bit words


def derive_seed(run_seed: int, domain: str, *parts: int | str) -> int:
    """The seed of one purpose: an int in [0, 2**63).

    Args:
        run_seed: the run's `seed` (any int).
        domain: the purpose, for example `"minibatch_order"`; one name for one use.
        parts: what tells this draw from others of the purpose, in a fixed order.

    Raises:
        TypeError: a part is neither int nor str (a bool is refused too: True would equal 1 in some callers and not in others).

    Example:
        >>> derive_seed(0, "data_order", 1) == derive_seed(0, "data_order", "1")
        False
    """
    message = b"".join(_encode(part) for part in (run_seed, domain, *parts))
    return _hash_to_int(message, "seed")


def request_seed(
    *,
    run_seed: int,
    split: str,
    step: int,
    prompt_id: str,
    sample: int,
    turn: int,
    request_index: int,
) -> int:
    """The seed of one generation request: an int in [0, 2**63).

    Args:
        run_seed: the run's seed.
        split: `train`, or the name of a validation pass.
        step: PPO step, so that a prompt is sampled anew whenever it returns.
        prompt_id: `Prompt.id` (a row's identity, not its text: rows with equal text must differ).
        sample: index in the prompt's group.
        turn: turn of the conversation.
        request_index: ordinal among the requests that share everything above (retries of an agent, repeated rows of a batch).
            A request that brings its own seed still takes an ordinal, so its neighbours' seeds do not move.
    """
    return derive_seed(run_seed, "request", split, step, prompt_id, sample, turn, request_index)


def turn_seed(
    *,
    run_seed: int,
    split: str,
    step: int,
    prompt_id: str,
    sample: int,
    request_index: int,
    lineage: str,
    content: str,
    ordinal: int,
) -> int:
    """The seed of one request within an episode of several turns: an int in [0, 2**63).

    The order in which an agent's requests arrive has no part in it: a request is known by what it continues and what it says.

    Args:
        run_seed, split, step, prompt_id, sample: as in `request_seed`.
        request_index: of the episode, among those of the step.
        lineage: digest of the turns that the request continues.
        content: digest of the request itself: its messages, tools and parameters.
        ordinal: place among the episode's requests that share everything above. A request with a seed of its own takes one too.
    """
    return derive_seed(run_seed, "turn", split, step, prompt_id, sample, request_index, lineage, content, ordinal)


def environment_seed(*, run_seed: int, split: str, step: int, prompt_id: str) -> int:
    """The seed of an environment: an int in [0, 2**63), the same for all samples of a prompt, so that a group's members start alike."""
    return derive_seed(run_seed, "environment", split, step, prompt_id)


def judge_seed(*, episode_seed: int, prompt_id: str, sample: int, judgement: int) -> int:
    """The seed of one judgement of an episode: an int in [0, 2**63).

    Args:
        episode_seed: of the episode's first request; run seed, split and step are in it.
        prompt_id, sample: as in `request_seed`; they keep judgements apart where a request brought a seed of its own.
        judgement: number among the episode's judgements.
    """
    return derive_seed(episode_seed, "judge", prompt_id, sample, judgement)


def torch_generator(seed: int) -> torch.Generator:
    """A CPU generator of its own, seeded; torch's global generator is neither read nor moved.

    CPU on purpose: CUDA generators give other numbers, and numbers drawn here should not depend on the device.
    """
    import torch

    return torch.Generator(device="cpu").manual_seed(seed)


def permutation(n: int, seed: int) -> list[int]:
    """A permutation of range(n), a function of (n, seed) alone: no generator, no library version takes part.

    Each index gets a 64-bit key (blake2b of the seed and a counter) and the indices are sorted by key; equal keys, should
    they ever occur, stay in index order.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"permutation: n is {n}, it must not be negative")
    prefix = _encode(seed)
    keys: list[int] = []
    for block in range((n + _WORDS_PER_BLOCK - 1) // _WORDS_PER_BLOCK):
        digest = hashlib.blake2b(prefix + _encode(block), digest_size=64, person=_person("perm")).digest()
        keys.extend(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8))
    return sorted(range(n), key=keys.__getitem__)


def _encode(part: int | str) -> bytes:
    """Injective and self-delimiting: tag, length as 8 bytes, payload."""
    if type(part) is int:
        tag, payload = b"i", str(part).encode("ascii")
    elif isinstance(part, str):
        # Lone surrogates occur in text from broken files; they are still part of an identity.
        tag, payload = b"s", part.encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"seed part {part!r} is a {type(part).__name__}; only int and str identify a draw (convert it)")
    return tag + len(payload).to_bytes(8, "little") + payload


def _hash_to_int(message: bytes, purpose: str) -> int:
    digest = hashlib.blake2b(message, digest_size=8, person=_person(purpose)).digest()
    return int.from_bytes(digest, "little") & _MASK_63


def _person(purpose: str) -> bytes:
    return f"exactrl{SEED_VERSION}/{purpose}".encode("ascii")  # blake2b takes at most 16 bytes and raises beyond
