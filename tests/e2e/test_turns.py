"""Level D6: episodes of several turns have the same bits in any topology, under any launcher, after a kill; and what breaks that is caught."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.golden import TURNS, golden_file
from tests.e2e.test_golden import assert_golden
from tests.e2e.test_levels import wait_for
from trainer.tiny.tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.timeout(580)


@pytest.fixture(scope="module")
def tries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a wrong answer may be mended; a few episodes of each step are played twice and compared."""
    run = tmp_path_factory.mktemp("turns") / "tries"
    return runs.train(run, *TURNS, "rollout.turns.audit_episodes=3", launcher="python")


def test_episodes_have_turns_and_are_trained_turn_by_turn(tries: Path) -> None:
    row = runs.metrics(tries)[-1]
    assert row["rollout/turns/max"] == 2
    assert row["rollout/turns/mean"] > 1
    assert row["rollout/forked_turns"] == 0
    assert "turns" in runs.ledger(tries)[1]["phases"]


def test_the_run_keeps_the_golden_ledger_of_several_turns(tries: Path) -> None:
    assert_golden(tries, golden_file("turns-"))


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("ray", marks=pytest.mark.long)])
def test_launcher_ranks_replicas_processes_and_prefix_cache_change_nothing(
    tries: Path, tmp_path: Path, launcher: str
) -> None:
    other = runs.train(
        tmp_path / "other",
        *TURNS,
        *(
            "rollout.replicas=2",
            "rollout.proxy.processes=2",
            "rollout.max_num_seqs=3",
            "rollout.enable_prefix_caching=false",
        ),
        launcher=launcher,
        ranks=2,
    )
    runs.assert_same(tries, other)


def test_after_a_kill_the_run_goes_on_with_the_same_bits(tries: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    process = runs.start(run, *TURNS, launcher="python")
    wait_for(run / "checkpoints" / "step_000001" / "COMPLETE")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    runs.train(run, *TURNS, "run.resume=auto", launcher="python")
    runs.assert_same(tries, run)


def test_servers_as_engines_change_nothing(tries: Path, tmp_path: Path) -> None:
    settings = ("rollout.engine=vllm_server", "rollout.replicas=2")
    other = runs.train(tmp_path / "other", *TURNS, *settings, launcher="python")
    runs.assert_same(tries, other)


CLOCK = """
import time

async def run(session, row):
    for _ in range(2):
        messages = [{"role": "user", "content": str(time.time_ns())}]
        await session.client.chat.completions.create(model=session.model, messages=messages)
    return 1.0

class Clock:
    def reset(self, row, seed):
        return []

    def step(self, action):
        return [{"role": "user", "content": str(time.time_ns())}], 1.0, action.turn == 1
"""


@pytest.mark.parametrize(("kind", "name", "turn"), [("environment", "Clock", 1), ("agent", "run", 0)])
def test_code_that_reads_the_clock_is_caught_by_the_audit(tmp_path: Path, kind: str, name: str, turn: int) -> None:
    (tmp_path / "clock.py").write_text(CLOCK)
    settings = [*TURNS[:1], f"rollout.{kind}={tmp_path / 'clock.py'}:{name}", *TURNS[2:4]]
    process = runs.start(tmp_path / "run", *settings, "rollout.turns.audit_episodes=1", launcher="python")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert f"was played twice with the same seeds and differs: turn {turn}, prompt_ids" in output


TOOL = '''
import json
import re
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser

class Halving(ToolParser):
    """An answer that ends with an even digit asks for its half; others are answers. So untrained models call, too."""

    def extract_tool_calls(self, model_output, request):
        even = re.search(r"([02468])$", model_output)
        call = FunctionCall(name="half", arguments=json.dumps({"number": int(even[1])})) if even else None
        calls = [ToolCall(function=call)] if call else []
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=model_output)

def half(number: int) -> int:
    """
    Halves a number.

    Args:
        number: The number.
    """
    return number // 2
'''
TOOLS_BY_NAME = "{%- if tools %}{{ '<system>' + tools[0].function.name }}{% endif -%}" + CHAT_TEMPLATE


def test_tools_have_the_same_bits_on_servers_ranks_replicas_and_processes(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "tools.jinja").write_text(TOOLS_BY_NAME)
    settings = (
        *("rollout.environment=tools", f"rollout.turns.params.tools=[{tmp_path / 'tool.py'}:half]"),
        *(
            f"rollout.turns.tool_parser={tmp_path / 'tool.py'}:Halving",
            f"model.chat_template={tmp_path / 'tools.jinja'}",
        ),
        *("rollout.turns.max_turns=3", "rollout.turns.max_tokens=64"),
    )
    one = runs.train(tmp_path / "one", *settings, "rollout.turns.audit_episodes=3", launcher="python")
    row = runs.metrics(one)[-1]
    assert (row["rollout/turns/min"], row["rollout/turns/max"], row["rollout/forked_turns"]) == (1, 3, 0)
    others = ("rollout.engine=vllm_server", "rollout.replicas=2", "rollout.proxy.processes=2")
    two = runs.train(tmp_path / "two", *settings, *others, launcher="torchrun", ranks=2)
    runs.assert_same(one, two)


AGENT = """
import asyncio
import random

async def run(session, row, chaos=False):
    async def ask(messages):
        if chaos:
            await asyncio.sleep(random.random() / 20)
        settings = {"model": session.model, "messages": messages}
        reply = await session.client.chat.completions.create(**settings)
        if chaos and random.random() < 0.5:  # as a client does that has lost the answer
            reply = await session.client.chat.completions.create(**settings, extra_headers={"x-stainless-retry-count": "1"})
        return reply

    first = await ask(row.messages)
    said = [*row.messages, {"role": "assistant", "content": first.choices[0].message.content}]
    again = await asyncio.gather(*(ask([*said, {"role": "user", "content": words}]) for words in ("No.", "Sure?")))
    return {reply.id: float(reply.choices[0].message.content == row.answer) for reply in (first, *again)}
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A run with an agent that asks two things at once, and its settings."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "my_agent.py").write_text(AGENT)
    settings = (*TURNS[:1], f"rollout.agent={folder / 'my_agent.py'}:run", *TURNS[2:4])
    return runs.train(folder / "run", *settings, launcher="python"), settings


def test_an_agents_paths_are_rows_and_each_turn_is_trained_once(agent: tuple[Path, tuple[str, ...]]) -> None:
    row = runs.metrics(agent[0])[-1]
    assert (row["rollout/turns/min"], row["rollout/turns/max"], row["rollout/forked_turns"]) == (3, 3, 0)
    assert row["rollout/rows"] == 32


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_arrival_retries_processes_replicas_launcher_and_ranks_change_nothing(
    agent: tuple[Path, tuple[str, ...]], tmp_path: Path, launcher: str
) -> None:
    run, settings = agent
    other = runs.train(
        tmp_path / "other",
        *settings,
        *("rollout.turns.params.chaos=true", "rollout.replicas=2", "rollout.proxy.processes=2"),
        launcher=launcher,
        ranks=2,
    )
    runs.assert_same(run, other)
    assert sum(row.get("rollout/retries", 0.0) for row in runs.metrics(other)) > 0


def test_an_agent_on_servers_goes_on_after_a_kill_with_the_same_bits(
    agent: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    reference, settings = agent
    run, settings = tmp_path / "killed", (*settings, "rollout.engine=vllm_server")
    process = runs.start(run, *settings, launcher="python")
    wait_for(run / "checkpoints" / "step_000001" / "COMPLETE")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    runs.train(run, *settings, "run.resume=auto", launcher="python")
    runs.assert_same(reference, run)
