"""Tools: Python functions that the policy may call before it answers.

    rollout.environment=tools 'rollout.turns.params.tools=[my_tools.py:add]' rollout.turns.tool_parser=hermes

The chat template shows the functions, vLLM's parser reads the calls, and each result comes back as a `tool` message. Nothing that the policy writes is evaluated. The
episode is over with an answer that calls nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from configs.user_code import load_reference
from rollout.turns.agent_values import AgentRow
from rollout.turns.answers import arguments_of
from rollout.turns.environment import Action, Context
from rollout.turns.runner import EpisodeError


class Environment:
    """One episode with tools.

    Args:
        tools: references to functions (`my_tools.py:add`). Parameters have types, and the docstring describes the function and, in Google's style,
            each argument: that is what the policy reads.
        concurrent: run the calls of one turn at the same time; results come in the order of the calls either way.

    The reward is that of the other sources (`reward.functions`, `reward.model`); a turn's own is 0.
    """

    def __init__(self, tools: Sequence[str], context: Context, concurrent: bool = False) -> None:
        from transformers.utils import get_json_schema

        if not tools:
            raise ValueError("rollout.turns.params.tools is empty; name at least one function")
        if not context.takes_tools:
            raise ValueError("the chat template has no place for tools; set model.chat_template to one that shows them")
        if not context.reader.reads_tools:
            raise ValueError("rollout.turns.tool_parser is null, so no tool call would be read")
        functions = [load_reference(reference) for reference in tools]
        self.tools = [get_json_schema(function) for function in functions]
        self._functions: dict[str, Callable[..., Any]] = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            raise ValueError(f"two of the tools {list(tools)} have the same name")
        self._types: dict[str, TypeAdapter[Any]] = {
            name: TypeAdapter(function)  # type: ignore[arg-type]
            for name, function in self._functions.items()
        }
        self._call_begins = context.reader.call_begins()
        self._concurrent = concurrent

    def reset(self, row: AgentRow, seed: int) -> list[Mapping[str, Any]]:
        """Begin with the row's own messages."""
        return []

    def step(self, action: Action) -> tuple[list[Mapping[str, Any]], float, bool]:
        """Run the calls; without any the episode is over."""
        calls = action.tool_calls
        if not calls:
            if self._call_begins is not None and self._call_begins in action.text:
                return [{"role": "user", "content": "Error: the tool call could not be read."}], 0.0, False
            return [], 0.0, True
        if self._concurrent:
            with ThreadPoolExecutor(len(calls)) as threads:
                results = list(threads.map(self._result, calls))
        else:
            results = [self._result(call) for call in calls]
        messages: list[Mapping[str, Any]] = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return messages, 0.0, False

    def _result(self, call: Mapping[str, Any]) -> str:
        """The result of a call as text, or its error."""
        name = call["function"]["name"]
        if name not in self._functions:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._functions)}."
        try:
            arguments = arguments_of(call)
            # Checks and converts the arguments by the function's own types, then calls it.
            found = self._types[name].validate_python(ArgsKwargs((), arguments))
        except ValidationError as error:
            first = error.errors()[0]
            return f"Error: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}."
        except EpisodeError:
            raise
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found, default=str)
