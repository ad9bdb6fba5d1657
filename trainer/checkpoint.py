"""Checkpoints that are complete or absent: written under a temporary name, verified by digest, renamed into place.

    checkpoints/step_000012.tmp/          being written (ignored and removed at the next save)
    checkpoints/step_000012/workers/      sharded weights and optimizers (torch.distributed.checkpoint)
                            state.json    the loop's own state: sampler, KL controller, counters; the run's id
                            digests.json  one SHA-256 for each file above
                            COMPLETE      the SHA-256 of digests.json; written last

An old checkpoint is removed only after a newer complete one is in place, so there is never a moment without one. Directories
with other names (`step_000012_best`, `step_000012.bak`) belong to the user: they are neither read nor removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.problems import UserError
from determinism.files import number_in, numbered, sync_directory, write_atomically

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
DIGESTS = "digests.json"
STATE = "state.json"
WORKERS = "workers"
TEMPORARY = ".tmp"
REMOVED = ".removed.tmp"
"""Suffixes of a checkpoint that is being written, and of one that is being removed."""
FULL = ("No space left on device", "Disk quota exceeded")
"""Error numbers with which the system says that nothing more fits."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is damaged, missing or from another run; the message names the file and the way out."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message says why, and which older one there is."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path

    @property
    def step(self) -> int:
        """Last training step it contains, by its name."""
        step = number_in(self.path.name)
        if step is None:
            raise CheckpointError(f"{self.path} is not named after its step; call it {numbered(12)} again")
        return step

    @property
    def workers(self) -> Path:
        """Directory of the sharded state."""
        return self.path / WORKERS

    def state(self) -> dict[str, Any]:
        """The loop's own state."""
        return json.loads((self.path / STATE).read_text(encoding="utf-8"))

    def damage(self) -> str | None:
        """What is wrong with its files, beginning with the name of the first such file; None when they are as they were written.

        Never raises: a file that can't be read counts as damaged.
        """
        try:
            recorded = (self.path / COMPLETE).read_bytes().strip()
        except OSError as error:
            return _unreadable(COMPLETE, error)
        if not re.fullmatch(rb"[0-9a-f]{64}", recorded):
            return f"{COMPLETE} does not hold a digest"
        try:
            data = (self.path / DIGESTS).read_bytes()
        except OSError as error:
            return _unreadable(DIGESTS, error)
        digests = _digests(data)
        if digests is None:
            return f"{DIGESTS} does not have its recorded digest"
        listed = hashlib.sha256(data).hexdigest().encode() == recorded
        for name, expected in digests.items():
            wrong = _file_damage(self.path / name, name, expected)
            if wrong is not None:
                return wrong if listed else f"{DIGESTS} does not have its recorded digest"
        # Every file agrees with the list, so the list is right and its recorded digest is wrong.
        return None if listed else f"{COMPLETE} does not hold the digest of {DIGESTS}"

    def foreign(self, run_id: str) -> str | None:
        """Why intact files are not this run's checkpoint of this step; None when they are.

        Args:
            run_id: the id of the run; empty when it is not known.
        """
        try:
            state = self.state()
        except (OSError, ValueError) as error:
            return _unreadable(STATE, error)
        if state.get("step", self.step) != self.step:
            return f"{STATE} says that it is the checkpoint of step {state['step']}, so the directory was renamed"
        found = state.get("run_id")
        if run_id and found is None:
            logger.warning("checkpoint %s does not say which run it is of (an older version wrote it)", self.path)
        elif run_id and found != run_id:
            return (
                f"{STATE} says that it is of the run with the id {found}, and this run's id is {run_id} (manifest.json)"
            )
        return None


