"""The nearest key or option to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# What other trainers call it -> the leaf or path here. Only names whose spelling gives no hint.
FOREIGN_NAMES = {
    "learning_rate": "optim.lr",
    "batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "rollout_batch_size": "data.prompts_per_step",
    "num_generations": "rollout.sampling.n",
    "n_samples_per_prompt": "rollout.sampling.n",
    "n_gpus_per_node": "launcher.num_ranks",
    "num_processes": "launcher.num_ranks",
    "world_size": "launcher.num_ranks",
    "adv_estimator": "algorithm.advantage.name",
    "clip_ratio": "algorithm.policy_loss.clip_low",
    "clip_coef": "algorithm.policy_loss.clip_low",
    "cliprange_value": "algorithm.value_loss.clip_range",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "init_kl_coef": "algorithm.kl.coef",
    "response_length": "rollout.sampling.max_new_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_tokens": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "total_training_steps": "trainer.total_steps",
    "save_freq": "trainer.checkpoint_every",
    "test_freq": "trainer.validate_every",
    "default_local_dir": "run.dir",
    "output_dir": "run.dir",
    "experiment_name": "run.name",
    "project_name": "tracking.project",
    "resume_mode": "run.resume",
    "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "deterministic": "full_determinism",
}

CUTOFF = 0.7


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that is spelt most like `word`, or None when none is near.

    Example:
        >>> nearest("tinny", ["micro", "tiny"])
        'tiny'
    """
    found = difflib.get_close_matches(word.lower(), list(options), n=1, cutoff=0.6)
    return found[0] if found else None


def suggest_key(unknown: str, known: Sequence[str]) -> str | None:
    """The known dotted key that was probably meant by `unknown`, or None.

    The last name counts most (whole, or as a word within: `random_seed` holds `seed`), then the path before it, then
    nearness to the root. Of equals the first in `known` wins, so that the answer depends on nothing else.

    Example:
        >>> suggest_key("rollout.sed", ["seed", "data.seed", "rollout.seed"])
        'rollout.seed'
        >>> suggest_key("trainer.random_seed", ["seed", "data.seed", "rollout.seed"])
        'seed'
    """
    foreign = FOREIGN_NAMES.get(unknown.rpartition(".")[2])
    if foreign is not None:
        known = [key for key in known if key == foreign or key.endswith(f".{foreign}")] or known
        return max(known, key=lambda key: _parent_likeness(unknown, key))
    best, best_score = None, 0.0
    for key in known:
        score = _likeness(unknown, key)
        if score > best_score:
            best, best_score = key, score
    return best


def _likeness(unknown: str, key: str) -> float:
    leaf = _leaf_likeness(unknown.rpartition(".")[2].lower(), key.rpartition(".")[2].lower())
    if leaf < CUTOFF:
        return 0.0
    parent = _parent_likeness(unknown, key)
    return leaf + 0.3 * parent if parent >= CUTOFF else leaf - 0.1 * key.count(".")


def _leaf_likeness(unknown: str, leaf: str) -> float:
    spelling = difflib.SequenceMatcher(None, unknown, leaf).ratio()
    ours, theirs = leaf.split("_"), unknown.split("_")
    within = all(word in theirs for word in ours) or all(word in ours for word in theirs)
    return max(spelling, 0.85) if within else spelling


def _parent_likeness(unknown: str, key: str) -> float:
    return difflib.SequenceMatcher(None, unknown.rpartition(".")[0], key.rpartition(".")[0]).ratio()
