"""Episodes of several turns as training rows: what counts once, where rewards lie, and that a single turn is the plain episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.schema import AdvantageConfig, AlgorithmConfig, RewardConfig, RewardFunctionConfig
from reward.by_turn import EpisodeRewards, discounted
from reward.manager import RewardError, RewardManager
from rollout.turns.conversation import rows_of
from rollout.types import Episode, PlacedReward, Prompt, SampleKey, Score, Turn, end_of
from trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from trainer.algorithms.kl import penalised_rewards
from trainer.algorithms.losses import policy_loss_from_config
from trainer.experience import Experience, loss_totals
from trainer.metrics import batch_metrics
from trainer.record import episode_record
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
    made = scores or [Score(float(e.reward or 0.0), {}, placed=rewards.place(e, 1.0)) for e in episodes]
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
        placed = EpisodeRewards("agent").place(chain(0, 1.0, 2.0), 10.0)
        assert placed == (PlacedReward(0, 1, 10.0), PlacedReward(0, 4, 20.0))


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


def respond(sample: int, *ids: int) -> Episode:
    return replace(plain(sample), response_ids=ids, response_mask=(True,) * len(ids), logprobs=tuple(-0.5 for _ in ids))


class TestProcessRewards:
    """Rewards by position that functions return."""

    def scored(
        self, given: str, *episodes: Episode, episodes_of: EpisodeRewards | None = None, **config: Any
    ) -> list[Score]:
        function = RewardFunctionConfig(
            name="f", function="tests.reward._functions:given", params={"what": given}, weight=config.pop("weight", 1.0)
        )
        manager = RewardManager(RewardConfig(functions=[function], **config), episodes=episodes_of)
        try:
            return manager.score(list(episodes))[0]
        finally:
            manager.close()

    def test_parts_lie_at_their_tokens(self) -> None:
        (score,) = self.scored("{'score': 1, 'tokens': [0, 0.5, 0.25, 0]}", respond(0, 4, 5, 6, 7), weight=2.0)
        assert (score.total, score.by_source) == (3.5, {"f": 1.75})
        made = experience([respond(0, 4, 5, 6, 7)], [score])
        assert token_rewards(made).tolist() == [[0.0, 0.0, 0.0, 1.0, 0.5, 2.0]]

    def test_gae_by_hand(self) -> None:
        (score,) = self.scored("{'tokens': [0, 0.5, 0.25, 1]}", respond(0, 4, 5, 6, 7))
        found = advantages(experience([respond(0, 4, 5, 6, 7)], [score]), "gae", gamma=1.0, lam=0.5)
        # Values are 0: A_t = r_t + 0.5 * A_{t+1}.
        assert found[0, 2:].tolist() == [0.4375, 0.875, 0.75, 1.0]

    def test_the_same_total_at_the_end_gives_other_advantages(self) -> None:
        (score,) = self.scored("1.75", respond(0, 4, 5, 6, 7))
        assert score.placed == ()
        found = advantages(experience([respond(0, 4, 5, 6, 7)], [score]), "gae", gamma=1.0, lam=0.5)
        assert found[0, 2:].tolist() == [0.21875, 0.4375, 0.875, 1.75]

    @pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
    def test_group_estimators_use_the_sum(self, name: str) -> None:
        episodes = [respond(0, 4, 5), respond(1, 6, 7)]
        parts = self.scored("{'tokens': [float(ids[0] == 4), 0.5]}", *episodes)
        sums = self.scored("float(ids[0] == 4) + 0.5", *episodes)
        assert [score.total for score in parts] == [score.total for score in sums] == [1.5, 0.5]
        assert torch.equal(advantages(experience(episodes, parts), name), advantages(experience(episodes, sums), name))

    def test_one_sample_in_parts_and_one_without(self) -> None:
        episodes = [respond(0, 4, 5), respond(1, 6, 7)]
        scores = self.scored("{'tokens': [1, 0]} if ids[0] == 4 else 3", *episodes)
        assert token_rewards(experience(episodes, scores)).tolist() == [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 3.0]]

    def test_turns_and_the_tokens_of_all_turns(self) -> None:
        (score,) = self.scored(
            "{'turns': {'0': 3}, 'tokens': [10 * len(turns) + i for i in range(len(ids))]}", chain(0, 0.0, 0.0)
        )
        made = experience([chain(0, 0.0, 0.0)], [score])
        assert token_rewards(made).tolist() == [[0.0, 0.0, 20.0, 24.0, 0.0, 22.0, 23.0]]

    def test_a_fork_gets_its_part_in_its_own_row(self) -> None:
        (score,) = self.scored("{'turns': {2: 3}, 'tokens': [1, 2, 3, 4, 5]}", forked(0, 0.0, 0.0, 0.0))
        made = experience([forked(0, 0.0, 0.0, 0.0)], [score])
        assert token_rewards(made).tolist() == [
            [0.0, 0.0, 1.0, 2.0, 0.0, 3.0, 4.0],
            [0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0],
        ]

    def test_beside_an_environment_s_rewards(self) -> None:
        one = chain(0, 0.25, 1.0)
        (score,) = self.scored("{'score': 8, 'turns': {0: 4}}", one, episodes_of=EpisodeRewards("environment"))
        assert (score.total, score.by_source) == (13.25, {"f": 12.0, "environment": 1.25})
        assert token_rewards(experience([one], [score])).tolist() == [[0.0, 0.0, 0.0, 4.25, 0.0, 0.0, 9.0]]

    def test_normalised_parts_add_up(self) -> None:
        episodes = [respond(0, 4, 5), respond(1, 6, 7)]
        for score in self.scored("{'turns': {0: 1}, 'tokens': [ids[0], 0.5]}", *episodes, normalise=True):
            assert sum(part.value for part in score.placed) == pytest.approx(score.total, abs=1e-12)
            assert score.placed[-1].position == 1

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ("{'tokens': [1]}", "place: it has rewards for 1 tokens; 2 were sampled"),
            ("{'turns': {1: 2}}", "place: it rewards turn 1; the episode has the turns 0"),
            ("{'tokens': [0, float('nan')]}", r"tokens\[1\]: returned nan"),
            ("{'score': True, 'turns': {0: 'x'}}", r"turns\[0\]: returned 'x'"),
            ("{'turns': {True: 1}}", "the turn True"),
            ("{'turns': {0: 1, '0': 2}}", "each once"),
            ("{'turns': [1]}", "it must be a mapping"),
            ("{'tokens': 1}", "it must be a list"),
            ("{'points': 1}", r"a mapping with 'points' \(str\); the entries of a reward are score, turns, tokens"),
            ("{}", "a mapping without an entry"),
            ("{'score': 3e38, 'tokens': [3e38, 0]}", "infinite in float32"),
        ],
    )
    def test_what_has_no_place_is_refused_by_sample(self, given: str, words: str) -> None:
        with pytest.raises(RewardError, match=f"(?s)'f', sample rows/0 .*{words}"):
            self.scored(given, plain(0))
        (score, _) = self.scored(f"{given} if turns == [[1, 2]] else 1.0", plain(0), respond(1, 3), on_error="drop")
        assert score.dropped

    def test_an_audit_sees_moved_parts(self) -> None:
        with pytest.raises(RewardError, match="was scored differently"):
            self.scored("{'tokens': [calls, -calls]}", plain(0), audit_rows=1, full_determinism=True)

    def test_all_samples_in_one_call(self) -> None:
        function = RewardFunctionConfig(name="f", function="tests.reward._functions:first_tokens")
        manager = RewardManager(RewardConfig(functions=[function]))
        scores = manager.score([respond(0, 4, 5), respond(1, 6)])[0]
        manager.close()
        assert [score.total for score in scores] == [4.0, 6.0]
        assert [score.placed for score in scores] == [((0, 0, 4.0), (0, 1, 0.0)), ((0, 0, 6.0),)]

    def test_they_are_in_the_record(self) -> None:
        (score,) = self.scored("{'tokens': [1, 0.5]}", plain(0))
        assert episode_record(plain(0), score)["placed_rewards"] == [[0, 0, 1.0], [0, 1, 0.5]]
