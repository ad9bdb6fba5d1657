"""Advantages against hand-computed values, plain-Python implementations, and permutations."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithms import EstimatorNeeds, estimator_needs
from configs.schema import AdvantageConfig
from trainer.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_to_go,
    rloo,
    varied_groups,
)

repeatable = settings(max_examples=50, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
NAMES = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
WHITENINGS = ("none", "full", "scale")


def f64(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask_of(rows) -> torch.Tensor:
    return torch.tensor(rows).bool()


def random_inputs(seed: int, rows: int = 7, width: int = 8) -> AdvantageInputs:
    """Three groups, gaps in the masks, perhaps empty rows, one dropped member; float32."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    mask[:, 0] = False
    return AdvantageInputs(
        token_rewards=torch.where(mask, torch.randn(rows, width, generator=g), 0.0),
        scores=torch.randn(rows, generator=g),
        mask=mask,
        group=torch.randint(0, 3, (rows,), generator=g),
        keep=torch.arange(rows) != 2,
        values=torch.randn(rows, width, generator=g),
        greedy_scores=torch.randn(rows, generator=g),
    )


def rows_of(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    present = {name: value[order] for name, value in vars(inputs).items() if value is not None}
    return replace(inputs, **present)


def padded(inputs: AdvantageInputs, extra: int) -> AdvantageInputs:
    """More columns on the right, filled with numbers that must not matter."""
    pad = torch.nn.functional.pad
    return replace(
        inputs,
        token_rewards=pad(inputs.token_rewards, (0, extra), value=9.0),
        values=pad(inputs.values, (0, extra), value=100.0),
        mask=pad(inputs.mask, (0, extra)),
    )


def gae_by_hand(rewards, values, mask, gamma, lam, after=0.0):
    """One row, as the paper writes it, over the trained tokens only."""
    steps = [t for t, m in enumerate(mask) if m]
    result = [0.0] * len(mask)
    for i, t in enumerate(steps):
        weight = 1.0
        for j in range(i, len(steps)):
            following = values[steps[j + 1]] if j + 1 < len(steps) else after
            result[t] += weight * (rewards[steps[j]] + gamma * following - values[steps[j]])
            weight *= gamma * lam
    return result


class TestGae:
    def test_case_p1_a_masked_value_does_not_leak(self):
        advantages, returns = gae(f64([[0, 1, 0]]), f64([[0, 0, 100]]), mask_of([[1, 1, 0]]), 1.0, 0.95)
        assert torch.equal(advantages, f64([[0.95, 1.0, 0.0]]))
        assert torch.equal(returns, f64([[0.95, 1.0, 0.0]]))

    def test_case_p2_a_terminal_score_with_padding(self):
        advantages, _ = gae(f64([[0, 1, 0, 0]]), f64([[0, 0, 0, 0]]), mask_of([[1, 1, 0, 0]]), 1.0, 0.95)
        assert torch.equal(advantages, f64([[0.95, 1.0, 0.0, 0.0]]))

    def test_the_leak_of_case_p1_would_be_seen(self):
        leaking, _ = gae(f64([[0, 1, 0]]), f64([[0, 0, 100]]), mask_of([[1, 1, 1]]), 1.0, 0.95)
        assert not torch.equal(leaking[:, :2], f64([[0.95, 1.0]]))

    def test_environment_tokens_between_turns_are_stepped_over(self):
        gapped, _ = gae(f64([[1, 7, 7, 2]]), f64([[3, 50, 60, 4]]), mask_of([[1, 0, 0, 1]]), 0.9, 0.5)
        dense, _ = gae(f64([[1, 2]]), f64([[3, 4]]), mask_of([[1, 1]]), 0.9, 0.5)
        assert torch.equal(gapped[:, [0, 3]], dense)
        assert torch.equal(gapped[:, 1:3], f64([[0, 0]]))

    def test_a_truncated_response_continues_with_the_value_after_its_last_token(self):
        advantages, returns = gae(f64([[0, 0]]), f64([[1, 2]]), mask_of([[1, 1]]), 0.5, 1.0, bootstrap=f64([8]))
        # R_1 = 0.5 * 8 = 4, R_0 = 0.5 * 4 = 2
        assert torch.equal(returns, f64([[2, 4]]))
        assert torch.equal(advantages, f64([[1, 2]]))

    def test_an_empty_response_gets_nothing_not_even_a_bootstrap(self):
        advantages, returns = gae(f64([[5, 5]]), f64([[5, 5]]), mask_of([[0, 0]]), 1.0, 0.95, bootstrap=f64([math.nan]))
        assert torch.equal(advantages, f64([[0, 0]]))
        assert torch.equal(returns, f64([[0, 0]]))

    def test_nan_outside_the_mask_is_harmless_and_inside_is_an_error_with_its_row(self):
        rewards, mask = f64([[0, 1], [0, 1]]), mask_of([[1, 1], [1, 0]])
        values = f64([[0, 0], [0, math.nan]])
        assert bool(gae(rewards, values, mask, 1.0, 0.95)[0].isfinite().all())
        with pytest.raises(ValueError, match=r"values are not finite in 1 of 2 rows \(rows 1; the first is nan\)"):
            gae(rewards, values, mask_of([[1, 1], [1, 1]]), 1.0, 0.95)

    @repeatable
    @given(seeds, st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    def test_it_equals_the_double_sum_of_the_paper(self, seed, gamma, lam):
        inputs = random_inputs(seed)
        rewards, values = inputs.token_rewards.double(), inputs.values.double()
        after = inputs.scores.double()
        advantages, returns = gae(rewards, values, inputs.mask, gamma, lam, bootstrap=after)
        for i in range(len(rewards)):
            expected = gae_by_hand(
                rewards[i].tolist(), values[i].tolist(), inputs.mask[i].tolist(), gamma, lam, after[i].item()
            )
            assert advantages[i].tolist() == pytest.approx(expected, abs=1e-12)
        assert torch.equal(returns, torch.where(inputs.mask, advantages + values, 0.0))


def test_reward_to_go_discounts_per_trained_token():
    assert torch.equal(reward_to_go(f64([[1, 9, 2, 4]]), mask_of([[1, 0, 1, 1]]), 0.5), f64([[3, 0, 4, 4]]))


class TestGroups:
    scores = f64([1, 0, 0, 1])
    group = torch.tensor([4, 4, 4, 4])
    mask = mask_of([[1, 1]] * 4)

    def test_grpo_divides_the_distance_from_the_mean_by_the_standard_deviation(self):
        unit = 0.5 / (math.sqrt(1 / 3) + 1e-6)
        assert grpo(self.scores, self.group, self.mask)[:, 0].tolist() == pytest.approx([unit, -unit, -unit, unit])

    def test_grpo_without_std_is_the_plain_distance(self):
        assert torch.equal(grpo(self.scores, self.group, self.mask, use_std=False)[:, 1], f64([0.5, -0.5, -0.5, 0.5]))

    def test_rloo_compares_with_the_mean_of_the_others(self):
        expected = [1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3]
        assert rloo(self.scores, self.group, self.mask)[:, 0].tolist() == pytest.approx(expected)

    def test_remax_compares_with_the_greedy_response(self):
        assert torch.equal(remax(self.scores, f64([1, 1, 0, 0]), self.mask)[:, 0], f64([0, -1, 0, 1]))

    def test_reinforce_plus_plus_whitens_the_reward_to_go_over_the_batch(self):
        rewards, mask = f64([[0, 1], [0, 3]]), mask_of([[1, 1], [0, 1]])
        # rewards to go 1, 1, 3: mean 5/3, unbiased variance 4/3
        root = math.sqrt(4 / 3 + 1e-8)
        expected = [(1 - 5 / 3) / root, (1 - 5 / 3) / root, 0.0, (3 - 5 / 3) / root]
        assert reinforce_plus_plus(rewards, mask).flatten().tolist() == pytest.approx(expected)

    def test_the_baseline_form_whitens_the_distance_from_the_group_mean_over_tokens(self):
        scores, group = f64([2, 0, 5, 1]), torch.tensor([0, 0, 1, 1])
        mask = mask_of([[1, 1], [1, 0], [1, 0], [1, 1]])
        # centred 1, -1, 2, -2, spread to tokens 1 1 -1 2 -2 -2: mean -1/6
        tokens = [1, 1, -1, 2, -2, -2]
        mean = sum(tokens) / 6
        root = math.sqrt(sum((t - mean) ** 2 for t in tokens) / 5 + 1e-8)
        result = reinforce_plus_plus_baseline(scores, group, mask)
        assert result[mask].tolist() == pytest.approx([(t - mean) / root for t in tokens])

    @pytest.mark.parametrize("estimate", [grpo, rloo, reinforce_plus_plus_baseline])
    def test_a_group_of_one_and_a_group_of_equals_get_exactly_zero(self, estimate):
        scores, group = f64([0.7, 0.1, 0.1, 0.1]), torch.tensor([9, 3, 3, 3])
        assert torch.equal(estimate(scores, group, self.mask), torch.zeros(4, 2, dtype=torch.float64))

    @pytest.mark.parametrize("estimate", [grpo, rloo, reinforce_plus_plus_baseline])
    def test_group_statistics_survive_a_dropped_member(self, estimate):
        scores = f64([1, math.nan, 0, 1])
        keep = torch.tensor([True, False, True, True])
        result = estimate(scores, self.group, self.mask, keep=keep)
        alone = estimate(scores[keep], self.group[keep], self.mask[keep])
        assert torch.equal(result[keep], alone)
        assert torch.equal(result[1], f64([0, 0]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("estimate", [grpo, rloo, reinforce_plus_plus_baseline])
    def test_case_p6_a_score_that_is_not_finite_is_an_error_that_names_the_row(self, estimate, bad):
        with pytest.raises(ValueError, match=r"scores are not finite in 1 of 4 rows \(rows 1;"):
            estimate(f64([1, bad, 0, 1]), self.group, self.mask)

    def test_a_group_with_one_survivor_is_a_group_of_one(self):
        keep = torch.tensor([True, False, False, False])
        assert torch.equal(grpo(self.scores, self.group, self.mask, keep=keep), torch.zeros(4, 2, dtype=torch.float64))

    @repeatable
    @given(seeds)
    def test_they_equal_plain_loops(self, seed):
        inputs = random_inputs(seed)
        scores, group = inputs.scores.double(), inputs.group.tolist()
        results = {
            "mean": grpo(scores, inputs.group, inputs.mask, use_std=False),
            "std": grpo(scores, inputs.group, inputs.mask),
            "rloo": rloo(scores, inputs.group, inputs.mask),
        }
        for i, mine in enumerate(group):
            members = [scores[j].item() for j, other in enumerate(group) if other == mine]
            others = [scores[j].item() for j, other in enumerate(group) if other == mine and j != i]
            mean, own = sum(members) / len(members), scores[i].item()
            variance = sum((m - mean) ** 2 for m in members) / max(len(members) - 1, 1)
            expected = {
                "mean": own - mean if others else 0.0,
                "std": (own - mean) / (math.sqrt(variance) + 1e-6) if others else 0.0,
                "rloo": own - sum(others) / len(others) if others else 0.0,
            }
            for name, result in results.items():
                wanted = [expected[name] if m else 0.0 for m in inputs.mask[i].tolist()]
                assert result[i].tolist() == pytest.approx(wanted, abs=1e-9)

    def test_varied_groups_are_those_with_something_to_learn(self):
        scores, group = f64([1, 1, 0, 1, math.nan, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
        keep = torch.tensor([True, True, True, True, False, True])
        assert varied_groups(scores, group, keep).tolist() == [False, False, True, True, False, False]


class TestDispatch:
    @repeatable
    @given(seeds, st.sampled_from(NAMES), st.sampled_from(WHITENINGS))
    def test_row_order_never_changes_a_bit(self, seed, name, whiten):
        inputs, config = random_inputs(seed), AdvantageConfig(name=name, whiten=whiten)
        order = torch.randperm(len(inputs.scores), generator=torch.Generator().manual_seed(seed))
        straight, shuffled = compute_advantages(inputs, config), compute_advantages(rows_of(inputs, order), config)
        assert torch.equal(shuffled.advantages, straight.advantages[order])
        assert torch.equal(shuffled.returns, straight.returns[order])

    @repeatable
    @given(seeds, st.sampled_from(NAMES), st.sampled_from(WHITENINGS), st.integers(1, 9))
    def test_padding_never_changes_a_bit(self, seed, name, whiten, extra):
        inputs, config = random_inputs(seed), AdvantageConfig(name=name, whiten=whiten)
        straight, wide = compute_advantages(inputs, config), compute_advantages(padded(inputs, extra), config)
        width = inputs.mask.shape[1]
        assert torch.equal(wide.advantages[:, :width], straight.advantages)
        assert torch.equal(wide.returns[:, :width], straight.returns)
        assert not bool(wide.advantages[:, width:].any())

    def test_a_sum_in_row_order_would_change_bits(self):
        scores = random_inputs(0, rows=64).scores
        orders = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
        sums = {float(sum(scores[order])) for order in orders}
        assert len(sums) > 1

    @repeatable
    @given(seeds, st.sampled_from(NAMES), st.sampled_from(WHITENINGS))
    def test_results_are_finite_zero_outside_the_mask_and_zero_for_dropped_rows(self, seed, name, whiten):
        inputs = random_inputs(seed)
        inputs.scores[2] = math.nan
        inputs.token_rewards[2] = math.nan
        outputs = compute_advantages(inputs, AdvantageConfig(name=name, whiten=whiten))
        for result in (outputs.advantages, outputs.returns):
            assert bool(result.isfinite().all())
            assert not bool(result[~inputs.mask].any())
            assert not bool(result[2].any())
            assert result.dtype == torch.float32

    @pytest.mark.parametrize("name", NAMES)
    def test_whitening_happens_once_and_leaves_returns_alone(self, name):
        inputs = random_inputs(5)
        plain = compute_advantages(inputs, AdvantageConfig(name=name))
        white = compute_advantages(inputs, AdvantageConfig(name=name, whiten="full"))
        assert torch.equal(plain.returns, white.returns)
        assert torch.equal(plain.advantages, white.advantages) == estimator_needs(name).whitens
        chosen = white.advantages[inputs.mask & inputs.keep[:, None]].double()
        assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(chosen.var()) == pytest.approx(1.0, abs=1e-5)

    @pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "remax"])
    def test_a_kl_penalty_in_the_reward_reaches_estimators_of_whole_responses(self, name):
        inputs = random_inputs(3)
        cheaper = replace(inputs, token_rewards=inputs.token_rewards - torch.where(inputs.mask, 0.1, 0.0))
        config = AdvantageConfig(name=name)
        assert not torch.equal(
            compute_advantages(cheaper, config).advantages, compute_advantages(inputs, config).advantages
        )

    def test_an_empty_response_still_counts_in_its_groups_statistics(self):
        inputs = AdvantageInputs(
            token_rewards=f64([[0, 1], [0, 0]]),
            scores=f64([1, -1]),
            mask=mask_of([[1, 1], [0, 0]]),
            group=torch.tensor([0, 0]),
            keep=torch.tensor([True, True]),
        )
        outputs = compute_advantages(inputs, AdvantageConfig(name="grpo", group_std=False))
        assert torch.equal(outputs.advantages, f64([[1, 1], [0, 0]]))

    def test_a_missing_critic_and_missing_greedy_scores_are_named(self):
        inputs = replace(random_inputs(0), values=None, greedy_scores=None)
        with pytest.raises(ValueError, match="gae needs a critic's values"):
            compute_advantages(inputs, AdvantageConfig(name="gae"))
        with pytest.raises(ValueError, match="remax needs scores of greedy responses"):
            compute_advantages(inputs, AdvantageConfig(name="remax"))

    def test_bootstrapping_without_a_critic_is_refused_not_ignored(self):
        inputs = replace(random_inputs(0), bootstrap=torch.ones(7))
        with pytest.raises(
            ValueError, match=r"algorithm\.truncated=bootstrap needs an estimator with a critic, not grpo"
        ):
            compute_advantages(inputs, AdvantageConfig(name="grpo"))

    def test_an_unknown_estimator_is_refused_with_a_suggestion(self):
        with pytest.raises(ValueError, match="did you mean `rloo`"):
            compute_advantages(random_inputs(0), AdvantageConfig(name="rlo"))

    def test_a_users_estimator_is_called_checked_and_whitened(self, tmp_path):
        path = tmp_path / "mine.py"
        path.write_text(
            "import torch\n"
            "from configs.algorithms import needs\n"
            "from trainer.algorithms.advantages import AdvantageOutputs\n"
            "@needs(groups=True)\n"
            "def scores_as_they_are(inputs, settings):\n"
            "    spread = torch.where(inputs.mask & inputs.keep[:, None], inputs.scores[:, None], 0.0)\n"
            "    return AdvantageOutputs(spread, spread)\n"
            "def broken(inputs, settings):\n"
            "    return AdvantageOutputs(inputs.token_rewards * float('nan'), inputs.token_rewards)\n"
            "def misshapen(inputs, settings):\n"
            "    return AdvantageOutputs(inputs.scores, inputs.scores)\n"
        )
        inputs = random_inputs(1)
        name = f"{path}:scores_as_they_are"
        assert estimator_needs(name) == EstimatorNeeds(groups=True)
        expected = torch.where(inputs.mask & inputs.keep[:, None], inputs.scores[:, None], 0.0)
        assert torch.equal(compute_advantages(inputs, AdvantageConfig(name=name)).advantages, expected)
        with pytest.raises(ValueError, match="are not finite in"):
            compute_advantages(inputs, AdvantageConfig(name=f"{path}:broken"))
        with pytest.raises(ValueError, match=r"gave shape \[7\]"):
            compute_advantages(inputs, AdvantageConfig(name=f"{path}:misshapen"))
