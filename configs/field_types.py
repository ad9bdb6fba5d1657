"""Types of the schema's fields, and what they take in words. pydantic checks them; a type may bring its range, choices, or the
form of its text along.

Stricter than pydantic's own: a number is never made of text or of true, a boolean is never made of a number.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

from pydantic import AllowInfNan, BeforeValidator, Field, Strict
from pydantic.fields import FieldInfo

_YAML_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _boolean(value: Any) -> Any:
    return _YAML_BOOLS.get(value.lower(), value) if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bool = Annotated[bool, Strict(), BeforeValidator(_boolean)]
Int = Annotated[int, Strict(), BeforeValidator(_whole)]
Float = Annotated[float, Strict(), AllowInfNan(False)]

PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
ShareAboveZero = Annotated[Float, Field(gt=0, le=1)]

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
# A text whose form can be told but not listed: the description is what people read.
OwnFunction = Annotated[
    str,
    Field(
        pattern=rf"^({_DOTTED}|.+\.py):{_DOTTED}$", description="package.module:function or path/to/file.py:function"
    ),
]
StepNumber = Annotated[str, Field(pattern="^[0-9]+$", description="the number of a step that has a checkpoint")]

NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


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
