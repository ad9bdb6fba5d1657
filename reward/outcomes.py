"""What a reward function returned or raised, as plain values. A function may return anything, even an object that raises when it is inspected."""

from __future__ import annotations

import math
import numbers
import traceback
from typing import Any

from reward.functions import LARGEST_REWARD

Outcome = list[float | tuple[str, str]]
"""One entry per sample: a finite number, or (kind, message) of a failure."""
_MESSAGE_CHARS = 4000


def checked(value: Any) -> float | tuple[str, str]:
    """`value` as a number, or what is wrong with it."""
    try:
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            value = value.item()
        if not isinstance(value, numbers.Real):
            return ("type", f"returned {shown(value)}; it must return a number")
        number = float(value)
    except OverflowError:
        return ("not_finite", f"returned {shown(value)}, which is infinite as a float")
    except BaseException as error:
        return ("type", f"returned {shown(value)}, which can't be read as a number: {describe(error, __file__)}")
    if not math.isfinite(number):
        return ("not_finite", f"returned {number}; it must return a finite number")
    if abs(number) > LARGEST_REWARD:
        return ("not_finite", f"returned {number}, which is infinite in the float32 that rewards are trained in")
    return number


def checked_batch(value: Any, count: int) -> Outcome:
    """The numbers of a list of `count`, or what is wrong with it or with each."""
    try:
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1:
            value = value.tolist()
        if not isinstance(value, list | tuple):
            return [("type", f"returned {shown(value)}; it must return a list of {count} numbers")] * count
        items = list(value)
    except BaseException as error:
        return [
            ("type", f"returned {shown(value)}, which can't be read as a list: {describe(error, __file__)}")
        ] * count
    if len(items) != count:
        return [("length", f"returned {len(items)} values for {count} samples")] * count
    return [checked(item) for item in items]


def shown(value: Any) -> str:
    """A value and its type, for a message."""
    try:
        text = _plain(repr(value))
    except BaseException as error:
        text = f"a value whose repr raises {type(error).__name__}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def describe(error: BaseException, host: str) -> str:
    """The traceback without the frames of the file `host` that come first; only its end where it is long."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == host:
        frames = frames.tb_next
    try:
        text = _plain("".join(traceback.format_exception(type(error), error, frames)).rstrip())
    except BaseException:  # an exception may misbehave like any other object
        text = f"{type(error).__name__} (its traceback can't be printed)"
    return text if len(text) <= _MESSAGE_CHARS else "..." + text[-_MESSAGE_CHARS:]


def _plain(text: str) -> str:
    """Text that can be written to any file: half of a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()
