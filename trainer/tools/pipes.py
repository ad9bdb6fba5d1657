"""A command whose output nobody reads any more (`exactrl compare A B | head`) ends quietly, like other Unix tools."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TextIO

READER_GONE = 128 + signal.SIGPIPE
"""Exit code: what a shell shows for a tool that SIGPIPE ended. Python ignores that signal and raises BrokenPipeError instead."""


def ending_with_the_reader(command: Callable[[], int]) -> int:
    """`command()`, or `READER_GONE` when what it prints goes into a pipe whose reader has ended.

    Raises:
        BrokenPipeError: another pipe broke, for instance the one to a worker; that is no reason to be quiet.
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # otherwise the rest is written at the interpreter's end, where the error could not be caught
    except BrokenPipeError:
        broken = [stream for stream in (sys.stdout, sys.stderr) if _reader_is_gone(stream)]
        if not broken:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in broken:
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return READER_GONE


def _reader_is_gone(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))
