"""From sampled tokens to an assistant's message: text, reasoning and tool calls, read by vLLM's own parsers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.user_code import is_reference, load_reference
from rollout.turns.conversation import Codec, Tools

Message = dict[str, Any]


class AnswerReader:
    """Reads answers.

    Args:
        codec: the policy's.
        tool_parser: `rollout.turns.tool_parser`; None reads no tool calls.
        reasoning_parser: `rollout.turns.reasoning_parser`; None splits nothing off.

    Raises:
        ValueError: there is no such parser, or it can't work with this tokenizer.
    """

    def __init__(self, codec: Codec, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        self._codec = codec
        self._tokenizer = codec.tokenizer
        self._tool_parser = None if tool_parser is None else _tool_parser_class(tool_parser)
        self._reasoning_parser = None if reasoning_parser is None else _reasoning_parser_class(reasoning_parser)
        self.reads_tools = self._tool_parser is not None
        if self._tool_parser is not None:
            self._parser_for((), "rollout.turns.tool_parser", tool_parser)

    def read(self, token_ids: Sequence[int], tools: Tools, name: str) -> Message:
        """The message of an answer.

        Args:
            tools: what the request offered; without tools no calls are read.
            name: the turn's; ids of its tool calls are made of it, so that they are the same in every run.

        Returns:
            `role`, `content` (text, or None beside tool calls), `reasoning_content` and `tool_calls` where there are any. Text that
            a parser can't read stays in `content`, as it was sampled.
        """
        with_calls = self._tool_parser is not None and bool(tools)
        text = self._text(token_ids, with_calls)
        message: Message = {"role": "assistant"}
        if self._reasoning_parser is not None:
            reasoning, rest = self._reasoning_parser(self._tokenizer).extract_reasoning(text, _request(tools))
            text = rest or ""
            if reasoning:
                message["reasoning_content"] = reasoning
        calls: list[Any] = []
        content: str | None = text
        if with_calls:
            try:
                found = self._parser_for(tools).extract_tool_calls(text, _request(tools))
            except (
                Exception
            ):  # parsers are not written for text that was merely sampled; what one can't read is no call
                found = None
            if found is not None and found.tools_called:
                calls, content = found.tool_calls, found.content
        message["content"] = content
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_id(name, place),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for place, call in enumerate(calls)
            ]
        return message

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special tokens included."""
        return [self._codec.decode_all([token]) for token in token_ids]

    def call_begins(self) -> str | None:
        """The text with which the model begins a tool call, where the parser says so: an answer that has it and no calls holds a malformed one."""
        if self._tool_parser is None:
            return None
        return getattr(self._parser_for(()), "tool_call_start_token", None)

    def _text(self, token_ids: Sequence[int], with_special: bool) -> str:
        if not with_special:
            return self._codec.decode(token_ids)
        # Some models mark their calls with special tokens. The token that ends the answer is no part of it.
        text = self._codec.decode_all(token_ids)
        return text.removesuffix(self._tokenizer.eos_token or "")

    def _parser_for(self, tools: Tools, setting: str = "", value: str | None = None) -> Any:
        assert self._tool_parser is not None
        try:
            return self._tool_parser(self._tokenizer, _request(tools).tools)
        except Exception as error:
            if not setting:
                raise
            raise ValueError(f"{setting}={value}: the parser can't work with this tokenizer: {error}") from error


def call_id(turn: str, place: int) -> str:
    """Id of a tool call: nine letters and digits (which is what Mistral's templates want), a function of the turn and the call's place."""
    digest = hashlib.blake2b(f"{turn}/{place}".encode(), digest_size=9).digest()
    return base64.b32encode(digest).decode().lower()[:9]


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call, as an object.

    Raises:
        ValueError: they are no JSON object; says where the text goes wrong.
    """
    text = call["function"].get("arguments") or "{}"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the arguments are no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the arguments must be an object, got {text[:80]}")
    return found


def _request(tools: Tools) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "model": "policy"}
    if tools:
        fields |= {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"}
    return ChatCompletionRequest(**fields)


def _tool_parser_class(name: str) -> Any:
    if is_reference(name):
        return load_reference(name)
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise ValueError(f"rollout.turns.tool_parser={name}: {error.args[0]}") from error


def _reasoning_parser_class(name: str) -> Any:
    from vllm.reasoning import ReasoningParserManager

    try:
        return ReasoningParserManager.get_reasoning_parser(name)
    except KeyError as error:
        raise ValueError(f"rollout.turns.reasoning_parser={name}: {error.args[0]}") from error
