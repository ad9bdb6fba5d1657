"""Episodes become tensors: padded once, masked once, cut into leaves that never change within a step."""

from itertools import chain

import pytest
import torch

from configs.schema import FsdpConfig
from rollout.types import Episode, Prompt, SampleKey, Score
from trainer.experience import Experience, LeafPlan, loss_totals


def episode(task: int, sample: int, prompt: list[int], response: list[int], finish: str = "stop") -> Episode:
    return Episode(
        key=SampleKey(task, sample),
        prompt=Prompt(f"rows/{task}", "rows", tuple(prompt), "", ()),
        seed=0,
        response_ids=tuple(response),
        response_mask=(True,) * len(response),
        logprobs=tuple(-0.5 for _ in response),
        finish_reason=finish,
        text="",
    )


def scores(count: int, dropped: tuple[int, ...] = ()) -> list[Score]:
    return [Score(float(i + 1), {}, dropped=i in dropped) for i in range(count)]


def plan(rows: int, leaf_size: int, seed: int = 3, step: int = 1) -> LeafPlan:
    return LeafPlan.draw(torch.ones(rows, dtype=torch.int64), FsdpConfig(leaf_size=leaf_size), seed, step)


def test_truncation_comes_from_the_finish_reason_never_from_the_padded_width():
    short_but_cut = episode(0, 0, [9], [1, 2, 3], finish="length")
    long_but_ended = episode(0, 1, [9], [1, 2, 3, 4, 5], finish="stop")
    experience = Experience.from_episodes([short_but_cut, long_but_ended], scores(2), pad_id=0)
    assert experience.truncated.tolist() == [True, False]


def test_sequences_start_at_column_zero_and_the_mask_covers_sampled_tokens_only():
    experience = Experience.from_episodes(
        [episode(0, 0, [7, 8], [1]), episode(1, 0, [7], [1, 2, 3])], scores(2), pad_id=0
    )
    assert experience.tokens.input_ids.tolist() == [[7, 8, 1, 0], [7, 1, 2, 3]]
    assert experience.tokens.mask.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert experience.tokens.lengths.tolist() == [3, 4]


def test_tokens_of_the_environment_are_not_trained_on():
    several_turns = Episode(
        SampleKey(0, 0),
        Prompt("a", "a", (9,), "", ()),
        0,
        (1, 2, 3),
        (True, False, True),
        (-1.0, 0.0, -1.0),
        "stop",
        "",
    )
    experience = Experience.from_episodes([several_turns], scores(1), pad_id=0)
    assert experience.tokens.mask.tolist() == [[False, True, False, True]]


def test_a_dropped_sample_has_no_trained_token_and_no_score():
    experience = Experience.from_episodes(
        [episode(0, 0, [9], [1]), episode(0, 1, [9], [2])], scores(2, dropped=(1,)), pad_id=0
    )
    assert experience.tokens.mask.any(dim=1).tolist() == [True, False]
    assert experience.scores.tolist() == [1.0, 0.0]
    assert experience.keep.tolist() == [True, False]


def test_an_empty_response_is_a_row_without_trained_tokens():
    experience = Experience.from_episodes([episode(0, 0, [9], []), episode(0, 1, [9], [2])], scores(2), pad_id=0)
    assert experience.tokens.mask.any(dim=1).tolist() == [False, True]


def test_another_number_of_scores_is_refused():
    with pytest.raises(ValueError, match="2 episodes but 1 scores"):
        Experience.from_episodes([episode(0, 0, [9], [1]), episode(0, 1, [9], [2])], scores(1), pad_id=0)


def test_pasting_undoes_cutting():
    episodes = [episode(i, 0, [9] * (1 + i % 3), list(range(1, 2 + i))) for i in range(8)]
    tokens = Experience.from_episodes(episodes, scores(8), pad_id=0).tokens
    plan = LeafPlan.draw(tokens.lengths, FsdpConfig(leaf_size=2), run_seed=3, step=1)
    leaves = [tokens.select(rows) for rows in plan.rows]
    assert [len(leaf) for leaf in leaves] == [2, 2, 2, 2]
    width = tokens.input_ids.shape[1]
    assert torch.equal(plan.paste([leaf.input_ids for leaf in leaves], width), tokens.input_ids)


def test_every_leaf_size_deals_the_same_row_order_so_roles_agree():
    small, large = plan(8, 2), plan(8, 4)
    assert torch.equal(torch.cat(small.rows), torch.cat(large.rows))


def test_the_plan_is_a_function_of_seed_and_step():
    def rows(seed: int, step: int) -> list[int]:
        return torch.cat(plan(64, 8, seed, step).rows).tolist()

    assert rows(3, 1) == rows(3, 1)
    assert rows(3, 1) != rows(4, 1)
    assert rows(3, 1) != rows(3, 2)


def test_an_epoch_visits_every_leaf_once_in_an_order_of_its_own():
    leaves = plan(64, 4)
    first, second = leaves.epoch(16, 3, "actor", 1, 0), leaves.epoch(16, 3, "actor", 1, 1)
    assert sorted(chain.from_iterable(first)) == list(range(16)) == sorted(chain.from_iterable(second))
    assert first != second
    assert [len(batch) for batch in first] == [4, 4, 4, 4]


def test_leaves_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="10 sequences can't be cut into leaves of 4"):
        plan(10, 4)


def test_an_all_masked_mini_batch_has_totals_of_one_so_its_loss_is_zero_not_nan():
    tokens = Experience.from_episodes([episode(0, 0, [9], [1])], scores(1, dropped=(0,)), pad_id=0).tokens
    totals = loss_totals([tokens.mask], max_response_tokens=4)
    assert (totals.tokens, totals.sequences) == (1, 1)


def test_buckets_put_rows_of_similar_length_into_one_leaf():
    lengths = torch.tensor([9, 1, 5, 2, 9, 1, 5, 2])
    leaves = LeafPlan.draw(lengths, FsdpConfig(leaf_size=2), 3, 1, bucket_by_length=True)
    assert [lengths[rows].tolist() for rows in leaves.rows] == [[1, 1], [2, 2], [5, 5], [9, 9]]


def test_a_token_budget_bounds_the_padded_size_of_a_leaf_and_loses_no_row():
    lengths = torch.tensor([3, 8, 2, 2, 7, 1, 4, 20])
    leaves = LeafPlan.draw(lengths, FsdpConfig(leaf_tokens=16), 3, 1)
    assert sorted(torch.cat(leaves.rows).tolist()) == list(range(8))
    for rows in leaves.rows:
        assert len(rows) * int(lengths[rows].max()) <= 16 or len(rows) == 1
    epoch = leaves.epoch(4, 3, "actor", 1, 0)
    assert sorted(chain.from_iterable(epoch)) == list(range(len(leaves.rows)))
    assert all(sum(len(leaves.rows[i]) for i in batch) >= 4 for batch in epoch[:-1])
