"""From a composed tree of plain values to a `Config`: pydantic checks the types, this file makes its findings readable.

OmegaConf's structured configs convert generously and Hydra's `+key` adds what nobody reads, so neither decides here. Every
key must exist, every value must have its field's type and lie in its range, and all problems are reported together.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from configs.field_types import base, bounds, element, in_words
from configs.problems import ConfigError, Problem
from configs.schema import MISSING_PATH, Config
from configs.suggest import suggest_key

WHOLE_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")

Origin = Callable[[str], str]
"""Dotted key -> where its value came from, or an empty string."""

REPORTED = object()
"""Stands for a value whose problem has been reported already."""


def validate(tree: Mapping[str, Any], origin: Origin = lambda key: "") -> Config:
    """The typed configuration of a tree; missing keys take their defaults, interpolations are resolved.

    Args:
        tree: nested dicts, lists and scalars as YAML gives them.
        origin: says where a key's value came from.

    Raises:
        ConfigError: with every problem found.
    """
    filled = with_defaults(tree)
    problems: list[Problem] = []
    resolved = _resolve(OmegaConf.create(filled), "", problems)
    try:
        config = _adapter().validate_python(resolved)
    except ValidationError as error:
        found = [problem for detail in error.errors(include_url=False) for problem in _readable(detail)]
        problems += {problem.key: problem for problem in reversed(found)}.values()
    problems = [dataclasses.replace(p, origin=origin(p.key)) for p in _first_causes(problems, filled)]
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.key))
    return config


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every field of the schema has a value; unknown keys stay, to be reported."""
    return _fill(Config, copy.deepcopy(dict(tree)), dataclasses.asdict(Config()))


def _fill(kind: Any, value: Any, default: Any) -> Any:
    inner = base(kind)
    if dataclasses.is_dataclass(inner) and isinstance(value, dict):
        owner = typing.cast(type, inner)
        if not isinstance(default, dict):
            default = dataclasses.asdict(owner())
        filled = {n: _fill(k, value[n], default[n]) if n in value else default[n] for n, k in hints(owner).items()}
        return filled | {key: v for key, v in value.items() if key not in filled}
    if element(kind) is not None and isinstance(value, list):
        return [_fill(element(kind), v, None) for v in value]
    return value


def _resolve(node: DictConfig | ListConfig, prefix: str, problems: list[Problem]) -> Any:
    """Plain values with interpolations replaced by what they point to; one that leads nowhere is a problem, as is a `???`."""
    values: dict[Any, Any] = {}
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        path = f"{prefix}{key}"
        try:
            value = MISSING_PATH if OmegaConf.is_missing(node, key) else node[key]
            if isinstance(value, DictConfig | ListConfig):
                value = _resolve(value, f"{path}.", problems)
        except (OmegaConfBaseException, RecursionError) as error:
            text = f"can't be resolved: {str(error).splitlines()[0]}"
            problems.append(Problem(path, text, "check the name inside ${...}"))
            value = REPORTED
        if value == MISSING_PATH:
            problems.append(Problem(path, "must be set", f"for example {path}=..."))
            value = REPORTED
        values[key] = value
    return list(values.values()) if isinstance(node, ListConfig) else values


# --- the schema as data ----------------------------------------------------------------------------------------------


@functools.cache
def hints(owner: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, in order, with what `Annotated` adds."""
    found = typing.get_type_hints(owner, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(owner)}


def type_at(path: str) -> Any | None:
    """The type of the field at a dotted key (list positions are numbers), `Any` below a free dict, None when unknown."""
    kind: Any = Config
    for part in path.split("."):
        inner = base(kind)
        if dataclasses.is_dataclass(inner):
            kind = hints(typing.cast(type, inner)).get(part)
        elif element(kind) is not None and part.isdigit():
            kind = element(kind)
        elif typing.get_origin(inner) is dict or inner is Any:
            kind = Any
        else:
            return None
    return kind


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Every key of the schema; elements of lists as position 0."""
    return tuple(_dotted(Config, ""))


def _dotted(owner: type, prefix: str) -> Iterator[str]:
    for name, kind in hints(owner).items():
        yield prefix + name
        inner = element(kind)
        below = f"{prefix}{name}." if inner is None else f"{prefix}{name}.0."
        inner = base(kind if inner is None else inner)
        if dataclasses.is_dataclass(inner):
            yield from _dotted(typing.cast(type, inner), below)


# --- problems --------------------------------------------------------------------------------------------------------


def _readable(detail: ErrorDetails) -> Iterator[Problem]:
    """One of pydantic's findings in the words of the schema."""
    value = detail["input"]
    keys: list[str] = []
    kind: Any = Config
    for part in detail["loc"]:  # beyond the key: a member of a union, the key of a free mapping
        below = type_at(".".join([*keys, str(part)]))
        if below is None or below is Any:
            break
        keys, kind = [*keys, str(part)], below
    key = ".".join(keys)
    if value is REPORTED:
        return
    if detail["type"] == "unexpected_keyword_argument":
        yield from _unknown(f"{key}.{detail['loc'][-1]}".strip("."), value)
    elif detail["type"].startswith(("greater_than", "less_than", "too_")):
        yield Problem(key, f"must be {bounds(kind)}, not {_show(value)}")
    else:
        yield Problem(key, f"must be {in_words(kind)}, not {_show(value)}", _way_out(key, base(kind), value))


def _way_out(key: str, kind: Any, value: Any) -> str:
    if kind is str and isinstance(value, bool | int | float):
        return f"quote it: '{value}'"
    if dataclasses.is_dataclass(kind):
        return f"set its keys: {key}.{next(iter(hints(typing.cast(type, kind))))}=..."
    examples = {list: f"for example '{key}=[...]'", dict: f"for example '{key}={{name: value}}'; names are text"}
    return examples.get(typing.get_origin(kind), "")


def _unknown(key: str, value: Any) -> Iterator[Problem]:
    known_names = {known.rpartition(".")[2] for known in dotted_keys()}
    if isinstance(value, dict) and value and key.rpartition(".")[2] not in known_names:
        for name, inner in value.items():
            yield from _unknown(f"{key}.{name}", inner)
    else:
        yield unknown_key(key)


def unknown_key(key: str) -> Problem:
    """The problem of a key that the schema does not have."""
    near = suggest_key(key, dotted_keys())
    way_out = f"did you mean `{near}`?" if near else "docs/configuration.md lists every key"
    return Problem(key, "there is no such key", way_out)


def _first_causes(problems: list[Problem], tree: dict[str, Any]) -> list[Problem]:
    """Leave out problems of keys that only repeat the value of another key with a problem."""
    broken = {problem.key for problem in problems}

    def cause(key: str) -> str | None:
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        match = WHOLE_INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        return match.group(1) if match else None

    def first(key: str) -> str:
        chain = [key]
        while (before := cause(chain[-1])) in broken:
            if before in chain:  # a circle has no first; its least key stands for it
                return min(chain[chain.index(before) :])
            chain.append(before)
        return chain[-1]

    return [problem for problem in problems if first(problem.key) == problem.key]


def _show(value: Any) -> str:
    """The value as a person would write it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
