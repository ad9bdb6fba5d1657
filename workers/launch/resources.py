"""CPUs and GPUs: what a run needs and what is there, compared before anything starts.

A run is laid out in *slots*. A slot is a place for one trainer rank and one replica of each kind of engine: they take turns
(ranks compute while engines are idle, and the other way round), so they share the slot's CPUs and its GPU on purpose. The need is
therefore the *largest* of the groups, not their sum: two ranks, two rollout engines and a reward engine run on two cores.

    slots = max(ranks, rollout replicas x GPUs of a replica, reward replicas, judge replicas)
    CPUs  = slots x determinism.threads          GPUs = slots on CUDA, 0 on CPU

On one GPU the memory is shared by setting `gpu_memory_utilization` of the engines. (The GPU accounting has not been verified on a
machine with GPUs.)
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from configs.problems import UserError
from configs.schema import Config

log = logging.getLogger(__name__)


class ResourceError(UserError, ValueError):
    """More was asked for than exists."""


@dataclass(frozen=True)
class Needs:
    """What a run asks of the machine or cluster."""

    slots: int
    """Places for a rank and its engines."""
    threads: int
    """CPUs of a slot."""
    gpus_per_slot: int
    """1 on CUDA, 0 on CPU."""
    reason: str
    """The groups that were counted."""

    @property
    def cpus(self) -> int:
        """CPUs needed."""
        return self.slots * self.threads

    @property
    def gpus(self) -> int:
        """GPUs needed."""
        return self.slots * self.gpus_per_slot


def resolve_device(name: str) -> str:
    """`cpu` or `cuda`; `auto` takes CUDA where there is a GPU.

    Raises:
        ResourceError: `cuda` on a machine without a usable GPU.
    """
    if name == "cpu":
        return "cpu"
    available = machine_gpus() > 0
    if name == "cuda" and not available:
        raise ResourceError(
            "launcher.device=cuda, but torch finds no usable GPU; set launcher.device=cpu, or install the CUDA build of torch"
        )
    return "cuda" if available else "cpu"


def needs_of(config: Config, device: str) -> Needs:
    """The slots that `config` asks for on `device` (`cpu` or `cuda`)."""
    ranks = config.launcher.num_ranks
    per_replica = config.rollout.tensor_parallel_size if device == "cuda" else 1
    rollout = config.rollout.replicas * per_replica
    reward = config.reward.model.replicas if config.reward.model.path else 0
    reason = f"launcher.num_ranks={ranks}, rollout.replicas={config.rollout.replicas}"
    if per_replica > 1:
        reason += f" x rollout.tensor_parallel_size={per_replica}"
    if reward:
        reason += f", reward.model.replicas={reward}"
    judge = config.reward.judge.replicas if config.reward.judge.path else 0
    if judge:
        reason += f", reward.judge.replicas={judge}"
    threads = config.determinism.threads
    return Needs(
        slots=max(ranks, rollout, reward, judge),
        threads=threads,
        gpus_per_slot=1 if device == "cuda" else 0,
        reason=f"the largest of {reason}; determinism.threads={threads} each",
    )


def check_resources(config: Config, started_ranks: int | None = None) -> Needs:
    """Compare the needs of `config` with this machine; nothing is started.

    A Ray cluster (`launcher.ray_address`) is counted when it is joined. Ranks that torchrun has already started here may be more
    than the CPUs: the operating system lets them take turns, so that is a warning. (Ray would wait for ever.)

    Args:
        started_ranks: ranks that torchrun or accelerate has started; None when Ray will start them.

    Raises:
        ResourceError: what is needed and what is available.
    """
    device = resolve_device(config.launcher.device)
    needs = needs_of(config, device)
    if started_ranks is None and config.launcher.ray_address is not None:
        return needs
    gpus = machine_gpus() if device == "cuda" else 0
    cpus = machine_cpus()
    if started_ranks is not None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", started_ranks))
        here = replace(needs, slots=-(-needs.slots * local_ranks // max(started_ranks, 1)))
        check(here, float("inf"), gpus, "this machine", "")
        if here.cpus > cpus and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning(
                "%d CPUs needed, %d available on this machine (%s): they take turns", here.cpus, cpus, here.reason
            )
        return needs
    way_out = "Ask for fewer, or let Ray count more CPUs than there are with launcher.ray_num_cpus (processes then share them)."
    if config.launcher.ray_num_cpus is not None:
        check(needs, config.launcher.ray_num_cpus, gpus, "this machine by launcher.ray_num_cpus", way_out)
    else:
        check(needs, cpus, gpus, "this machine", way_out)
    return needs


def check(needs: Needs, cpus: float, gpus: float, where: str, way_out: str) -> None:
    """Compare needs with what there is.

    Args:
        cpus, gpus: what there is.
        where: what was counted (`this machine`).
        way_out: what the user can do about too few CPUs.

    Raises:
        ResourceError: needed and available, what was counted, and the way out.
    """
    if needs.gpus > gpus:
        raise ResourceError(
            f"{needs.gpus} GPUs needed, {gpus:g} available on {where} ({needs.reason}). "
            "Ask for fewer ranks or replicas, or set launcher.device=cpu."
        )
    if needs.cpus > cpus:
        raise ResourceError(f"{needs.cpus} CPUs needed, {cpus:g} available on {where} ({needs.reason}). {way_out}")


def machine_cpus() -> int:
    """CPUs this process may use: its affinity, and the quota of its container where that is smaller."""
    count = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            count = min(count, max(1, int(limit) // int(period)))
    return count


def machine_gpus() -> int:
    """GPUs torch can use here (CUDA_VISIBLE_DEVICES respected)."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
