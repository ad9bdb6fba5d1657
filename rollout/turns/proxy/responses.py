"""`POST /v1/responses`: items in, items out; `previous_response_id` names the turn that is continued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from rollout.turns.conversation import RecordedTurn
from rollout.turns.proxy.fields import MODEL, check_fields, flag, integer, refused, text_of, tools_of
from rollout.turns.session import Options, RequestError, Session

_OWN = (
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "seed",
    "max_output_tokens",
    "stream",
    "stream_options",
)
_FIXED = {
    "store": lambda value: isinstance(value, bool),  # turns are kept until the episode ends, whatever it says
    "text": lambda value: value in ({}, {"format": {"type": "text"}}),
    "truncation": lambda value: value == "disabled",
    "background": lambda value: value is False,
    "include": lambda value: value == [],
    "reasoning": lambda value: not any(value.values()) if isinstance(value, dict) else False,
    "top_logprobs": lambda value: value == 0 and not isinstance(value, bool),
}


class Responses:
    """Answers the requests of all sessions."""

    def __init__(self) -> None:
        self._instructions: WeakKeyDictionary[RecordedTurn, str | None] = WeakKeyDictionary()

    async def create(
        self, session: Session, body: Mapping[str, Any], retry: bool, key: str | None
    ) -> dict[str, Any] | Iterator[str]:
        """As `chat.chat_completion`."""
        check_fields(session, body, _OWN, _FIXED)
        stream = flag(body, "stream")
        if body.get("stream_options") is not None and set(body["stream_options"]) - {"include_obfuscation"}:
            raise refused("stream_options", body["stream_options"], "only include_obfuscation, which has no effect")
        options = Options(
            max_new_tokens=integer(body, "max_output_tokens"),
            seed=integer(body, "seed", 0),
            retry=retry,
            idempotency_key=key,
        )
        tools = tools_of(session, body, flat=True)
        messages = input_messages(body.get("input"))
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise refused("instructions", instructions, "must be a text")
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        parent = self._previous(session, body.get("previous_response_id"))
        if parent is not None and self._instructions.get(parent) == instructions:
            (turn,) = await session.generate(messages, parent=parent, tools=tools, options=options)
        elif parent is not None:
            # The API's rule: instructions of an earlier response do not carry over. So it is another conversation from its first token on.
            before = [dict(message) for message in session.conversation.messages(parent)]
            before = before if self._instructions.get(parent) is None else before[1:]
            (turn,) = await session.generate([*system, *before, *messages], tools=tools, options=options)
        else:
            (turn,) = await session.generate([*system, *messages], tools=tools, options=options)
        self._instructions[turn] = instructions
        response = _response(session, turn, body)
        return _events(response) if stream else response

    def _previous(self, session: Session, turn_id: Any) -> RecordedTurn | None:
        if turn_id is None:
            return None
        found = session.conversation.by_id(turn_id) if isinstance(turn_id, str) else None
        if found is None:
            raise RequestError(
                f"{session.name}: there is no response {turn_id!r} in this episode",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found


def input_messages(given: Any) -> list[dict[str, Any]]:
    """The items of `input` as messages. Items that an assistant wrote one after the other (reasoning, text, calls) are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise refused("input", given, "must be a text or a list of items")
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None

    def assistant(fresh: bool) -> dict[str, Any]:
        nonlocal answer
        if answer is None or fresh:
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        return answer

    for place, item in enumerate(given):
        param = f"input.{place}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") == "assistant":
            begun = answer is not None and (answer["content"] is not None or "tool_calls" in answer)
            assistant(begun)["content"] = text_of(item.get("content"), f"{param}.content") or ""
        elif kind == "function_call":
            fields = [item.get("call_id"), item.get("name"), item.get("arguments")]
            if not all(isinstance(value, str) for value in fields):
                raise refused(param, item, "a call needs call_id, name and arguments, all of them texts")
            call = {"id": fields[0], "type": "function", "function": {"name": fields[1], "arguments": fields[2]}}
            assistant(False).setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            begun = answer is not None and (answer["content"] is not None or "tool_calls" in answer)
            text = "".join(part.get("text") or "" for part in item.get("content") or [])
            if text:
                assistant(begun)["reasoning_content"] = text
        elif kind == "function_call_output":
            answer = None
            output = text_of(item.get("output"), f"{param}.output")
            if output is None or not isinstance(item.get("call_id"), str):
                raise refused(param, item, "the output of a call needs call_id and output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif kind == "message" and item.get("role") in ("system", "developer", "user"):
            answer = None
            content = text_of(item.get("content"), f"{param}.content")
            if content is None:
                raise refused(f"{param}.content", None, "is missing")
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": content})
        else:
            raise refused(param, item, "items may be messages, reasoning, function_call and function_call_output")
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _response(session: Session, turn: RecordedTurn, body: Mapping[str, Any]) -> dict[str, Any]:
    cut, sampling = turn.generation.finish_reason == "length", session.spec.sampling
    prompt, sampled = len(turn.prompt_ids), len(turn.generation.token_ids)
    return {
        "id": turn.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": MODEL,
        "output": _output(turn),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        "user": body.get("user"),
    }


def _output(turn: RecordedTurn) -> list[dict[str, Any]]:
    """Ids of the items are made of the turn's, so they are the same in every run."""
    message, status = turn.message, "incomplete" if turn.generation.finish_reason == "length" else "completed"
    name = turn.id.removeprefix("turn-")
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs-{name}", "type": "reasoning", "summary": [], "content": content, "status": status})
    if message.get("content") or not message.get("tool_calls"):
        text: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        items.append({"id": f"msg-{name}", "type": "message", "role": "assistant", "status": status, "content": [text]})
    for call in message.get("tool_calls") or ():
        items.append(
            {
                "id": f"fc-{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": status,
            }
        )
    return items


def _events(response: Mapping[str, Any]) -> Iterator[str]:
    """The response as events; each text comes in one piece, since the turn is complete before the first event is sent."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for place, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": place}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            events.append(_item("added", place, {**empty, "arguments": ""}))
            kind = "response.function_call_arguments"
            events.append({"type": f"{kind}.delta", **at, "delta": item["arguments"]})
            events.append({"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]})
        else:
            events.append(_item("added", place, {**empty, "content": []}))
            (part,) = item["content"]
            kind = "response.output_text" if part["type"] == "output_text" else "response.reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            at["content_index"] = 0
            events.append({"type": "response.content_part.added", **at, "part": {**part, "text": ""}})
            events.append({"type": f"{kind}.delta", **at, "delta": part["text"], **more})
            events.append({"type": f"{kind}.done", **at, "text": part["text"], **more})
            events.append({"type": "response.content_part.done", **at, "part": part})
        events.append(_item("done", place, item))
    events.append({"type": f"response.{response['status']}", "response": dict(response)})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"


def _item(what: str, place: int, item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": f"response.output_item.{what}", "output_index": place, "item": dict(item)}
