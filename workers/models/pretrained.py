"""Reading a Hugging Face checkpoint without ever holding the whole model: its config, an empty network, rows of its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint directory does not hold what the model needs."""


class Checkpoint:
    """The tensors of a safetensors checkpoint, in one file or several with an index; read by rows.

    Raises:
        CheckpointError: the directory or its weights are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"checkpoint {str(path)!r} is not a directory; give the path of a Hugging Face checkpoint"
            )
        self._files = self._locate()
        self._open: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of dimension 0, in the stored dtype; only these bytes are read."""
        return self._handle(name).get_slice(name)[start:stop]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        return self._handle(name).get_tensor(name)

    def _locate(self) -> dict[str, str]:
        index = self.path / INDEX_FILE
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            absent = sorted({file for file in weight_map.values() if not (self.path / file).is_file()})
            if absent:
                raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}")
            return weight_map
        if (self.path / SINGLE_FILE).is_file():
            return dict.fromkeys(self._handle_of(SINGLE_FILE).keys(), SINGLE_FILE)
        raise CheckpointError(
            f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights in another format must be saved again with "
            "`save_pretrained(..., safe_serialization=True)`"
        )

    def _handle(self, name: str) -> Any:
        handles = self._open
        file = self._files[name]
        if file not in handles:
            handles[file] = self._handle_of(file)
        return handles[file]

    def _handle_of(self, file: str) -> Any:
        from safetensors import safe_open

        return safe_open(str(self.path / file), framework="pt", device="cpu")


def load_config(path: str | Path, attention: str, trust_remote_code: bool = False) -> Any:
    """The checkpoint's config as training needs it: no dropout, no KV cache, float32 master weights, one attention."""
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{str(path)!r} has no config.json; give the path of a Hugging Face checkpoint")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, attn_implementation=attention)
    for name, value in sorted(vars(config).items()):
        # Dropout would make the first ratio differ from 1 and draw from a global generator.
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache = False
    config.dtype = torch.float32
    return config


def empty_model(auto_class: Any, config: Any, trust_remote_code: bool = False) -> nn.Module:
    """`auto_class.from_config(config)` with parameters on the meta device and real buffers.

    Non-persistent buffers (rotary frequencies) are in no checkpoint, so they are computed here. Building a model
    draws initial weights from the global generator; its state is put back.
    """
    from accelerate import init_empty_weights

    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()  # moving each parameter to meta as it was registered untied them
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def bind(
    checkpoint: Checkpoint,
    model: nn.Module,
    *,
    initial: Mapping[str, Tensor] | None = None,
    ignore: Sequence[str] = (),
    rename: Callable[[str], str] = lambda name: name,
) -> Callable[[str, int, int], Tensor]:
    """Match a model's parameters with a checkpoint's tensors; the result reads rows of a parameter by its name.

    Args:
        initial: whole tensors of parameters that are new, by parameter name; they win over the checkpoint.
        ignore: regular expressions of checkpoint tensors that the model may leave aside.
        rename: parameter name -> name in the checkpoint.

    Raises:
        CheckpointError: parameters without a tensor, tensors without a parameter, or another shape, each named.
    """
    initial = dict(initial or {})
    available = set(checkpoint.names())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    source: dict[str, str] = {}
    missing: list[str] = []
    used: set[str] = set()
    for names in shared_names(model):
        if names[0] in initial:
            continue
        stored = [rename(name) for name in names if rename(name) in available]
        used.update(stored)
        if stored:
            source.update(dict.fromkeys(names, stored[0]))
        else:
            missing.append(" = ".join(names))
    patterns = [*ignore, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unexpected = [
        name for name in sorted(available - used) if not any(re.search(pattern, name) for pattern in patterns)
    ]
    wrong = [
        f"{name} is {checkpoint.shape(stored)} in the checkpoint and {shapes[name]} in the model"
        for name, stored in source.items()
        if checkpoint.shape(stored) != shapes[name]
    ]
    problems = [
        f"{label}: {', '.join(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit {type(model).__name__}; " + "; ".join(problems))

    def read(name: str, start: int, stop: int) -> Tensor:
        return initial[name][start:stop] if name in initial else checkpoint.rows(source[name], start, stop)

    return read


def shared_names(model: nn.Module) -> list[list[str]]:
    """Names of each parameter, tied ones together, in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())
