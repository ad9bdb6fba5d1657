"""Cheaper forms of two of vLLM's small layers on CPU, whose overhead is much of what a tiny model costs.

    RMSNorm       vLLM composes it of seven PyTorch operators on CPU. Here it is one call of the fused kernel in vLLM's own CPU
                  build, which the CPU path does not use. It goes through one row at a time, so a row's bits depend on that row
                  alone; a self-test of every width decides. Its sum has another order: bits move, by float32 rounding.
    SiLU-and-mul  the product is written over the activation instead of into a third tensor. The same bits.

The fused norm is used in float32 only. In bfloat16 it rounds once where the composition, and the trainer's model, round twice:
it would be nearer to the exact result and further from the trainer (the gap of log-probabilities grew by a quarter). vLLM's
fused SiLU is left alone too: it is three times slower than PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NORM_LANES = 8
"""The fused norm takes widths that are multiples of this."""

_PROBES = 16
_SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64)

RowWise = Callable[[Tensor], Tensor]
"""[M, K] -> [M, L], where row i of the result should be a function of row i alone."""


def fused_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension.

    Args:
        x: float32 [..., K]; need not be contiguous.
        weight: float32 [K], K a multiple of `NORM_LANES`.

    Returns:
        A new contiguous tensor of x's shape.
    """
    # The kernel takes the rows to lie end to end, and reads the wrong ones of a slice without an error.
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMS norm of x + residual; both are overwritten, as vLLM's layers expect.

    Args:
        x, residual: float32 [..., K], contiguous.
        weight: float32 [K], K a multiple of `NORM_LANES`.

    Returns:
        The norm (in x's memory) and the sum (in residual's).
    """
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half. [..., 2 K] -> [..., K]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def rows_stand_alone(function: RowWise, width: int) -> bool:
    """Self-test: whether a float32 row has the same bits at every tested batch size and position.

    A sum in another order changes the scale of about every second row, so a dependence shows in some of the sixteen.
    """
    generator = torch.Generator().manual_seed(21)
    pool = torch.randn(max(_SIZES), width, generator=generator, dtype=torch.float32, device="cpu")
    probes = torch.randn(_PROBES, width, generator=generator, dtype=torch.float32, device="cpu")
    expected = [function(row[None].clone()) for row in probes]
    for size in _SIZES:
        places = sorted({0, size // 3, size // 2, size - 1})
        for row, alone in zip(probes, expected, strict=True):
            batch = pool[:size].clone()
            batch[places] = row
            if not torch.equal(function(batch)[places], alone.expand(len(places), -1)):
                return False
    return True


def norms_stand_alone(width: int) -> bool:
    """Self-test of both fused norms at this width."""
    generator = torch.Generator().manual_seed(22)
    weight = torch.rand(width, generator=generator, dtype=torch.float32, device="cpu") + 0.5

    def with_residual(x: Tensor) -> Tensor:
        return torch.cat(fused_add_norm(x, x.flip(-1), weight, 1e-6), dim=-1)

    return rows_stand_alone(lambda x: fused_norm(x, weight, 1e-6), width) and rows_stand_alone(with_residual, width)


def replace_norm(widths: dict[int, bool]) -> None:
    """Let vLLM's RMSNorm use the fused kernels on CPU wherever they fit; everything else stays as it is.

    Args:
        widths: is filled, as layers are built, with the widths whose self-test passed (True) or failed (False).
    """
    from vllm.model_executor.layers.layernorm import RMSNorm

    original_init = RMSNorm.__init__

    def fits(layer: Any) -> bool:
        # A subclass may compute something else.
        if type(layer) is not RMSNorm or not layer.has_weight or layer.variance_size_override is not None:
            return False
        width = layer.hidden_size
        if layer.weight.dtype != torch.float32 or width % NORM_LANES != 0:
            return False
        if width not in widths:
            widths[width] = norms_stand_alone(width)
        return widths[width]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.exactrl_fused = fits(self)

    def forward_cpu(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not self.exactrl_fused or x.dtype != torch.float32:
            return self.forward_native(x, residual)
        if residual is None:
            return fused_norm(x, self.weight, self.variance_epsilon)
        if not (x.is_contiguous() and residual.is_contiguous() and residual.dtype == x.dtype):
            return self.forward_native(x, residual)
        return fused_add_norm(x, residual, self.weight, self.variance_epsilon)

    RMSNorm.__init__, RMSNorm.forward_cpu = init, forward_cpu


def replace_activation() -> None:
    """Let vLLM's SiluAndMul write its product over the activation."""
    from vllm.model_executor.layers.activation import SiluAndMul

    SiluAndMul.forward_cpu = lambda self, x: silu_and_mul(x)
