"""The judge: a generative reward model on engines like those of the rollout; a function reads the score from what it writes.

    Episode --judge_text--> prompt --judge_tokens--> ids --rollout engines--> texts --parser, in a pool of processes--> scores --> their mean

A judgement is a sample as exact as a rollout's: its seed follows from the episode's, it travels as tokens, and the engine check covers its engines.
What the policy wrote is encoded as plain text, so it can't close the judge's turn or speak with another role.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import Config, JudgeConfig, RewardConfig, RewardFunctionConfig, RolloutConfig
from determinism.seeds import judge_seed
from reward.outcomes import ProcessReward
from reward.pool import CallFailure, FunctionPool, FunctionSample
from rollout.engines import RolloutEngines
from rollout.sampling import find_eos_token_ids, sampling_from_config
from rollout.types import Episode, Generation, GenerationRequest, SampleKey
from workers.checkpoint_files import weight_files

JUDGE_SOURCE = "judge"
"""Name of the judge among the sources."""
FIELDS = ("prompt", "response", "answer", "conversation")
"""What a judge's prompt may name in braces."""
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")
_PLACE = "exactrl-judge-place"


def judge_text(config: JudgeConfig, episode: Episode) -> str:
    """The judge's prompt for an episode: `reward.judge.prompt` with its fields filled in.

    Braces in what is filled in stay as they are.
    """
    conversation = [_line(message) for message in episode.conversation]
    before = [_line(message) for message in episode.conversation[:-1]]
    single = len(before) == 1 and episode.conversation[0].get("role") == "user"
    answer = episode.prompt.answer
    fields = {
        "prompt": _text(episode.conversation[0]) if single else "\n".join(before),
        "response": episode.text,
        "answer": answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str),
        "conversation": "\n".join(conversation),
    }
    return _FIELD.sub(lambda match: fields[match[1]], config.prompt)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([*([text] if text or not calls else []), *(f"calls {call}" for call in calls)])


def _line(message: Mapping[str, Any]) -> str:
    return f"{message['role']}: {_text(message)}"


def judge_tokens(text: str, tokenizer: Any, config: JudgeConfig) -> tuple[int, ...]:
    """The judge's prompt in its own vocabulary, within its chat template. Special tokens that stand in the text are encoded as plain text.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {config.tokenizer or config.path} has no chat template")
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    messages.append({"role": "user", "content": _PLACE})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, tail = rendered.partition(_PLACE)

    def ids(part: str, plain: bool) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, split_special_tokens=plain)["input_ids"])

    return tuple(ids(head, False) + ids(text, True) + ids(tail, False))


def check_judge(path: str | Path) -> None:
    """Refuse a checkpoint that writes no text, or whose weight files are not its own.

    Raises:
        ValueError: a classifier, or weight files as in `workers.checkpoint_files.weight_files`.
    """
    weight_files(path)
    settings = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    architectures = settings.get("architectures") or []
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ValueError(f"{path} is {', '.join(architectures)}, which writes no text; serve it by reward.model.path")


def judge_rollout(config: Config) -> RolloutConfig:
    """The judge's engines as settings of rollout engines."""
    judge = config.reward.judge
    shared = (
        "replicas",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_mib",
        "gpu_memory_utilization",
        "start_timeout_s",
    )
    return RolloutConfig(
        seed=config.rollout.seed,
        full_determinism=config.full_determinism,
        deterministic_sampling=config.rollout.deterministic_sampling,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        **{name: getattr(judge, name) for name in shared},
    )


