"""`manifest.json`: under which circumstances a run computed, so that two runs which differ can first be told apart by them.

version      of this format
run_id       a random name, made once at the run's start and kept by every resume; it binds checkpoints to their run
code         digest of the packages' files; git commit when they are in a repository
config       the resolved configuration, without where the run lives and who watches it; and its digest
inputs       digests of data and models, from the caller
processes    name -> facts read back in that process (`determinism.environment.facts`)
informative  wall clock, host, command: for people, never compared
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from determinism.files import write_atomically
from determinism.seeds import SEED_VERSION

MANIFEST_VERSION = 1
"""Version of the format."""

PACKAGES = ("configs", "determinism", "reward", "rollout", "trainer", "workers")
"""The code whose digest is recorded."""

UNCOMPARED_GROUPS = ("run", "tracking")
"""Config groups that never change results: they would differ between any two runs."""

_ROOT = Path(__file__).resolve().parent.parent


UNCOMPARED_FIELDS = ("informative", "run_id")
"""Fields of a manifest that differ between any two runs."""


class ManifestError(ValueError):
    """A manifest can't be read."""


def write_manifest(
    path: str | Path,
    config: Mapping[str, Any],
    processes: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
    informative: Mapping[str, Any] | None = None,
    run_id: str = "",
) -> None:
    """Write a manifest; a kill leaves the old file or the new one.

    Args:
        path: the file (`manifest.json` of the run directory).
        config: the resolved configuration as plain data.
        processes: process name (`trainer/0`, `rollout/1`) -> its own `facts()`.
        data: what the run reads, by digest: `{"data/train": ..., "model/actor": ...}`.
        informative: more for people to read; never compared.
        run_id: which run this is; never compared.
    """
    from determinism.digest import DIGEST_VERSION, digest_value

    compared = {name: value for name, value in config.items() if name not in UNCOMPARED_GROUPS}
    manifest = {
        "version": MANIFEST_VERSION,
        "run_id": run_id,
        "formats": {"seeds": SEED_VERSION, "digests": DIGEST_VERSION},
        "code": {"digest": code_digest(), **git_state()},
        "config": compared,
        "config_digest": digest_value(compared),
        "data": dict(data or {}),
        "processes": {name: dict(found) for name, found in sorted(processes.items())},
        "informative": {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "command": list(sys.argv),
            **(informative or {}),
        },
    }
    write_atomically(Path(path), json.dumps(manifest, indent=2) + "\n")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest as written; drop `UNCOMPARED_FIELDS` before comparing.

    Raises:
        ManifestError: not a manifest of this version.
        FileNotFoundError: there is none.
    """
    try:
        manifest = json.loads(Path(path).read_text(encoding="utf-8"))
        version = manifest["version"]
    except (ValueError, KeyError, TypeError, IsADirectoryError) as error:
        raise ManifestError(f"{path} is not a manifest: {error}") from error
    if version != MANIFEST_VERSION:
        raise ManifestError(f"{path} is a manifest of version {version}; this code reads version {MANIFEST_VERSION}")
    return manifest


def code_digest(root: Path = _ROOT) -> str:
    """Digest of the packages' Python and YAML files and their relative names; 32 hex characters."""
    hasher = hashlib.blake2b(digest_size=16, person=b"exactrl1/code")
    files = [p for name in PACKAGES for suffix in ("*.py", "*.yaml") for p in (root / name).rglob(suffix)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode("utf-8"), path.read_bytes()):
            hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def git_state(root: Path = _ROOT) -> dict[str, Any]:
    """`git_commit`, and `git_dirty` (the packages differ from it); both None when the code is not in a repository of its own."""
    own = _git(root, "ls-files", "--error-unmatch", "determinism/manifest.py")
    if own is None:  # installed somewhere; a repository around that place is not ours
        return {"git_commit": None, "git_dirty": None}
    changes = _git(root, "status", "--porcelain", "--", *PACKAGES)
    return {"git_commit": _git(root, "rev-parse", "HEAD"), "git_dirty": bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None when it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
