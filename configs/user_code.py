"""A user's own functions, named in YAML as `package.module:function` or `path/to/file.py:function`: the one loader for all of them.

There is no registration call on purpose: a name that had to be registered first would exist in one process and be missing
in the next (a Ray actor, another rank). A reference says where the function is, so every process finds it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.problems import UserError

OURS = frozenset({"configs", "determinism", "reward", "rollout", "trainer", "workers"})


class UserCodeError(UserError, ValueError):
    """A reference leads to nothing that can be called."""


def is_reference(name: str) -> bool:
    """Whether `name` has the form `module:function` or `file.py:function`."""
    place, _, attribute = name.rpartition(":")
    return bool(place) and bool(attribute)


def file_of(name: str) -> Path | None:
    """The file that a reference points into; None when it names a module."""
    place = name.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def absolute_reference(name: str) -> str:
    """The same reference with a file's path made absolute, so that a process with another working directory finds it."""
    path = file_of(name)
    return name if path is None else f"{path.resolve()}:{name.rpartition(':')[2]}"


def load_reference(name: str) -> Any:
    """The function at `package.module:function` or `path/to/file.py:function` (dotted attributes are followed).

    A file is loaded once in a process, whoever refers to it, under a module name of its own: it hides no package, and files of
    one name in two folders are two modules. It may import its neighbours.

    Raises:
        UserCodeError: no such module, file or function; importing it fails; or an import of the file would take another module than
            the neighbour that it means.
    """
    place, _, attribute = name.rpartition(":")
    path = file_of(name)
    module = _import_module(place) if path is None else _import_file(path.resolve())
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserCodeError(f"{place} has no function {attribute!r}; it has {', '.join(names) or 'none'}")
    return value


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError(
                f"there is no module {error.name!r}; it must be importable from where the run starts"
            ) from error
        raise _failed(name, error) from error


def _import_file(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserCodeError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Last on the path: a neighbour called `reward.py` must not hide the package `reward` from what is imported later.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Entered before it runs: dataclasses in the file look their module up by name.
    sys.modules[name] = module
    try:
        for neighbour in _neighbours(path, set()):
            _require_same(neighbour, path)
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, UserCodeError) or not isinstance(error, Exception):
            raise
        raise _failed(path, error) from error
    return module


def _failed(what: str | Path, error: Exception) -> UserCodeError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return UserCodeError(
        f"importing {what} failed: {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
    )


def _neighbours(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Files and packages of the same folder that a file imports, also through one another."""
    seen.add(path)
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for top in {name.partition(".")[0] for name in names} - OURS:
            for found in (path.parent / top / "__init__.py", path.parent / f"{top}.py"):
                if found.is_file() and found not in seen:
                    yield found
                    yield from _neighbours(found, seen) if found.parent == path.parent else ()
                    break


def _require_same(neighbour: Path, importer: Path) -> None:
    """Python knows one module by a name: the neighbour must be that one, or the file would silently get another's code."""
    name = neighbour.parent.name if neighbour.name == "__init__.py" else neighbour.stem
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    if origin is None or Path(origin).resolve() != neighbour:
        raise UserCodeError(
            f"{importer} imports {name!r} and lies beside {neighbour}, but that name already belongs to {origin or 'another module'}; "
            "rename it"
        )
