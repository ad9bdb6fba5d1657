"""What a resumed run may change, and what it may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.problems import UserError

# Keys that never decide what is learned: where things run, how long, what is written. Among them are the keys of the topology. Under full
# determinism they move no bit (levels D2 to D5); without it they change rounding only.
FREE = (
    "run",
    "tracking",
    "launcher",
    "ledger",
    "trainer",
    "determinism.engine_check",
    "rollout.replicas",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_mib",
    "rollout.gpu_memory_utilization",
    "rollout.enable_prefix_caching",
    "rollout.start_timeout_s",
    "rollout.proxy",
    "rollout.turns.audit_episodes",
    "rollout.turns.timeout_s",
    "reward.model.replicas",
    "reward.model.kv_cache_mib",
    "reward.model.gpu_memory_utilization",
    "reward.model.start_timeout_s",
    "reward.function_workers",
    "reward.audit_rows",
)


class ResumeError(UserError, ValueError):
    """The resumed run is another experiment."""


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any], allow: Sequence[str], where: str) -> None:
    """Refuse a resume whose model, data or algorithm settings differ.

    Args:
        old, new: resolved configs as nested dicts.
        allow: further dotted keys (or groups) that may differ.
        where: the run directory, for the message.

    Raises:
        ResumeError: names every differing key with both values.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    differing = changed_keys(old, new, allow)
    if differing:
        lines = [f"  {key}: {before.get(key)!r} in the run, {after.get(key)!r} now" for key in differing]
        raise ResumeError(
            f"{where} was started with other settings, so continuing it would mix two experiments:\n"
            + "\n".join(lines)
            + "\nSet them back, choose another run.dir, or allow them: "
            + f"'run.resume_allow=[{','.join(differing)}]'"
        )


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], allow: Sequence[str] = ()) -> list[str]:
    """Dotted keys whose values differ and are neither `FREE` nor allowed, sorted; configs as in `check_resume`."""
    free = (*FREE, *allow)
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested dicts and lists under dotted keys (`data.train.0.path`)."""
    if isinstance(tree, Mapping) and tree:
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)) and tree:
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
