"""Checks level D3 on the real engines, before a run relies on it: the same requests, asked in other ways, must give the same bits.

    burst (random prompts, seeds of their own domain) --asked in several ways, on every replica--> Trials --> first_difference

D3 is claimed because of this check, never because of a flag of a library. The requests use no training data and no training seed, and
what they leave in a prefix cache is dropped with the first weights, so the check leaves no trace in a run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs.problems import UserError
from configs.schema import Config
from determinism.seeds import derive_seed, permutation
from determinism.selfcheck import Answer, Difference, Trial, first_difference
from rollout.engines import ask_each
from rollout.types import Generation, GenerationRequest, SampleKey, Sampling
from workers.launch.group import WorkerGroup

logger = logging.getLogger(__name__)

DOMAIN = "engine_check"
"""Part of every seed here, so that none equals a seed of a run."""
KV_BLOCK = 32
"""Prompts that share more tokens than a block of the KV cache are found in the prefix cache."""
WAY_OUT = (
    "Ways out: determinism.cpu_linear=block16 (on CPU), another dtype, determinism.engine_check=false (the run goes on without the "
    "claim), or full_determinism=false"
)


class EngineCheckError(UserError, RuntimeError):
    """Engines that full determinism can't rely on: an answer depends on the other requests, or on which replica was asked."""


ROLES = {"rollout": "rollout", "reward": "reward.model", "judge": "reward.judge"}
"""The groups of engines, and where their settings are."""


@dataclass(frozen=True)
class Plan:
    """A way to ask: which requests are sent together, and in which order."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    """Positions of the requests, each position once; a chunk is one call of the engine."""


@dataclass(frozen=True)
class Size:
    """How thorough a check is."""

    requests: int
    new_tokens: int
    prompt_tokens: int
    """Longest prompt, unless the engine's context is shorter."""
    scores: int
    """Inputs of the reward model."""


SHORT = Size(requests=12, new_tokens=8, prompt_tokens=160, scores=6)
"""At the start of a run: well under a second for small models."""
THOROUGH = Size(requests=48, new_tokens=16, prompt_tokens=1024, scores=16)
"""For `exactrl doctor`."""


@dataclass(frozen=True)
class EngineCheck:
    """A check that passed, for the log and the manifest."""

    requests: int
    """Different requests of the rollout engines and of the judge's."""
    scores: int
    """Different inputs of the reward engines; 0 without a reward model."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check_engines(config: Config, groups: Mapping[str, WorkerGroup], context: int) -> EngineCheck:
    """The short check at the start of a run.

    Args:
        config: with paths resolved to directories.
        groups: the engines, started: `rollout`, and `reward` and `judge` where there are such.
        context: tokens of the rollout engines' context.

    Raises:
        EngineCheckError: names the engines, the first differing request and token, and the ways out.
    """
    served = {name: group for name, group in groups.items() if name in ROLES}
    for group in served.values():
        group.ready()  # engines may still be starting; that wait does not count as time of the check
    start = time.perf_counter()
    asked = scored = 0
    for role, group in served.items():
        if role == "reward":
            inputs = conversations(config, context, SHORT)
            trials, scored = reward_trials(group, inputs, order_plans(len(inputs))), len(inputs)
        else:
            model = config.model.path if role == "rollout" else str(config.reward.judge.path)
            limit = min(context, config.reward.judge.max_model_len or context) if role == "judge" else context
            requests = burst(vocabulary(model), limit, SHORT)
            trials, asked = rollout_trials(group, requests, short_plans(len(requests))), asked + len(requests)
        found = first_difference(trials)
        if found is not None:
            raise EngineCheckError(refusal(config, role, found))
    check = EngineCheck(asked, scored, time.perf_counter() - start)
    logger.info(
        "engine check: %d requests and %d scores have the same bits in other batches, other orders, cold and warm, on every replica "
        "(%.2f s)",
        check.requests,
        check.scores,
        check.seconds,
    )
    return check


def refusal(config: Config, role: str, found: Difference) -> str:
    """Why a run with these engines can't start."""
    settings = engine_settings(config, role)
    return (
        f"full_determinism needs level D3 (rollout topology), and the {role} engines don't keep it here ({settings}): "
        f"{found.describe()}. {WAY_OUT}"
    )


def engine_settings(config: Config, role: str) -> str:
    """The settings that decide the bits of an engine, in the form of a command line."""
    key = ROLES[role]
    settings: Any = {"rollout": config.rollout, "reward": config.reward.model, "judge": config.reward.judge}[role]
    extra = getattr(settings, "engine_args", {})
    parts = [f"{key}.dtype={settings.dtype}", f"determinism.cpu_linear={config.determinism.cpu_linear}"]
    parts.append(f"determinism.threads={config.determinism.threads}")
    parts += [f"engine_args.{name}={extra[name]}" for name in sorted(extra)]
    return ", ".join(parts)


# --- what is asked -------------------------------------------------------------------------------------------------


