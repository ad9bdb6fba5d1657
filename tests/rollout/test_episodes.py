"""Seeds and order of requests come from logical identity alone; episodes handed out early are those of the result."""

from typing import Any

import pytest

from configs.schema import RolloutConfig
from rollout.episodes import Rollout, requests_for, seeds_are_derived
from rollout.routing import assign
from rollout.types import Episode, Generation, GenerationRequest, Prompt, Sampling

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)


def prompts() -> list[Prompt]:
    p, q = (5, 6, 7), (8, 9)
    return [Prompt(f"rows/{i}", "rows", ids, "", ()) for i, ids in enumerate((p, p, q))]


def seeds(step: int, split: str = "train", **kwargs) -> list[int]:
    return [r.seed for r in requests_for(prompts(), SAMPLING, n=4, run_seed=1, split=split, step=step, **kwargs)]


def test_all_seeds_differ_within_a_step_and_between_steps_also_for_equal_texts():
    first, second = seeds(1), seeds(2)
    assert len(set(first + second)) == 24


def test_validation_draws_other_seeds_than_training():
    assert not set(seeds(1)) & set(seeds(1, split="validation"))


def test_seeds_do_not_depend_on_the_number_of_replicas():
    requests = requests_for(prompts(), SAMPLING, n=4, run_seed=1, split="train", step=1)
    for replicas in (1, 2, 3, 4):
        placed = [request for share in assign(requests, replicas) for request in share]
        assert {r.key: r.seed for r in placed} == {r.key: r.seed for r in requests}


def test_an_explicit_seed_wins_and_the_index_still_counts():
    requests = requests_for(prompts(), SAMPLING, n=4, run_seed=1, split="train", step=1, shared_seed=7)
    assert {r.seed for r in requests} == {7}
    assert [r.priority for r in requests] == list(range(12))


def test_without_derived_seeds_only_an_explicit_one_is_sent():
    assert seeds(1, derive_seeds=False) == [None] * 12
    assert seeds(1, derive_seeds=False, shared_seed=7) == [7] * 12


@pytest.mark.parametrize(
    ("full", "sampling", "derived"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_full_determinism_includes_deterministic_sampling(full, sampling, derived):
    config = RolloutConfig(full_determinism=full, deterministic_sampling=sampling)
    assert seeds_are_derived(config) is derived


class Backwards:
    """A worker group in this process whose replicas finish their requests in reverse order."""

    def __init__(self, size: int, lost: int = 0) -> None:
        self.size, self.lost = size, lost
        self.left: list[list[GenerationRequest]] = []
        self.asked: list[Any] = []

    def run(self, method: str, sharded: Any = None, /) -> list[Any]:
        self.asked.append(sharded)
        if method == "begin":
            self.left = [list(share)[self.lost :] for share in sharded]
            return [None] * self.size
        if method == "generate":
            return [[self.answer(request) for request in share] for share in sharded]
        assert method == "finished"
        taken = [
            [left.pop() for _ in range(min(count, len(left)))] for left, count in zip(self.left, sharded, strict=True)
        ]
        return [[self.answer(request) for request in share] for share in taken]

    @staticmethod
    def answer(request: GenerationRequest) -> Generation:
        return Generation(request.key, (request.priority,), (-1.0,), "stop", 3)


def rollout(group: Backwards) -> Rollout:
    return Rollout(group, lambda ids: " ".join(map(str, ids)), run_seed=1)


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_handed_out_early_is_the_result_once(replicas):
    early: list[Episode] = []
    many = [Prompt(f"rows/{i}", "rows", (5,), "", ()) for i in range(40)]
    settings = {"n": 3, "split": "train", "step": 1}
    group = Backwards(replicas)
    streamed = rollout(group).generate(many, SAMPLING, **settings, on_finished=early.extend)
    assert streamed == rollout(Backwards(replicas)).generate(many, SAMPLING, **settings)
    assert early != streamed
    assert sorted(early, key=lambda episode: episode.key) == streamed
    if replicas == 1:
        assert group.asked[1:] == [[60], [30], [16], [14]]


def test_a_request_that_is_lost_in_portions_is_named():
    with pytest.raises(RuntimeError, match=r"missing: \(task 0, sample 0"):
        rollout(Backwards(1, lost=1)).generate(
            prompts(), SAMPLING, n=1, split="train", step=1, on_finished=lambda episodes: None
        )
