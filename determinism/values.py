"""The first differing value of two recorded phases: which sample, which token or parameter, and how far apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determinism.files import numbered
from determinism.ledger import RAW_SUFFIXES
from determinism.runs import NotComparableError

if TYPE_CHECKING:
    from torch import Tensor

    from determinism.runs import Run


@dataclass(frozen=True)
class ValueDifference:
    """One element that differs."""

    where: str
    """In words: the sample and token, or the parameter and element, or what differs about the shapes."""
    a: Any
    b: Any
    ulps: int | None
    """Number of representable values between the two; None for integers and shapes."""
    count: int
    """Differing elements in the phase."""

    def describe(self) -> str:
        """One line."""
        distance = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return f"{self.where}: {self.a!r} | {self.b!r}{distance} ({self.count} element(s) differ)"


def first_value_difference(a: Run, b: Run, step: int, phase: str) -> ValueDifference | None:
    """Look into the raw values of both runs; None when one of them did not record this phase."""
    if a.path is None or b.path is None:
        return None
    left, right = _load(a.path, step, phase), _load(b.path, step, phase)
    rows = _rows(a.path, step)
    for name in sorted(left.keys() & right.keys()):
        found = tensor_difference(left[name], right[name], name, phase, rows)
        if found is not None:
            return found
    return None


def tensor_difference(a: Tensor, b: Tensor, name: str, phase: str, rows: list[list[Any]]) -> ValueDifference | None:
    """First element (row-major) whose bits differ.

    Args:
        name: the tensor's name: the phase itself, or `phase/parameter`.
        rows: [prompt id, task, sample] of each row for per-sample tensors.
    """
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return ValueDifference(
            f"{name}: shape or dtype", f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}", None, 0
        )
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    different = (_bits(flat_a) != _bits(flat_b)).nonzero().reshape(-1)
    if not len(different):
        return None
    first = int(different[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    if name == phase and index and len(rows) == a.shape[0]:
        prompt_id, _, sample = rows[index[0]]
        where = f"prompt {prompt_id}, sample {sample}" + (f", token {index[1]}" if len(index) > 1 else "")
    elif name != phase:
        where = f"parameter {name.removeprefix(phase + '/')}{index}"
    else:
        where = f"{name}{index}"
    one, two = flat_a[first].item(), flat_b[first].item()
    return ValueDifference(where, one, two, ulps(flat_a[first], flat_b[first]), len(different))


def ulps(a: Tensor, b: Tensor) -> int | None:
    """Distance of two floats of one dtype in units in the last place, counted across zero; None for integers."""
    if not a.is_floating_point():
        return None
    return abs(_ordered(a) - _ordered(b))


def _ordered(value: Tensor) -> int:
    """Floats as integers in the same order, so that neighbours differ by one."""
    bits = int(_bits(value.reshape(1))[0])
    width = value.element_size() * 8
    magnitude = bits & ((1 << (width - 1)) - 1)
    return -magnitude if bits < 0 else magnitude


def _bits(values: Tensor) -> Tensor:
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.element_size()])


def _load(run: Path, step: int, phase: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    path = run / "ledger" / numbered(step, suffix=RAW_SUFFIXES[0])
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name == phase or name.startswith(phase + "/")]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise NotComparableError(f"{path} can't be read: {error}") from error


def _rows(run: Path, step: int) -> list[list[Any]]:
    path = run / "ledger" / numbered(step, suffix=RAW_SUFFIXES[1])
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotComparableError(f"{path} can't be read: {error}") from error