class CheckpointStore:
    """All checkpoints of a run. Only the driver uses it.

    Args:
        root: the run's `checkpoints/`.
        keep_last: newest checkpoints kept; 0 keeps all.
        keep_every: checkpoints at multiples of this step are kept for good; 0 for none.
        run_id: the id of the run; written into every checkpoint, and checked in every checkpoint that is read. Empty: neither.
    """

    def __init__(self, root: Path, keep_last: int, keep_every: int, run_id: str = "") -> None:
        self.root = root
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.run_id = run_id

    def all(self) -> list[Checkpoint]:
        """Everything that has a checkpoint's name, oldest first; contents are not verified here.

        Unfinished saves have another name, and a checkpoint is renamed before it is removed.
        """
        found = [Checkpoint(path) for path in self.root.glob("step_*") if number_in(path.name) is not None]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def begin(self, step: int, size: int = 0) -> Path:
        """A fresh temporary directory into which the workers write; leftovers of killed saves are removed.

        Args:
            size: bytes that the workers will write.

        Raises:
            SaveError: there is less room than that.
        """
        for left in self.root.glob("step_*"):
            if number_in(left.name, suffixes=(TEMPORARY, REMOVED)) is not None:
                _remove(left)
        free = shutil.disk_usage(self.root).free if self.root.exists() else size
        if free < size:
            raise SaveError(self._not_saved(step, _no_space(self.root, size, free)))
        path = self.root / numbered(step, suffix=TEMPORARY)
        (path / WORKERS).mkdir(parents=True)
        return path

    def finish(self, temporary: Path, state: dict[str, Any]) -> Checkpoint:
        """Record digests of what the workers wrote, move it into place, then remove checkpoints that are not kept.

        Raises:
            OSError: the disk is full or refuses the write; the older checkpoints are untouched.
        """
        state = {"run_id": self.run_id, **state} if self.run_id else state
        write_atomically(temporary / STATE, json.dumps(state, indent=1))
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        data = _as_json({path.relative_to(temporary).as_posix(): _sha256(path) for path in files})
        write_atomically(temporary / DIGESTS, data)
        write_atomically(temporary / COMPLETE, hashlib.sha256(data).hexdigest())
        for path in [*files, *sorted(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            sync_directory(path)
        final = temporary.with_suffix("")
        if final.exists():  # the step was saved before; the new checkpoint replaces the old one whole
            _remove(final)
        os.rename(temporary, final)
        sync_directory(self.root)
        self._prune()
        return Checkpoint(final)

    def find(self, step: int | None = None, choose: str = "run.resume={step}") -> Checkpoint | None:
        """The newest checkpoint, or the one of `step`; verified. None when there is none at all.

        Args:
            choose: how the user asks for another step; for the message.

        Raises:
            CheckpointError: it is damaged or from another run (the message names the file, and the next older good checkpoint), or `step` has none.
        """
        everything = self.all()
        candidates = [c for c in everything if step is None or c.step == step]
        if not candidates:
            if step is None:
                return None
            have = ", ".join(str(c.step) for c in everything) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.root} (there are: {have})")
        newest = candidates[-1]
        wrong = self._wrong(newest)
        if wrong is None:
            return newest
        older = next((c for c in reversed(everything) if c.step < newest.step and self._wrong(c) is None), None)
        way_out = (
            f"The next older intact one is step {older.step}: take it with {choose.format(step=older.step)}."
            if older
            else "There is no older intact one."
        )
        raise CheckpointError(f"checkpoint {newest.path} {wrong}. {way_out}")

    def newest_good(self, before: int) -> Checkpoint | None:
        """The newest intact checkpoint of this run from before a step."""
        return next((c for c in reversed(self.all()) if c.step < before and self._wrong(c) is None), None)

    def failed(self, temporary: Path, size: int, error: Exception) -> SaveError:
        """Why the save into `temporary` failed, for people; the half-written directory is still there."""
        step = number_in(temporary.name, suffixes=(TEMPORARY,)) or 0
        free = shutil.disk_usage(self.root).free
        if free + size_of(temporary) < size or any(text in str(error) for text in FULL):
            return SaveError(self._not_saved(step, _no_space(self.root, size, free + size_of(temporary))))
        return SaveError(self._not_saved(step, str(error)))

    def _not_saved(self, step: int, why: str) -> str:
        older = self.all()
        left = f"the checkpoint of step {older[-1].step} is intact" if older else "there is no older one"
        return f"the checkpoint of step {step} could not be saved: {why}; {left}"

    def _wrong(self, checkpoint: Checkpoint) -> str | None:
        damage = checkpoint.damage()
        if damage is not None:
            return f"is damaged: {damage}"
        foreign = checkpoint.foreign(self.run_id)
        return None if foreign is None else f"is not this run's: {foreign}"

    def _prune(self) -> None:
        if self.keep_last <= 0:
            return
        for checkpoint in self.all()[: -self.keep_last]:
            if not (self.keep_every and checkpoint.step % self.keep_every == 0):
                _remove(checkpoint.path)


def write_checkpoint(
    store: CheckpointStore,
    step: int,
    state: dict[str, Any],
    save_workers: Callable[[Path], None],
    size: int = 0,
) -> None:
    """Save one step: the directory is made, every worker writes its shards, and the checkpoint is sealed and moved into place.

    Args:
        state: the loop's own state, JSON values only.
        save_workers: writes the workers' state into the given directory.
        size: bytes that the workers will write, as far as known.

    Raises:
        SaveError: there is no room, or a write failed; the older checkpoints are untouched.
    """
    temporary = store.begin(step, size)
    try:
        save_workers(temporary / WORKERS)
        store.finish(temporary, state)
    except Exception as error:
        raise store.failed(temporary, size, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is in place under its own name, or it failed


def size_of(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def megabytes(size: int) -> str:
    """A size for people.

    Example:
        >>> megabytes(12_340_000)
        '12.3 MB'
    """
    return f"{size / 1e6:.1f} MB"


def _no_space(root: Path, size: int, free: int) -> str:
    needed = f"{megabytes(size)} needed, " if size else ""
    return f"no space left on {root}: {needed}{megabytes(free)} free"


def _file_damage(file: Path, name: str, expected: str) -> str | None:
    try:
        return None if _sha256(file) == expected else f"{name} does not have its recorded digest"
    except (OSError, ValueError) as error:
        return _unreadable(name, error)


def _unreadable(name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a directory instead of a file"
    return f"{name} can't be read ({getattr(error, 'strerror', None) or error})"


def _digests(data: bytes) -> dict[str, str] | None:
    """The list of digests, as this file writes it; None when these bytes are something else."""
    try:
        digests = json.loads(data)
        canonical = _as_json(digests) == data
    except (ValueError, TypeError):
        return None
    if not canonical or not isinstance(digests, dict) or not all(isinstance(d, str) for d in digests.values()):
        return None
    return digests


def _as_json(digests: dict[str, str]) -> bytes:
    return json.dumps(digests, indent=1).encode()


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in the middle leaves no half checkpoint."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.name.endswith(TEMPORARY):
        aside = path.with_name(path.name + REMOVED)
        shutil.rmtree(aside, ignore_errors=True)
        path = path.rename(aside)
    shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
