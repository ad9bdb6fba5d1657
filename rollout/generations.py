"""An engine's answer, checked before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.types import Generation, GenerationRequest


class NonFiniteLogprobError(RuntimeError):
    """A sampled token has no finite log-probability; names the request."""


def checked_generation(
    request: GenerationRequest,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    *,
    version: int,
    dtype: str,
) -> Generation:
    """The record of what an engine sampled.

    Args:
        version: number of weight updates that the engine had taken.
        dtype: its compute type, for the message.

    Raises:
        NonFiniteLogprobError: a log-probability is infinite or NaN.
        RuntimeError: the engine ended the request for another reason than a stop or the cap.
        ValueError: not one log-probability a token.
    """
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(f"{request.key}: the engine ended the request with {finish_reason!r}")
    wrong = next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)
    if wrong is not None:
        raise NonFiniteLogprobError(
            f"{request.key}: the engine gave token {wrong} of the response (id {token_ids[wrong]}) the "
            f"log-probability {logprobs[wrong]} under weights {version}: the model's weights or activations are not finite "
            f"(seed {request.seed}, prompt of {len(request.prompt_token_ids)} tokens, dtype {dtype})"
        )
    return Generation(
        key=request.key,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        finish_reason=finish_reason,
        weight_version=version,
    )
