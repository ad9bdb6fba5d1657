r"""A row's reference answer: which texts it accepts, and what it means as mathematics.

    accepted("24")  accepted(24)  accepted(["24", "24.0"])  accepted({"target": [...]})  -->  a list of texts, any of which is right

Mathematics is read by the library `math-verify`. It reads LaTeX well, but misreads some things
that people write: `25\%` as 25, `45°` and `√2` as mere text, `0.\overline{3}` as 0, `1e-05` as e - 5. `plain_latex` rewrites those first.

This file is imported where reward functions run: keep it light.
"""

from __future__ import annotations

import decimal
import functools
import logging
import re
import threading
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.schema import RewardConfig
    from rollout.types import Prompt

logger = logging.getLogger(__name__)

ANSWER_KEYS = ("target", "ground_truth")
"""A mapping with one of these holds the accepted answers there (Search-R1, verl)."""
CHECKED_EXPRESSIONS = 5_000
"""At most so many different answers, plain numbers not counted, are parsed before training starts; a parse takes some milliseconds."""
_IGNORED_KEYS = {"style"}
_PARSE_LIMIT_S = 5
_LARGEST_EXPONENT = 400

_NUMBER = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_SIMPLE = re.compile(rf"-?(?:{_NUMBER})")
_PERCENT = re.compile(rf"({_NUMBER})\s*\\?%")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(-?)(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.]*\w)")
_REPEATING = re.compile(r"(\d+)\.(\d*)(?:\\overline|\\bar)\s*(?:\{(\d+)\}|(\d))")
_IN_PARENTHESES = re.compile(r"(\d+)\.\((\d+)\)")
_DOTTED = re.compile(r"(\d+)\.(\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|\w))")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SYMBOLS = {"°": r"^\circ ", "−": "-", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div "}


class AnswerError(ValueError):
    """A reward function can't compare with a row's answer; the message says why."""


def accepted(answer: Any) -> list[str]:
    """The texts that a row's answer accepts.

    Args:
        answer: text; a number (accepted without exponent, and as Python writes it); a list of these; or a mapping that has them under one of
            `ANSWER_KEYS` and nothing else.

    Raises:
        AnswerError: there is no answer, or one of another form.

    Example:
        >>> accepted({"target": ["Paris", 1e-05]})
        ['Paris', '0.00001', '1e-05']
    """
    if answer is None or answer != answer:  # NaN is how tables write a missing cell
        raise AnswerError("the row has no answer; set the source's answer_key")
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, bool | int):
        return [str(answer)]
    if isinstance(answer, float):
        return list(dict.fromkeys([_without_exponent(repr(answer)), repr(answer)]))
    if isinstance(answer, list | tuple) and answer:
        if any(isinstance(part, list | tuple | Mapping) for part in answer):
            raise AnswerError(f"the answer {_short(answer)} is a list of lists; it must be a list of texts or numbers")
        return list(dict.fromkeys(text for part in answer for text in accepted(part)))
    if isinstance(answer, Mapping):
        found = [key for key in answer if key in ANSWER_KEYS]
        if len(found) == 1 and set(answer) <= {found[0], *_IGNORED_KEYS}:
            return accepted(answer[found[0]])
    raise AnswerError(
        f"the answer {_short(answer)} is a {type(answer).__name__} that can't be compared with; it must be text, a number, a list of "
        f"accepted ones, or a mapping with nothing but one of {', '.join(ANSWER_KEYS)}"
    )


def expression(text: str, parsing_timeout: int | None = None) -> list[Any]:
    r"""What an answer means: what the library reads, without its fallback to mere text.

    `\boxed{...}` and `$...$` mark the expression. Without them the whole text is the expression. A dollar sign that is escaped or alone means money.

    Raises:
        AnswerError: it is no mathematical expression.
    """
    marked = "\\boxed" in text or len(re.findall(r"(?<!\\)\$", text)) > 1
    if marked:
        forms = [plain_latex(text, scientific=False)]
    else:
        bare = " ".join(plain_latex(text.replace("\\$", "").replace("$", "")).split())
        forms = [f"${bare}$", f"\\boxed{{{bare}}}"] if bare else []
    for form in forms:
        found = _parse(form, parsing_timeout)
        if found:
            return found
    within = f" that can be read within {parsing_timeout} s" if parsing_timeout else ""
    raise AnswerError(f"the answer {text!r} is not a mathematical expression{within}")


