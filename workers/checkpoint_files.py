"""Which files of a checkpoint directory are its weights: one list for the trainer, the rollout engines and the reward model.

Each program that reads a directory has rules of its own: transformers prefers `model.safetensors` to an index, vLLM reads every
`*.safetensors` where there is no index, and only `consolidated*.safetensors` where there is one. They agree when the directory
holds the listed files and no others, so anything else is refused before something starts.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_FORMATS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.gguf", "tf_model.h5", "flax_model.msgpack")

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]

_STORED_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(masked_)?bias$")


class PretrainedError(ValueError):
    """A directory of pretrained weights does not hold what the model needs."""


def weight_files(directory: str | Path) -> list[Path]:
    """The files that hold the weights, sorted: `model.safetensors`, or those that the index names.

    Raises:
        PretrainedError: no directory, no weights, weights in another format only, an index that can't be read, names missing files or
            stands beside a single file, or a `*.safetensors` file that is not listed (named).
    """
    root = Path(directory)
    if not root.is_dir():
        raise PretrainedError(
            f"checkpoint {str(directory)!r} is not a directory; give the path of a Hugging Face checkpoint"
        )
    present = {file.name for file in root.glob("*.safetensors")}
    index, single = root / INDEX_FILE, SINGLE_FILE in present
    if index.is_file():
        listed = set(_weight_map(index).values())
        if single and SINGLE_FILE not in listed:
            raise PretrainedError(
                f"{root} has both {SINGLE_FILE} and {INDEX_FILE}, and programs differ in which of the two they read; "
                "move one of them elsewhere"
            )
        absent = sorted(file for file in listed if not (root / file).is_file())
        if absent:
            raise PretrainedError(
                f"{index} names files that are not there: {', '.join(absent)}; download or copy them again"
            )
        by = INDEX_FILE
    elif single:
        listed, by = {SINGLE_FILE}, SINGLE_FILE
    else:
        raise PretrainedError(_nothing_to_read(root, sorted(present)))
    unlisted = sorted(present - listed)
    if unlisted:
        raise PretrainedError(
            f"{root} holds weight files that do not belong to {by}: {', '.join(unlisted)}. An engine may read them in the place of "
            "the model's weights; move them to another directory"
        )
    others = _other_formats(root)
    if others:
        logger.warning("%s: %s is not read; the weights are those of %s", root, ", ".join(others), by)
    return [root / file for file in sorted(listed)]


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Name of each stored tensor -> its file; from headers only.

    Raises:
        PretrainedError: as `weight_files`, or a file that is damaged, or that does not hold what the index says of it.
    """
    found: dict[str, Path] = {}
    for file in weight_files(directory):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name in found:
                    raise PretrainedError(f"{name} is in two files: {found[name]} and {file}")
                found[name] = file
    index = Path(directory) / INDEX_FILE
    if index.is_file():
        said = _weight_map(index)
        wrong = sorted(
            name for name in said.keys() | found.keys() if name not in found or said.get(name) != found[name].name
        )
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise PretrainedError(
                f"{index} does not describe its files; it is wrong about {', '.join(wrong[:3])}{more}"
            )
    return found


def tensor_shapes(directory: str | Path) -> Shapes:
    """Name -> shape of each stored tensor; from headers only.

    Raises:
        PretrainedError: as `tensor_files`.
    """
    by_file: dict[Path, list[str]] = {}
    for name, file in tensor_files(directory).items():
        by_file.setdefault(file, []).append(name)
    shapes: Shapes = {}
    for file, names in by_file.items():
        with _opened(file) as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in names})
    return shapes


def is_stored_buffer(name: str) -> bool:
    """Whether a stored tensor is a constant that old versions of transformers saved with the weights (Llama's rotary frequencies, the
    causal mask of GPT-2 and GPT-NeoX). Every reader computes it instead."""
    return _STORED_BUFFERS.search(name) is not None


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise PretrainedError(f"{file} can't be read as safetensors ({error}); download or copy it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = dict(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PretrainedError(f"{index} is not an index of weights ({error!r}); download or copy it again") from error
    outside = sorted({file for file in named.values() if not isinstance(file, str) or Path(file).name != file})
    if not named or outside:
        raise PretrainedError(f"{index} must name files of its own directory; it names {outside or 'none'}")
    return named


def _other_formats(root: Path) -> list[str]:
    return sorted(file.name for pattern in _OTHER_FORMATS for file in root.glob(pattern))


def _nothing_to_read(root: Path, present: list[str]) -> str:
    neither = f"{root} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if present:
        if any(name.startswith("adapter_model") for name in present):
            return (
                f"{neither} but {', '.join(present)}: an adapter; merge it into its base model and give that directory"
            )
        return f"{neither} but {', '.join(present)}; rename a single file to {SINGLE_FILE}, or add the index of several"
    others = _other_formats(root)
    if others:
        return (
            f"{neither}, only {', '.join(others)}; load the model with transformers and save it again with `save_pretrained`, "
            "which writes safetensors"
        )
    return f"{neither}, and no weights in another format; give the path of a Hugging Face checkpoint"
