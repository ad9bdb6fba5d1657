"""What the length cap does to a response: its score, its place in the loss, and where its return ends.

Whether a response is truncated comes from the engine's finish reason, never from a padded width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig

TRUNCATED = ("keep", "mask", "penalise", "bootstrap")


def shape_scores(
    scores: Tensor, lengths: Tensor, truncated: Tensor, algorithm: AlgorithmConfig, max_response_tokens: int
) -> Tensor:
    """Scores with the penalties for truncated and overlong responses.

    - `algorithm.truncated=penalise`: `truncated_penalty` is added to a truncated response's score.
    - `algorithm.overlong_buffer=b` > 0: with L the cap, a response of n tokens gets -overlong_penalty * (n - (L - b)) / b
      within the last b tokens below the cap, and no more than -overlong_penalty.

    Both may be set; they add up.

    Args:
        scores: [N] float.
        lengths: [N] int64; tokens that the policy sampled.
        truncated: [N] bool.
        algorithm: the `algorithm` group.
        max_response_tokens: L, the cap.

    Returns:
        [N], dtype of `scores`.

    Raises:
        ValueError: an unknown mode, or a buffer longer than the cap.

    Source: Yu et al. 2025, "DAPO", equation 13 (soft overlong punishment).
    """
    _require_mode(algorithm)
    buffer = algorithm.overlong_buffer
    if not 0 <= buffer <= max_response_tokens:
        raise ValueError(f"algorithm.overlong_buffer={buffer}: must lie in 0 to the response cap {max_response_tokens}")
    shaped = scores.to(torch.float64)
    if algorithm.truncated == "penalise":
        shaped = torch.where(truncated, shaped + algorithm.truncated_penalty, shaped)
    if buffer > 0:
        over = (lengths - (max_response_tokens - buffer)).clamp(0, buffer).to(torch.float64)
        shaped = shaped - algorithm.overlong_penalty * over / buffer
    return shaped.to(scores.dtype)


def trained_mask(mask: Tensor, truncated: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[N, T] bool: the mask without truncated responses when `algorithm.truncated=mask`; their scores still count in groups."""
    _require_mode(algorithm)
    return mask & ~truncated[:, None] if algorithm.truncated == "mask" else mask


def bootstrap_values(last_values: Tensor, truncated: Tensor, algorithm: AlgorithmConfig) -> Tensor | None:
    """[N] value after the last token for truncated responses, 0 for the others; None unless `algorithm.truncated=bootstrap`.

    Args:
        last_values: [N] float; the critic's value of the state after each response's last token.
        truncated: [N] bool.
    """
    _require_mode(algorithm)
    return torch.where(truncated, last_values, 0.0) if algorithm.truncated == "bootstrap" else None


def _require_mode(algorithm: AlgorithmConfig) -> None:
    if algorithm.truncated not in TRUNCATED:
        raise ValueError(f"algorithm.truncated={algorithm.truncated}: known are {', '.join(TRUNCATED)}")
