"""From a composed tree of plain values to a `Config`: a strict walk over the dataclasses.

OmegaConf's structured configs convert generously and Hydra's `+key` adds what nobody reads, so neither decides here. Every
key must exist, every value must have its field's type and lie in its range, and all problems are reported together.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checks import cross_check, warn
from configs.contract import force
from configs.limits import violation
from configs.problems import ConfigError, Problem
from configs.roles import roles_needed
from configs.schema import MISSING_PATH, Config
from configs.suggest import suggest_key

__all__ = [
    "check",
    "cross_check",
    "dotted_keys",
    "force",
    "roles_needed",
    "type_at",
    "validate",
    "warn",
    "with_defaults",
]

YAML_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
WHOLE_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")

Origin = Callable[[str], str]
"""Dotted key -> where its value came from, or an empty string."""


class _Invalid:
    """Stands for a value that has already been reported."""


INVALID = _Invalid()


def validate(tree: Mapping[str, Any], origin: Origin = lambda key: "", raw: Mapping[str, str] | None = None) -> Config:
    """The typed configuration of a tree; missing keys take their defaults, interpolations are resolved.

    Args:
        tree: nested dicts, lists and scalars as YAML gives them.
        origin: says where a key's value came from.
        raw: dotted key -> text as it was typed, for text fields whose value looks like a number (`run.name=137`).

    Raises:
        ConfigError: with every problem found.
    """
    filled = with_defaults(tree)
    problems: list[Problem] = []
    resolved = _resolve(filled, problems)
    walk = _Walk(problems, raw or {})
    config = walk.dataclass(Config, resolved, "")
    problems = [
        p if p.origin else dataclasses.replace(p, origin=origin(p.key)) for p in _first_causes(problems, filled)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def check(config: Config) -> tuple[Config, list[Problem]]:
    """Everything that can be said before anything starts.

    Returns:
        The configuration as it will run (with what full determinism forces), and warnings.

    Raises:
        ConfigError: settings that don't fit together.
    """
    problems = cross_check(config)
    if problems:
        raise ConfigError(problems)
    warnings = warn(config)
    config, forced = force(config)
    return config, warnings + forced


# --- the schema as data --------------------------------------------------------------------------------------------


@functools.cache
def hints(owner: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, in order."""
    found = typing.get_type_hints(owner)
    return {field.name: found[field.name] for field in dataclasses.fields(owner)}


def optional(kind: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); X -> (X, False)."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (inner,) = [a for a in typing.get_args(kind) if a is not type(None)]
        return inner, True
    return kind, False


def type_at(path: str) -> Any | None:
    """The type of the field at a dotted key (list positions are numbers), `Any` below a free dict, None when unknown."""
    kind: Any = Config
    for part in path.split("."):
        kind, _ = optional(kind)
        if dataclasses.is_dataclass(kind):
            kind = hints(typing.cast(type, kind)).get(part)
        elif typing.get_origin(kind) is list and part.isdigit():
            (kind,) = typing.get_args(kind)
        elif typing.get_origin(kind) is dict:
            kind = Any
        elif kind is not Any:
            return None
        if kind is None:
            return None
    return kind


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Every key of the schema; elements of lists as position 0."""
    return tuple(_dotted(Config, ""))


def _dotted(owner: type, prefix: str) -> Iterator[str]:
    for name, kind in hints(owner).items():
        key = prefix + name
        yield key
        kind, _ = optional(kind)
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
            key += ".0"
        if dataclasses.is_dataclass(kind):
            yield from _dotted(typing.cast(type, kind), key + ".")


# --- defaults and interpolations -----------------------------------------------------------------------------------


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every field of the schema has a value; unknown keys stay for the walk to find."""
    return _fill(Config, copy.deepcopy(dict(tree)), dataclasses.asdict(Config()))


