"""Placement is a pure function of the identities."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.routing import assign
from rollout.types import GenerationRequest, SampleKey, Sampling

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)


def requests(tasks: int, samples: int) -> list[GenerationRequest]:
    keys = [SampleKey(task, sample) for task in range(tasks) for sample in range(samples)]
    return [GenerationRequest(key, (1, 2), seed=i, sampling=SAMPLING, priority=i) for i, key in enumerate(keys)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 50])
def test_every_request_goes_to_one_replica_and_the_load_is_even(replicas):
    batch = requests(8, 4)
    placed = assign(batch, replicas)
    assert len(placed) == replicas
    assert sorted(r.key for part in placed for r in part) == [r.key for r in batch]
    assert max(map(len, placed)) - min(map(len, placed)) <= 1


def test_placement_does_not_depend_on_the_order_of_requests():
    batch = requests(8, 4)
    shuffled = list(batch)
    random.Random(1).shuffle(shuffled)
    assert assign(shuffled, 3) == assign(batch, 3)


def test_a_replica_gets_its_requests_in_canonical_order():
    for part in assign(requests(8, 4), 3):
        assert [r.key for r in part] == sorted(r.key for r in part)


def test_a_group_is_spread_over_the_replicas():
    owners = [{r.key.task for r in part} for part in assign(requests(8, 8), 2)]
    assert owners[0] == owners[1] == set(range(8))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_kept_group_goes_to_one_replica_in_member_order(replicas):
    shuffled = requests(8, 4)
    random.Random(1).shuffle(shuffled)
    placed = assign(shuffled, replicas, keep_groups=True)
    assert sorted(r.key for part in placed for r in part) == [r.key for r in requests(8, 4)]
    owners = [{r.key.task for r in part} for part in placed]
    assert sum(map(len, owners)) == 8
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    for part in placed:
        assert [r.key.sample for r in part] == [0, 1, 2, 3] * (len(part) // 4)


@pytest.mark.parametrize("hash_seed", ["1", "2", "3"])
def test_placement_is_the_same_in_any_process(hash_seed):
    program = (
        "from tests.rollout.test_routing import requests; from rollout.routing import assign;"
        "print([[tuple(r.key) for r in part] for part in assign(requests(4, 4), 2)])"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([[tuple(r.key) for r in part] for part in assign(requests(4, 4), 2)])


def test_a_repeated_request_is_refused():
    batch = requests(2, 2)
    with pytest.raises(ValueError, match="task 0, sample 1"):
        assign([*batch, batch[1]], 2)


def test_a_repeated_priority_is_refused():
    first, second = requests(1, 2)
    with pytest.raises(ValueError, match="the same priority"):
        assign([first, replace(second, priority=first.priority)], 2)


def test_no_replica_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.replicas"):
        assign(requests(1, 1), 0)
