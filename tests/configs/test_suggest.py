"""The nearest key is the one that a person meant."""

from __future__ import annotations

import pytest

from configs.suggest import FOREIGN_NAMES, nearest, suggest_key
from configs.validate import dotted_keys


@pytest.mark.parametrize(("unknown", "meant"), sorted(FOREIGN_NAMES.items()))
def test_names_of_other_trainers_lead_to_keys_that_exist(unknown, meant):
    found = suggest_key(unknown, dotted_keys())
    assert found in dotted_keys()
    assert found == meant or found.endswith(f".{meant}")


@pytest.mark.parametrize("key", dotted_keys())
def test_a_dropped_letter_in_the_last_name_is_found_again(key):
    parent, dot, leaf = key.rpartition(".")
    if len(leaf) < 6:
        return
    assert suggest_key(f"{parent}{dot}{leaf[:2]}{leaf[3:]}", dotted_keys()) == key


def test_the_place_decides_between_equal_names():
    assert suggest_key("critic.optim.lrr", dotted_keys()) == "critic.optim.lr"
    assert suggest_key("critic.learning_rate", dotted_keys()) == "critic.optim.lr"
    assert suggest_key("learning_rate", dotted_keys()) == "actor.optim.lr"


def test_what_resembles_nothing_gets_no_suggestion():
    assert suggest_key("rollout.xyzzy", dotted_keys()) is None
    assert nearest("xyzzy", ["tiny", "micro"]) is None


def test_the_order_of_the_known_keys_breaks_ties():
    assert suggest_key("b.x", ["a.x", "c.x"]) == "a.x"
    assert suggest_key("b.x", ["c.x", "a.x"]) == "c.x"
