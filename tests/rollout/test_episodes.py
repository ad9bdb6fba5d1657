"""Seeds and order of requests come from logical identity alone; episodes handed out early are those of the result."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from configs.schema import RolloutConfig
from rollout.engines import RolloutEngines
from rollout.episodes import Rollout, requests_for
from rollout.routing import assign
from rollout.sampling import seeds_are_derived
from rollout.types import Episode, Generation, GenerationRequest, Prompt, SampleKey, Sampling
from workers.launch.group import WorkerError

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


class Replicas:
    """A worker group in this process: it remembers what each replica was asked for, and answers when a test says so."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[list[tuple[GenerationRequest, Future[Generation]]]] = [[] for _ in range(size)]

    def submit(self, worker: int, requests: Sequence[GenerationRequest]) -> list[Future[Generation]]:
        made = [(request, Future()) for request in requests]
        self.asked[worker] += made
        return [future for _, future in made]

    def answer(self, worker: int, count: int | None = None) -> None:
        """The replica's last requests are done, the last one first."""
        for _ in range(len(self.asked[worker]) if count is None else count):
            request, future = self.asked[worker].pop()
            future.set_result(Generation(request.key, (request.priority,), (-1.0,), "stop", 3))


def rollout(group: Replicas) -> Rollout:
    return Rollout(RolloutEngines(group), lambda ids: " ".join(map(str, ids)), run_seed=1)  # type: ignore[arg-type]


SETTINGS = {"n": 3, "split": "train", "step": 1}
MANY = [Prompt(f"rows/{i}", "rows", (5,), "", ()) for i in range(40)]


@pytest.mark.parametrize("replicas", [1, 3])
def test_episodes_come_in_canonical_order_and_each_is_handed_out_once_when_it_finishes(replicas):
    early: list[Episode] = []
    group = Replicas(replicas)
    generating = rollout(group).start(MANY, SAMPLING, **SETTINGS, on_finished=early.append)
    for worker in reversed(range(replicas)):
        group.answer(worker)
    episodes = generating.result()
    assert [episode.key for episode in episodes] == [
        SampleKey(task, sample) for task in range(40) for sample in range(3)
    ]
    assert [episode.response_ids for episode in episodes] == [(i,) for i in range(120)]
    assert {episode.weight_version for episode in episodes} == {3}
    assert early != episodes
    assert sorted(early, key=lambda episode: episode.key) == episodes


def test_one_replica_does_not_wait_for_another():
    early: queue.SimpleQueue[Episode] = queue.SimpleQueue()
    group = Replicas(2)
    generating = rollout(group).start(MANY, SAMPLING, **SETTINGS, on_finished=early.put)
    share = len(group.asked[1])
    group.answer(1)
    assert len({early.get(timeout=30).key for _ in range(share)}) == share
    group.answer(0)
    assert len(generating.result()) == 120


def test_an_engine_that_fails_is_told_although_others_never_answer():
    group = Replicas(2)
    generating = rollout(group).start(MANY, SAMPLING, **SETTINGS)
    group.asked[1][5][1].set_exception(WorkerError("rollout-1 was killed"))
    with pytest.raises(WorkerError, match="rollout-1 was killed"):
        generating.result()


def test_what_the_receiver_of_early_episodes_raises_is_raised_by_the_result():
    def refuse(episode: Episode) -> None:
        raise LookupError(f"no place for {episode.text}")

    group = Replicas(1)
    generating = rollout(group).start(MANY, SAMPLING, **SETTINGS, on_finished=refuse)
    group.answer(0, 1)
    with pytest.raises(LookupError, match="no place for 119"):
        generating.result()


def test_the_answer_to_another_request_is_refused():
    group = Replicas(1)
    generating = rollout(group).start(MANY, SAMPLING, **SETTINGS)
    group.asked[0][0][1].set_result(Generation(SampleKey(7, 1), (1,), (-1.0,), "stop", 3))
    with pytest.raises(RuntimeError, match=r"task=0, sample=0.* was asked for, and the engine answered .*task=7"):
        generating.result()
