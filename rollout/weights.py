"""Which tensors a checkpoint holds. A weight update that lacks one of them is refused.

vLLM only warns about a missing tensor and then computes with a mixture of two versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.checkpoint_files import Shapes, is_stored_buffer, tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

TIED_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the output head; with tied embeddings it is the embedding itself."""


def checkpoint_shapes(directory: str | Path) -> Shapes:
    """Name and shape of every parameter of a checkpoint, read from headers only.

    Buffers that old checkpoints stored are left out, and so is the output head when embeddings are tied.

    Raises:
        PretrainedError: the directory's weight files are not as they should be (`workers.checkpoint_files`).
    """
    root = Path(directory)
    shapes = {name: shape for name, shape in tensor_shapes(root).items() if not is_stored_buffer(name)}
    if _is_tied(root):
        for head in TIED_HEADS:
            shapes.pop(head, None)
    return shapes


def architecture_digest(directory: str | Path) -> str:
    """Digest of a model's `config.json`; two directories with the same one hold the same architecture."""
    return hashlib.sha256((Path(directory) / "config.json").read_bytes()).hexdigest()


def check_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an update that does not hold exactly the checkpoint's parameters; a tied output head may be among them.

    Raises:
        ValueError: names the parameters that are missing, unknown or of another shape.
    """
    unknown = [name for name in tensors if not (name in expected or name in TIED_HEADS or is_stored_buffer(name))]
    missing = [name for name in expected if name not in tensors]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{n} {shapes[n]} instead of {tuple(s)}" for n, s in expected.items() if n in shapes and shapes[n] != tuple(s)
    ]
    found = {"missing": missing, "unknown": unknown, "wrong shape": wrong}
    problems = "; ".join(f"{what}: {_some(names)}" for what, names in found.items() if names)
    if problems:
        raise ValueError(f"weight update does not fit the engine's model of {len(expected)} parameters; {problems}")


def _is_tied(root: Path) -> bool:
    file = root / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return bool(config.get("tie_word_embeddings", False))


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
