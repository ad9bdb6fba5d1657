"""Canonical sums: one order of additions, whatever the number of ranks.

Floating-point addition is not associative, so "the sum of these gradients" is not one number until an order is fixed. Here
it is the balanced binary tree over the leaves in canonical order, the last one waiting where a level's count is odd. Of 7:

    0    1    2    3    4    5    6
      01        23        45      6
          0123               456
                 0123456

Why 1, 2 and 4 ranks get equal bits: leaf `slot * ranks + rank` is computed by `rank` at `slot`. With `ranks` a power of two,
the leaves of one slot are a complete subtree; its sum is made across ranks (`TreeReduceScatter`, pairwise in rank order). The
slots' sums then arrive one after the other, and a binary counter (`BinaryCounter`) adds two of them exactly when they are
equally large neighbours, which is the upper part of the same tree. More ranks move the line between the two parts; no addition
changes its operands. A count that does not fill the last slot is filled with zeros: x + 0 is x, except for the sign of a zero, so
results have no negative zeros.

All of it is elementwise additions, which have one right answer in IEEE 754; no library reduction, whose order depends on shape,
threads and instruction set, takes part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


def tree_sum(rows: Tensor) -> Tensor:
    """Sum over dim 0 by the canonical tree.

    Args:
        rows: [n, ...] of a float dtype, n >= 0; not changed.

    Returns:
        [...], without negative zeros; zeros when n is 0.

    Example:
        >>> tree_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor(6.)
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(rows.shape[1:])
    while rows.shape[0] > 1:
        pairs = rows.shape[0] // 2
        added = rows[0 : 2 * pairs : 2] + rows[1 : 2 * pairs : 2]
        rows = torch.cat([added, rows[2 * pairs :]]) if rows.shape[0] % 2 else added
    return rows[0] + 0.0


def pairwise_rows(rows: Tensor) -> Tensor:
    """Sum over dim 0 by the complete binary tree: the part of the canonical tree inside one slot.

    Args:
        rows: [n, ...], n a power of two; not changed. Signs of zeros are kept.

    Raises:
        ValueError: n is not a power of two.
    """
    require_power_of_two(rows.shape[0], "pairwise_rows: the number of rows")
    while rows.shape[0] > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


class BinaryCounter:
    """The canonical sum of lists of tensors that arrive one after the other, with about log2(count) lists alive.

    Like incrementing a binary number: a list of weight 2**k waits until its right neighbour of the same weight is complete.

    Example:
        >>> counter = BinaryCounter()
        >>> for leaf in (1.0, 2.0, 3.0):
        ...     counter.push([torch.tensor([leaf])])
        >>> counter.result()
        [tensor([6.])]
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Tensor]]] = []  # (log2 of the number of leaves, their sum), large to small

    def push(self, tensors: Sequence[Tensor]) -> None:
        """Add the next leaf. The tensors belong to the counter from now on: sums are made in place.

        Raises:
            ValueError: the number of tensors or a shape differs from the leaf before.
        """
        right, level = list(tensors), 0
        if self._waiting:
            self._check_like(self._waiting[-1][1], right)
        while self._waiting and self._waiting[-1][0] == level:
            right = _add_in_place(self._waiting.pop()[1], right)
            level += 1
        self._waiting.append((level, right))

    def result(self) -> list[Tensor]:
        """The sum of everything pushed, without negative zeros; the counter is empty afterwards.

        Raises:
            ValueError: nothing was pushed.
        """
        if not self._waiting:
            raise ValueError("BinaryCounter.result: nothing was pushed, so there is no sum (nor shapes for zeros)")
        total = self._waiting.pop()[1]
        while self._waiting:
            total = _add_in_place(self._waiting.pop()[1], total)
        if total:
            torch._foreach_add_(total, 0.0)
        return total

    @staticmethod
    def _check_like(before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        if [tensor.shape for tensor in before] != [tensor.shape for tensor in now]:
            raise ValueError(
                f"BinaryCounter.push: a leaf of shapes {[tuple(t.shape) for t in now]} after one of "
                f"{[tuple(t.shape) for t in before]}; every leaf must bring the same tensors"
            )


def _add_in_place(left: list[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    if left:
        torch._foreach_add_(left, right)
    return left


def row_square_sums(local: Tensor) -> Tensor:
    """Sum of squares of each row, in float32.

    FSDP2 cuts between rows of dim 0 and never inside one, so a row's number is the same at any world size.

    Args:
        local: [rows, ...] (a 0-d tensor counts as one row of one); rows or width may be 0; not changed.

    Returns:
        [rows] float32.
    """
    if local.dim() == 0:
        local = local.reshape(1, 1)
    rows, width = local.shape[0], math.prod(local.shape[1:])
    x = local.reshape(rows, width).to(torch.float32).square()
    if width == 0:
        return x.new_zeros(rows)
    return _halve(x)[:, 0].contiguous()


def halving_sum(vector: Tensor) -> Tensor:
    """Sum of a vector by explicit halving: the second half is added onto the first until one element is left.

    The order depends on the length alone.

    Args:
        vector: [n], n >= 0; not changed.

    Returns:
        0-d, of the vector's dtype; 0 when n is 0.

    Raises:
        ValueError: not a vector.
    """
    if vector.dim() != 1:
        raise ValueError(f"halving_sum: got shape {tuple(vector.shape)}; it adds the elements of a vector")
    if vector.shape[0] == 0:
        return vector.new_zeros(())
    return _halve(vector.clone().reshape(1, -1))[0, 0].clone()


def _halve(x: Tensor) -> Tensor:
    """[rows, n] -> [rows, 1] in place, n >= 1: column i takes column i + ceil(n / 2), again and again."""
    width = x.shape[1]
    while width > 1:
        half = (width + 1) // 2
        x[:, : width - half] += x[:, half:width]
        width = half
    return x[:, :1]


def require_power_of_two(count: int, what: str) -> None:
    """Refuse a count that the canonical tree can't be cut by.

    Raises:
        ValueError: names the value, `what` it counts and the way out.
    """
    if count < 1 or count & (count - 1):
        raise ValueError(
            f"{what} is {count}, not a power of two: the sums would not be those of other world sizes. "
            "Use 1, 2, 4, 8, ... or turn full_determinism off."
        )


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter for FSDP2's `set_custom_reduce_scatter`: everyone's pieces are exchanged, then added pairwise in rank order.

    gloo's and NCCL's own add in an order that depends on the position in the buffer and on the world size. This one sends as
    much as a ring does ((ranks - 1) / ranks of the buffer) and needs a second buffer of the input's size.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for a collective; FSDP2's interface."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [n] with the sum over ranks of their r-th n elements of `input_tensor` [ranks * n], r this rank.

        Raises:
            ValueError: the world size is not a power of two, or `op` is not a plain sum (a mean multiplies between the
                additions; call `set_gradient_divide_factor(1.0)` and `set_force_sum_reduction_for_comms(True)`).
        """
        ranks = group.size()
        require_power_of_two(ranks, "TreeReduceScatter: the number of FSDP ranks")
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"TreeReduceScatter: the reduction is {op}, it must be SUM: call set_gradient_divide_factor(1.0) and "
                "set_force_sum_reduction_for_comms(True) on the FSDP modules"
            )
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(pairwise_rows(received.view(ranks, -1)))
