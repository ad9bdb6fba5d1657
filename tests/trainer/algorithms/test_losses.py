"""Losses against hand-computed values and plain loops; shares that add up; gradients that are zero where they must be."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig, KlConfig, PolicyLossConfig, RolloutCorrectionConfig
from trainer.algorithms.aggregate import AGGREGATIONS
from trainer.algorithms.losses import PolicyLoss, ValueLoss, policy_loss_from_config, value_loss_from_config
from trainer.algorithms.rollout_gap import RolloutCorrection
from trainer.metrics import combine_metrics
from workers.launch.group import deal
from workers.models.batch import LossTotals, PolicyOutputs, TokenBatch, ValueOutputs

repeatable = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
POLICY_LOSSES = [
    PolicyLoss(),
    PolicyLoss(dual_clip=1.5, clip_low=0.1, clip_high=0.3, entropy_coef=0.01, aggregation="seq_mean_token_mean"),
    PolicyLoss("gspo", clip_low=0.05, clip_high=0.05, aggregation="seq_mean_token_mean", kl_coef=0.1),
    PolicyLoss("cispo", clip_low=1.0, aggregation="seq_mean_token_sum", kl_coef=0.1, kl_estimator="k2"),
    PolicyLoss(correction=RolloutCorrection(tis_cap=1.2, sequence_mask_low=0.8, sequence_mask_high=1.2)),
    PolicyLoss(correction=RolloutCorrection(decoupled=True), aggregation="seq_mean_token_sum_norm"),
]


def batch_of(mask, **tensors) -> TokenBatch:
    mask = torch.as_tensor(mask).bool()
    zeros = torch.zeros(mask.shape)
    given = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in tensors.items()}
    lengths = torch.full((len(mask),), mask.shape[1])
    return TokenBatch(zeros.long(), lengths, mask, **{"old_logprobs": zeros, "advantages": zeros, **given})


def outputs_of(logprobs, entropy=None) -> PolicyOutputs:
    logprobs = torch.as_tensor(logprobs, dtype=torch.float32).clone().requires_grad_()
    return PolicyOutputs(logprobs, torch.zeros_like(logprobs).detach() if entropy is None else entropy)


def totals_of(batch: TokenBatch) -> LossTotals:
    return LossTotals(int(batch.mask.sum()), int(batch.mask.any(dim=1).sum()), 6)


def random_case(seed: int, rows: int = 6, width: int = 9) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """A batch with gaps and an empty row, and the policy's new log-probabilities and entropies."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    mask[:, 0] = False
    mask[1] = False

    def noisy(base: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.where(mask, base + scale * torch.randn(rows, width, generator=g), 0.0)

    old = noisy(torch.full((rows, width), -2.0), 0.5)
    batch = batch_of(
        mask,
        old_logprobs=old,
        rollout_logprobs=noisy(old, 0.1),
        ref_logprobs=noisy(old, 0.3),
        advantages=noisy(torch.zeros(rows, width), 1.0),
        old_values=noisy(torch.zeros(rows, width), 1.0),
        returns=noisy(torch.zeros(rows, width), 1.0),
    )
    return batch, noisy(old, 0.3), noisy(torch.ones(rows, width), 0.2)


def run(loss, batch, new, entropy, totals=None):
    """(loss, metrics, gradient) of a policy or value loss on one leaf."""
    new = new.clone().requires_grad_()
    outputs = ValueOutputs(new) if isinstance(loss, ValueLoss) else PolicyOutputs(new, entropy)
    value, metrics = loss(outputs, batch, totals or totals_of(batch))
    value.backward()
    return float(value.detach()), {name: float(metric) for name, metric in metrics.items()}, new.grad


def rows_of(batch: TokenBatch, rows) -> TokenBatch:
    return batch.select(torch.as_tensor(rows))


# --- CASE P3: the loss is global -----------------------------------------------------------------------------------

P3 = batch_of([[0, 1, 0, 0], [0, 1, 1, 1]], advantages=[[0, 1.0, 0, 0], [0, -1.0, -1.0, -1.0]])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_case_p3_the_token_mean_is_one_half_for_every_micro_batch_size_and_rank_count(size, ranks):
    leaves = [rows_of(P3, range(i, i + size)) for i in range(0, 2, size)]
    total = 0.0
    for share_of_rank in deal(leaves, ranks):
        for leaf in share_of_rank:
            total += float(PolicyLoss()(outputs_of(torch.zeros(leaf.mask.shape)), leaf, totals_of(P3))[0].detach())
    assert total == 0.5


def test_case_p3_would_be_zero_if_means_were_averaged():
    leaves = [rows_of(P3, [i]) for i in range(2)]
    local = [float(PolicyLoss()(outputs_of(torch.zeros(1, 4)), leaf, totals_of(leaf))[0].detach()) for leaf in leaves]
    assert sum(local) / 2 == 0.0


@repeatable
@given(seeds, st.sampled_from([*POLICY_LOSSES, ValueLoss(), ValueLoss(0.0, "seq_mean_token_mean")]), st.integers(1, 6))
def test_shares_of_any_cut_give_one_loss_one_set_of_metrics_and_the_same_gradient_bits(seed, loss, size):
    batch, new, entropy = random_case(seed)
    value, metrics, gradient = run(loss, batch, new, entropy)
    parts = [
        run(
            loss, rows_of(batch, range(i, min(i + size, 6))), new[i : i + size], entropy[i : i + size], totals_of(batch)
        )
        for i in range(0, 6, size)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert torch.equal(torch.cat([part[2] for part in parts]), gradient)
    combined = combine_metrics([part[1] for part in parts])
    assert combined.keys() == metrics.keys()
    for name, expected in metrics.items():
        assert combined[name] == pytest.approx(expected, rel=1e-12, abs=1e-12), name


@repeatable
@given(seeds, st.sampled_from([*POLICY_LOSSES, ValueLoss()]), st.integers(1, 20))
def test_padding_on_the_right_moves_no_bit_of_loss_metrics_or_gradient(seed, loss, extra):
    batch, new, entropy = random_case(seed)
    pad = torch.nn.functional.pad
    wide = batch._map(lambda value: pad(value, (0, extra)) if value.dim() == 2 else value)
    narrow_result = run(loss, batch, new, entropy)
    wide_result = run(loss, wide, pad(new, (0, extra)), pad(entropy, (0, extra)))
    assert wide_result[:2] == narrow_result[:2]
    assert torch.equal(wide_result[2], pad(narrow_result[2], (0, extra)))


@repeatable
@given(seeds, st.sampled_from([*POLICY_LOSSES, ValueLoss()]))
def test_row_order_moves_no_bit_of_a_gradient(seed, loss):
    batch, new, entropy = random_case(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    shuffled = run(loss, rows_of(batch, order), new[order], entropy[order])
    straight = run(loss, batch, new, entropy)
    assert torch.equal(shuffled[2], straight[2][order])
    assert shuffled[0] == pytest.approx(straight[0], rel=1e-12, abs=1e-12)


# --- objectives ----------------------------------------------------------------------------------------------------


def objective_by_hand(loss: PolicyLoss, batch: TokenBatch, new: torch.Tensor) -> float:
    """The three objectives as loops over tokens; token mean; no entropy, KL or correction."""
    total, count = 0.0, 0
    for i, row in enumerate(batch.mask.tolist()):
        steps = [t for t, m in enumerate(row) if m]
        gaps = {t: float(new[i, t]) - float(batch.old_logprobs[i, t]) for t in steps}
        for t in steps:
            log_ratio = sum(gaps.values()) / len(gaps) if loss.name == "gspo" else gaps[t]
            ratio, advantage = math.exp(log_ratio), float(batch.advantages[i, t])
            bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            if loss.name == "cispo":
                total += -bounded * advantage * float(new[i, t])
            else:
                objective = min(ratio * advantage, bounded * advantage)
                if loss.dual_clip is not None and advantage < 0:
                    objective = max(objective, loss.dual_clip * advantage)
                total -= objective
            count += 1
    return total / max(count, 1)


@repeatable
@given(
    seeds,
    st.sampled_from(
        [
            PolicyLoss(),
            PolicyLoss(clip_low=0.1, clip_high=0.28, dual_clip=1.2),
            PolicyLoss("gspo", 0.05, 0.1),
            PolicyLoss("gspo", 0.05, 0.1, dual_clip=1.1),
            PolicyLoss("cispo", 1.0, 0.3),
        ]
    ),
)
def test_objectives_equal_plain_loops(seed, loss):
    batch, new, entropy = random_case(seed)
    _, metrics, _ = run(loss, batch, new, entropy)
    assert metrics["actor/pg_loss"] == pytest.approx(objective_by_hand(loss, batch, new), rel=1e-5, abs=1e-6)


def one_token(loss: PolicyLoss, ratio: float, advantage: float, **tensors):
    batch = batch_of([[0, 1]], advantages=[[0, advantage]], **tensors)
    return run(loss, batch, torch.tensor([[0.0, math.log(ratio)]]), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped"),
    [
        (1.5, 2.0, -1.3 * 2.0, True),  # good and already likelier: bounded by 1 + high
        (1.5, -2.0, 1.5 * 2.0, False),  # bad and likelier: pushed down in full
        (0.5, 2.0, -0.5 * 2.0, False),  # good and less likely: pushed up in full
        (0.5, -2.0, 0.9 * 2.0, True),  # bad and already less likely: bounded by 1 - low
        (1.0, 2.0, -2.0, False),
    ],
)
def test_ppo_clip_bounds_only_what_already_moved_the_right_way(ratio, advantage, value, clipped):
    loss, metrics, gradient = one_token(PolicyLoss(clip_low=0.1, clip_high=0.3), ratio, advantage)
    assert loss == pytest.approx(value, rel=1e-6)
    assert metrics["actor/pg_clipfrac"] == float(clipped)
    if clipped:
        assert gradient[0, 1] == 0.0
    else:
        assert float(gradient[0, 1]) == pytest.approx(-ratio * advantage, rel=1e-6)


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    loss, metrics, gradient = one_token(PolicyLoss(dual_clip=3.0), 8.0, -2.0)
    assert (loss, metrics["actor/pg_clipfrac_lower"], float(gradient[0, 1])) == (6.0, 1.0, 0.0)
    loss, metrics, gradient = one_token(PolicyLoss(dual_clip=3.0), 2.0, -2.0)
    assert loss == pytest.approx(4.0)
    assert metrics["actor/pg_clipfrac_lower"] == 0.0
    assert float(gradient[0, 1]) != 0.0


def test_the_first_ratio_is_exactly_one_and_the_loss_is_minus_the_advantage():
    for name in ("ppo_clip", "gspo"):
        batch, _, entropy = random_case(11)
        _, metrics, gradient = run(PolicyLoss(name), batch, batch.old_logprobs, entropy)
        assert metrics["actor/ratio_max"] == metrics["actor/ratio_min"] == 1.0
        assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
        share = torch.tensor(1.0 / totals_of(batch).tokens, dtype=torch.float64).float()
        assert torch.equal(gradient, torch.where(batch.mask, -batch.advantages * share, 0.0))


def test_gspo_clips_whole_sequences():
    # The sequence's ratio is exp(0.1); its tokens' own ratios lie on both sides of it.
    batch = batch_of([[0, 1, 1]], advantages=[[0, 1.0, 1.0]])
    new, none = torch.tensor([[0.0, 0.4, -0.2]]), torch.zeros(1, 3)
    _, metrics, gradient = run(PolicyLoss("gspo", 0.05, 0.05), batch, new, none)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert not bool(gradient.any())
    _, metrics, gradient = run(PolicyLoss("gspo", 0.2, 0.2, aggregation="seq_mean_token_mean"), batch, new, none)
    assert metrics["actor/ratio_max"] == pytest.approx(math.exp(0.1), rel=1e-6)
    assert gradient[0].tolist() == pytest.approx([0.0, -math.exp(0.1) / 2, -math.exp(0.1) / 2], rel=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    _, metrics, gradient = one_token(PolicyLoss("cispo", clip_low=1.0, clip_high=0.3), 5.0, 2.0)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert float(gradient[0, 1]) == pytest.approx(-1.3 * 2.0, rel=1e-6)


def test_an_advantage_of_zero_stays_zero_whatever_the_ratio():
    for advantage in (0.0, 1.0, -1.0):
        batch = batch_of([[0, 1]], advantages=[[0, advantage]])
        for loss in (PolicyLoss(), PolicyLoss("gspo"), PolicyLoss("cispo")):
            value, metrics, gradient = run(loss, batch, torch.tensor([[0.0, 500.0]]), torch.zeros(1, 2))
            assert math.isfinite(value)
            assert bool(gradient.isfinite().all())
            assert value == 0.0 or advantage != 0.0
            assert all(math.isfinite(metric) for metric in metrics.values())


# --- entropy, KL ---------------------------------------------------------------------------------------------------


def test_the_entropy_bonus_lowers_the_loss_and_raises_the_entropy():
    entropy = torch.tensor([[0.0, 2.0, 4.0]], requires_grad=True)
    batch = batch_of([[0, 1, 1]])
    loss, metrics = PolicyLoss(entropy_coef=0.1)(outputs_of(torch.zeros(1, 3), entropy), batch, totals_of(batch))
    assert float(loss.detach()) == pytest.approx(-0.3)
    assert float(metrics["actor/entropy"]) == 3.0
    loss.backward()
    assert entropy.grad[0].tolist() == pytest.approx([0.0, -0.05, -0.05])


def test_the_logged_kl_is_the_one_that_is_trained():
    batch, new, entropy = random_case(4)
    plain, _, without = run(PolicyLoss(), batch, new, entropy)
    for estimator in ("k1", "k2", "k3"):
        value, metrics, gradient = run(PolicyLoss(kl_coef=0.25, kl_estimator=estimator), batch, new, entropy)
        assert value == pytest.approx(plain + 0.25 * metrics["actor/kl_loss"], rel=1e-12)
        assert not torch.equal(gradient, without)


def test_the_kl_term_pulls_towards_the_reference():
    batch = batch_of([[0, 1, 1]], ref_logprobs=[[0, -1.0, -3.0]])
    for estimator in ("k2", "k3"):
        loss = PolicyLoss(kl_coef=1.0, kl_estimator=estimator)
        _, _, gradient = run(loss, batch, torch.tensor([[0.0, -2.0, -2.0]]), torch.zeros(1, 3))
        # A step against the gradient raises the token the reference likes more and lowers the other.
        assert gradient[0, 1] < 0.0 < gradient[0, 2]


def test_the_full_kl_comes_from_the_worker_and_its_absence_is_an_error():
    loss = PolicyLoss(kl_coef=2.0, kl_estimator="full")
    assert loss.needs_full_kl
    assert not PolicyLoss(kl_coef=2.0).needs_full_kl
    batch, one = batch_of([[0, 1]]), outputs_of(torch.zeros(1, 2))
    value, metrics = loss(PolicyOutputs(one.logprobs, one.entropy, torch.tensor([[9.0, 0.5]])), batch, totals_of(batch))
    assert float(value.detach()) == 1.0
    assert float(metrics["actor/kl_loss"]) == 0.5
    with pytest.raises(ValueError, match=r"algorithm\.kl\.estimator=full needs `full_kl`"):
        loss(one, batch, totals_of(batch))


# --- train/rollout gap ---------------------------------------------------------------------------------------------


def test_truncated_importance_sampling_weights_each_token_up_to_the_cap():
    batch = batch_of([[0, 1, 1]], advantages=[[0, 1.0, 1.0]], rollout_logprobs=[[0, math.log(2.0), math.log(0.1)]])
    zero = torch.zeros(1, 3)
    capped = PolicyLoss(correction=RolloutCorrection(tis_cap=2.0))
    value, metrics, _ = run(capped, batch, zero, zero)
    assert value == pytest.approx(-(0.5 + 2.0) / 2)
    assert metrics["rollout_corr/tis_clipfrac"] == 0.5
    assert metrics["rollout_corr/ratio_max"] == pytest.approx(10.0)
    value, _, _ = run(PolicyLoss(correction=RolloutCorrection(decoupled=True)), batch, zero, zero)
    assert value == pytest.approx(-(0.5 + 10.0) / 2)


def test_decoupled_ppo_clips_around_the_old_policy_and_weights_by_the_behaviour():
    batch = batch_of([[0, 1]], advantages=[[0, 1.0]], old_logprobs=[[0, -1.0]], rollout_logprobs=[[0, -2.0]])
    loss = PolicyLoss(correction=RolloutCorrection(decoupled=True))
    value, metrics, gradient = run(loss, batch, torch.tensor([[0.0, -1.0]]), torch.zeros(1, 2))
    assert value == pytest.approx(-math.e, rel=1e-6)
    assert metrics["actor/ratio_max"] == 1.0
    assert float(gradient[0, 1]) == pytest.approx(-math.e, rel=1e-6)
    _, metrics, gradient = run(loss, batch, torch.tensor([[0.0, -0.5]]), torch.zeros(1, 2))
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert gradient[0, 1] == 0.0


def test_sequences_far_from_the_rollout_policy_are_left_out_and_counted():
    batch = batch_of(
        [[0, 1, 1], [0, 1, 1], [0, 1, 0]],
        advantages=[[0, 1.0, 1.0]] * 3,
        rollout_logprobs=[[0, 0.3, 0.5], [0, 0.3, -0.3], [0, -0.4, 0]],
    )
    correction = RolloutCorrection(sequence_mask_low=0.8, sequence_mask_high=1.25)
    zero = torch.zeros(3, 3)
    value, metrics, gradient = run(PolicyLoss(correction=correction), batch, zero, zero)
    assert value == pytest.approx(-2 / 5)
    assert metrics["rollout_corr/masked_sequences"] == pytest.approx(2 / 3)
    assert gradient.any(dim=1).tolist() == [False, True, False]


def test_without_a_gap_corrections_change_no_bit():
    batch, new, entropy = random_case(8)
    batch = batch.with_(rollout_logprobs=batch.old_logprobs)
    plain = run(PolicyLoss(), batch, new, entropy)
    for correction in (RolloutCorrection(decoupled=True), RolloutCorrection(2.0, 0.99, 1.01)):
        corrected = run(PolicyLoss(correction=correction), batch, new, entropy)
        assert corrected[0] == plain[0]
        assert torch.equal(corrected[2], plain[2])
    assert plain[1]["rollout_corr/kl"] == plain[1]["rollout_corr/logprob_diff_max"] == 0.0
    assert plain[1]["rollout_corr/ratio_mean"] == 1.0


def test_a_correction_without_rollout_log_probabilities_is_an_error_not_silence():
    batch = batch_of([[0, 1]])
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction needs `rollout_logprobs`"):
        PolicyLoss(correction=RolloutCorrection(tis_cap=2.0))(outputs_of(torch.zeros(1, 2)), batch, totals_of(batch))


# --- value loss ----------------------------------------------------------------------------------------------------


def test_the_value_loss_takes_the_worse_of_the_plain_and_the_bounded_error():
    batch = batch_of([[0, 1, 1, 1]], old_values=[[0, 0, 0, 0]], returns=[[0, 1.0, -1.0, 0.1]])
    value, metrics, gradient = run(ValueLoss(0.2), batch, torch.tensor([[0.0, 0.5, 0.5, 0.1]]), None)
    # moved by 0.5 towards 1: bounded at 0.2, error 0.64; away from -1: plain error 2.25; inside the range: 0
    assert value == pytest.approx(0.5 * (0.64 + 2.25 + 0.0) / 3, rel=1e-6)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(2 / 3)
    assert gradient[0].tolist() == pytest.approx([0.0, 0.0, 1.5 / 3, 0.0], abs=1e-7)


def test_the_clip_fraction_is_measured_before_clipping():
    batch = batch_of([[0, 1]], old_values=[[0, 0]], returns=[[0, 0]])
    assert run(ValueLoss(0.2), batch, torch.tensor([[0.0, 5.0]]), None)[1]["critic/vf_clipfrac"] == 1.0
    assert run(ValueLoss(0.2), batch, torch.tensor([[0.0, 0.1]]), None)[1]["critic/vf_clipfrac"] == 0.0


def test_a_clip_range_of_zero_is_plain_regression_and_needs_no_old_values():
    batch = batch_of([[0, 1]], returns=[[0, 1.0]])
    value, metrics, gradient = run(ValueLoss(0.0), batch, torch.tensor([[0.0, 5.0]]), None)
    assert (value, metrics["critic/vf_clipfrac"], float(gradient[0, 1])) == (8.0, 0.0, 4.0)
    with pytest.raises(ValueError, match="the clipped value loss needs `old_values`"):
        run(ValueLoss(0.2), batch, torch.zeros(1, 2), None)


# --- robustness and configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*POLICY_LOSSES, ValueLoss()])
def test_rows_without_trained_tokens_contribute_nothing_and_nothing_is_nan(loss):
    batch, new, entropy = random_case(3)
    empty = rows_of(batch, [1])
    value, metrics, gradient = run(loss, empty, new[1:2], entropy[1:2], totals_of(batch))
    assert value == 0.0
    assert not bool(gradient.any())
    assert set(metrics.values()) <= {0.0}
    nothing = run(loss, empty, new[1:2], entropy[1:2], LossTotals(1, 1, 6))
    assert nothing[0] == 0.0


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_what_stands_outside_the_mask_can_not_poison_the_gradient(loss):
    batch, new, entropy = random_case(3)
    clean = run(loss, batch, new, entropy)
    fill = {"old_logprobs": math.nan, "advantages": math.inf, "rollout_logprobs": -math.inf, "ref_logprobs": math.nan}
    dirty = batch.with_(**{n: torch.where(batch.mask, getattr(batch, n), bad) for n, bad in fill.items()})
    result = run(loss, dirty, new, entropy)
    assert result[:2] == clean[:2]
    assert torch.equal(result[2], clean[2])


@pytest.mark.parametrize("loss", [*POLICY_LOSSES, ValueLoss()])
def test_losses_survive_being_sent_to_a_worker(loss):
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize("name", ["old_logprobs", "advantages"])
def test_a_batch_without_what_the_loss_needs_is_named(name):
    batch = batch_of([[0, 1]]).with_(**{name: None})
    with pytest.raises(ValueError, match=f"needs `{name}`"):
        PolicyLoss()(outputs_of(torch.zeros(1, 2)), batch, LossTotals(1, 1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyLoss("ppo_clp"), "did you mean `ppo_clip`"),
        (lambda: PolicyLoss(clip_low=-0.1), r"algorithm\.policy_loss\.clip_low=-0\.1"),
        (lambda: PolicyLoss(dual_clip=0.9), r"algorithm\.policy_loss\.dual_clip=0\.9"),
        (lambda: PolicyLoss("cispo", dual_clip=3.0), "cispo has none"),
        (lambda: PolicyLoss(aggregation="mean"), r"algorithm\.aggregation=mean"),
        (lambda: PolicyLoss(kl_coef=1.0, kl_estimator="k4"), r"algorithm\.kl\.estimator=k4"),
        (lambda: ValueLoss(-1.0), r"algorithm\.value_loss\.clip_range=-1\.0"),
        (lambda: ValueLoss(aggregation="mean"), r"algorithm\.aggregation=mean"),
        (lambda: RolloutCorrection(tis_cap=0.0), r"rollout_correction\.tis_cap=0\.0"),
        (lambda: RolloutCorrection(sequence_mask_low=1.5), r"sequence_mask_low=1\.5"),
        (lambda: RolloutCorrection(sequence_mask_high=0.5), r"sequence_mask_high=0\.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_their_key(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_losses_are_built_from_the_configuration():
    algorithm = AlgorithmConfig(
        policy_loss=PolicyLossConfig("gspo", 3e-4, 4e-4, None, 0.01),
        kl=KlConfig(placement="loss", estimator="k2"),
        aggregation="seq_mean_token_mean",
        rollout_correction=RolloutCorrectionConfig(2.0, 0.5, 2.0, True),
    )
    assert policy_loss_from_config(algorithm, kl_coef=0.05) == PolicyLoss(
        "gspo", 3e-4, 4e-4, None, 0.01, "seq_mean_token_mean", 0.05, "k2", RolloutCorrection(2.0, 0.5, 2.0, True)
    )
    assert value_loss_from_config(algorithm) == ValueLoss(0.2, "seq_mean_token_mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_default_configuration_builds_under_every_aggregation(aggregation):
    algorithm = AlgorithmConfig(aggregation=aggregation)
    batch, new, entropy = random_case(2)
    value, _, _ = run(policy_loss_from_config(algorithm, 0.0), batch, new, entropy)
    assert math.isfinite(value)
