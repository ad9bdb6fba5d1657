"""Fields of requests, read strictly: what can't be honoured is refused by its name, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.turns.session import RequestError, Session

MODEL = "policy"
"""Name of the served model."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields that must say what the run says: the distribution that is sampled is the one that is trained."""
HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "user": lambda value: True,
    "metadata": lambda value: True,
    "safety_identifier": lambda value: True,
    "prompt_cache_key": lambda value: True,
    "prompt_cache_retention": lambda value: True,
    "service_tier": lambda value: value in ("auto", "default"),
    "parallel_tool_calls": lambda value: value is True,
}
"""Fields that change no answer, and which values of them are true here anyway."""
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def refused(param: str, value: Any, why: str) -> RequestError:
    """The error for a field."""
    text = repr(value)
    return RequestError(f"{param}={text if len(text) <= 80 else text[:77] + '...'}: {why}", param=param)


def check_fields(
    session: Session, body: Mapping[str, Any], own: Sequence[str], fixed: Mapping[str, Callable[[Any], bool]]
) -> None:
    """Refuse fields that are unknown or say something that can't be done.

    Args:
        own: fields that the caller reads itself.
        fixed: fields of this kind of request and which values of them are true here anyway.
    """
    for name, value in body.items():
        if value is None or name in own:
            continue
        if name == "model":
            if value != MODEL:
                raise RequestError(
                    f"there is no model {value!r} here; the policy is {MODEL!r}",
                    status=404,
                    code="model_not_found",
                    param="model",
                )
        elif name in SAMPLING:
            mine = getattr(session.spec.sampling, name)
            if isinstance(value, bool) or value != mine:
                raise refused(
                    name,
                    value,
                    f"the run samples with {mine}, and what is sampled otherwise can't be trained on; leave it out",
                )
        else:
            allowed = HARMLESS.get(name) or fixed.get(name)
            if allowed is None:
                raise refused(name, value, "this field is not supported; docs/agents.md lists those that are")
            if not allowed(value):
                raise refused(name, value, "this value can't be honoured; leave the field out")


def integer(body: Mapping[str, Any], name: str, low: int = 1, high: int = 2**63 - 1) -> int | None:
    """A whole number, or None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refused(name, value, f"must be a whole number from {low} to {high}")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false; null is false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(name, value, "must be true or false")
    return bool(value)


def stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that end the answer."""
    value = body.get("stop")
    found = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise refused("stop", value, "must be a text or a list of texts, none of them empty")
    return tuple(found)


def tools_of(session: Session, body: Mapping[str, Any], flat: bool = False) -> tuple[dict[str, Any], ...]:
    """The functions that the model is shown, in chat form.

    Args:
        flat: the request has name, description and parameters beside `type`, as the Responses API writes them.
    """
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refused("tool_choice", choice, "answers are sampled freely, so no call can be forced; use auto or none")
    given = body.get("tools") or []
    if not isinstance(given, list):
        raise refused("tools", given, "must be a list")
    found = tuple(_tool(tool, place, flat) for place, tool in enumerate(given))
    if not found or choice == "none":
        return ()
    if not session.reader.reads_tools:
        raise RequestError(
            f"{len(found)} tools are given, but rollout.turns.tool_parser is null, so no call would be read from an answer; "
            "set it to the parser of the model's form (hermes, llama3_json, ...)",
            param="tools",
        )
    return found


def _tool(tool: Any, place: int, flat: bool) -> dict[str, Any]:
    param = f"tools.{place}"
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise refused(param, tool, "only tools of type function are supported")
    function = tool if flat else tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise refused(param, tool, "a function needs a name")
    if function.get("strict"):
        raise refused(
            f"{param}.strict",
            True,
            "answers are sampled freely, so arguments can't be forced into the schema; set it to false",
        )
    known = {"name", "description", "parameters", "strict", *(("type",) if flat else ())}
    for where, names in ((function, known), ({} if flat else tool, {"type", "function"})):
        for name in where:
            if name not in names and where[name] is not None:
                raise refused(f"{param}.{name}", where[name], "this field is not supported")
    shown: dict[str, Any] = {"name": function["name"], "description": function.get("description") or ""}
    shown["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def text_of(content: Any, param: str) -> str | None:
    """A message's content as one text; parts are joined. None stays None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(param, content, "must be a text or a list of parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise refused(f"{param}.{place}", part, "only parts with text are supported")
        texts.append(part["text"])
    return "".join(texts)


def chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, each with the fields that chat templates know."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise refused("messages", given, "must be a list of at least one message")
    return [_message(message, f"messages.{place}") for place, message in enumerate(given)]


def _message(message: Any, param: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refused(param, message, "must be an object")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise refused(f"{param}.role", role, "must be system, developer, user, assistant or tool")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value not in (None, "", [], {}):
            raise refused(f"{param}.{name}", value, "this field is not supported")
    found: dict[str, Any] = {
        "role": "system" if role == "developer" else role,  # one role under two names; templates know the older one
        "content": text_of(message.get("content"), f"{param}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise refused(f"{param}.{name}", message[name], "must be a text")
            found[name] = message[name]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise refused(f"{param}.tool_calls", calls, "must be a list, in an assistant's message")
        found["tool_calls"] = [_call(call, f"{param}.tool_calls.{place}") for place, call in enumerate(calls)]
    if found["content"] is None and "tool_calls" not in found:
        if role != "assistant":
            raise refused(f"{param}.content", None, "is missing")
        found["content"] = ""
    return found


def _call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    fields = [call.get("id"), function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    if not fields or not all(isinstance(value, str) for value in fields):
        raise refused(param, call, "a call needs id, function.name and function.arguments, all of them texts")
    return {"id": fields[0], "type": "function", "function": {"name": fields[1], "arguments": fields[2]}}
