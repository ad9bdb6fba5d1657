"""Built-in reward functions, and how a function named in the config is found and called.

A reward function is a plain Python function. Its parameters say what it wants to see:

    prompt      the rendered prompt, text
    response    the response without special tokens, text
    response_with_special_tokens    the response as it was sampled, text: with the end-of-sequence token and its like
    answer      the row's reference answer (None when the data has none)
    extra       the row's remaining columns, a dict
    messages    the conversation before the response, a list of dicts with role and content; for an episode of several turns all of it, tool calls included
    response_token_ids    the sampled token ids, a list, the end-of-sequence token included; for several turns those of all turns, one after the other
    turn_token_ids        the sampled token ids of each turn, a list of lists (a single one for a plain response)

It may have further parameters of its own, which `params` of the config fill. It returns a finite number. For example:

    def shorter_is_better(response, limit=100):
        return 1.0 if len(response) <= limit else 0.0

A *process reward* is a mapping instead of a number. What lies where counts for the advantages of `gae`; group estimators use the sum of the parts.

    {"score": 1.0,                  at the end of the episode
     "turns": {0: 0.5},             at the end of a turn, by its number
     "tokens": [0.0, 0.1, ...]}     at each sampled token, in the order of `response_token_ids`

With the plural names (`prompts`, `responses`, `responses_with_special_tokens`, `answers`, `extras`, `conversations`, `responses_token_ids`,
`turns_token_ids`) it gets the samples of the whole step as lists, in canonical order, in one call, and returns a list of rewards, one per sample.
`async def` functions are awaited, several at a time.

Functions run in processes of their own (`reward/pool.py`). This file is imported there: keep it light.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.user_code import UserCodeError, is_reference, load_reference
from reward.answers import accepted, expression, is_right

LARGEST_REWARD = 3.4e38
"""Rewards are trained on in float32, where anything larger is infinite."""

SINGLE = (
    *("prompt", "response", "response_with_special_tokens", "answer", "extra", "messages"),
    *("response_token_ids", "turn_token_ids"),
)
"""Parameters of a function that scores one sample."""

BATCHED = {
    "prompts": "prompt",
    "responses": "response",
    "responses_with_special_tokens": "response_with_special_tokens",
    "answers": "answer",
    "extras": "extra",
    "conversations": "messages",
    "responses_token_ids": "response_token_ids",
    "turns_token_ids": "turn_token_ids",
}
"""Parameters of a function that scores all samples at once, each with the field that it lists."""


class FunctionError(ValueError):
    """A reward function cannot be found or called as configured."""


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function, ready to be called with the fields that it names."""

    call: Callable[..., Any]
    """The function with the config's `params` bound."""
    wanted: tuple[str, ...]
    """Names from `SINGLE`, or from `BATCHED`, that it takes."""
    batched: bool
    """One call scores all samples."""
    is_async: bool
    """The call returns an awaitable."""


def load_function(spec: str, params: Mapping[str, Any]) -> LoadedFunction:
    """Find a function by name, `package.module:function` or `path/to/file.py:function`, and bind its parameters.

    Raises:
        FunctionError: there is no such function; it takes no sample field; it mixes single and plural fields; a parameter has no value; there is a
            value for a parameter that it does not have.
    """
    function = BUILT_IN.get(spec) or _find(spec)
    if spec in LIBRARIES:
        importlib.import_module(LIBRARIES[spec])  # a first import takes seconds, too long for a call's limit
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise FunctionError(f"reward function {spec!r}: its parameters cannot be read ({error})") from error
    single = tuple(name for name in parameters if name in SINGLE)
    plural = tuple(name for name in parameters if name in BATCHED)
    if bool(single) == bool(plural):
        what = f"mixes {', '.join(single + plural)}" if single else f"has the parameters ({', '.join(parameters)})"
        raise FunctionError(
            f"reward function {spec!r} {what}; it must take some of {', '.join(SINGLE)} (one sample), or some of {', '.join(BATCHED)} (all)"
        )
    wanted = single or plural
    clash = sorted(set(params) & set(wanted))
    if clash:
        raise FunctionError(f"reward function {spec!r}: params set {', '.join(clash)}, which the sample fills")
    try:
        inspect.signature(function).bind(**dict.fromkeys(wanted), **params)
    except TypeError as error:
        raise FunctionError(
            f"reward function {spec!r} cannot be called with params {dict(params)}: {error}; its parameters are {', '.join(parameters)}"
        ) from error
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    return LoadedFunction(functools.partial(function, **params), wanted, bool(plural), is_async)


