"""What is wrong with a configuration, as records that print as one clear line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong (or, as a warning, worth knowing)."""

    key: str
    """Dotted key of the setting."""
    text: str
    """What is wrong, with the value."""
    way_out: str = ""
    """What to do about it."""
    origin: str = ""
    """The override or file that set it, when known."""
    level: str = ""
    """The level of full determinism that it would break (`D1` to `D7`), when it is about one."""

    def __str__(self) -> str:
        line = f"{self.key}: {self.text}"
        if self.level:
            line += f" (level {self.level})"
        if self.origin:
            line += f" [from {self.origin}]"
        if self.way_out:
            line += f"; {self.way_out}"
        return " ".join(line.split())


class UserError(Exception):
    """Something that the person who started the run can mend: the command line prints it as it is, without a traceback."""


class ConfigError(UserError, ValueError):
    """A configuration that can't be run; `problems` holds every reason, `str()` gives a line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
