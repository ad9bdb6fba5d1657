"""Environments: what the policy acts in, turn after turn.

    reset(row, seed) -> messages --generate--> Action --step--> (messages, reward, done) --generate--> ...

An environment is a class; one object of it plays one episode. Its methods may be plain or async functions:

    class Guess:
        def reset(self, row, seed):                    # the conversation to begin with; [] for the row's own messages (row.messages)
            self.secret = seed % 100
            return [{"role": "user", "content": "Guess a number below 100."}]

        def step(self, action):                        # messages to add, the reward of this turn, whether the episode is over
            right = action.text.strip() == str(self.secret)
            return [{"role": "user", "content": "No."}], float(right), right

`tools`, if it has such an attribute after `reset`, is the list of functions (in OpenAI's form) that turns may call. `close()`, if there is one, is called at the end.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.checks import ENVIRONMENTS
from configs.schema import RolloutConfig
from configs.user_code import load_reference
from determinism.seeds import environment_seed
from rollout.turns.agent_values import row_of
from rollout.turns.answers import AnswerReader
from rollout.turns.conversation import Codec
from rollout.turns.runner import EpisodeError, OpenSessions, UserLoop
from rollout.turns.session import BudgetError, Session

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Action:
    """What the policy did in a turn."""

    text: str
    """The answer's text, without reasoning and tool calls where parsers are set."""
    message: Mapping[str, Any]
    """The answer as a message."""
    finish_reason: str
    """`stop`, or `length` when a cap ended it."""
    turn: int
    """Number of the turn, from 0."""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls in the answer, in order."""
        return self.message.get("tool_calls") or ()


@dataclass(frozen=True)
class Context:
    """What built-in environments know besides the row; own ones get it too if their class has a parameter `context`."""

    reader: AnswerReader
    """Reads tool calls."""
    takes_tools: bool
    """Whether the chat template shows tools."""
    full_determinism: bool


def load_environment(name: str) -> Any:
    """The class behind `rollout.environment`.

    Raises:
        UserCodeError: a reference leads to nothing, or to something without `reset` and `step`.
    """
    if name in ENVIRONMENTS:
        return importlib.import_module(f"rollout.turns.environments.{name}").Environment
    found = load_reference(name)
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(f"rollout.environment={name}: it has no {' and no '.join(missing)}; see docs/agents.md")
    return found


class EnvironmentRunner:
    """Plays every episode in an environment of its own (`rollout.turns.runner.Runner`).

    Args:
        config: names the class and its arguments.
    """

    def __init__(self, config: RolloutConfig, codec: Codec, reader: AnswerReader) -> None:
        assert config.environment is not None
        self._name, self._params = config.environment, dict(config.turns.params)
        self._context = Context(reader, bool(getattr(codec, "takes_tools", False)), config.full_determinism)
        self._class: Any = None
        self._user = UserLoop()

    async def start(self, sessions: OpenSessions, base_url: str | None) -> None:
        """Load the class and make one object, so that wrong arguments are found now."""
        self._class = load_environment(self._name)
        try:
            await self._user.call(self._make)
        except EpisodeError as error:
            raise ValueError(f"rollout.environment={self._name}: {error}") from error

    async def admit(self, session: Session) -> None:
        """Nothing to wait for."""

    async def run(self, session: Session) -> None:
        """See `Runner.run`."""
        environment = await self._user.call(self._make)
        try:
            await self._play(environment, session)
        finally:
            if hasattr(environment, "close"):
                await self._call(environment.close, "close")

    async def close(self) -> None:
        """Stop the thread of the users' code."""
        self._user.close()

    async def _play(self, environment: Any, session: Session) -> None:
        spec = session.spec
        seed = environment_seed(run_seed=spec.run_seed, split=spec.split, step=spec.step, prompt_id=spec.prompt.id)
        added = self._messages("reset", await self._call(environment.reset, "reset", row_of(session), seed))
        added = added or list(spec.prompt.messages)
        parent, number = None, 0
        while True:
            try:
                (turn,) = await session.generate(added, parent=parent, tools=getattr(environment, "tools", None) or ())
            except BudgetError:
                return  # the episode is over; that is what budgets are for
            text = str(turn.message.get("content") or "")
            action = Action(text, turn.message, turn.generation.finish_reason, number)
            found = await self._call(environment.step, "step", action)
            if not isinstance(found, tuple | list) or len(found) != 3:
                raise EpisodeError(f"{self._name}.step returned {_short(found)}; it must be (messages, reward, done)")
            messages, reward, done = found
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EpisodeError(f"{self._name}.step gave the reward {_short(reward)}; it must be a finite number")
            session.set_reward(float(reward), turn.id)
            if done:
                return
            added, parent, number = self._messages("step", messages), turn, number + 1
            if not added:
                raise EpisodeError(f"{self._name}.step added no message and did not end the episode")

    async def _call(self, method: Any, name: str, *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await self._user.run(self._awaiting(method, name, *arguments))
        return await self._user.call(self._calling, method, name, *arguments)

    async def _awaiting(self, method: Any, name: str, *arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except Exception as error:
            raise self._failed(name, error) from error

    def _calling(self, method: Any, name: str, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise self._failed(name, error) from error

    def _make(self) -> Any:
        try:
            takes = "context" in _parameters(self._class)
            return self._class(**self._params, **({"context": self._context} if takes else {}))
        except Exception as error:
            raise self._failed("__init__", error) from error

    def _failed(self, name: str, error: Exception) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        where = "".join(traceback.format_list(frames[-3:]))
        return EpisodeError(f"{self._name}.{name} raised {type(error).__name__}: {error}\n{where}".rstrip())

    def _messages(self, method: str, found: Any) -> list[Mapping[str, Any]]:
        good = isinstance(found, list | tuple) and all(
            isinstance(message, Mapping) and message.get("role") in ROLES for message in found
        )
        if not good:
            raise EpisodeError(
                f"{self._name}.{method} gave {_short(found)} for messages; they must be a list of dicts with a role "
                f"({', '.join(ROLES)}) and a content"
            )
        return list(found)


def _parameters(made: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(made).parameters
    except (TypeError, ValueError):  # a class without an `__init__` of its own
        return {}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
