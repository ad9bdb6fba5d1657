"""Seeds and order of requests come from logical identity alone."""

from rollout.episodes import requests_for
from rollout.routing import assign
from rollout.types import Prompt, Sampling

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