def is_right(given: str, gold: list[Any], bare: bool = False) -> bool:
    """Whether the last expression of a response equals an answer's `expression`.

    Args:
        bare: the text is an answer by itself (it followed a marker), so it needs no `$` or box to be an expression.
    """
    from math_verify import verify

    # A model may write any text: when it can't be parsed or compared, it is a wrong answer, not an error.
    for text in dict.fromkeys([plain_latex(given), plain_latex(given, scientific=False)]):  # 3e-5 may also be 3e - 5
        for form in [text, f"${' '.join(text.split())}$"] if bare else [text]:
            found = _parse(form, None)
            if found and verify(gold, found, timeout_seconds=None):
                return True
    return False


def plain_latex(text: str, scientific: bool = True) -> str:
    r"""The text, with whatever the library misreads rewritten as LaTeX that it reads correctly.

    Args:
        scientific: take `1e-05` for a number, not for a difference with Euler's e in it.

    Example:
        >>> plain_latex(r"25\% of √2, 0.1\overline{6} or 1e-05")
        '\\frac{25}{100} of \\sqrt{2}, \\frac{15}{90} or 0.00001'
    """
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    if scientific:
        text = _SCIENTIFIC.sub(lambda m: _without_exponent(m[0]), text)
    text = _REPEATING.sub(lambda m: _repeating(m[1], m[2], m[3] or m[4]), text)
    text = _IN_PARENTHESES.sub(lambda m: _repeating(m[1], "", m[2]), text)
    text = _DOTTED.sub(lambda m: _repeating(m[1], m[2], m[3] + (m[4] or "") + (m[5] or "")), text)
    text = _PERCENT.sub(lambda m: f"\\frac{{{m[1].replace(',', '')}}}{{100}}", text)
    text = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = _VULGAR.sub(
        lambda m: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("\u2044")), text
    )
    return _RAISED.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)


def check_answers(reward: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Refuse rows that a configured `exact_match` or `math_verify` could never score, before anything starts.

    Rows of streaming sources are not known yet; they fail when they are scored.

    Raises:
        AnswerError: names the row.
    """
    used = {function.function for function in reward.functions} & {"exact_match", "math_verify"}
    if not used:
        return
    # The library's limit works in the main thread only.
    limit = _PARSE_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    parsed: set[str] = set()
    for prompt in prompts:
        try:
            texts = accepted(prompt.answer)
            for text in texts if "math_verify" in used else ():
                if text not in parsed and not _SIMPLE.fullmatch(text) and len(parsed) < CHECKED_EXPRESSIONS:
                    parsed.add(text)
                    expression(text, limit)
        except AnswerError as error:
            raise AnswerError(f"prompt {prompt.id!r}: {error} (reward functions: {', '.join(sorted(used))})") from None
    if len(parsed) >= CHECKED_EXPRESSIONS:
        logger.warning(
            "%d different answers were parsed before training; further ones are when they are scored", len(parsed)
        )


@functools.lru_cache(maxsize=1024)
def _parse_text(text: str, parsing_timeout: int | None) -> tuple[Any, ...]:
    from math_verify import parse

    # The library's own time limit is off for scores: it counts a slow parse as a wrong answer, so a score would depend on the machine's load.
    return tuple(parse(text, fallback_mode="no_fallback", parsing_timeout=parsing_timeout))


def _parse(text: str, parsing_timeout: int | None) -> list[Any]:
    return list(_parse_text(text, parsing_timeout))


def _repeating(whole: str, fixed: str, period: str) -> str:
    """The fraction of a repeating decimal."""
    top = int(whole + fixed + period) - int(whole + fixed)
    return f"\\frac{{{top}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def _without_exponent(text: str) -> str:
    try:
        value = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return text
    small = value.is_finite() and abs(value.adjusted()) <= _LARGEST_EXPONENT
    return format(value, "f") if small else text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