def _find(spec: str) -> Callable[..., Any]:
    if not is_reference(spec):
        raise FunctionError(
            f"reward function {spec!r} is not built in ({', '.join(BUILT_IN)}); name your own as package.module:function or path/to/file.py:function"
        )
    try:
        return load_reference(spec)
    except UserCodeError as error:
        raise FunctionError(f"reward function {spec!r}: {error}") from error


def final_answer(response: str, marker: str | None = None, end_marker: str | None = None) -> str | None:
    """What follows the last `marker`, up to `end_marker`; the whole response without a marker; None when the marker is missing.

    Example:
        >>> final_answer("so 2, no: <answer>3</answer>.", "<answer>", "</answer>")
        '3'
    """
    if marker is not None:
        _, found, response = response.rpartition(marker)
        if not found:
            return None
    return response if end_marker is None else response.partition(end_marker)[0]


def exact_match(
    response: str,
    answer: Any,
    *,
    marker: str | None = None,
    end_marker: str | None = None,
    ignore_case: bool = False,
    ignore_whitespace: bool = True,
) -> float:
    """1.0 when the response is the answer, or one of the accepted answers, else 0.0.

    Args:
        response: text of the response.
        answer: reference, compared as text; its forms are those of `reward.answers.accepted`.
        marker, end_marker: compare only what stands after the last `marker`, up to `end_marker`; no marker in the response scores 0.
        ignore_case: compare without case.
        ignore_whitespace: take runs of white space as one space, and none at the ends.

    Raises:
        AnswerError: the row has no answer, or none that can be compared with.
    """
    texts = accepted(answer)
    given = final_answer(response, marker, end_marker)

    def normal(text: str) -> str:
        text = " ".join(text.split()) if ignore_whitespace else text
        return text.casefold() if ignore_case else text

    return float(given is not None and normal(given) in map(normal, texts))


def math_verify(response: str, answer: Any, *, marker: str | None = None, end_marker: str | None = None) -> float:
    """1.0 when the response's last mathematical expression equals the answer, or one of the accepted answers (library `math-verify`), else 0.0.

    How answers are read: `reward/answers.py`. A comparison that takes longer than the pool's time limit is an error.

    Args:
        answer: reference; its forms are those of `reward.answers.accepted`.
        marker, end_marker: look only at what stands after the last `marker`, up to `end_marker`; no marker in the response scores 0.

    Raises:
        AnswerError: the row has no answer, or one that is not an expression.
    """
    golds = [expression(text) for text in accepted(answer)]
    given = final_answer(response, marker, end_marker)
    return float(given is not None and any(is_right(given, gold, bare=marker is not None) for gold in golds))


@functools.lru_cache(maxsize=64)
def _task(name: str, params: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(params))


def reasoning_gym(
    response: str, answer: Any, extra: Mapping[str, Any], *, marker: str | None = None, end_marker: str | None = None
) -> float:
    """The score that the row's reasoning-gym task gives the response (0 to 1; many tasks give partial credit).

    Args:
        response: text of the response.
        answer: reference.
        extra: the row's columns; a `reasoning_gym` source put the task there.
        marker, end_marker: score only what stands after the last `marker`, up to `end_marker`; no marker in the response scores 0.

    Raises:
        ValueError: the row is not a reasoning-gym row.
    """
    row = extra.get("reasoning_gym")
    if row is None:
        raise ValueError(
            "the row was not generated by reasoning-gym (its extra columns have no 'reasoning_gym'); use another function"
        )
    given = final_answer(response, marker, end_marker)
    entry = {"question": row["question"], "answer": answer, "metadata": row["metadata"]}
    task = _task(row["task"], json.dumps(row["params"], sort_keys=True))
    return 0.0 if given is None else float(task.score_answer(answer=given.strip(), entry=entry))


