"""One process at a time writes into a run directory: a lock that the operating system releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)


class RunLock:
    """An exclusive `flock` on a file, which also says who holds it.

    Forks of the holder close their copy, so that only the holder's own end, or `release`, releases the lock.

    Args:
        path: the lock's file; its folder must exist. It stays when the lock is released.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> str | None:
        """Take the lock unless another process has it. Returns None when it is ours now (or was already), otherwise the holder in words.

        Raises:
            OSError: the file can't be opened.
        """
        if self._descriptor is not None:
            return None
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _locked(descriptor, fcntl.LOCK_EX, self.path):
            os.close(descriptor)
            return _holder(self.path)
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)
        me = {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(me) + "\n").encode(), 0)
        return None

    def holder(self) -> str | None:
        """The other process that holds the lock, in words; None when there is none. Changes nothing."""
        if self._descriptor is not None or not self.path.is_file():
            return None
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return None if _locked(descriptor, fcntl.LOCK_SH, self.path) else _holder(self.path)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int, kind: int, path: Path) -> bool:
    """Whether the lock was free. A file system without locks can't refuse anybody; there is a warning."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "%s: this file system has no locks (%s), so nothing stops a second run in this directory",
            path,
            error.strerror,
        )
    return True


def _holder(path: Path) -> str:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']} (since {known['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"another process (see {path})"
