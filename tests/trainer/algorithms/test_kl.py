"""KL estimators, the penalty in the reward, and the coefficient's controllers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import KlConfig
from trainer.algorithms.kl import (
    AdaptiveKl,
    FixedKl,
    controller,
    kl_estimate,
    kl_k1,
    kl_k2,
    kl_k3,
    penalised_rewards,
    sequence_kl,
)

repeatable = settings(max_examples=50, deadline=None, derandomize=True)


def f64(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask_of(rows) -> torch.Tensor:
    return torch.tensor(rows).bool()


class TestEstimators:
    logprobs, reference = f64([-1.0, -2.0]), f64([-1.5, -1.0])

    def test_k1_is_the_log_ratio(self):
        assert torch.equal(kl_k1(self.logprobs, self.reference), f64([0.5, -1.0]))

    def test_k2_is_half_its_square(self):
        assert torch.equal(kl_k2(self.logprobs, self.reference), f64([0.125, 0.5]))

    def test_k3_is_the_ratio_minus_one_minus_its_log(self):
        expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
        assert kl_k3(self.logprobs, self.reference).tolist() == pytest.approx(expected, rel=1e-14)

    def test_equal_policies_have_exactly_zero_kl(self):
        for estimate in (kl_k1, kl_k2, kl_k3):
            assert torch.equal(estimate(self.logprobs, self.logprobs), f64([0.0, 0.0]))

    def test_k3_keeps_its_digits_near_zero_and_never_goes_negative(self):
        tiny = torch.linspace(-1e-4, 1e-4, 1001)
        values = kl_k3(tiny, torch.zeros_like(tiny))
        assert bool((values >= 0).all())
        assert float(kl_k3(torch.tensor(-1e-3), torch.tensor(0.0))) == pytest.approx(0.5e-6, rel=1e-3)

    @pytest.mark.parametrize("above", [0.0, 3.0, 19.0, 21.0, 29.0, 200.0])
    def test_k3_pulls_a_policy_back_that_is_far_above_the_reference(self, above):
        logprobs = f64([-1.0]).requires_grad_()
        value = kl_k3(logprobs, logprobs.detach() - above)
        assert value.item() == pytest.approx(math.exp(-above) - 1 + above, rel=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        assert gradient.item() == pytest.approx(1 - math.exp(-above), rel=1e-12)

    def test_k3_goes_on_as_its_tangent_for_a_token_the_policy_almost_never_samples(self):
        for dtype in (torch.float32, torch.float64):
            logprobs = torch.tensor([-20.0, -200.0], dtype=dtype).requires_grad_()
            value = kl_k3(logprobs, torch.tensor([-1.0, -1.0], dtype=dtype))
            assert value.tolist() == pytest.approx([math.exp(19) - 20, math.exp(20) * 180 - 200], rel=1e-6)
            (gradient,) = torch.autograd.grad(value.sum(), logprobs)
            assert gradient.tolist() == pytest.approx([1 - math.exp(19), 1 - math.exp(20)], rel=1e-6)

    def test_k1_and_k3_average_to_the_kl_over_the_vocabulary_and_k2_to_its_gradient(self):
        generator = torch.Generator().manual_seed(0)
        logits, ref_logits = torch.randn(2, 5, dtype=torch.float64, generator=generator)
        p = logits.softmax(-1)
        logprobs, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        exact = float((p * (logprobs - reference)).sum())
        assert float((p * kl_k1(logprobs, reference)).sum()) == pytest.approx(exact)
        assert float((p * kl_k3(logprobs, reference)).sum()) == pytest.approx(exact)

        def gradient(loss) -> torch.Tensor:
            at = logits.clone().requires_grad_()
            return torch.autograd.grad(loss(at), at)[0]

        wanted = gradient(lambda x: (x.softmax(-1) * (x.log_softmax(-1) - reference)).sum())
        got = gradient(lambda x: (p * kl_k2(x.log_softmax(-1), reference)).sum())
        useless = gradient(lambda x: (p * kl_k1(x.log_softmax(-1), reference)).sum())
        assert torch.allclose(got, wanted)
        assert torch.allclose(useless, torch.zeros(5, dtype=torch.float64))

    def test_estimates_are_zero_outside_the_mask_whatever_is_there(self):
        logprobs, reference = f64([[-1.0, math.nan]]), f64([[-2.0, math.inf]])
        for name in ("k1", "k2", "k3"):
            assert kl_estimate(logprobs, reference, mask_of([[1, 0]]), name)[0, 1] == 0.0

    def test_full_in_the_reward_and_unknown_names_are_refused(self):
        one = torch.zeros(1, 1)
        with pytest.raises(ValueError, match=r"`full` needs logits: set algorithm\.kl\.placement=loss"):
            kl_estimate(one, one, one.bool(), "full")
        with pytest.raises(ValueError, match=r"algorithm\.kl\.estimator=k4: known are k1, k2, k3"):
            kl_estimate(one, one, one.bool(), "k4")


class TestPenalisedRewards:
    def test_the_score_stands_on_the_last_trained_token_and_the_penalty_on_each(self):
        rewards = penalised_rewards(f64([2.0]), f64([[9.0, 1.0, 9.0, 3.0, 9.0]]), mask_of([[0, 1, 0, 1, 0]]), 0.5)
        assert torch.equal(rewards, f64([[0.0, -0.5, 0.0, 0.5, 0.0]]))

    def test_an_empty_response_gets_no_reward_at_all(self):
        rewards = penalised_rewards(f64([7.0, 7.0]), f64([[1.0, 1.0]] * 2), mask_of([[0, 0], [0, 1]]), 0.5)
        assert torch.equal(rewards, f64([[0.0, 0.0], [0.0, 6.5]]))

    def test_a_batch_of_nothing_but_prompts_is_no_special_case(self):
        assert torch.equal(penalised_rewards(f64([7.0]), None, mask_of([[0]]), 0.5), f64([[0.0]]))

    def test_nan_outside_the_mask_stays_out(self):
        rewards = penalised_rewards(f64([1.0]), f64([[math.nan, 1.0]]), mask_of([[0, 1]]), 0.5)
        assert torch.equal(rewards, f64([[0.0, 0.5]]))

    @repeatable
    @given(st.integers(0, 2**31), st.integers(1, 6))
    def test_padding_moves_nothing(self, seed, extra):
        generator = torch.Generator().manual_seed(seed)
        scores, kl = torch.randn(4, generator=generator), torch.randn(4, 6, generator=generator)
        mask = torch.rand(4, 6, generator=generator) < 0.5
        pad = torch.nn.functional.pad
        wide = penalised_rewards(scores, pad(kl, (0, extra), value=5.0), pad(mask, (0, extra)), 0.1)
        assert torch.equal(wide, pad(penalised_rewards(scores, kl, mask, 0.1), (0, extra)))


class TestControllers:
    def test_the_adaptive_coefficient_follows_ziegler(self):
        kl = AdaptiveKl(coef=0.1, target=6.0, horizon=1000.0)
        kl.update(6.6, 100)  # 10% above: error 0.1
        assert kl.coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000), rel=1e-14)

    @pytest.mark.parametrize(("measured", "error"), [(600.0, 0.2), (0.0, -0.2), (6.0, 0.0)])
    def test_its_error_is_clipped_to_a_fifth(self, measured, error):
        kl = AdaptiveKl(coef=0.1, target=6.0, horizon=1000.0)
        kl.update(measured, 100)
        assert kl.coef == 0.1 * (1 + error * 100 / 1000)

    def test_a_resumed_controller_goes_on_bit_for_bit(self):
        straight = AdaptiveKl(0.1, 6.0, 1000.0)
        for measured in (1.0, 9.0, 7.3):
            straight.update(measured, 64)
        first, second = AdaptiveKl(0.1, 6.0, 1000.0), AdaptiveKl(0.1, 6.0, 1000.0)
        first.update(1.0, 64)
        second.load_state_dict(first.state_dict())
        for measured in (9.0, 7.3):
            second.update(measured, 64)
        assert second.coef == straight.coef
        assert second.coef != 0.1

    def test_a_fixed_coefficient_stays_and_obeys_the_configuration_on_resume(self):
        kl = FixedKl(0.1)
        kl.update(600.0, 64)
        assert kl.coef == 0.1
        changed = FixedKl(0.2)
        changed.load_state_dict(kl.state_dict())
        assert changed.coef == 0.2

    @pytest.mark.parametrize("kl", [FixedKl(0.1), AdaptiveKl(0.1, 6.0, 1000.0)])
    def test_a_kl_that_is_not_finite_is_an_error_before_it_spoils_the_coefficient(self, kl):
        with pytest.raises(ValueError, match="measured KL per sequence is nan"):
            kl.update(math.nan, 64)
        assert kl.coef == 0.1

    def test_a_horizon_shorter_than_the_batch_can_not_turn_the_sign(self):
        with pytest.raises(ValueError, match=r"raise algorithm\.kl\.horizon=10\.0"):
            AdaptiveKl(0.1, 6.0, 10.0).update(0.0, 64)

    def test_the_configuration_chooses_the_controller(self):
        assert controller(KlConfig(coef=0.3)) == FixedKl(0.3)
        assert controller(KlConfig(coef=0.3, controller="adaptive")) == AdaptiveKl(0.3, 6.0, 10000.0)
        with pytest.raises(ValueError, match=r"algorithm\.kl\.controller=pid"):
            controller(KlConfig(controller="pid"))
        with pytest.raises(ValueError, match=r"algorithm\.kl\.target=0\.0"):
            controller(KlConfig(controller="adaptive", target=0.0))


def test_the_kl_per_sequence_leaves_out_empty_responses_and_ignores_order():
    kl, mask = f64([[1.0, 2.0, 9.0], [9.0, 9.0, 9.0], [5.0, 9.0, 9.0]]), mask_of([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert sequence_kl(kl, mask) == (4.0, 2)
    assert sequence_kl(kl[[2, 0, 1]], mask[[2, 0, 1]]) == (4.0, 2)
    assert sequence_kl(kl, torch.zeros_like(mask)) == (0.0, 0)