def burst(vocab: int, context: int, size: Size) -> list[GenerationRequest]:
    """Requests of mixed length, a third with a common prefix, some greedy and some cut to a nucleus; end of sequence ignored.

    A function of the arguments alone.

    Args:
        vocab: ids are drawn below it.
        context: limit of prompt and new tokens together.
    """
    new = max(1, min(size.new_tokens, context // 8))
    longest = max(1, min(size.prompt_tokens, context - new))
    common = _ids(vocab, min(longest, max(2 * KV_BLOCK, longest // 2)), "common")
    requests = []
    for index in range(size.requests):
        length = 1 + derive_seed(0, DOMAIN, "length", index) % longest
        prompt = _ids(vocab, length, index)
        if index % 3 == 0:
            prompt = (common + prompt)[: max(length, min(longest, len(common) + 1))]
        requests.append(
            GenerationRequest(
                key=SampleKey(index, 0),
                prompt_token_ids=tuple(prompt),
                seed=derive_seed(0, DOMAIN, "request", index),
                sampling=Sampling(
                    max_new_tokens=new,
                    temperature=0.0 if index % 4 == 1 else 1.0,
                    top_p=0.9 if index % 4 == 2 else 1.0,
                    ignore_eos=True,
                ),
                priority=index,
            )
        )
    return requests


def conversations(config: Config, context: int, size: Size) -> list[list[int]]:
    """Inputs of the reward model: random ids of mixed length."""
    longest = min(size.prompt_tokens, config.reward.model.max_model_len or context)
    vocab = vocabulary(str(config.reward.model.path))
    return [
        _ids(vocab, 1 + derive_seed(0, DOMAIN, "conversation", i) % longest, f"score {i}") for i in range(size.scores)
    ]


def vocabulary(path: str | Path) -> int:
    """`vocab_size` of a checkpoint directory.

    Raises:
        EngineCheckError: its config names none.
    """
    settings = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    found = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    if not found:
        raise EngineCheckError(f"{path}/config.json has no vocab_size, so no request can be made up. {WAY_OUT}")
    return int(found)


def _ids(vocab: int, count: int, label: int | str) -> list[int]:
    return [derive_seed(0, DOMAIN, "id", label, i) % vocab for i in range(count)]


# --- ways to ask ---------------------------------------------------------------------------------------------------


def short_plans(count: int) -> list[Plan]:
    """One batch; shuffled and cut, singles among the chunks; and the batch again, reversed, with the prefix cache warm."""
    whole = tuple(range(count))
    return [
        Plan("one batch", (whole,)),
        Plan("shuffled, in chunks of 1, 1, 3 and the rest", _cut(_shuffled(count, 0), (1, 1, 3, count))),
        Plan("reversed, cache warm", (whole[::-1],)),
    ]


def batch_plans(count: int) -> list[Plan]:
    """One batch; chunks of 1, 3, 8 and 16; reversed; shuffled."""
    whole = tuple(range(count))
    chunks = [Plan(f"in chunks of {size}", _cut(_shuffled(count, size), (size,) * count)) for size in (1, 3, 8, 16)]
    return [
        Plan("one batch", (whole,)),
        *chunks,
        Plan("reversed", (whole[::-1],)),
        Plan("shuffled", (_shuffled(count, 0),)),
    ]


def order_plans(count: int) -> list[Plan]:
    """One call; reversed; one at a time."""
    whole = tuple(range(count))
    return [
        Plan("in order", (whole,)),
        Plan("reversed", (whole[::-1],)),
        Plan("shuffled, one at a time", _cut(_shuffled(count, 0), (1,) * count)),
    ]


def _shuffled(count: int, label: int) -> tuple[int, ...]:
    return tuple(permutation(count, derive_seed(0, DOMAIN, "order", label)))


def _cut(order: tuple[int, ...], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    chunks = []
    for size in sizes:
        if order:
            chunks.append(order[:size])
            order = order[size:]
    return tuple(chunks)


# --- asking --------------------------------------------------------------------------------------------------------


def rollout_trials(group: WorkerGroup, requests: Sequence[GenerationRequest], plans: Sequence[Plan]) -> list[Trial]:
    """Send every replica the same requests in each of the ways; one trial per replica and way."""
    trials: list[Trial] = []
    for plan in plans:
        answers: list[dict[int, Answer]] = [{} for _ in range(group.size)]
        for chunk in plan.chunks:
            # The priority is the place in the chunk, so that another order also means another schedule.
            asked = [replace(requests[position], priority=place) for place, position in enumerate(chunk)]
            for found, generations in zip(answers, ask_each(group, asked), strict=True):
                found |= {p: _answer(generation) for p, generation in zip(chunk, generations, strict=True)}
        trials += _trials(plan, answers, len(requests))
    return trials


def reward_trials(group: WorkerGroup, inputs: Sequence[list[int]], plans: Sequence[Plan]) -> list[Trial]:
    """As `rollout_trials`, for the reward engines."""
    trials: list[Trial] = []
    for plan in plans:
        answers: list[dict[int, Answer]] = [{} for _ in range(group.size)]
        for chunk in plan.chunks:
            asked = [inputs[position] for position in chunk]
            for found, scores in zip(answers, ask_each(group, asked), strict=True):
                found |= {p: Answer((), (float(score),)) for p, score in zip(chunk, scores, strict=True)}
        trials += _trials(plan, answers, len(inputs))
    return trials


def _trials(plan: Plan, answers: Sequence[dict[int, Answer]], count: int) -> list[Trial]:
    return [
        Trial(
            plan.name if len(answers) == 1 else f"{plan.name}, replica {replica}",
            tuple(found[position] for position in range(count)),
        )
        for replica, found in enumerate(answers)
    ]


def _answer(generation: Generation) -> Answer:
    return Answer(tuple(generation.token_ids), tuple(generation.logprobs))
