"""Reading a Hugging Face checkpoint without ever holding the whole model: an empty network, rows of its tensors, and which is which.

    PretrainedFiles (names, shapes, rows)  +  empty_model  --bind-->  Bound: reads a parameter's rows, knows its name in the files

Files and network may name a tensor differently (GPT-NeoX's `embed_out` is transformers' `lm_head`); transformers' own table of names
says how. The engines know the files' names, so weights leave the trainer under these.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.checkpoint_files import PretrainedError, is_stored_buffer, tensor_files
from workers.models.hf_config import refuse_randomness, switch_off_randomness


class PretrainedFiles:
    """The tensors of a pretrained model's safetensors files; read by rows.

    Raises:
        PretrainedError: the directory's weight files are not as they should be (`workers.checkpoint_files`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = tensor_files(path)
        self._open: dict[Path, Any] = {}

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

    def _handle(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt", device="cpu")
        return self._open[file]


def empty_model(auto_class: Any, config: Any, trust_remote_code: bool = False) -> nn.Module:
    """`auto_class.from_config(config)` with parameters on the meta device and real buffers.

    Non-persistent buffers (rotary frequencies) are in no checkpoint, so they are computed here. Building a model
    draws initial weights from the global generator; its state is put back.
    """
    from accelerate import init_empty_weights

    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()  # moving each parameter to meta as it was registered untied them
    switch_off_randomness(model)
    refuse_randomness(model)
    return model


def check_forward(model: nn.Module) -> None:
    """Insist that a causal language model takes positions and can give logits for chosen columns.

    A forward pass that swallows unknown arguments would ignore these two without a word.

    Raises:
        PretrainedError: it does not name them among its arguments.
    """
    absent = sorted({"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters))
    if absent:
        raise PretrainedError(
            f"{type(model).__name__} takes no {' and no '.join(absent)}, which training needs; docs/models.md lists what works"
        )


@dataclass(frozen=True)
class Bound:
    """A network's parameters and the stored tensors that they come from."""

    files: PretrainedFiles
    initial: Mapping[str, Tensor]
    """Whole tensors of parameters that are new, by parameter name."""
    stored: Mapping[str, str]
    """Parameter name -> name in the files; without those that are new."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of a parameter."""
        if name in self.initial:
            return self.initial[name][start:stop]
        return self.files.rows(self.stored[name], start, stop)


def bind(
    files: PretrainedFiles,
    model: nn.Module,
    *,
    initial: Mapping[str, Tensor] | None = None,
    ignore: Sequence[str] = (),
    rename: Callable[[str], str] = lambda name: name,
) -> Bound:
    """Match a model's parameters with a checkpoint's tensors.

    Args:
        initial: whole tensors of parameters that are new, by parameter name; they win over the checkpoint.
        ignore: regular expressions of checkpoint tensors that the model may leave aside.
        rename: parameter name -> its name in transformers' model (adapters wrap layers).

    Raises:
        PretrainedError: parameters without a tensor, tensors without a parameter, or another shape, each named.
    """
    initial = dict(initial or {})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    available = stored_names(files.names(), model, {rename(name) for name in shapes})
    source: dict[str, str] = {}
    missing: list[str] = []
    used: set[str] = set()
    for names in shared_names(model):
        if names[0] in initial:
            continue
        stored = [available[rename(name)] for name in names if rename(name) in available]
        used.update(stored)
        if stored:
            source.update(dict.fromkeys(names, stored[0]))
        else:
            missing.append(" = ".join(names))
    patterns = [*ignore, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unexpected = [
        name
        for name in sorted(set(files.names()) - used)
        if not is_stored_buffer(name) and not any(re.search(pattern, name) for pattern in patterns)
    ]
    wrong = [
        f"{name} is {files.shape(stored)} in the checkpoint and {shapes[name]} in the model"
        for name, stored in source.items()
        if files.shape(stored) != shapes[name]
    ]
    problems = [
        f"{label}: {', '.join(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise PretrainedError(f"{files.path} does not fit {type(model).__name__}; " + "; ".join(problems))
    return Bound(files, initial, source)


def stored_names(stored: Iterable[str], model: nn.Module, parameters: set[str]) -> dict[str, str]:
    """Name in transformers' model -> name in the files, by transformers' own renaming of what it loads.

    Args:
        stored: the files' names.
        model: its class and those of its parts decide which renamings there are.
        parameters: the names that are looked for; a name that fits as it is stays, and the base model's prefix is added or taken away.

    Raises:
        PretrainedError: transformers would join or cut tensors of this model while it loads them; names the family.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    known: dict[str, Any] = dict.fromkeys(parameters, True)
    prefix = str(model.base_model_prefix)
    names: dict[str, str] = {}
    for name in sorted(stored):
        renamed, converted = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known:
            # As transformers does: perhaps the name needs no renaming, or only a prefix.
            renamed, converted = rename_source_key(name, [], [], prefix, known)
        elif converted is not None:
            raise PretrainedError(
                f"{type(model).__name__}: transformers makes {renamed} of {name} and others while it loads, and the engines need the "
                "files' tensors; such a model can't be trained here. docs/models.md lists what works"
            )
        names[renamed] = name
    return names


def shared_names(model: nn.Module) -> list[list[str]]:
    """Names of each parameter, tied ones together, in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())
