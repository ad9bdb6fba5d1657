"""What a reward function returned or raised, as plain values. A function may return anything, even an object that raises when it is inspected."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.functions import LARGEST_REWARD


@dataclass(frozen=True)
class ProcessReward:
    """A reward in parts that lie at turns and tokens; see `reward/functions.py`."""

    score: float = 0.0
    """What lies at the end of the episode."""
    turns: tuple[tuple[int, float], ...] = ()
    """(turn, reward) at the ends of turns."""
    tokens: tuple[float, ...] = ()
    """One for each sampled token, or none."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return math.fsum((self.score, *(value for _, value in self.turns), *self.tokens))


Entry = float | ProcessReward | tuple[str, str]
"""Of one sample: a finite number, one in parts, or (kind, message) of a failure."""
Outcome = list[Entry]
"""One entry per sample."""
PARTS = ("score", "turns", "tokens")
_MESSAGE_CHARS = 4000


def checked(value: Any) -> Entry:
    """What a function returned for a sample, or what is wrong with it."""
    try:
        if isinstance(value, Mapping):
            return _in_parts(dict(value))
    except BaseException as error:
        return ("type", f"returned {shown(value)}, which can't be read as a mapping: {describe(error, __file__)}")
    return checked_number(value)


def _in_parts(value: dict[Any, Any]) -> Entry:
    unknown = [key for key in value if key not in PARTS]
    if unknown or not value:
        what = f"with {', '.join(map(shown, unknown))}" if unknown else "without an entry"
        return ("type", f"returned a mapping {what}; the entries of a reward are {', '.join(PARTS)}")
    turns, tokens = value.get("turns", {}), value.get("tokens", [])
    if type(tokens).__module__ == "numpy" and getattr(tokens, "ndim", 0) == 1:
        tokens = tokens.tolist()
    if not isinstance(turns, Mapping):
        return ("type", f"returned turns={shown(turns)}; it must be a mapping of turn numbers (from 0) to rewards")
    if not isinstance(tokens, list | tuple):
        return ("type", f"returned tokens={shown(tokens)}; it must be a list with a reward for each token")
    by_turn: dict[int, Any] = {}
    for key, one in turns.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has only text as keys
        if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 0 or number in by_turn:
            return ("type", f"returned a reward for the turn {shown(key)}; turns are numbers from 0, each once")
        by_turn[int(number)] = one
    parts = [("score", value.get("score", 0.0))]
    parts += [(f"turns[{number}]", by_turn[number]) for number in sorted(by_turn)]
    parts += [(f"tokens[{at}]", one) for at, one in enumerate(tokens)]
    found = [(name, checked_number(one)) for name, one in parts]
    for name, one in found:
        if isinstance(one, tuple):
            return (one[0], f"{name}: {one[1]}")
    score, *rest = [one for _, one in found if isinstance(one, float)]
    made = ProcessReward(score, tuple(zip(sorted(by_turn), rest, strict=False)), tuple(rest[len(by_turn) :]))
    if abs(made.total) > LARGEST_REWARD:
        return ("not_finite", f"returned parts whose sum is {made.total}, which is infinite in float32")
    return made


def checked_number(value: Any) -> float | tuple[str, str]:
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
    """The entries of a list of `count`, or what is wrong with it or with each."""
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