def _post(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.load(reply)


def _post_with_retries(
    url: str, body: bytes, headers: Mapping[str, str], attempts: int, backoff_s: float, timeout_s: float
) -> Any:
    for attempt in range(attempts):
        try:
            return _post(url, body, headers, timeout_s)
        except urllib.error.HTTPError as error:
            # Busy or broken servers may recover; a refused request would be refused again.
            if error.code != 429 and error.code < 500:
                raise
            failure: Exception = error
        except OSError as error:  # no connection, a reset, a timeout
            failure = error
        if attempt + 1 < attempts:
            time.sleep(backoff_s * 2**attempt)
    raise ConnectionError(f"{url}: {attempts} attempts failed, the last with: {failure}") from failure


async def http(
    prompt: str,
    response: str,
    answer: Any,
    extra: Mapping[str, Any],
    messages: list[dict[str, Any]],
    response_token_ids: list[int],
    *,
    url: str,
    headers: Mapping[str, str] | None = None,
    attempts: int = 3,
    backoff_s: float = 0.5,
    attempt_timeout_s: float = 5.0,
    score_key: str = "score",
) -> Any:
    """The score from an HTTP service: a JSON POST of prompt, response, answer, extra, messages and response_token_ids; the reply's `score_key` is the score.

    Args:
        url: address of the service.
        headers: further HTTP headers.
        attempts: most tries after connection errors, timeouts, status 429 and 5xx; the wait doubles from `backoff_s`.
        backoff_s: first wait between tries, seconds.
        attempt_timeout_s: limit of one try, seconds; the source's `timeout_s` bounds all of them.
        score_key: field of the reply: a number, or a process reward (its turns as keys are text in JSON, and are read as numbers).

    Raises:
        ConnectionError: no try succeeded.
        ValueError: the reply has no such field.
    """
    import asyncio

    fields = {"prompt": prompt, "response": response, "answer": answer, "extra": extra, "messages": messages}
    fields["response_token_ids"] = response_token_ids
    body = json.dumps(fields).encode()
    reply = await asyncio.to_thread(
        _post_with_retries, url, body, headers or {}, attempts, backoff_s, attempt_timeout_s
    )
    if not isinstance(reply, dict) or score_key not in reply:
        raise ValueError(f"{url} replied {str(reply)[:200]}; it must be a JSON object with {score_key!r}")
    return reply[score_key]


def score_in_text(
    response: str,
    *,
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)",
    lowest: float | None = None,
    highest: float | None = None,
) -> float:
    """The number that a text gives as its score: what the only group of `pattern` holds where it matches last.

    It reads what a judge wrote (`reward.judge.parser`).

    Args:
        response: text.
        pattern: regular expression with one group.
        lowest, highest: the score must lie between these.

    Raises:
        ValueError: no match, no number, or a score outside of the limits.
    """
    compiled = re.compile(pattern)
    if compiled.groups != 1:
        raise ValueError(f"the pattern {pattern!r} has {compiled.groups} groups; it needs one, around the score")
    found = compiled.findall(response)
    if not found:
        raise ValueError(f"nothing in the text matches {pattern!r}")
    score = float(found[-1])
    if (lowest is not None and score < lowest) or (highest is not None and score > highest):
        raise ValueError(f"the score {score:g} is not between {lowest} and {highest}")
    return score


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "http": http,
    "score_in_text": score_in_text,
}
"""Built-in functions, which the config names without a module."""

LIBRARIES = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}
"""What a built-in function needs; imported when it is loaded."""
