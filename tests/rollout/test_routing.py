"""Placement is a pure function of the identities, and gathering accepts exactly what was asked for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.routing import assign, gather
from rollout.types import Generation, GenerationRequest, SampleKey, Sampling

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)


def requests(tasks: int, samples: int) -> list[GenerationRequest]:
    keys = [SampleKey(task, sample) for task in range(tasks) for sample in range(samples)]
    return [GenerationRequest(key, (1, 2), seed=i, sampling=SAMPLING, priority=i) for i, key in enumerate(keys)]


def generation(request: GenerationRequest) -> Generation:
    return Generation(request.key, (1,), (-0.5,), "stop", 0)


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


def test_no_replica_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.replicas"):
        assign(requests(1, 1), 0)


def test_answers_come_back_in_canonical_order_whatever_order_they_arrived_in():
    batch = requests(4, 2)
    answers = [[generation(r) for r in reversed(part)] for part in reversed(assign(batch, 3))]
    assert gather(batch, answers) == [generation(r) for r in batch]


def test_a_missing_answer_is_named():
    batch = requests(2, 2)
    with pytest.raises(RuntimeError, match=r"missing: \(task 1, sample 0, turn 0\)"):
        gather(batch, [[generation(r) for r in batch if r.key != (1, 0, 0)]])


def test_a_repeated_answer_is_named():
    batch = requests(2, 2)
    with pytest.raises(RuntimeError, match=r"returned twice: \(task 0, sample 1, turn 0\)"):
        gather(batch, [[generation(r) for r in batch], [generation(batch[1])]])


def test_a_foreign_answer_is_named():
    batch = requests(2, 2)
    with pytest.raises(RuntimeError, match=r"never asked for: \(task 1, sample 1, turn 0\)"):
        gather(batch[:3], [[generation(r) for r in batch]])
