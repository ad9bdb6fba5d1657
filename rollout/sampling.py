"""How settings become the parameters of a request.

    SamplingConfig (YAML) --sampling_from_config--> Sampling (all explicit) --> GenerationRequest --> engine

An engine takes tokens and gives tokens. It inherits nothing from the model directory: every parameter, the end-of-sequence
ids included, travels with the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.types import GenerationRequest, Sampling

if TYPE_CHECKING:
    from configs.schema import RolloutConfig, SamplingConfig


def seeds_are_derived(config: RolloutConfig) -> bool:
    """Whether each request gets a seed of its own (`rollout.deterministic_sampling`, which full determinism includes)."""
    return config.full_determinism or config.deterministic_sampling


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
    same = {field.name: getattr(config, field.name) for field in fields(Sampling)}
    return Sampling(**{**same, "stop": tuple(config.stop), "stop_token_ids": tuple(sorted(ends))})


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


def check_request(request: GenerationRequest, max_model_len: int) -> None:
    """Refuse a request that no engine could serve as asked.

    Raises:
        ValueError: an empty prompt, or a prompt and cap beyond the context.
    """
    prompt, cap = len(request.prompt_token_ids), request.sampling.max_new_tokens
    if prompt == 0:
        raise ValueError(f"{request.key}: the prompt has no tokens; a model needs at least one (a BOS, for example)")
    if prompt + cap > max_model_len:
        raise ValueError(
            f"{request.key}: {prompt} prompt tokens + {cap} new tokens = {prompt + cap}, but the engine's context "
            f"(rollout.max_model_len) is {max_model_len}"
        )


def _as_ids(listed: Any, file: Path) -> list[int]:
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{file}: eos_token_id must be an integer or a list of integers, got {listed!r}")
    return ids
