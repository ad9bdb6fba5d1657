"""The run directory: who may use it, what is in it, and how a resumed run finds its place.

config.yaml  manifest.json  ledger.jsonl  metrics.jsonl  episodes/  checkpoints/  logs/  wandb/
run.lock     held by the process that writes here, to its end
set_aside/   what resumes took out of the record, one folder each
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.problems import UserError
from determinism.files import DamagedLineError, json_lines, move_file, move_lines, number_in, numbered
from trainer.run_lock import RunLock

# A directory that holds one of these belongs to a run already.
MARKS = ("config.yaml", "ledger.jsonl", "metrics.jsonl")
EPISODES = ("step", "validation")
"""Prefixes of the files in `episodes/`."""


class RunDirectoryError(UserError, ValueError):
    """The directory can't be used as asked."""


SOCKET_NAME = 107
"""Bytes that the system allows for the path of a socket."""
SOCKETS = "/01234567-89ab-cdef-0123-456789abcdef"
"""The longest name that vLLM and multiprocessing give to a socket below the temporary folder."""


def check_temporary_folder() -> None:
    """Refuse a temporary folder in which processes could not reach each other: its name is too long for sockets below it.

    Raises:
        RunDirectoryError: names the folder, its length and the limit.
    """
    folder, most = tempfile.gettempdir(), SOCKET_NAME - len(SOCKETS)
    if len(os.fsencode(folder)) > most:
        raise RunDirectoryError(
            f"TMPDIR={folder} has {len(os.fsencode(folder))} bytes; at most {most} leave room for the names of the sockets "
            "below it. Set TMPDIR to a shorter folder, such as /tmp."
        )


class RunDirectory:
    """Paths of one run, and the right to write there.

    Args:
        path: the directory; created by `claim`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.manifest = self.path / "manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.episodes = self.path / "episodes"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.set_aside = self.path / "set_aside"
        self.id = ""
        """The run's id (`trainer/claim.py`); empty before it is known."""
        self._lock = RunLock(self.path / "run.lock")

    @property
    def used(self) -> bool:
        """Whether a run has written here."""
        return any((self.path / mark).exists() for mark in MARKS) or any(self.checkpoints.glob("*"))

    def check(self, resume: str) -> None:
        """Refuse a directory that can't be written, is in use, or holds a run although `run.resume` is `never`. Changes nothing.

        Raises:
            RunDirectoryError: names the directory and the ways out.
        """
        if self.path.is_symlink() and not self.path.exists():
            raise RunDirectoryError(
                f"run.dir={self.path} is a link to {os.readlink(self.path)}, which does not exist; make that directory, or remove the link"
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"run.dir={self.path} is a file, not a directory")
        with self._readable():
            self._refuse(self._lock.holder())
            if self.used and resume == "never":
                raise RunDirectoryError(
                    f"run.dir={self.path} already holds a run. Continue it with run.resume=auto, "
                    "or choose another run.dir (or run.name)."
                )

    def claim(self, resume: str) -> None:
        """Create the directory and its fixed parts, and keep everybody else out until `release`. Existing files do not change.

        Raises:
            RunDirectoryError: as in `check`, or the directory can't be made.
        """
        self.check(resume)
        with self._readable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse(self._lock.take())
            self.check(
                resume
            )  # again, now that nobody else can write: two starts may both have seen an empty directory
            self.open()

    def open(self) -> None:
        """Create the directory and its fixed parts."""
        for path in (self.path, self.episodes, self.checkpoints, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def release(self) -> None:
        """Let others write here, if `claim` kept them out."""
        self._lock.release()

    def check_records(self) -> None:
        """Refuse metrics that can't be continued.

        Raises:
            RunDirectoryError: names the damaged line.
        """
        self._metric_lines()

    def take_out_after(self, step: int, aside: Path) -> None:
        """Move what was recorded after `step` (metrics, episodes) into `aside`, before a resumed run writes those steps again.

        Files with other names than those that a run gives stay where they are.
        """
        ends = [end for recorded, end in self._metric_lines() if recorded <= step]
        move_lines(self.metrics, max(ends, default=0), aside / self.metrics.name)
        for path in sorted(self.episodes.iterdir()):
            recorded = number_in(path.name, EPISODES, (".jsonl",))
            if recorded is not None and recorded > step:
                move_file(path, aside / self.episodes.name / path.name)

    def next_aside(self, step: int) -> Path:
        """A folder under `set_aside/` that does not exist yet, for what comes after `step` (-1: for everything)."""
        numbers = [path.name.partition("_")[0] for path in self.set_aside.glob("*_*")]
        number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
        return self.set_aside / f"{number:04d}_{'after_' + numbered(step) if step >= 0 else 'everything'}"

    def _metric_lines(self) -> list[tuple[int, int]]:
        """(step, byte offset after it) of every line of the metrics."""
        try:
            return [(int(line.record["step"]), line.end) for line in json_lines(self.metrics)]
        except (DamagedLineError, KeyError, TypeError, ValueError) as error:
            what = str(error) if isinstance(error, DamagedLineError) else f"{self.metrics}: a line without its step"
            raise RunDirectoryError(f"{what}. Mend or remove that line to resume the run") from error

    def _refuse(self, holder: str | None) -> None:
        if holder is not None:
            raise RunDirectoryError(
                f"run.dir={self.path} is in use by {holder}. Wait for that run or end it, or choose another run.dir; "
                "nothing was changed."
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """What the file system refuses, turned into an error that names the setting."""
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir={self.path} can't be used: {error.strerror or error} ({error.filename or self.path}). "
                "Choose a run.dir that this user can write to."
            ) from error
