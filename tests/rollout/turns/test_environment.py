"""Environments: the loop, what they may return, and the built-in ones."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.checks import cross_check
from configs.schema import Config, RolloutConfig, TurnsConfig
from rollout.turns.agent_values import AgentRow
from rollout.turns.answers import AnswerReader
from rollout.turns.environment import Action, Context, EnvironmentRunner
from rollout.turns.environments.gymnasium import Environment as Gymnasium
from rollout.turns.environments.tools import Environment as Tools
from rollout.turns.environments.tries import Environment as Tries
from rollout.turns.runner import EpisodeError, OpenSessions
from rollout.turns.session import SessionResult, SessionSpec
from rollout.types import SampleKey
from tests.rollout.turns.scripted import TOOLS_TEMPLATE, codec, digits, policy_of, session_of, spec_of

PLAIN = codec()

GUESS = """
class Guess:
    def __init__(self, words="No."):
        self.words = words

    def reset(self, row, seed):
        self.seen, self.seed = row, seed
        return [{"role": "user", "content": f"Guess {row.answer} {seed % 1000}"}]

    async def step(self, action):
        right = int(action.text) % 2 == 0
        return [{"role": "user", "content": self.words}], float(right), right

class Endless:
    def reset(self, row, seed): return []
    def step(self, action): return [{"role": "user", "content": "More."}], 0.5, False

class Silent(Endless):
    def step(self, action): return [], 0.0, False

class Pair(Endless):
    def step(self, action): return [], 0.0

class Words(Endless):
    def step(self, action): return [], "1", True

class Text(Endless):
    def reset(self, row, seed): return "hello"

class Raises(Endless):
    def step(self, action): raise KeyError("lost")

class Half:
    def reset(self, row, seed): return []
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "my_env.py"
    path.write_text(GUESS)
    return path


def play(name: str, spec: SessionSpec | None = None, say: Callable[..., str] = digits, **turns: Any) -> SessionResult:
    """One episode, with the runner's own start and end."""

    async def whole() -> SessionResult:
        config = RolloutConfig(environment=name, turns=TurnsConfig(**turns))
        runner = EnvironmentRunner(config, PLAIN, AnswerReader(PLAIN))
        await runner.start(OpenSessions(), None)
        session = session_of(PLAIN, policy_of(PLAIN, say), spec, **turns)
        try:
            await runner.run(session)
        finally:
            await runner.close()
        return await session.end()

    return asyncio.run(whole())


def row(**extra: Any) -> AgentRow:
    """A row whose answer is 5."""
    return AgentRow("task/7", "task", [], "", "5", extra)


