"""The schema as data: its keys, the types behind them, and those types in words."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from configs.schema import Config

NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


@functools.cache
def hints(owner: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, in order, with what `Annotated` adds."""
    found = typing.get_type_hints(owner, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(owner)}


def members(kind: Any) -> list[Any]:
    """The types of a union; the type itself, alone, when it is none."""
    return list(typing.get_args(kind)) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]


def base(kind: Any) -> Any:
    """The type without `None`, choices and ranges: a dataclass, `list[...]`, `dict[...]`, str, int, float, bool or Any."""
    first = members(kind)[0]
    if typing.get_origin(first) is typing.Annotated:
        first = typing.get_args(first)[0]
    return str if typing.get_origin(first) is typing.Literal else first


def element(kind: Any) -> Any | None:
    """The type of a list's elements; None when it is no list."""
    inner = base(kind)
    return typing.get_args(inner)[0] if typing.get_origin(inner) is list else None


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


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a field may hold, in order; empty when its type doesn't list any."""
    return tuple(
        word
        for member in members(kind)
        if typing.get_origin(member) is typing.Literal
        for word in typing.get_args(member)
    )


def forms(kind: Any) -> list[str]:
    """Descriptions of further texts that a field may hold."""
    return [info.description for member in members(kind) for info in _field_infos(member) if info.description]


def bounds(kind: Any) -> str:
    """The range of a number or of a list's length in words; empty without one."""
    limits: dict[str, Any] = {}
    for info in _field_infos(members(kind)[0]):
        for limit in info.metadata:
            limits |= {
                name: getattr(limit, name) for name in ("ge", "gt", "le", "lt", "max_length") if hasattr(limit, name)
            }
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "max_length": "of length {}"}
    return " and ".join(words[name].format("2^63" if at == 2**63 else f"{at:g}") for name, at in limits.items())


def in_words(kind: Any) -> str:
    """What a field takes: `a whole number, at least 1, or null`."""
    options = [", ".join(choices(kind)), *forms(kind)] if choices(kind) else [_noun(base(kind))]
    return " or ".join(options + (["null"] if type(None) in members(kind) else []))


def _noun(kind: Any) -> str:
    return NOUNS.get(typing.get_origin(kind) or kind, "a group of settings")


def _field_infos(kind: Any) -> list[FieldInfo]:
    return [part for part in getattr(kind, "__metadata__", ()) if isinstance(part, FieldInfo)]
