"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout.turns.conversation import RecordedTurn
from rollout.turns.proxy.fields import MODEL, chat_messages, check_fields, flag, integer, refused, stops, tools_of
from rollout.turns.session import Options, Session

_OWN = (
    "messages",
    "tools",
    "tool_choice",
    "n",
    "seed",
    "stop",
    "logprobs",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
)
_FIXED = {
    "store": lambda value: value is False,
    "response_format": lambda value: value == {"type": "text"},
    "top_logprobs": lambda value: value == 0 and not isinstance(value, bool),
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
}


async def chat_completion(
    session: Session, body: Mapping[str, Any], retry: bool, key: str | None
) -> dict[str, Any] | Iterator[str]:
    """Answer a request.

    Args:
        retry: the client has sent it before.
        key: the client's own name of the request.

    Returns:
        The response, or the events of a stream, each as it is sent.

    Raises:
        RequestError: the request is refused.
    """
    check_fields(session, body, _OWN, _FIXED)
    cap = integer(body, "max_completion_tokens")
    older = integer(body, "max_tokens")
    if None not in (cap, older) and cap != older:
        raise refused("max_tokens", older, f"max_completion_tokens says {cap}; leave one of them out")
    stream, with_logprobs, with_usage = flag(body, "stream"), flag(body, "logprobs"), _wants_usage(body)
    options = Options(
        max_new_tokens=cap or older,
        stop=stops(body),
        seed=integer(body, "seed", 0),
        n=integer(body, "n") or 1,
        retry=retry,
        idempotency_key=key,
    )
    turns = await session.generate(chat_messages(body), tools=tools_of(session, body), options=options)
    if stream:
        return _events(session, turns, with_logprobs, with_usage)
    choices = [
        {"index": place, "message": _message(turn), **_ending(session, turn, with_logprobs)}
        for place, turn in enumerate(turns)
    ]
    return {**_head(turns, "chat.completion"), "choices": choices, "usage": _usage(turns)}


def _wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not flag(body, "stream"):
        raise refused("stream_options", options, "is for streams; set stream to true")
    # A mask of the length of chunks against eavesdroppers; there is one chunk.
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise refused("stream_options", options, "only include_usage is supported")
    return flag(options, "include_usage")


def _head(turns: Sequence[RecordedTurn], kind: str) -> dict[str, Any]:
    return {"id": turns[0].id, "object": kind, "created": int(time.time()), "model": MODEL}


def _message(turn: RecordedTurn) -> dict[str, Any]:
    return {"content": None, "refusal": None, **turn.message}


def _ending(session: Session, turn: RecordedTurn, with_logprobs: bool) -> dict[str, Any]:
    """`turn_id` is this project's own: what a reward may be given to."""
    reason = turn.generation.finish_reason
    if reason == "stop" and turn.message.get("tool_calls"):
        reason = "tool_calls"
    logprobs = {"content": token_logprobs(session, turn), "refusal": None} if with_logprobs else None
    return {"finish_reason": reason, "logprobs": logprobs, "turn_id": turn.id}


def token_logprobs(session: Session, turn: RecordedTurn) -> list[dict[str, Any]]:
    """Every sampled token, the ending one too: its text, and its log-probability (nats) under the distribution that was sampled."""
    texts = session.reader.token_texts(turn.generation.token_ids)
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, turn.generation.logprobs, strict=True)
    ]


def _usage(turns: Sequence[RecordedTurn]) -> dict[str, Any]:
    prompt, sampled = len(turns[0].prompt_ids), sum(len(turn.generation.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _events(session: Session, turns: Sequence[RecordedTurn], with_logprobs: bool, with_usage: bool) -> Iterator[str]:
    """One chunk with everything and one that ends it for each answer: the turn is complete before its first chunk is sent."""
    head = _head(turns, "chat.completion.chunk")
    none: dict[str, Any] = {"usage": None} if with_usage else {}
    for place, turn in enumerate(turns):
        ending = _ending(session, turn, with_logprobs)
        delta = _message(turn)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        first = {"index": place, "delta": delta, **ending, "finish_reason": None}
        last = {"index": place, "delta": {}, "finish_reason": ending["finish_reason"], "logprobs": None}
        for choice in (first, last):
            yield f"data: {json.dumps({**head, 'choices': [choice], **none})}\n\n"
    if with_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(turns)})}\n\n"
    yield "data: [DONE]\n\n"
