"""The run directory and its contract: who may use it, what is in it, and how a resumed run finds its place.

config.yaml  manifest.json  ledger.jsonl  metrics.jsonl  episodes/  checkpoints/  logs/  wandb/
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from configs.problems import UserError

# A directory which holds one of these belongs to a run already.
MARKS = ("config.yaml", "ledger.jsonl", "metrics.jsonl", "checkpoints")


class RunDirectoryError(UserError, ValueError):
    """The directory can't be used as asked."""


class RunDirectory:
    """Paths of one run.

    Args:
        path: the directory; created by `open`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.manifest = self.path / "manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.episodes = self.path / "episodes"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"

    @property
    def used(self) -> bool:
        """Whether a run has written here."""
        return any((self.path / mark).exists() for mark in MARKS)

    def check(self, resume: str) -> None:
        """Refuse a used directory unless the run resumes.

        Raises:
            RunDirectoryError: names the directory and the ways out.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"run.dir={self.path} is a file, not a directory")
        if self.used and resume == "never":
            raise RunDirectoryError(
                f"run.dir={self.path} already holds a run. Continue it with run.resume=auto, "
                "or choose another run.dir (or run.name)."
            )

    def open(self) -> None:
        """Create the directory and its fixed parts."""
        for path in (self.path, self.episodes, self.checkpoints, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def cut_after(self, step: int) -> None:
        """Remove what was recorded after `step`, before a resumed run writes those steps again."""
        cut_jsonl(self.metrics, step)
        for path in sorted(self.episodes.glob("*.jsonl")):
            if step_of(path) > step:
                path.unlink()


def step_of(path: Path) -> int:
    """Step number at the end of a file or directory name (`step_000012`, `validation_000012.jsonl`)."""
    return int(path.name.split(".")[0].rsplit("_", 1)[1])


def cut_jsonl(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is at most `step`; a torn last line (a kill while writing) goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader or a kill sees the old content or the new, never a part. Text is written as UTF-8."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one line with a single write; Python's float text is exact, so reading it back gives the same bits."""
    data = (json.dumps(record, allow_nan=True) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
