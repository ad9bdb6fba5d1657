"""Seeds are a function of logical identity: distinct where draws differ, equal wherever the same draw is made."""

import os
import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from determinism.seeds import derive_seed, permutation, request_seed, torch_generator

PROMPT_IDS = ["data/0", "data/1", "data/2"]  # rows 0 and 1 share their text; a seed never looks at text
SAMPLES = 4


def seeds_of_step(step: int, chunks: int, replicas: int) -> dict[tuple[str, int], int]:
    """All request seeds of a step, made chunk by chunk and replica by replica, as a distributed run would."""
    work = [(prompt_id, sample) for prompt_id in PROMPT_IDS for sample in range(SAMPLES)]
    size = -(-len(work) // chunks)
    seeds = {}
    for start in range(0, len(work), size):
        chunk = work[start : start + size]
        for replica in range(replicas):
            for prompt_id, sample in chunk[replica::replicas]:
                seeds[prompt_id, sample] = request_seed(
                    run_seed=7, split="train", step=step, prompt_id=prompt_id, sample=sample, turn=0, request_index=0
                )
    return seeds


def test_s1_request_seeds_are_distinct_within_and_between_steps():
    first, second = seeds_of_step(1, 1, 1), seeds_of_step(2, 1, 1)
    everything = [*first.values(), *second.values()]
    assert len(set(everything)) == len(everything) == 2 * 3 * SAMPLES


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_s1_request_seeds_do_not_move_with_chunks_or_replicas(chunks, replicas):
    assert seeds_of_step(3, chunks, replicas) == seeds_of_step(3, 1, 1)


def test_s2_seeds_and_orders_ignore_the_hash_seed():
    program = (
        "from determinism.seeds import *\n"
        "ids = {'uid-7', 'uid-8', 'uid-9'}\n"  # a set, whose order follows PYTHONHASHSEED
        "seeds = [request_seed(run_seed=1, split='train', step=2, prompt_id=i, sample=0, turn=0, request_index=0) for i in sorted(ids)]\n"
        "print(seeds, permutation(9, 4), hash('uid-7'))"
    )
    lines = []
    for hash_seed in range(1, 7):
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        lines.append(run.stdout.strip().rsplit(" ", 1))
    assert len({answer for answer, _ in lines}) == 1
    assert len({builtin for _, builtin in lines}) > 1  # hash() would have failed this test


def test_the_derivation_is_frozen():
    """A change here changes every run of every user: raise SEED_VERSION and say so in the changelog."""
    assert derive_seed(0, "data_order", 1) == 2935348190934064721
    assert permutation(8, 0) == [7, 4, 6, 1, 2, 0, 5, 3]


def test_every_field_of_a_request_matters():
    base = {
        "run_seed": 0,
        "split": "train",
        "step": 1,
        "prompt_id": "a",
        "sample": 0,
        "turn": 0,
        "request_index": 0,
    }
    other = {"run_seed": 1, "split": "val", "step": 2, "prompt_id": "b", "sample": 1, "turn": 1, "request_index": 1}
    seeds = [request_seed(**base)] + [request_seed(**{**base, name: other[name]}) for name in base]
    assert len(set(seeds)) == len(seeds)


def test_parts_cannot_run_into_each_other():
    assert derive_seed(0, "x", "ab", "c") != derive_seed(0, "x", "a", "bc")
    assert derive_seed(0, "x", 1) != derive_seed(0, "x", "1")
    assert derive_seed(0, "x", 12, 3) != derive_seed(0, "x", 1, 23)
    assert derive_seed(0, "xy") != derive_seed(0, "x", "y")
    assert derive_seed(0, "x") != derive_seed(0, "x", "")
    assert derive_seed(1, "x", -1) != derive_seed(-1, "x", 1)


def test_seeds_have_63_bits_and_spread():
    seeds = [derive_seed(0, "spread", i) for i in range(2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert 800 < ones < 1200, f"bit {bit} is set in {ones} of 2000 seeds"
    assert min(abs(b - a) for a, b in pairwise(sorted(seeds))) > 1000  # no seed + 1 neighbours


@pytest.mark.parametrize("part", [True, 1.5, None, ("a",), b"a"])
def test_parts_of_other_types_are_refused(part):
    with pytest.raises(TypeError, match="seed part"):
        derive_seed(0, "x", part)


def test_a_lone_surrogate_is_still_an_identity():
    assert derive_seed(0, "x", "\ud800") != derive_seed(0, "x", "\ud801")


def test_permutation_is_one_and_depends_on_the_seed():
    for n in (0, 1, 2, 7, 8, 9, 100):
        assert sorted(permutation(n, 5)) == list(range(n))
    assert permutation(100, 5) != permutation(100, 6)
    assert permutation(100, 5) != list(range(100))
    with pytest.raises(ValueError, match="n is -1"):
        permutation(-1, 0)


def test_permutation_has_no_favourite_position():
    firsts = [0] * 5
    for seed in range(2000):
        firsts[permutation(5, seed)[0]] += 1
    assert all(320 < count < 480 for count in firsts)


def test_global_generators_neither_move_nor_matter():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state())
    drawn = torch.rand(4, generator=torch_generator(3)), permutation(20, 3)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    again = torch.rand(4, generator=torch_generator(3)), permutation(20, 3)
    assert torch.equal(drawn[0], again[0])
    assert drawn[1] == again[1]


def test_torch_generator_takes_the_largest_seed():
    assert torch_generator(2**63 - 1).initial_seed() == 2**63 - 1
