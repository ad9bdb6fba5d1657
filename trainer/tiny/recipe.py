"""What the small models are: their task, shapes and training stages, as frozen records with a digest.

The task is two-term addition, `basic_arithmetic` of reasoning-gym: its question ("Calculate 57 + 65.") is the shortest
of the arithmetic tasks, so a character-level prompt is about 20 tokens and an answer at most 4 with its end token.

Why the warm start is what it is: PPO can only sharpen behaviour that is already sampled sometimes. So the policy first
learns addition, and then imitates a *careless demonstrator*, who adds each column but forgets the carries in more than
half of his answers (and slips at random in a few). It ends up greedy-wrong on most sums with a carry, while the right
answer keeps a probability of some forty per cent: mediocre, uncertain, and quick to improve from a reward alone. The
reward model starts from the weights before that second stage, where sums are known.

Held-out questions never appear in any training of the builder. The seeds of the training and held-out rows are chosen so
that the two sets of questions are disjoint; `shared_questions` counts the overlap and the builder refuses to go on with one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

BUILDER_VERSION = 1
"""Raise when the builder's code changes what it builds: the version is part of the cache key."""


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task and the rows that the shipped data configuration uses (`configs/data/<name>.yaml`).

    Rows `seed .. seed + size - 1` of the generator make up a split: reasoning-gym derives row i from `seed + i`.
    """

    name: str
    params: dict[str, Any]
    train_seed: int
    train_size: int
    heldout_seed: int
    heldout_size: int
    builder_seed: int = 10_000_000
    """First row of the builder's own stream of examples."""


def additions(digits: int, **rows: int) -> Task:
    """Sums of two numbers from 0 to 10**digits (inclusive: the generator's range), and the rows of both splits."""
    params = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": digits,
        "max_digits": digits,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    }
    return Task(name="basic_arithmetic", params=params, **rows)


@dataclass(frozen=True)
class Shape:
    """A Qwen3 architecture; sizes in units of its configuration class."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 32
    max_positions: int = 512
    rope_theta: float = 100.0
    """Base of the rotary positions. 100 still tells 512 positions apart (its slowest wave is some 500 long); with the usual
    10,000 most waves stand still over a prompt of 20 characters, and one trial learned the carries later."""


@dataclass(frozen=True)
class Stage:
    """One stage of training with a learning rate that warms up, stays, and falls to zero."""

    steps: int
    batch_size: int
    """Questions of one optimizer step."""
    lr: float
    """AdamW's peak rate for embeddings and norms; matrices are trained by Muon at `MATRIX_LR_FACTOR` times this."""
    careless: float = 0.0
    """Share of answers in which the demonstrator forgets every carry."""
    slips: float = 0.0
    """Share of answers with one random digit changed."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bits of the two models, apart from library versions."""

    name: str
    task: Task
    shape: Shape
    learn: Stage
    """Right answers only."""
    forget: Stage
    """The careless demonstrator; ends as the policy."""
    reward: Stage
    """Preference pairs, from the weights after `learn`; ends as the reward model."""
    reward_layers: int = 2
    """Layers that the reward model has on top of the policy's."""
    rejected: int = 3
    """Wrong answers that each right one is compared with."""
    label_smoothing: float = 0.05
    """Of the reward model's losses: keeps logits within about log(0.95 / 0.05) = 2.9 of zero."""
    seed: int = 0


RECIPES: dict[str, Recipe] = {
    "tiny": Recipe(
        name="tiny",
        task=additions(2, train_seed=1_175_321, train_size=896, heldout_seed=2_000_384, heldout_size=128),
        shape=Shape(hidden_size=128, intermediate_size=640, num_layers=3, num_heads=4, num_kv_heads=2),
        learn=Stage(steps=320, batch_size=64, lr=3e-3),
        forget=Stage(steps=60, batch_size=64, lr=2e-3, careless=0.6, slips=0.05),
        reward=Stage(steps=200, batch_size=24, lr=3e-3),
    ),
    "micro": Recipe(
        name="micro",
        task=additions(1, train_seed=1_040_579, train_size=64, heldout_seed=2_001_728, heldout_size=16),
        shape=Shape(hidden_size=64, intermediate_size=192, num_layers=2, num_heads=2, num_kv_heads=1),
        learn=Stage(steps=150, batch_size=32, lr=3e-3),
        forget=Stage(steps=20, batch_size=32, lr=1e-3, careless=0.6, slips=0.05),
        reward=Stage(steps=100, batch_size=16, lr=4e-3),
    ),
}
ROLES = ("policy", "reward")


def recipe_digest(recipe: Recipe) -> str:
    """16 hex characters over the recipe, the builder's version and the versions of the libraries that compute with it."""
    facts = {
        "recipe": dataclasses.asdict(recipe),
        "builder": BUILDER_VERSION,
        **{name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def task_rows(task: Task, seed: int, size: int) -> list[dict[str, Any]]:
    """Rows of the generator: dicts with `question`, `answer` and `metadata`, as the data source yields them."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.params)
    return [dataset[index] for index in range(size)]


def heldout_questions(task: Task) -> frozenset[str]:
    """Questions of the held-out split; only for membership tests."""
    return frozenset(row["question"] for row in task_rows(task, task.heldout_seed, task.heldout_size))


def shared_questions(task: Task) -> list[str]:
    """Questions that occur both in the training and in the held-out split, sorted; must be empty."""
    train = {row["question"] for row in task_rows(task, task.train_seed, task.train_size)}
    return sorted(train & heldout_questions(task))


def builder_rows(task: Task, start: int = 0) -> Iterator[dict[str, Any]]:
    """The builder's endless stream of rows, from row `start` on, without held-out questions."""
    heldout = heldout_questions(task)
    block, seed = 1024, task.builder_seed + start
    while True:
        yield from (row for row in task_rows(task, seed, block) if row["question"] not in heldout)
        seed += block


def careless_answer(question: str) -> str:
    """The sum with every carry forgotten: 57 + 65 gives 12 (7 + 5 leaves 2, 5 + 6 leaves 1).

    Raises:
        ValueError: the question holds no two-term addition.
    """
    match = re.search(r"(\d+) \+ (\d+)", question)
    if match is None:
        raise ValueError(f"the careless demonstrator only adds; question {question!r} has no two-term addition")
    left, right = (term[::-1] for term in match.groups())
    width = max(len(left), len(right))
    columns = [(int(a) + int(b)) % 10 for a, b in zip(left.ljust(width, "0"), right.ljust(width, "0"), strict=True)]
    return str(int("".join(map(str, reversed(columns)))))
