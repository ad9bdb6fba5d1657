"""Checkpoints that are complete or not there: written aside, verified by digest, renamed into place.

    checkpoints/step_000012.tmp/          being written (ignored and removed at the next save)
    checkpoints/step_000012/workers/      sharded weights and optimizers (torch.distributed.checkpoint)
                            state.json    the loop's own state: sampler, KL controller, counters
                            digests.json  a SHA-256 for each file above
                            COMPLETE      the SHA-256 of digests.json; written last

An old checkpoint is removed only after a newer complete one is in place, so there is never a moment without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.problems import UserError
from trainer.run_dir import step_of

COMPLETE = "COMPLETE"
DIGESTS = "digests.json"
STATE = "state.json"
WORKERS = "workers"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is damaged or missing; the message names the file and the way out."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path

    @property
    def step(self) -> int:
        """Last training step it contains."""
        return step_of(self.path)

    @property
    def workers(self) -> Path:
        """Directory of the sharded state."""
        return self.path / WORKERS

    def state(self) -> dict[str, Any]:
        """The loop's own state."""
        return json.loads((self.path / STATE).read_text(encoding="utf-8"))

    def damage(self) -> str | None:
        """The first file whose bytes are not those that were written, or None."""
        digests = (self.path / DIGESTS).read_bytes()
        if hashlib.sha256(digests).hexdigest() != (self.path / COMPLETE).read_text().strip():
            return DIGESTS
        for name, expected in json.loads(digests).items():
            file = self.path / name
            if not file.exists() or _sha256(file) != expected:
                return name
        return None


class CheckpointStore:
    """All checkpoints of a run. Only the main process calls it.

    Args:
        root: the run's `checkpoints/`.
        keep_last: newest checkpoints kept; 0 keeps all.
        keep_every: checkpoints at multiples of this step are kept for good; 0 for none.
    """

    def __init__(self, root: Path, keep_last: int, keep_every: int) -> None:
        self.root = root
        self.keep_last = keep_last
        self.keep_every = keep_every

    def complete(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first; contents are not verified here."""
        found = [
            Checkpoint(path)
            for path in self.root.glob("step_*")
            if path.suffix != ".tmp" and (path / COMPLETE).exists()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def begin(self, step: int) -> Path:
        """A fresh directory aside, into which the workers write; leftovers of killed saves are removed."""
        for left in self.root.glob("*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        path = self.root / f"step_{step:06d}.tmp"
        (path / WORKERS).mkdir(parents=True)
        return path

    def finish(self, temporary: Path, state: dict[str, Any]) -> Checkpoint:
        """Seal what the workers wrote, move it into place, then prune.

        Raises:
            OSError: the disk is full or refuses; the older checkpoints are untouched.
        """
        _write(temporary / STATE, json.dumps(state, indent=1).encode())
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        digests = {str(path.relative_to(temporary)): _sha256(path) for path in files}
        data = json.dumps(digests, indent=1).encode()
        _write(temporary / DIGESTS, data)
        _write(temporary / COMPLETE, hashlib.sha256(data).hexdigest().encode())
        for path in [*files, *sorted(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            _fsync(path)
        final = temporary.with_suffix("")
        if final.exists():  # the same step saved by the run that this one resumed; the new bytes replace it whole
            shutil.rmtree(final)
        os.rename(temporary, final)
        _fsync(self.root)
        self._prune()
        return Checkpoint(final)

    def find(self, step: int | None = None, choose: str = "run.resume={step}") -> Checkpoint | None:
        """The newest complete checkpoint, or the one of `step`; verified.

        Args:
            choose: how the caller's user asks for another step; for the message.

        Raises:
            CheckpointError: it is damaged (the file is named, and the next older complete one), or `step` has none.
        """
        candidates = [c for c in self.complete() if step is None or c.step == step]
        if not candidates:
            if step is None:
                return None
            have = ", ".join(str(c.step) for c in self.complete()) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.root} (there are: {have})")
        newest = candidates[-1]
        damaged = newest.damage()
        if damaged is None:
            return newest
        older = [c for c in self.complete() if c.step < newest.step and c.damage() is None]
        way_out = (
            f"The next older intact one is step {older[-1].step}: take it with {choose.format(step=older[-1].step)}."
            if older
            else "There is no older intact one."
        )
        raise CheckpointError(
            f"checkpoint {newest.path} is damaged: {damaged} does not have its recorded digest. {way_out}"
        )

    def remove_after(self, step: int) -> None:
        """Drop checkpoints newer than `step` (a resume from an older one makes them another history)."""
        for checkpoint in self.complete():
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)

    def _prune(self) -> None:
        if self.keep_last <= 0:
            return
        for checkpoint in self.complete()[: -self.keep_last]:
            if not (self.keep_every and checkpoint.step % self.keep_every == 0):
                (checkpoint.path / COMPLETE).unlink()  # a kill in the middle of rmtree must not leave half a checkpoint
                shutil.rmtree(checkpoint.path)


def write_checkpoint(
    store: CheckpointStore,
    step: int,
    state: dict[str, Any],
    save_workers: Callable[[Path], None],
) -> None:
    """Save one step: every worker writes its shard between the opening and the sealing.

    Args:
        state: the loop's own state, JSON values only.
        save_workers: writes the workers' state into the given directory.
    """
    temporary = store.begin(step)
    try:
        save_workers(temporary / WORKERS)
        store.finish(temporary, state)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
