"""Types of the schema's fields. pydantic checks them; a type may bring its range, choices, or the form of its text along.

Stricter than pydantic's own: a number is never made of text or of true, a boolean is never made of a number.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AllowInfNan, BeforeValidator, Field, Strict

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
