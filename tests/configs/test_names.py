"""The names that the configuration allows are the names that the code knows."""

from __future__ import annotations

import pytest

from configs.algorithms import ESTIMATORS, POLICY_LOSSES
from configs.field_types import choices
from configs.validate import type_at
from reward.functions import BUILT_IN
from rollout.engines import ENGINES
from trainer.algorithms import advantages, surrogates
from trainer.algorithms.aggregate import AGGREGATIONS
from trainer.algorithms.registry import Registry


def test_advantage_estimators():
    assert choices(type_at("algorithm.advantage.name")) == tuple(ESTIMATORS) == tuple(advantages.ESTIMATORS.entries)


def test_policy_losses():
    assert choices(type_at("algorithm.policy_loss.name")) == POLICY_LOSSES == tuple(surrogates.SURROGATES.entries)


@pytest.mark.parametrize(
    ("entries", "odd"), [({"red": len}, "blue"), ({"red": len, "blue": len, "green": len}, "green")]
)
def test_a_name_without_a_function_or_a_function_without_a_name_fails_when_it_is_imported(entries, odd):
    with pytest.raises(TypeError, match=f"{odd}: a colour must stand in configs/algorithms.py"):
        Registry("colour", "paint.colour", entries, declared=["red", "blue"])


def test_aggregations():
    assert choices(type_at("algorithm.aggregation")) == AGGREGATIONS


def test_reward_functions():
    assert choices(type_at("reward.functions.0.function")) == tuple(BUILT_IN)


def test_engines():
    assert choices(type_at("rollout.engine")) == tuple(ENGINES)
