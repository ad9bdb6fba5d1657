"""Addresses and slots of a cluster, without one; what a real Ray refuses is in `test_launch.py`."""

from __future__ import annotations

import pytest

from workers.launch.ray_cluster import Slot, in_order, knock
from workers.launch.resources import ResourceError


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "ray_address=127.0.0.1:1: no Ray cluster answers there"),
        ("ray://head:10001", "Ray's client is not supported"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once(address, message):
    with pytest.raises(ResourceError, match=message):
        knock(address)


def test_slots_are_sorted_by_machine_the_drivers_first_and_by_device_as_a_number():
    slots = [
        Slot(0, "b", ("10",)),
        Slot(1, "a", ("1",)),
        Slot(2, "own", ("0",)),
        Slot(3, "b", ("9",)),
        Slot(4, "a", ("0",)),
    ]
    assert [slot.bundle for slot in in_order(slots, "own")] == [2, 4, 1, 3, 0]
