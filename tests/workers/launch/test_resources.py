"""What a run needs is held against what there is before anything starts."""

from __future__ import annotations

import pytest

from configs.schema import Config
from workers.launch import resources
from workers.launch.resources import ResourceError, check_resources, needs_of


def config(ranks: int = 1, rollout: int = 1, reward: int | None = None, threads: int = 1) -> Config:
    made = Config()
    made.launcher.num_ranks = ranks
    made.launcher.device = "cpu"
    made.rollout.replicas = rollout
    made.determinism.threads = threads
    if reward is not None:
        made.reward.model.path = "somewhere"
        made.reward.model.replicas = reward
    return made


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(resources, "machine_cpus", lambda: 2)
    monkeypatch.setattr(resources, "machine_gpus", lambda: 0)


def test_groups_that_take_turns_share_cpus():
    assert check_resources(config(ranks=2, rollout=2, reward=1)).cpus == 2


def test_the_largest_group_counts_and_threads_multiply():
    assert needs_of(config(ranks=1, rollout=3, reward=4), "cpu").cpus == 4
    assert needs_of(config(ranks=2, threads=3), "cpu").cpus == 6
    assert needs_of(config(), "cpu").gpus == 0


def test_a_reward_model_that_is_not_served_needs_nothing():
    wanted = config()
    wanted.reward.model.replicas = 8
    assert needs_of(wanted, "cpu").cpus == 1


def test_on_cuda_a_replica_takes_a_slot_for_each_of_its_gpus():
    wanted = config(ranks=2, rollout=2)
    wanted.rollout.tensor_parallel_size = 4
    assert needs_of(wanted, "cuda").gpus == 8
    assert needs_of(wanted, "cpu").slots == 2


@pytest.mark.parametrize("wanted", [config(ranks=3), config(rollout=3), config(reward=3), config(threads=3)])
def test_too_few_cpus_name_needed_and_available_and_the_way_out(wanted):
    with pytest.raises(ResourceError, match=r"3 CPUs needed, 2 available on this machine .*launcher.ray_num_cpus"):
        check_resources(wanted)


def test_more_cpus_may_be_counted_than_there_are():
    wanted = config(ranks=4)
    wanted.launcher.ray_num_cpus = 4
    assert check_resources(wanted).cpus == 4
    wanted.launcher.ray_num_cpus = 3
    with pytest.raises(ResourceError, match="4 CPUs needed, 3 available"):
        check_resources(wanted)


def test_ranks_that_already_run_may_take_turns_on_fewer_cpus(caplog):
    assert check_resources(config(ranks=4), started_ranks=4).cpus == 4
    assert "4 CPUs needed, 2 available" in caplog.text


def test_cuda_without_a_gpu_is_refused():
    wanted = config()
    wanted.launcher.device = "cuda"
    with pytest.raises(ResourceError, match=r"launcher\.device=cuda"):
        check_resources(wanted)


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(resources, "machine_gpus", lambda: 1)
    wanted = config(ranks=2)
    wanted.launcher.device = "auto"
    with pytest.raises(ResourceError, match="2 GPUs needed, 1 available"):
        check_resources(wanted)
    with pytest.raises(ResourceError, match="2 GPUs needed, 1 available"):
        check_resources(wanted, started_ranks=2)


def test_this_machine_has_cpus():
    assert resources.machine_cpus() >= 1
