"""The first update's numbers: what rounding explains passes, anything more stops or warns, with the numbers."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from configs.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    FsdpConfig,
    ModelConfig,
    PolicyLossConfig,
    RolloutConfig,
)
from trainer.first_gap import FLOAT32_GAP, HALF_GAP, FirstGapError, Gap, check_first_gap
from workers.models.batch import TokenBatch

ONE = {"actor/ratio_min": 1.0, "actor/ratio_max": 1.0}


def config(
    *, full: bool = True, dtype: str = "float32", precision: str = "fp32", warmup: int = 0, loss: str = "ppo_clip"
) -> Config:
    return Config(
        full_determinism=full,
        model=ModelConfig(path="/models/mine"),
        actor=ActorConfig(fsdp=FsdpConfig(precision=precision)),
        critic=CriticConfig(warmup_steps=warmup),
        rollout=RolloutConfig(dtype=dtype),
        algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(name=loss)),
    )


def tokens(*gaps: float) -> TokenBatch:
    """A row with these gaps, behind a prompt whose numbers must not count."""
    rollout = torch.tensor([[9.0, *[-2.0] * len(gaps), 7.0]])
    old = torch.tensor([[-9.0, *[-2.0 + gap for gap in gaps], -7.0]])
    mask = torch.tensor([[False, *[True] * len(gaps), False]])
    count = mask.shape[1]
    return TokenBatch(torch.ones(1, count, dtype=torch.int64), torch.tensor([count]), mask, rollout, old)


def test_the_gap_is_that_of_the_trained_tokens():
    gap = Gap.of(tokens(0.5, -1.0, 0.0, 0.5))
    assert (gap.mean, gap.largest, gap.tokens) == (0.5, 1.0, 4)
    assert Gap.of(tokens()) is None


@pytest.mark.parametrize(("dtype", "precision", "limit"), [
    ("float32", "fp32", FLOAT32_GAP), ("bfloat16", "fp32", HALF_GAP), ("float32", "bf16", HALF_GAP), ("bfloat16", "bf16", HALF_GAP),
])  # fmt: skip
def test_the_limit_is_the_coarser_precisions(dtype, precision, limit):
    settings = config(dtype=dtype, precision=precision)
    check_first_gap(settings, "actor", 1, tokens(0.9 * limit, -0.9 * limit), ONE)
    with pytest.raises(
        FirstGapError, match=rf"{'float32' if limit == FLOAT32_GAP else 'bfloat16'} explains a mean of {limit:g}"
    ):
        check_first_gap(settings, "actor", 1, tokens(1.1 * limit, -1.1 * limit), ONE)


def test_the_message_has_the_numbers_and_where_to_look():
    with pytest.raises(FirstGapError) as error:
        check_first_gap(config(), "actor", 1, tokens(1.5, -4.5), ONE)
    for part in (
        "step 1",
        "mean |difference| 3 nats",
        "largest 4.5",
        "2 tokens",
        "actor.fsdp.attention=sdpa",
        "/models/mine",
        "rollout.engine_args",
    ):
        assert part in str(error.value)


def test_without_full_determinism_it_warns(caplog):
    with caplog.at_level(logging.WARNING):
        check_first_gap(config(full=False), "actor", 1, tokens(1.5), {"actor/ratio_min": 0.5, "actor/ratio_max": 2.0})
    assert "mean |difference| 1.5 nats" in caplog.text
    assert "goes from 0.5 to 2 and must be 1" in caplog.text


@pytest.mark.parametrize("ratios", [(0.68, 1.0), (1.0, 1.63), (1.0, 1.0 + 2e-3)])
def test_a_first_ratio_other_than_one_stops_the_run(ratios):
    metrics = dict(zip(ONE, ratios, strict=True))
    with pytest.raises(FirstGapError, match="is random in training"):
        check_first_gap(config(), "actor", 1, tokens(0.0), metrics)


def test_nan_is_no_small_gap_and_a_skipped_update_has_no_ratio():
    check_first_gap(config(), "actor", 1, tokens(0.0), {"actor/ratio_min": math.nan, "actor/ratio_max": math.inf})
    with pytest.raises(FirstGapError, match=r"difference\| nan nats"):
        check_first_gap(config(), "actor", 1, tokens(0.0, math.nan), ONE)


def test_only_the_actors_first_update_is_looked_at():
    for role, step, warmup in (("critic", 1, 0), ("actor", 2, 0), ("actor", 1, 2), ("actor", 4, 2)):
        check_first_gap(config(warmup=warmup), role, step, tokens(5.0), ONE)
    with pytest.raises(FirstGapError):
        check_first_gap(config(warmup=2), "actor", 3, tokens(5.0), ONE)


def test_what_a_users_loss_calls_its_ratio_is_not_judged():
    check_first_gap(config(loss="mine:loss"), "actor", 1, tokens(0.0), {"actor/ratio_min": 0.0, "actor/ratio_max": 3.0})


def test_nothing_sampled_is_nothing_to_compare():
    check_first_gap(config(), "actor", 1, tokens(), {})
