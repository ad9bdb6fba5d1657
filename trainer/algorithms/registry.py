"""Names in YAML to functions: the built-in ones, and the user's own (`configs/user_code.py`)."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from configs.user_code import is_reference, load_reference

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The built-in things of one kind, and the way to the user's own.

    Example:
        >>> Registry("colour", "algorithm.colour", {"red": 1}, declared=["red"]).get("red")
        1
    """

    kind: str
    """What is looked up, for error messages: `advantage estimator`."""
    setting: str
    """The configuration key that names it: `algorithm.advantage.name`."""
    entries: Mapping[str, T]
    """Built-in names."""
    declared: Collection[str]
    """The same names as `configs/algorithms.py` has them."""

    def __post_init__(self) -> None:
        if set(self.entries) != set(self.declared):
            odd = ", ".join(sorted(set(self.entries) ^ set(self.declared)))
            raise TypeError(f"{odd}: a {self.kind} must stand in configs/algorithms.py and have a function here")

    def get(self, name: str) -> T:
        """The built-in entry of that name, or what the reference `module:function` points to.

        Raises:
            ValueError: neither a built-in name nor a reference that leads to something callable.
        """
        if name in self.entries:
            return self.entries[name]
        if is_reference(name):
            try:
                return load_reference(name)
            except ValueError as error:
                raise ValueError(f"{self.setting}={name}: {error}") from error
        close = difflib.get_close_matches(name, self.entries, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ValueError(
            f"{self.setting}={name}: no such {self.kind}{hint} Known: {', '.join(self.entries)}; "
            "your own is written as package.module:function or path/to/file.py:function"
        )
