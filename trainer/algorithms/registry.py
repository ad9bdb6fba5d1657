"""Names in YAML to functions: the built-in ones, and the user's own by `package.module:function` or `path/to/file.py:function`.

There is no registration call on purpose: a name that had to be registered first would exist in one process and be missing
in the next (a Ray actor, another rank). A reference says where the function is, so every process finds it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The built-in things of one kind, and the way to the user's own.

    Example:
        >>> Registry("colour", "algorithm.colour", {"red": 1}).get("red")
        1
    """

    kind: str
    """What is looked up, for error messages: `advantage estimator`."""
    setting: str
    """The configuration key that names it: `algorithm.advantage.name`."""
    entries: Mapping[str, T]
    """Built-in names."""

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


def is_reference(name: str) -> bool:
    """Whether `name` has the form `module:attribute`."""
    module, _, attribute = name.rpartition(":")
    return bool(module) and bool(attribute)


def absolute_reference(name: str) -> str:
    """The same reference with a file path made absolute, so that a process with another working directory finds it."""
    module, _, attribute = name.rpartition(":")
    return f"{Path(module).resolve()}:{attribute}" if module.endswith(".py") else name


@cache
def load_reference(name: str) -> Any:
    """The callable at `package.module:function` or `path/to/file.py:function` (dotted attributes are followed).

    Raises:
        ValueError: the module can't be imported, or has no such callable.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {error.filename}") from error
    except ImportError as error:
        raise ValueError(f"importing {where} failed: {error}") from error
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{where} has no function `{attribute}`; it has {', '.join(names) or 'none'}")
    return value


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name derived from its path; a second reference into the same file gets the same module."""
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    name = "exactrl_user_" + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Entered before it runs: dataclasses in the file look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
