"""What the loop knows about a rollout engine, and how its settings become the parameters of a request.

    SamplingConfig (YAML) --sampling_from_config--> Sampling (all explicit) --> GenerationRequest --> RolloutEngine

An engine takes tokens and gives tokens. It inherits nothing from the model directory: every parameter, the end-of-sequence
ids included, travels with the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollout.types import Generation, GenerationRequest, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from configs.schema import SamplingConfig


class RolloutEngine(Protocol):
    """One replica. Its process is its own, so it may touch global generators and thread pools."""

    def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Sample a continuation of every request.

        Returns:
            One `Generation` a request, in the order of `requests`, whatever order they finished in.

        Raises:
            ValueError: a request cannot be served as asked (too long for the context, a repeated key or priority, ...).
        """
        ...

    def begin(self, requests: list[GenerationRequest]) -> None:
        """Take a batch on; `finished` then gives it in portions. One batch at a time: what is left of an earlier one is given up.

        Raises:
            ValueError: see `generate`.
        """
        ...

    def finished(self, count: int) -> list[Generation]:
        """Work until `count` more of the begun requests have finished, and return those, in the order in which they did."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the policy's weights; later generations carry `weight_version=version`.

        Args:
            tensors: every parameter under its checkpoint name, full (not sharded), on any device, any float dtype.
            version: number of weight updates these weights have seen.

        Raises:
            ValueError: a name is missing, unknown or has the wrong shape; the engine must not be used afterwards.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What is in force in this process, read back, for the run's manifest."""
        ...

    def close(self) -> None:
        """Free the engine's memory; safe to call twice."""
        ...


def sampling_from_config(config: SamplingConfig, eos_token_ids: Iterable[int]) -> Sampling:
    """Turn a config group into a request's parameters.

    Args:
        config: validated settings.
        eos_token_ids: every id that ends a response (see `find_eos_token_ids`). They become explicit stop ids, unless the
            config ignores EOS: then only `config.stop_token_ids` end a response before the cap.

    Example:
        >>> from configs.schema import SamplingConfig
        >>> sampling_from_config(SamplingConfig(stop_token_ids=[7]), [3]).stop_token_ids
        (3, 7)
    """
    ends = set(config.stop_token_ids) | (set() if config.ignore_eos else set(eos_token_ids))
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        stop=tuple(config.stop),
        stop_token_ids=tuple(sorted(ends)),
        ignore_eos=config.ignore_eos,
    )


def find_eos_token_ids(model_path: str | Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id at which the model ends a response: the tokenizer's EOS and those of `generation_config.json`.

    Only the ids are read from that file. Its sampling parameters (a top-k, a penalty) never take effect: they would make the
    sampled distribution differ from the trained one.

    Args:
        model_path: checkpoint directory.
        tokenizer_eos: `tokenizer.eos_token_id`.

    Returns:
        Ids in ascending order, at least one.

    Raises:
        ValueError: neither the tokenizer nor the model directory names an EOS.
    """
    found: set[int] = set()
    if tokenizer_eos is not None:
        found.add(tokenizer_eos)
    file = Path(model_path) / "generation_config.json"
    if file.is_file():
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(_as_ids(listed, file))
    if not found:
        raise ValueError(
            f"{model_path}: neither the tokenizer nor generation_config.json names an EOS token, so no response could end "
            "before its cap. Set `eos_token` in the tokenizer, or `eos_token_id` in generation_config.json."
        )
    return tuple(sorted(found))


def check_requests(requests: Sequence[GenerationRequest], max_model_len: int) -> None:
    """Refuse a batch that no engine could serve as asked, before any of it runs.

    Raises:
        ValueError: an empty prompt, a prompt and cap beyond the context, or a key or priority that occurs twice.
    """
    keys: set[Any] = set()
    priorities: set[int] = set()
    for request in requests:
        prompt, cap = len(request.prompt_token_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise ValueError(
                f"{request.key}: the prompt has no tokens; a model needs at least one (a BOS, for example)"
            )
        if prompt + cap > max_model_len:
            raise ValueError(
                f"{request.key}: {prompt} prompt tokens + {cap} new tokens = {prompt + cap}, but the engine's context "
                f"(rollout.max_model_len) is {max_model_len}"
            )
        if request.key in keys:
            raise ValueError(f"{request.key} occurs twice in one batch; a key names one generation")
        if request.priority in priorities:
            raise ValueError(
                f"{request.key}: priority {request.priority} occurs twice in one batch; the scheduler would break the tie "
                "by arrival time"
            )
        keys.add(request.key)
        priorities.add(request.priority)


def _as_ids(listed: Any, file: Path) -> list[int]:
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{file}: eos_token_id must be an integer or a list of integers, got {listed!r}")
    return ids
