"""The names that the configuration allows are the names that the code knows."""

from __future__ import annotations

from configs.limits import CHOICES
from configs.roles import CRITIC_ESTIMATORS, GREEDY_ESTIMATORS, GROUP_ESTIMATORS
from reward.functions import BUILT_IN
from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.aggregate import AGGREGATIONS
from trainer.algorithms.surrogates import SURROGATES


def test_advantage_estimators():
    assert set(CHOICES["AdvantageConfig", "name"]) == set(ESTIMATORS.entries)


def test_what_estimators_need():
    entries = ESTIMATORS.entries.items()
    assert set(CRITIC_ESTIMATORS) == {name for name, function in entries if getattr(function, "needs_critic", False)}
    assert set(GROUP_ESTIMATORS) == {name for name, function in entries if getattr(function, "needs_groups", False)}
    assert set(GREEDY_ESTIMATORS) == {name for name, function in entries if getattr(function, "needs_greedy", False)}


def test_policy_losses():
    assert set(CHOICES["PolicyLossConfig", "name"]) == set(SURROGATES.entries)


def test_aggregations():
    assert CHOICES["AlgorithmConfig", "aggregation"] == AGGREGATIONS


def test_reward_functions():
    assert set(CHOICES["RewardFunctionConfig", "function"]) == set(BUILT_IN)
