"""The head by chunks: the outputs and gradients of plain autograd, and never the logits of all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.models.head import HeadInputs, linear_head, row_outputs

ROWS, VOCAB, WIDTH = 37, 53, 16


def tensors(dtype: torch.dtype = torch.float64, bias: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, WIDTH), (VOCAB, WIDTH)] + [(VOCAB,)] * bias
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, other) -> Tensor:
    scores = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logprobs = scores.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    kl = torch.zeros_like(entropy) if other is None else (logprobs.exp() * (logprobs - other)).sum(-1)
    return torch.stack([logprobs.gather(1, targets[:, None])[:, 0], entropy, kl])


@pytest.mark.parametrize("rows_at_once", [1, 10, 64])
@pytest.mark.parametrize(("entropy", "with_reference"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_plain_autograd(rows_at_once, entropy, with_reference, bias):
    ours, theirs = tensors(torch.float32, bias), tensors(torch.float32, bias)
    targets = torch.arange(ROWS) * 7 % VOCAB
    reference = other = None
    if with_reference:
        reference = HeadInputs(*(t.detach() * 0.9 for t in tensors(torch.float32)[:2]))
        other = reference.logprobs(slice(0, ROWS), 0.7)
    found = row_outputs(
        HeadInputs(*ours), targets, 0.7, entropy_gradient=entropy, reference=reference, rows_at_once=rows_at_once
    )
    expected = plain(*theirs, *[None] * (3 - len(theirs)), targets, 0.7, other)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    factors = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(2))
    if not entropy:
        factors[1] = 0  # plain autograd has no switch for it
    if not with_reference:
        factors[2] = 0
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    for own, other_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other_one.grad, atol=1e-5, rtol=1e-4)


def test_the_size_of_a_chunk_changes_no_bit_of_the_outputs():
    # With the logits given, so that only what this module computes is compared, not the rows of a matrix product.
    logits, targets = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)), torch.arange(ROWS)
    whole = row_outputs(HeadInputs(logits), targets, 0.7)
    assert all(torch.equal(whole, row_outputs(HeadInputs(logits), targets, 0.7, rows_at_once=n)) for n in (1, 5, 36))


def test_an_entropy_without_gradient_gets_none():
    hidden, weight = tensors(torch.float32)
    row_outputs(HeadInputs(hidden, weight), torch.zeros(ROWS, dtype=torch.int64), 1.0)[1].sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_sums_over_chunks_of_bfloat16_weights_are_taken_in_float32():
    """Chunk by chunk in bfloat16, hundreds of small additions would be lost."""
    grads = []
    for rows_at_once in (1, ROWS):
        hidden, weight = tensors(torch.bfloat16)
        targets = torch.zeros(ROWS, dtype=torch.int64)
        row_outputs(HeadInputs(hidden, weight), targets, 1.0, rows_at_once=rows_at_once)[0].sum().backward()
        grads.append(weight.grad.float())
    scale = grads[1].abs().max()
    assert (grads[0] - grads[1]).abs().max() < scale * 2**-7


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


@pytest.mark.parametrize("rows_at_once", [4, ROWS])
def test_no_more_than_a_chunk_of_logits_is_ever_there(rows_at_once):
    hidden, weight = tensors(torch.float32)
    with Largest() as largest:
        outputs = row_outputs(
            HeadInputs(hidden, weight),
            torch.zeros(ROWS, dtype=torch.int64),
            1.0,
            entropy_gradient=True,
            rows_at_once=rows_at_once,
        )
        outputs.sum().backward()
    assert largest.elements == max(rows_at_once * VOCAB, weight.numel())


@pytest.mark.parametrize(("family", "direct"), [("Qwen2", True), ("Gemma2", False), ("Granite", False), ("GPT2", True)])
def test_a_model_that_changes_its_logits_after_the_head_computes_them_itself(family, direct, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.workers.models._families import save_family

    model = AutoModelForCausalLM.from_pretrained(save_family(tmp_path, family))
    assert (linear_head(model) is not None) == direct
