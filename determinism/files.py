"""The one way in which files of a run are written and read again: whole or not at all, and what could not be written is an error.

write_atomically   a file whole, in the place of the old one
append_json_line   one more line of a JSONL file
json_lines         the whole lines of a JSONL file; a torn last one is left out and said
numbered           names that carry a step, exactly as they are written (`step_000012.jsonl`)
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class NotWrittenError(OSError):
    """A file of the run could not be written (a full disk, a quota, a limit on file sizes); it is as it was before."""


class DamagedLineError(ValueError):
    """A whole line of a JSONL file is not a JSON object: the file was edited or damaged."""


@dataclass(frozen=True)
class JsonLine:
    """One whole line of a JSONL file."""

    number: int
    """From 1."""
    record: dict[str, Any]
    """What it says."""
    end: int
    """Byte offset after it."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, a kill or a full disk leaves the old content or the new, never a part. Text is UTF-8.

    Raises:
        NotWrittenError: names the file and the reason; the old file is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            _write_all(file.fileno(), data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_written(path, error) from error


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line, durable when this returns. Python's float text is exact, so reading it back gives the same bits.

    A last line without its newline (torn by a kill) is cut before, and said, so that this line does not stick to it.

    Raises:
        NotWrittenError: names the file and the reason; the file is as it was.
    """
    data = (json.dumps(record, allow_nan=True) + "\n").encode()
    new = not path.exists()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            whole = _whole_size(descriptor, path)
            try:
                _write_all(descriptor, data)
            except OSError:
                os.ftruncate(descriptor, whole)
                raise
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync_directory(path.parent)
    except OSError as error:
        raise _not_written(path, error) from error


def json_lines(path: Path) -> list[JsonLine]:
    """The whole lines of a JSONL file, none when there is no file. A torn last line is left out and said in the log.

    Raises:
        DamagedLineError: a whole line is not a JSON object; names the file and the line.
        OSError: the file can't be read.
    """
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        logger.warning("%s: the last line is torn (a kill while it was written) and is left out", path)
    found, end = [], 0
    for number, line in enumerate(lines, start=1):
        end += len(line) + 1
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DamagedLineError(
                f"{path}, line {number}: not JSON ({error}); the file was edited or damaged"
            ) from error
        if not isinstance(record, dict):
            raise DamagedLineError(f"{path}, line {number}: not a JSON object; the file was edited or damaged")
        found.append(JsonLine(number, record, end))
    return found


def cut(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes; a kill can't leave that half done."""
    if not path.exists() or path.stat().st_size == size:
        return
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_file(path: Path, target: Path) -> None:
    """Move a file or a directory within one file system; the target's folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, target)
    sync_directory(target.parent)
    sync_directory(path.parent)


def move_lines(path: Path, size: int, target: Path) -> None:
    """Move what a JSONL file holds after its first `size` bytes into `target`; nothing is made when there is nothing.

    A kill in between leaves it in both files, never in none.
    """
    rest = path.read_bytes()[size:] if path.exists() else b""
    if rest:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, rest)
        cut(path, size)


def sync_directory(path: Path) -> None:
    """Make renames and new files in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(step: int, prefix: str = "step", suffix: str = "") -> str:
    """A name that carries a step.

    Example:
        >>> numbered(12, suffix=".jsonl")
        'step_000012.jsonl'
    """
    return f"{prefix}_{step:06d}{suffix}"


def number_in(name: str, prefixes: Sequence[str] = ("step",), suffixes: Sequence[str] = ("",)) -> int | None:
    """The step in a name that `numbered` made; None for every other name (`step_000012_best`, `step_000012 (copy)`), which is a person's.

    Example:
        >>> number_in("step_000012"), number_in("step_000012.bak"), number_in("step_12")
        (12, None, None)
    """
    for prefix in prefixes:
        for suffix in suffixes:
            match = re.fullmatch(rf"{re.escape(prefix)}_([0-9]{{6,}}){re.escape(suffix)}", name)
            if match and numbered(int(match[1]), prefix, suffix) == name:
                return int(match[1])
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however many writes the system makes of it.

    Raises:
        OSError: with what was written until then.
    """
    view, done = memoryview(data), 0
    while done < len(data):
        try:
            done += os.write(descriptor, view[done:])
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} (only {done} of {len(data)} bytes)") from error


def _whole_size(descriptor: int, path: Path) -> int:
    """Size of the file without a torn last line, which is cut."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    whole = path.read_bytes().rfind(b"\n") + 1
    logger.warning("%s: the last line was torn (a kill while it was written) and is cut: %d bytes", path, size - whole)
    os.ftruncate(descriptor, whole)
    return whole


def _not_written(path: Path, error: OSError) -> NotWrittenError:
    return NotWrittenError(error.errno, f"{error.strerror or error}: it could not be written", str(path))
