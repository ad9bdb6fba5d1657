"""The language-model head: what a loss needs of chosen rows, without holding the logits of all of them.

    hidden states [M, H] --ROWS_AT_ONCE at a time--> logits [m, V] --> log-probability, entropy, KL of each row; the logits are dropped

At a vocabulary of 152,000 the logits of 4,096 tokens are 2.5 GB, and a plain implementation holds four or five copies. Here one
chunk is alive at a time, and the backward pass computes it again. When all rows fit one chunk, it is kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS_AT_ONCE = 512
"""Rows of one chunk. Part of the numerics: the head's gradient is summed chunk by chunk."""


@dataclass(frozen=True)
class HeadInputs:
    """What logits are computed from."""

    hidden: Tensor
    """[M, H], the states before the head; or [M, V], the logits themselves, when `weight` is None."""
    weight: Tensor | None = None
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""

    def logprobs(self, rows: slice, temperature: float) -> Tensor:
        """[m, V] float32 log-softmax of the logits of `rows`, divided by the temperature."""
        hidden = self.hidden[rows]
        logits = (hidden if self.weight is None else functional.linear(hidden, self.weight, self.bias)).float()
        return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def row_outputs(
    inputs: HeadInputs,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    reference: HeadInputs | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Tensor:
    """Log-probability of the target, entropy, and KL to the reference, of each row.

    Args:
        inputs: M rows; gradients flow to all of its tensors.
        targets: [M] int64, the tokens that were sampled.
        temperature: above 0; the distribution is softmax(logits / temperature).
        entropy_gradient: let gradients flow through the entropy too.
        reference: the same rows of a frozen model; without it the KL is 0.
        rows_at_once: rows of one chunk.

    Returns:
        [3, M] float32, nats: log-probabilities, entropies, KL(policy || reference) over the whole vocabulary.
    """
    settings = _Settings(targets, temperature, entropy_gradient, reference, rows_at_once)
    return _RowOutputs.apply(inputs.hidden, inputs.weight, inputs.bias, settings)


@dataclass(frozen=True)
class _Settings:
    targets: Tensor
    temperature: float
    entropy_gradient: bool
    reference: HeadInputs | None
    rows_at_once: int

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.targets), self.rows_at_once):
            yield slice(start, min(start + self.rows_at_once, len(self.targets)))


class _RowOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, settings: _Settings) -> Tensor:
        inputs = HeadInputs(hidden, weight, bias)
        outputs = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        logprobs = None
        for rows in settings.chunks():
            logprobs = inputs.logprobs(rows, settings.temperature)
            outputs[0, rows] = logprobs.gather(1, settings.targets[rows, None])[:, 0]
            shares = logprobs.exp()
            if settings.reference is not None:
                ratio = logprobs - settings.reference.logprobs(rows, settings.temperature)
                outputs[2, rows] = ratio.mul_(shares).sum(dim=-1)
            outputs[1, rows] = shares.mul_(logprobs).sum(dim=-1).neg_()
        only_one = len(hidden) <= settings.rows_at_once
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, outputs, logprobs if only_one else None)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, outputs, kept = ctx.saved_tensors
        settings: _Settings = ctx.settings
        inputs = HeadInputs(hidden, weight, bias)
        for_hidden = torch.zeros_like(hidden)
        # Sums over chunks are taken in float32, whatever the type of the weights.
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for rows in settings.chunks():
            logprobs = inputs.logprobs(rows, settings.temperature) if kept is None else kept
            scores = _score_gradient(logprobs, rows, gradient, outputs, settings)
            if settings.temperature != 1.0:
                scores.div_(settings.temperature)
            scores = scores.to(hidden.dtype)
            for_hidden[rows] = scores if weight is None else scores @ weight
            if for_weight is not None and hidden.dtype == torch.float32:
                for_weight.addmm_(scores.t(), hidden[rows])
            elif for_weight is not None:
                for_weight += scores.t() @ hidden[rows]
            if for_bias is not None:
                for_bias += scores.sum(dim=0)
        sums = (None if each is None else each.to(hidden.dtype) for each in (for_weight, for_bias))
        return for_hidden, *sums, None


def _score_gradient(logprobs: Tensor, rows: slice, gradient: Tensor, outputs: Tensor, settings: _Settings) -> Tensor:
    """[m, V] gradient with respect to logits / temperature, from that of the three outputs ([3, M]).

    With p = softmax and q the reference: d logp_y = 1[y] - p; dH = -p (log p + H); dKL = p (log p - log q - KL).
    """
    of_logprob, of_entropy, of_kl = gradient[:, rows, None]
    _, entropy, kl = outputs[:, rows, None]
    shares = logprobs.exp()
    if settings.entropy_gradient or settings.reference is not None:
        factor = (-of_logprob).expand_as(logprobs).clone()
        if settings.entropy_gradient:
            factor -= of_entropy * (logprobs + entropy)
        if settings.reference is not None:
            factor += of_kl * (logprobs - settings.reference.logprobs(rows, settings.temperature) - kl)
        shares *= factor
    else:
        shares *= -of_logprob
    return shares.scatter_add_(1, settings.targets[rows, None], of_logprob)


Compute = Callable[[HeadInputs], Tensor]


class ChosenRows:
    """Stands in for a head during one forward pass of its model.

    Args:
        rows: [M] int64, of the flattened hidden states that reach the head.
        compute: what to return instead of logits.
    """

    def __init__(self, head: nn.Linear, rows: Tensor, compute: Compute) -> None:
        self.head = head
        self.rows = rows
        self.compute = compute
        self.returned: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """In place of `nn.Linear.forward`."""
        chosen = hidden.flatten(0, -2).index_select(0, self.rows)
        self.returned = self.compute(HeadInputs(chosen, self.head.weight, self.head.bias))
        return self.returned


@contextmanager
def in_place_of(head: nn.Linear, stand_in: ChosenRows) -> Iterator[None]:
    """Let `stand_in` answer for the head as long as the context is open."""
    head.forward = stand_in  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del head.forward


def linear_head(model: nn.Module) -> nn.Linear | None:
    """The model's head, when its outputs are the logits; None when the model scales or caps them afterwards, or has another kind of head.

    Decided by a forward pass of two tokens: what the head returned must be what the model returns. Collective for a sharded model,
    whose gathered parameters the caller frees.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    ids = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    first = ids[0, :1]
    probe = ChosenRows(head, first, lambda inputs: inputs.hidden.new_zeros(3, 1, dtype=torch.float32))
    with torch.no_grad(), in_place_of(head, probe):
        logits = model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=first).logits
    return head if logits is probe.returned else None