def _fill(kind: Any, value: Any, default: Any) -> Any:
    kind, _ = optional(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        owner = typing.cast(type, kind)
        if not isinstance(default, dict):
            default = dataclasses.asdict(owner())
        filled = {n: _fill(k, value[n], default[n]) if n in value else default[n] for n, k in hints(owner).items()}
        return filled | {key: v for key, v in value.items() if key not in filled}
    if typing.get_origin(kind) is list and isinstance(value, list):
        return [_fill(typing.get_args(kind)[0], v, None) for v in value]
    return value


def _resolve(tree: dict[str, Any], problems: list[Problem]) -> Any:
    """Replace interpolations by what they point to; one that leads nowhere is a problem."""
    return _plain(OmegaConf.create(tree), "", problems)


def _plain(node: DictConfig | ListConfig, prefix: str, problems: list[Problem]) -> Any:
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    values = {}
    for key in keys:
        path = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            values[key] = MISSING_PATH
            continue
        try:
            value = node[key]
            plain = _plain(value, f"{path}.", problems) if isinstance(value, DictConfig | ListConfig) else value
        except (OmegaConfBaseException, RecursionError) as error:
            reason = str(error).splitlines()[0]
            problems.append(Problem(path, f"can't be resolved: {reason}", "check the name inside ${...}"))
            plain = INVALID
        values[key] = plain
    return list(values.values()) if isinstance(node, ListConfig) else values


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


# --- the walk ------------------------------------------------------------------------------------------------------


class _Walk:
    """Builds the dataclasses; what is wrong goes to `problems` and leaves `INVALID` behind."""

    def __init__(self, problems: list[Problem], raw: Mapping[str, str]) -> None:
        self.problems = problems
        self.raw = raw

    def refuse(self, key: str, text: str, way_out: str = "") -> _Invalid:
        self.problems.append(Problem(key, text, way_out))
        return INVALID

    def dataclass(self, owner: type, value: Any, prefix: str) -> Any:
        key = prefix.rstrip(".")
        if not isinstance(value, dict):
            return self.refuse(
                key,
                f"must be a group of settings, not {_show(value)}",
                f"set its keys: {prefix}{next(iter(hints(owner)))}=...",
            )
        for name in value:
            if name not in hints(owner):
                self.unknown(f"{prefix}{name}", value[name])
        fields = {}
        for name, kind in hints(owner).items():
            field = self.value(kind, value[name], f"{prefix}{name}")
            if not isinstance(field, _Invalid):
                reason = self.violation(owner, name, field)
                if reason is not None:
                    field = self.refuse(f"{prefix}{name}", reason)
            fields[name] = field
        return owner(**fields)

    def unknown(self, key: str, value: Any) -> None:
        if (
            isinstance(value, dict)
            and value
            and key.rpartition(".")[2] not in {k.rpartition(".")[2] for k in dotted_keys()}
        ):
            for name, inner in value.items():
                self.unknown(f"{key}.{name}", inner)
            return
        near = suggest_key(key, dotted_keys())
        way_out = f"did you mean `{near}`?" if near else "docs/configuration.md lists every key"
        self.refuse(key, "there is no such key", way_out)

    @staticmethod
    def violation(owner: type, name: str, value: Any) -> str | None:
        for element in value if isinstance(value, list) else [value]:
            known = element is not None and not isinstance(element, _Invalid)
            reason = violation(owner.__name__, name, element) if known else None
            if reason is not None:
                return reason
        return None

    def value(self, kind: Any, value: Any, key: str) -> Any:
        """`value` as an instance of `kind`."""
        if isinstance(value, _Invalid):
            return value
        if value == MISSING_PATH:
            return self.refuse(key, "must be set", f"for example {key}=...")
        kind, nullable = optional(kind)
        if value is None and nullable:
            return None
        if dataclasses.is_dataclass(kind):
            return self.dataclass(typing.cast(type, kind), value, f"{key}.")
        if typing.get_origin(kind) is list:
            return self.sequence(typing.get_args(kind)[0], value, key)
        if typing.get_origin(kind) is dict:
            return self.mapping(value, key)
        return self.scalar(kind, value, key, nullable)

    def sequence(self, kind: Any, value: Any, key: str) -> Any:
        if not isinstance(value, list):
            return self.refuse(key, f"must be a list, not {_show(value)}", f"for example '{key}=[...]'")
        return [self.value(kind, element, f"{key}.{i}") for i, element in enumerate(value)]

    def mapping(self, value: Any, key: str) -> Any:
        if not isinstance(value, dict):
            return self.refuse(key, f"must be a mapping, not {_show(value)}", f"for example '{key}={{name: value}}'")
        for name in value:
            if not isinstance(name, str):
                return self.refuse(key, f"has the key {_show(name)}, which is not text", "quote it")
        return value

    def scalar(self, kind: type, value: Any, key: str, nullable: bool) -> Any:
        if kind is bool:
            return self.boolean(value, key)
        if kind is str:
            return self.text(value, key)
        article = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            or_null = " or null" if nullable else ""
            return self.refuse(key, f"must be {article}{or_null}, not {_show(value)}")
        if kind is int and value != int(value):
            return self.refuse(key, f"must be {article}, not {_show(value)}")
        return kind(value)

    def boolean(self, value: Any, key: str) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in YAML_BOOLS:
            return YAML_BOOLS[value.lower()]
        return self.refuse(key, f"must be true or false, not {_show(value)}")

    def text(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            return value
        if value is not None and not isinstance(value, list | dict) and key in self.raw:
            return self.raw[key]
        way_out = "" if value is None or isinstance(value, list | dict) else f"quote it: '{value}'"
        return self.refuse(key, f"must be text, not {_show(value)}", way_out)


def _show(value: Any) -> str:
    """The value as a person would write it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
