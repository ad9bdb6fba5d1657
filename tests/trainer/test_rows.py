"""Episodes of several turns as training rows: what counts once, where rewards lie, and that a single turn is the plain episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.schema import AdvantageConfig, AlgorithmConfig, RewardConfig
from reward.by_turn import EpisodeRewards, discounted
from reward.manager import RewardError, RewardManager
from rollout.turns.conversation import rows_of
from rollout.types import Episode, PlacedReward, Prompt, SampleKey, Score, Turn, end_of
from trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from trainer.algorithms.kl import penalised_rewards
from trainer.algorithms.losses import policy_loss_from_config
from trainer.experience import Experience, loss_totals
from trainer.metrics import batch_metrics
from workers.models.batch import PolicyOutputs

PROMPT = Prompt("rows/0", "rows", (7, 8), "", ({"role": "user", "content": "x"},))


def turn(parent: int | None, prompt: tuple[int, ...], ids: tuple[int, ...], reward: float = 0.0) -> Turn:
    return Turn(parent, prompt, ids, tuple(-0.5 for _ in ids), "stop", 1, reward=reward)


def episode(sample: int, turns: tuple[Turn, ...], continues: tuple[int | None, ...], **fields: Any) -> Episode:
    rows = rows_of(turns, continues)
    first = rows[0]
    made = Episode(
        SampleKey(0, sample),
        PROMPT,
        1,
        first.response_ids,
        first.mask,
        first.logprobs,
        "stop",
        "",
        turns=turns,
        paths=rows,
    )
    return replace(made, **{"reward": sum(one.reward for one in turns), **fields})


def chain(sample: int, *rewards: float) -> Episode:
    """Turns of one path: each samples two tokens, and one token (9) stands between them."""
    turns: list[Turn] = []
    prompt = PROMPT.token_ids
    for i, reward in enumerate(rewards):
        turns.append(turn(i - 1 if i else None, prompt, (1, 2), reward))
        prompt = (*prompt, 1, 2, 9)
    return episode(sample, tuple(turns), (None, *range(len(rewards) - 1)))


def forked(sample: int, *rewards: float) -> Episode:
    """Three turns, of which the last begins a row of its own."""
    one, two = chain(sample, *rewards[:2]).turns
    three = turn(1, (5, 5, 5), (3,), rewards[2])
    return episode(sample, (one, two, three), (None, 0, None))


def plain(sample: int) -> Episode:
    return Episode(SampleKey(0, sample), PROMPT, 1, (1, 2), (True, True), (-0.5, -0.5), "stop", "")


def experience(episodes: list[Episode], scores: list[Score] | None = None, multiple: int = 1) -> Experience:
    rewards = EpisodeRewards("environment")
    made = scores or [Score(float(e.reward or 0.0), {}, placed=rewards.place(e, 1.0, 0.0)) for e in episodes]
    return Experience.from_episodes(episodes, made, pad_id=0, multiple=multiple)


def token_rewards(made: Experience) -> torch.Tensor:
    at_end, placed = made.token_scores(made.scores)
    return penalised_rewards(at_end, None, made.tokens.mask, 0.0, placed)


def advantages(made: Experience, name: str, **settings: Any) -> torch.Tensor:
    inputs = AdvantageInputs.of(made, token_rewards(made), made.scores)
    inputs = replace(inputs, values=torch.zeros_like(made.tokens.mask, dtype=torch.float32))
    return compute_advantages(inputs, AdvantageConfig(name=name, **settings)).advantages


def test_a_single_turn_gives_the_tensors_of_the_plain_episode() -> None:
    score = Score(1.5, {})
    one = Experience.from_episodes([chain(0, 1.5)], [score], 0)
    other = Experience.from_episodes([plain(0)], [score], 0)
    for name, tensor in other.tensors().items():
        assert torch.equal(one.tensors()[name], tensor), name
    placed = experience([chain(0, 1.5)])
    assert torch.equal(token_rewards(placed), penalised_rewards(other.scores, None, other.tokens.mask, 0.0))


def test_tokens_between_turns_are_there_and_not_trained() -> None:
    made = experience([chain(0, 0.0, 1.0)])
    assert made.tokens.input_ids.tolist() == [[7, 8, 1, 2, 9, 1, 2]]
    assert made.tokens.mask.tolist() == [[False, False, True, True, False, True, True]]


def test_rewards_lie_at_the_last_token_of_their_turns() -> None:
    assert token_rewards(experience([chain(0, 0.25, 1.0)])).tolist() == [[0, 0, 0, 0.25, 0, 0, 1.0]]


def test_gae_sees_the_turns() -> None:
    # gamma = lambda = 1 and no values: the sum of what comes.
    found = advantages(experience([chain(0, 0.25, 1.0)]), "gae", gamma=1.0, lam=1.0, whiten="none")
    assert found.tolist() == [[0, 0, 1.25, 1.25, 0, 1.0, 1.0]]


def test_a_fork_is_a_row_of_its_own_and_the_sample_counts_once_in_its_group() -> None:
    # Samples of 1.75 and 0.75: their mean is 1.25, whatever the number of rows.
    made = experience([forked(0, 0.25, 0.5, 1.0), chain(1, 0.75)], multiple=4)
    assert made.sample.tolist() == [0, 0, 1, -1]
    assert made.first.tolist() == [0, 0, 2, 3]
    found = advantages(made, "grpo", group_std=False, whiten="none")
    per_row = [sorted(set(row[mask].tolist())) for row, mask in zip(found, made.tokens.mask, strict=True)]
    assert per_row == [[0.5], [0.5], [-0.5], []]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "gae"])
def test_blanks_change_no_advantage_and_no_loss(name: str) -> None:
    episodes = [forked(0, 0.25, 0.5, 1.0), chain(1, 0.75)]
    without, padded = experience(episodes), experience(episodes, multiple=8)
    assert len(padded) == 8
    assert torch.equal(advantages(padded, name)[:3], advantages(without, name))
    assert not advantages(padded, name)[3:].any()

    def loss(made: Experience) -> torch.Tensor:
        tokens = made.tokens.with_(old_logprobs=made.tokens.rollout_logprobs, advantages=advantages(made, name))
        assert tokens.old_logprobs is not None
        logprobs = (tokens.old_logprobs * 1.1).requires_grad_()
        outputs = PolicyOutputs(logprobs, torch.zeros_like(logprobs))
        return policy_loss_from_config(AlgorithmConfig(), 0.0)(outputs, tokens, loss_totals([tokens.mask], 16))[0]

    assert torch.equal(loss(padded), loss(without))


def test_a_plain_batch_has_no_blanks() -> None:
    assert len(experience([plain(0)], [Score(1.0, {})], multiple=8)) == 1


def test_a_dropped_sample_is_dropped_in_all_of_its_rows() -> None:
    scores = [Score(0.0, {}, dropped=True), Score(1.0, {}, placed=end_of(chain(1, 1.0), 1.0))]
    made = experience([forked(0, 0.0, 0.0, 0.0), chain(1, 1.0)], scores)
    assert made.keep.tolist() == [False, False, True]
    assert made.tokens.mask.any(dim=1).tolist() == [False, False, True]


def test_metrics_count_samples_and_sampled_tokens() -> None:
    found = batch_metrics(experience([forked(0, 0.25, 0.5, 1.0), chain(1, 0.75)], multiple=4), 16)
    assert (found["critic/score/mean"], found["critic/score/max"]) == (1.25, 1.75)
    assert (found["response_length/mean"], found["response_length/max"]) == (3.5, 5.0)
    assert (found["rollout/turns/mean"], found["rollout/rows"], found["rollout/blank_rows"]) == (2.0, 3.0, 1.0)


def test_what_shaping_adds_lies_at_the_end_of_the_first_row() -> None:
    made = experience([forked(0, 0.25, 0.5, 1.0)])
    at_end, placed = made.token_scores(made.scores - 1.0)
    rewards = penalised_rewards(at_end, None, made.tokens.mask, 0.0, placed)
    assert rewards.tolist() == [[0, 0, 0, 0.25, 0, 0, -0.5], [0, 0, 0, 1.0, 0, 0, 0]]


class TestDiscount:
    def test_along_a_path(self) -> None:
        assert discounted(chain(0, 1.0, 0.0, 1.0).turns, 0.5) == [1.25, 0.5, 1.0]

    def test_a_turn_gets_the_mean_of_those_that_continue_it(self) -> None:
        turns = (turn(None, (), (1,)), turn(0, (), (1,), 1.0), turn(0, (), (1,), 3.0))
        assert discounted(turns, 0.5) == [1.0, 1.0, 3.0]

    def test_arrival_has_no_part_in_it(self) -> None:
        turns = (turn(None, (), (1,)), turn(0, (), (1,), 3.0), turn(0, (), (1,), 1.0))
        assert discounted(turns, 0.5)[0] == 1.0

    def test_without_one_rewards_stay(self) -> None:
        placed = EpisodeRewards("agent").place(chain(0, 1.0, 2.0), 10.0, 0.5)
        assert placed == (PlacedReward(0, 1, 10.0), PlacedReward(0, 4, 20.0), PlacedReward(0, 4, 0.5))


class TestManager:
    def scored(self, *episodes: Episode, **config: Any) -> list[Score]:
        manager = RewardManager(RewardConfig(**config), episodes=EpisodeRewards("environment"))
        return manager.score(list(episodes))[0]

    def test_what_an_environment_gives_is_a_source(self) -> None:
        (score,) = self.scored(chain(0, 0.25, 1.0), episode_weight=2.0)
        assert (score.total, score.by_source) == (2.5, {"environment": 1.25})
        assert [part.value for part in score.placed] == [0.5, 2.0]

    def test_a_failed_episode_is_named(self) -> None:
        with pytest.raises(
            RewardError, match=r"(?s)'environment', sample rows/0 \(task 0, sample 1\): raised: it fell"
        ):
            self.scored(chain(0, 1.0), replace(chain(1, 1.0), failure="it fell"))

    def test_a_failed_episode_may_be_dropped_or_penalised(self) -> None:
        failed = replace(chain(1, 1.0), failure="it fell")
        assert [score.dropped for score in self.scored(chain(0, 1.0), failed, on_error="drop")] == [False, True]
        assert self.scored(chain(0, 1.0), failed, on_error="penalise", penalty=-2.0)[1].total == -2.0

    def test_an_episode_without_any_reward_is_an_error(self) -> None:
        with pytest.raises(RewardError, match="gave no reward, and there is no other source"):
            self.scored(replace(chain(0, 0.0), reward=None))

    def test_normalised_parts_add_up_to_the_normalised_total(self) -> None:
        for score in self.scored(chain(0, 0.25, 1.0), chain(1, 0.5), normalise=True):
            assert sum(part.value for part in score.placed) == pytest.approx(score.total, abs=1e-12)