class TestOwn:
    def test_an_episode_goes_on_until_the_environment_ends_it(self, file: Path) -> None:
        result = play(f"{file}:Guess", max_turns=20)
        assert [turn.reward for turn in result.turns] == [0.0] * (len(result.turns) - 1) + [1.0]
        assert int(result.text) % 2 == 0
        assert result.messages[-1]["content"] == result.text
        assert not result.truncated

    def test_params_reach_the_class(self, file: Path) -> None:
        said = iter(("111", "222"))
        result = play(f"{file}:Guess", say=lambda _: next(said), params={"words": "Wrong!"})
        assert result.messages[2]["content"] == "Wrong!"

    def test_a_group_begins_alike(self, file: Path) -> None:
        specs = [replace(spec_of(PLAIN), key=SampleKey(0, sample), request_index=sample) for sample in (0, 1)]
        first, second = (play(f"{file}:Guess", spec, max_turns=20) for spec in specs)
        assert first.turns[0].prompt_ids == second.turns[0].prompt_ids
        assert first.turns[0].seed != second.turns[0].seed
        other = play(f"{file}:Guess", replace(specs[0], step=2), max_turns=20)
        assert other.turns[0].prompt_ids != first.turns[0].prompt_ids

    def test_the_budget_ends_an_environment_that_never_does(self, file: Path) -> None:
        result = play(f"{file}:Endless", max_turns=3)
        assert (len(result.turns), result.reward, result.truncated) == (3, 1.5, True)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Silent", r"step added no message and did not end the episode"),
            ("Pair", r"step returned \(\[\], 0\.0\); it must be \(messages, reward, done\)"),
            ("Words", r"step gave the reward '1'; it must be a finite number"),
            ("Text", r"reset gave 'hello' for messages"),
            ("Raises", r"(?s)step raised KeyError: 'lost'.*my_env\.py"),
        ],
    )
    def test_what_an_environment_may_not_return(self, file: Path, name: str, message: str) -> None:
        with pytest.raises(EpisodeError, match=message):
            play(f"{file}:{name}")

    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            ("Half", {}, "it has no step"),
            ("Missing", {}, "has no function 'Missing'"),
            ("Guess", {"colour": 1}, "unexpected keyword argument 'colour'"),
        ],
    )
    def test_code_that_cannot_be_used_is_found_at_the_start(
        self, file: Path, name: str, params: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            play(f"{file}:{name}", params=params)


class TestTries:
    def action(self, text: str, turn: int = 0) -> Action:
        return Action(text, {"role": "assistant", "content": text}, "stop", turn)

    def test_a_wrong_answer_may_be_mended(self) -> None:
        environment = Tries(tries=2, function="exact_match", late=0.5)
        environment.reset(row(), 0)
        assert environment.step(self.action("4")) == ([{"role": "user", "content": "No. Try again."}], 0.0, False)
        assert environment.step(self.action("5", 1))[1:] == (0.5, True)
        assert environment.step(self.action("4", 1))[1:] == (0.0, True)
        assert environment.step(self.action("5"))[1:] == (1.0, True)

    def test_a_task_of_reasoning_gym_scores_itself(self) -> None:
        task = {"task": "basic_arithmetic", "params": {"seed": 1, "size": 1}, "question": "2 + 3", "metadata": {}}
        environment = Tries()
        environment.reset(row(reasoning_gym=task), 0)
        assert environment.step(self.action("5"))[1:] == (1.0, True)

    def test_arguments_are_checked(self) -> None:
        with pytest.raises(ValueError, match="tries is 0"):
            Tries(tries=0)


ECHO = """
import string

import gymnasium


class Echo(gymnasium.Env):
    action_space = gymnasium.spaces.Text(5, charset="0123456789")
    observation_space = gymnasium.spaces.Text(20, charset=string.printable)

    def __init__(self, secret=100):
        self.secret = secret

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(self.secret))
        return f"Say {self.number}.", {}

    def step(self, action):
        return "Once more.", float(action == str(self.number)), action == str(self.number), False, {}


gymnasium.register("Echo-v0", Echo, max_episode_steps=3)
"""


class TestGymnasium:
    @pytest.fixture
    def echo(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "echo_here.py").write_text(ECHO)
        monkeypatch.syspath_prepend(tmp_path)
        return "echo_here:Echo-v0"

    def row(self) -> AgentRow:
        return replace(row(), messages=[{"role": "user", "content": "Play."}])

    def action(self, text: str) -> Action:
        return Action(text, {"role": "assistant", "content": text}, "stop", 0)

    def test_observations_are_messages_and_answers_are_actions(self, echo: str) -> None:
        environment = Gymnasium(echo, make={"secret": 50}, penalty=-0.5)
        (first,) = environment.reset(self.row(), 7)
        asked, number = first["content"].rsplit("\n", 1)[0], first["content"].split()[-1].strip(".")
        assert asked == "Play."  # the row's own question comes first
        assert environment.reset(self.row(), 7) == [first]
        assert {environment.reset(self.row(), seed)[0]["content"] for seed in range(8)} != {first["content"]}
        environment.reset(self.row(), 7)
        assert environment.step(self.action("no")) == (
            [{"role": "user", "content": "'no' is no action here."}],
            -0.5,
            False,
        )
        assert environment.step(self.action("99")) == ([{"role": "user", "content": "Once more."}], 0.0, False)
        assert environment.step(self.action(number))[1:] == (1.0, True)

    def test_a_time_limit_ends_an_episode(self, echo: str) -> None:
        environment = Gymnasium(echo, begin="Listen.")
        assert environment.reset(self.row(), 2**40)[0]["content"].startswith("Listen.\nSay ")
        assert [environment.step(self.action("999"))[2] for _ in range(3)] == [False, False, True]

    def test_whole_numbers_are_read_from_answers(self) -> None:
        environment = Gymnasium("FrozenLake-v1", make={"is_slippery": False}, action="int")
        environment.reset(self.row(), 0)
        assert environment.step(self.action("down"))[0][0]["content"] == "'down' is no whole number."
        assert environment.step(self.action("7"))[0][0]["content"] == "'7' is no action here."
        assert environment.step(self.action(" 1\n")) == ([{"role": "user", "content": "4"}], 0.0, False)
        environment.close()

    def test_an_episode_is_played_with_it(self, echo: str) -> None:
        found = play("gymnasium", params={"id": echo, "begin": "Listen."}, say=digits)
        assert found.failure is None
        assert len(found.turns) == 3
        with pytest.raises(ValueError, match="action is 'words'"):
            Gymnasium(echo, action="words")

    def test_it_is_missed_before_anything_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gymnasium", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        config = Config(rollout=RolloutConfig(environment="gymnasium", turns=TurnsConfig(max_tokens=64)))
        assert "pip install 'exactrl[gymnasium]'" in " ".join(map(str, cross_check(config)))


class TestTools:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Callable[..., Tools]:
        (tmp_path / "my_tools.py").write_text(
            '''
import time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    time.sleep(0.05 * a)
    return a + b

def fail(what: str) -> str:
    """Fail.

    Args:
        what: How.
    """
    raise RuntimeError(what)
'''
        )
        shows_tools = codec(TOOLS_TEMPLATE)

        class Reader(AnswerReader):
            def __init__(self) -> None:
                super().__init__(shows_tools)
                self.reads_tools = True

            def call_begins(self) -> str | None:
                return "<tool_call>"

        context = Context(Reader(), shows_tools.takes_tools, True)
        names = [f"{tmp_path / 'my_tools.py'}:{name}" for name in ("add", "fail")]
        return lambda **more: Tools(**{"tools": names, "context": context, **more})

    def action(self, *calls: tuple[str, Any], text: str = "") -> Action:
        made = [
            {
                "id": f"c{i}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for i, (name, arguments) in enumerate(calls)
        ]
        return Action(text, {"role": "assistant", "content": text, "tool_calls": made}, "stop", 0)

    def test_functions_are_shown_by_their_schema(self, made: Callable[..., Tools]) -> None:
        first = made().tools[0]["function"]
        assert (first["name"], first["description"]) == ("add", "Add two numbers.")
        assert first["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}

    @pytest.mark.parametrize("concurrent", [False, True])
    def test_results_come_in_the_order_of_the_calls(self, made: Callable[..., Tools], concurrent: bool) -> None:
        calls = [("add", {"a": a, "b": 10}) for a in (2, 0, 1)]
        messages, reward, done = made(concurrent=concurrent).step(self.action(*calls))
        assert [(m["role"], m["tool_call_id"], m["content"]) for m in messages] == [
            ("tool", "c0", "12"),
            ("tool", "c1", "10"),
            ("tool", "c2", "11"),
        ]
        assert (reward, done) == (0.0, False)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (("divide", {}), r"Error: there is no tool 'divide'; there are add, fail."),
            (("add", "{'a': 1}"), "Error: ValueError: the arguments are no valid JSON"),
            (("add", "[1]"), "Error: ValueError: the arguments must be an object"),
            (("add", {"a": "x", "b": 1}), "Error: a: Input should be a valid integer"),
            (("add", {"a": 1}), "Error: b: Missing required argument"),
            (("fail", {"what": "badly"}), "Error: RuntimeError: badly"),
            (("add", {"a": "__import__('os').abort()", "b": 1}), "Error: a: Input should be a valid integer"),
        ],
    )
    def test_a_wrong_call_is_answered_with_its_error(
        self, made: Callable[..., Tools], call: tuple[str, Any], message: str
    ) -> None:
        ((answer,), reward, done) = made().step(self.action(call))
        assert answer["role"] == "tool"
        assert answer["content"].startswith(message)
        assert (reward, done) == (0.0, False)

    def test_a_call_that_cannot_be_read_is_answered_and_a_plain_answer_ends(self, made: Callable[..., Tools]) -> None:
        messages, _, done = made().step(self.action(text="<tool_call>{oops"))
        assert (messages[0]["role"], done) == ("user", False)
        assert made().step(self.action(text="12")) == ([], 0.0, True)

    def test_what_cannot_work_is_refused(self, made: Callable[..., Tools]) -> None:
        reader = AnswerReader(PLAIN)
        with pytest.raises(ValueError, match="no place for tools"):
            made(context=Context(reader, False, True))
        with pytest.raises(ValueError, match="tool_parser is null"):
            made(context=Context(reader, True, True))
        with pytest.raises(ValueError, match="tools is empty"):
            made(tools=[])


def test_an_environment_that_blocks_holds_up_no_other(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nclass Slow:\n    def reset(self, row, seed): return []\n"
        "    def step(self, action):\n        time.sleep(0.3)\n        return [], 1.0, True\n"
    )

    async def many() -> float:
        config = RolloutConfig(environment=f"{tmp_path / 'slow.py'}:Slow")
        runner = EnvironmentRunner(config, PLAIN, AnswerReader(PLAIN))
        await runner.start(OpenSessions(), None)
        sessions = [session_of(PLAIN, policy_of(PLAIN, digits)) for _ in range(20)]
        start = time.monotonic()
        await asyncio.gather(*(runner.run(session) for session in sessions))
        return time.monotonic() - start

    assert asyncio.run(many()) < 20 * 0.3