class JudgeModel:
    """The judge's engines and its parser.

    Args:
        engines: its engines.
        tokenizer: its own tokenizer.
        config: `reward.judge`.
        context: tokens of its context.
        log_dir: for the parser's output; None discards it.
        derive_seeds: False gives its requests no seeds.
    """

    def __init__(
        self,
        engines: RolloutEngines,
        tokenizer: Any,
        config: JudgeConfig,
        *,
        context: int,
        log_dir: Path | None = None,
        derive_seeds: bool = True,
    ) -> None:
        assert config.path is not None
        self.engines, self.tokenizer, self.config, self.context = engines, tokenizer, config, context
        self.sampling = sampling_from_config(config.sampling, find_eos_token_ids(config.path, tokenizer.eos_token_id))
        self.derive_seeds = derive_seeds
        self.pool = FunctionPool([parser_of(config)], log_dir=log_dir)

    def start(self) -> None:
        """Load the parser now instead of at the first step; raises `PoolError`."""
        self.pool.start()

    def close(self) -> None:
        """End the parser's process; safe to call twice."""
        self.pool.close()

    def begin(self) -> PendingJudgements:
        """The judgements of a batch that is still being sampled."""
        return PendingJudgements(self)

    def requests(self, episode: Episode) -> list[GenerationRequest]:
        """One request for each judgement of an episode, in order.

        Raises:
            ValueError: prompt and answer do not fit the judge's context.
        """
        ids = judge_tokens(judge_text(self.config, episode), self.tokenizer, self.config)
        cap = self.sampling.max_new_tokens
        if len(ids) + cap > self.context:
            raise ValueError(
                f"the judge's prompt has {len(ids)} tokens, and its answer may have {cap}; its context (reward.judge.max_model_len) is {self.context}"
            )
        key = episode.key
        found = []
        for number in range(self.config.sampling.n):
            seed = None
            if self.derive_seeds and episode.seed is not None:
                seed = judge_seed(
                    episode_seed=episode.seed, prompt_id=episode.prompt.id, sample=key.sample, judgement=number
                )
            # The priority is a function of the sample, so that it does not depend on which episode finished first.
            priority = (key.task << 24) + (key.sample << 12) + number
            found.append(GenerationRequest(SampleKey(key.task, key.sample, number), ids, seed, self.sampling, priority))
        return found


class PendingJudgements:
    """The judge's part in scoring one batch; see `reward.pending.PendingRewards`."""

    def __init__(self, judge: JudgeModel) -> None:
        self._judge = judge
        self._asked: dict[SampleKey, list[Future[Generation]] | CallFailure] = {}

    def add(self, episode: Episode) -> None:
        """Start to judge this episode, unless it was added before; returns at once."""
        if episode.key not in self._asked:
            self._asked[episode.key] = self._ask(episode)

    def scores(self, episodes: Sequence[Episode], seen: Sequence[FunctionSample]) -> list[float | CallFailure]:
        """The mean score of each episode, or why there is none; waits until all are there.

        Args:
            seen: what the parser sees of each episode, except for the response: that is the judge's text.

        Raises:
            WorkerError: an engine failed.
            PoolError: the parser cannot be run.
        """
        for episode in episodes:
            self.add(episode)
        asked = [self._asked[episode.key] for episode in episodes]
        futures = [future for one in asked if not isinstance(one, CallFailure) for future in one]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # a failure is raised at once, without waiting for the rest
        texts = [
            [] if isinstance(one, CallFailure) else [self._text(future.result()) for future in one] for one in asked
        ]
        samples = [replace(one, response=text) for one, own in zip(seen, texts, strict=True) for text in own]
        (parsed,) = self._judge.pool.score(samples).values() if samples else ([],)
        entries = iter(zip(samples, parsed, strict=True))
        return [
            one if isinstance(one, CallFailure) else _mean([next(entries) for _ in own])
            for one, own in zip(asked, texts, strict=True)
        ]

    def _ask(self, episode: Episode) -> list[Future[Generation]] | CallFailure:
        try:
            requests = self._judge.requests(episode)
        except ValueError as error:
            name = f"{episode.prompt.id} (task {episode.key.task}, sample {episode.key.sample})"
            return CallFailure(JUDGE_SOURCE, name, "length", str(error))
        return [self._judge.engines.ask(request) for request in requests]

    def _text(self, generation: Generation) -> str:
        return str(self._judge.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True))


def _mean(entries: Sequence[tuple[FunctionSample, Any]]) -> float | CallFailure:
    values = []
    for sample, entry in entries:
        if isinstance(entry, ProcessReward):
            entry = CallFailure(
                JUDGE_SOURCE, sample.name, "type", "the parser returned a mapping; it must return a number"
            )
        if isinstance(entry, CallFailure):
            return replace(entry, message=f"{entry.message}\nThe judge wrote: {sample.response[:400]!r}")
        values.append(float(entry))
    return math.fsum(values) / len(values)


def functions_of(config: RewardConfig) -> list[RewardFunctionConfig]:
    """Every function that a run calls for its rewards: reward functions, and the judge's parser."""
    return [*config.functions, *([parser_of(config.judge)] if config.judge.path is not None else [])]


def parser_of(config: JudgeConfig) -> RewardFunctionConfig:
    """The parser as a function for the pool."""
    return RewardFunctionConfig(
        name=JUDGE_SOURCE, function=config.parser, params=dict(config.parser_params), timeout_s=config.parser_timeout_s
    )
