"""From a log-ratio of two policies to the ratio: the one place where an exponential is kept from overflowing.

float32 overflows at 88 nats, and infinity times an advantage of zero is not a number. So beyond `LOG_RATIO_LIMIT` nats the exponential
goes on as its tangent there: it keeps growing, and its gradient keeps its sign and stays at e^20. Below there is nothing to bound:
the exponential of a very negative number is a small positive one or zero, and so is its gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats; e^20, about 5e8, is far beyond any clip bound and any useful KL."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """e^x up to the limit L, e^L (1 + x - L) beyond; same shape and dtype, differentiable everywhere, finite for finite input."""
    return _with_tangent(log_ratio, torch.exp, math.exp(LOG_RATIO_LIMIT))


def ratio_minus_one(log_ratio: Tensor) -> Tensor:
    """`ratio_of(x) - 1` with the digits that the subtraction would lose near x = 0."""
    return _with_tangent(log_ratio, torch.expm1, math.expm1(LOG_RATIO_LIMIT))


def _with_tangent(x: Tensor, function, at_limit: float) -> Tensor:
    # Both branches are computed and both pass gradients back, so neither may see a number that overflows in it.
    inside = function(x.clamp(max=LOG_RATIO_LIMIT))
    return torch.where(x > LOG_RATIO_LIMIT, at_limit + math.exp(LOG_RATIO_LIMIT) * (x - LOG_RATIO_LIMIT), inside)
