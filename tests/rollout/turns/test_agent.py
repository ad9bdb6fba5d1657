"""Agents: functions, programs, and programs elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from openai import AsyncOpenAI

from configs.problems import UserError
from configs.schema import ProxyConfig, RolloutConfig, TurnsConfig
from rollout.turns.agent import RemoteRunner, check_agent
from rollout.turns.proxy.server import ProxyServer
from rollout.turns.session import SessionResult
from rollout.types import SampleKey
from tests.rollout.turns.scripted import spec_of
from tests.rollout.turns.served import PLAIN, TOOLS, agent_file, calls_then_answers, play, play_agent, served

ASK = "answer = await session.client.chat.completions.create(model=session.model, messages=row.messages)\n"


def result_of(agent: str, **settings: Any) -> SessionResult:
    """Of one episode."""
    (found,) = asyncio.run(play_agent(agent, **settings))
    return found


class TestFunctions:
    def test_a_number_is_the_last_turn_s_reward(self, tmp_path: Path) -> None:
        found = result_of(
            agent_file(
                tmp_path,
                ASK + "said = [*row.messages, answer.choices[0].message, {'role': 'user', 'content': 'No.'}]\n"
                "await session.client.chat.completions.create(model='policy', messages=said)\n"
                "return 0.5 if row.answer == '5' else 0.0",
            )
        )
        assert [turn.reward for turn in found.turns] == [0.0, 0.5]
        assert (found.reward, found.failure) == (0.5, None)

    @pytest.mark.parametrize("name", ["0", "answer.id", "'0'"])
    def test_a_mapping_names_turns_by_id_or_position(self, tmp_path: Path, name: str) -> None:
        found = result_of(agent_file(tmp_path, ASK + f"return {{{name}: 2}}"))
        assert [turn.reward for turn in found.turns] == [2.0]

    def test_rewards_may_be_set_from_any_thread_on_the_way(self, tmp_path: Path) -> None:
        body = ASK + "session.set_reward(1.0)\nawait asyncio.to_thread(session.set_reward, 3, answer.id)"
        assert result_of(agent_file(tmp_path, body)).reward == 3.0

    def test_none_gives_no_reward(self, tmp_path: Path) -> None:
        assert result_of(agent_file(tmp_path, ASK)).reward is None

    def test_params_and_what_a_session_shows(self, tmp_path: Path) -> None:
        body = (
            ASK + "assert params == {'tries': 2} and row.id == 'task/7' and row.source == 'task' and session.id\n"
            "assert session.base_url.endswith('/v1') and session.api_key.startswith('sk-') and 0 <= session.seed < 2**63"
        )
        assert result_of(agent_file(tmp_path, body), params={"tries": 2}).failure is None

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (ASK + "return 'good'", ["return value", "'good' (str)"]),
            (ASK + "return True", ["True (bool)"]),
            (ASK + "return float('nan')", ["nan", "finite"]),
            (ASK + "return {3: 1.0}", ["the turn 3", "0 to 0"]),
            (ASK + "return {0: None}", ["for the turn 0", "None"]),
            (ASK + "return {0: 1.0, 'turn-x': 1.0}", ["'turn-x'"]),
            (ASK + "raise KeyError('a key')", ["KeyError: 'a key'", "agent_", "raise KeyError"]),
            (ASK + "import sys; sys.exit(3)", ["SystemExit: 3"]),
            ("pass", ["the model was never called"]),
            ("return 1.0", ["the model was never called"]),
        ],
    )
    def test_what_is_wrong_is_named_and_gives_no_reward(self, tmp_path: Path, body: str, words: list[str]) -> None:
        found = result_of(agent_file(tmp_path, body))
        assert found.failure is not None
        assert all(word in found.failure for word in words), found.failure
        assert found.reward is None
        assert "rollout/turns/agent.py" not in found.failure

    def test_an_agent_that_meets_its_budget_has_not_failed(self, tmp_path: Path) -> None:
        body = "said = list(row.messages)\nwhile True:\n    " + ASK.replace("row.messages", "said")
        body += (
            "    session.set_reward(1.0)\n    said += [answer.choices[0].message, {'role': 'user', 'content': 'No.'}]"
        )
        found = result_of(agent_file(tmp_path, body), max_turns=3)
        assert found.failure is None
        assert (len(found.turns), found.truncated) == (3, True)

    def test_the_client_may_be_closed_without_harm_to_others(self, tmp_path: Path) -> None:
        body = ASK + "await session.client.close()\nreturn 1.0"
        specs = [spec_of(PLAIN, key=SampleKey(0, i), request_index=i) for i in range(8)]
        found = asyncio.run(play_agent(agent_file(tmp_path, body), *specs))
        assert [one.reward for one in found] == [1.0] * 8

    def test_an_agent_that_calls_after_its_end_is_told_so(self, tmp_path: Path) -> None:
        body = (
            ASK + "async def late():\n    await asyncio.sleep(0.2)\n"
            "    try:\n        await session.client.models.list()\n"
            "    except Exception as error:\n        open(params['file'], 'w').write(str(error))\n"
            "asyncio.get_running_loop().create_task(late())"
        )
        file = tmp_path / "late"

        async def go() -> None:
            async with served() as here:
                from rollout.turns.agent import make_agent_runner

                agent = agent_file(tmp_path, body)
                runner = make_agent_runner(RolloutConfig(agent=agent, turns=TurnsConfig(params={"file": str(file)})))
                await runner.start(here.sessions, here.url)
                await play(here, runner, here.new())
                while not file.exists():
                    await asyncio.sleep(0.02)
                await runner.close()

        asyncio.run(go())
        assert "the episode has ended" in file.read_text()

    def test_two_hundred_episodes_do_not_depend_on_the_order_of_arrival(self, tmp_path: Path) -> None:
        body = "import random\nawait asyncio.sleep(random.random() / 10)\n" + ASK + "return 1.0"
        specs = [spec_of(PLAIN, key=SampleKey(0, i), request_index=i) for i in range(200)]
        one = asyncio.run(play_agent(agent_file(tmp_path, body), *specs))
        other = asyncio.run(play_agent(agent_file(tmp_path, body), *specs))
        assert one == other
        assert len({result.turns[0].seed for result in one}) == 200


class TestChecks:
    @pytest.mark.parametrize(
        ("agent", "params", "words"),
        [
            ("{file}:run", {}, None),
            ("{file}:other", {}, "no function 'other'"),
            ("{file}:plain", {}, "async function"),
            ("{file}:strict", {"tries": 2}, "tries"),
            ("missing.py:run", {}, "there is no file"),
            ("program:", {}, "no command"),
            ("program:no-such-program-anywhere x", {}, "no program 'no-such-program-anywhere'"),
            ("program:sh -c 'echo 1", {}, "quotation"),
            ("program:sh -c 'echo 1'", {}, None),
            ("remote", {}, None),
        ],
    )
    def test_what_cannot_be_used_is_found_before_anything_starts(
        self, tmp_path: Path, agent: str, params: dict[str, Any], words: str | None
    ) -> None:
        file = tmp_path / "checked.py"
        file.write_text(
            "async def run(session, row, **params): ...\ndef plain(session, row): ...\nasync def strict(session, row): ...\n"
        )
        config = RolloutConfig(agent=agent.format(file=file), turns=TurnsConfig(params=params))
        if words is None:
            check_agent(config)
        else:
            with pytest.raises((ValueError, UserError), match=words):
                check_agent(config)


PROGRAM = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.read())
assert row == json.loads(os.environ["EXACTRL_ROW"])
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["messages"]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
)
answer = json.load(urllib.request.urlopen(request))
"""


def program(folder: Path, more: str) -> str:
    path = folder / "program.py"
    path.write_text(PROGRAM + more)
    return f"program:{sys.executable} {path}"


class TestPrograms:
    def test_the_last_line_is_the_reward(self, tmp_path: Path) -> None:
        found = result_of(program(tmp_path, "print('thinking')\nprint(0.25)\n\nprint()"))
        assert (found.reward, found.failure) == (0.25, None)
        found = result_of(program(tmp_path, "print(json.dumps({answer['id']: 2}))"))
        assert [turn.reward for turn in found.turns] == [2.0]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("print('very good')", ["'very good'"]),
            ("print('true')", ["'true'"]),
            ("", ["is missing"]),
            ("print('NaN')", ["nan", "finite"]),
            ("sys.exit('out of luck')", ["exited with code 1", "out of luck"]),
            ("os.kill(os.getpid(), 9)", ["SIGKILL"]),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, more: str, words: list[str]) -> None:
        found = result_of(program(tmp_path, more))
        assert found.failure is not None
        assert all(word in found.failure for word in words), found.failure
        assert found.reward is None

    def test_a_program_that_never_calls_the_model(self) -> None:
        assert result_of("program:echo 1").failure == "the model was never called"

    def test_a_late_program_is_killed_with_everything_it_started(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        script = f"sleep 600 & echo $! > {pids}; setsid sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; sleep 600"
        began = time.monotonic()
        found = result_of(f'program:sh -c "{script}"', timeout_s=1.0)
        assert found.failure == "timeout"
        assert time.monotonic() - began < 60  # it was not waited for
        left = [int(pid) for pid in pids.read_text().split()]
        assert len(left) == 3
        assert not any(psutil.pid_exists(pid) for pid in left)

    def test_what_a_program_leaves_behind_ends_with_it(self, tmp_path: Path) -> None:
        more = f"import subprocess\none = subprocess.Popen(['sleep', '600'], start_new_session=True)\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(one.pid))\nprint(1)"
        assert result_of(program(tmp_path, more)).reward == 1.0
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))

    def test_no_more_run_at_once_than_the_engines_serve(self, tmp_path: Path) -> None:
        from rollout.turns.program import ProgramRunner

        log = tmp_path / "log"
        more = (
            f"import os, time\nlog = os.open({str(log)!r}, os.O_APPEND | os.O_WRONLY | os.O_CREAT)\nos.write(log, b'+')\n"
            # Nobody goes on alone, so two are seen to run together; a third has a moment to come too early.
            f"while os.path.getsize({str(log)!r}) < 2: time.sleep(0.01)\n"
            "time.sleep(0.2)\nos.write(log, b'-')\nprint(1)"
        )

        async def go() -> None:
            async with served() as here:
                runner = ProgramRunner(RolloutConfig(agent=program(tmp_path, more), max_num_seqs=2))
                await runner.start(here.sessions, here.url)
                found = await asyncio.gather(*(play(here, runner, here.new()) for _ in range(5)))
                assert [result.reward for result in found] == [1.0] * 5

        asyncio.run(go())
        running = list(itertools.accumulate({"+": 1, "-": -1}[mark] for mark in log.read_text()))
        assert (len(running), max(running), running[-1]) == (10, 2, 0)


class TestRemote:
    def test_a_program_elsewhere_starts_rewards_and_ends_episodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ADMIN_KEY", "secret")

        async def go() -> None:
            async with served(admin_key_env="ADMIN_KEY") as here:
                runner = RemoteRunner()
                await runner.start(here.sessions, here.url)
                headers = {"Authorization": "Bearer secret"}
                async with httpx2.AsyncClient(base_url=here.url, headers=headers) as http:
                    none = await http.post("/episodes/start")
                    assert (none.status_code, none.headers["retry-after"]) == (503, "1")
                    stranger = await http.post("/episodes/start", headers={"Authorization": "Bearer x"})
                    assert stranger.status_code == 401

                    specs = [spec_of(PLAIN, key=SampleKey(0, i), request_index=i) for i in (2, 0, 1, 0)]
                    tasks = [asyncio.ensure_future(play(here, runner, here.new(spec))) for spec in specs]
                    await asyncio.sleep(0.05)
                    begun = [(await http.post("/episodes/start")).json() for _ in range(4)]
                    names = ["train-1-task.7-0", "train-1-task.7-0-2", "train-1-task.7-1", "train-1-task.7-2"]
                    assert [one["id"] for one in begun] == names
                    for one in begun:
                        assert one["base_url"] == here.url
                        async with AsyncOpenAI(base_url=one["base_url"], api_key=one["api_key"]) as client:
                            answer = await client.chat.completions.create(
                                model=one["model"], messages=one["row"]["messages"]
                            )
                        await http.post(f"/episodes/{one['id']}/reward", json={"reward": 1.0, "turn": answer.id})
                    wrong = await http.post(f"/episodes/{names[0]}/reward", json={"reward": "good"})
                    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reward")
                    assert (await http.post("/episodes/other/end")).status_code == 404
                    for name, body in zip(names, ({}, {}, {"reward": 2.0}, {"error": "no luck"}), strict=True):
                        assert (await http.post(f"/episodes/{name}/end", json=body)).status_code == 200
                    assert (await http.post(f"/episodes/{names[0]}/end")).status_code == 410
                    two, zero, one_, again = await asyncio.gather(*tasks)
                    assert "no luck" in (two.failure or "")
                    assert (zero.reward, one_.reward) == (1.0, 2.0)
                    assert zero.turns == again.turns  # the suffix of a name enters nothing
                    assert len(here.sessions) == 0

        asyncio.run(go())

    def test_the_time_limit_begins_when_the_episode_does(self) -> None:
        async def go() -> None:
            async with served() as here:
                runner = RemoteRunner()
                await runner.start(here.sessions, here.url)
                task = asyncio.ensure_future(play(here, runner, here.new(), timeout_s=0.2))
                await asyncio.sleep(0.5)
                assert not task.done()
                async with httpx2.AsyncClient(base_url=here.url) as http:  # loopback needs no admin key
                    name = (await http.post("/episodes/start")).json()["id"]
                    assert (await task).failure == "timeout"
                    assert (await http.post(f"/episodes/{name}/end")).status_code == 410

        asyncio.run(go())

    def test_episodes_are_not_given_out_where_the_agent_is_here(self) -> None:
        async def go() -> None:
            async with served() as here, httpx2.AsyncClient(base_url=here.url) as http:
                assert (await http.post("/episodes/start")).status_code == 404

        asyncio.run(go())

    def test_no_server_for_other_machines_without_a_key(self) -> None:
        with pytest.raises(ValueError, match="admin_key_env"):
            ProxyServer(None, ProxyConfig(host="0.0.0.0"), 0)  # type: ignore[arg-type]


class TestLibraries:
    @pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
    def test_pydantic_ai_runs_its_tool_loop(self, tmp_path: Path, model: str) -> None:
        pytest.importorskip("pydantic_ai")
        body = f"""
from pydantic_ai import Agent
from pydantic_ai.models.openai import {model}
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.profiles.openai import OpenAIModelProfile
profile = OpenAIModelProfile(openai_supports_strict_tool_definition=False)
agent = Agent({model}(session.model, provider=OpenAIProvider(openai_client=session.client), profile=profile))
seen = []
@agent.tool_plain
def add(a: int, b: int) -> int:
    "Adds."
    seen.append((a, b))
    return a + b
found = await agent.run(row.messages[-1]["content"])
assert seen == [(2, 3)], seen
return 1.0 if row.answer in found.output else 0.0
"""
        found = result_of(agent_file(tmp_path, body), with_codec=TOOLS, say=calls_then_answers, parser="hermes")
        assert found.failure is None, found.failure
        assert found.reward == 1.0
        assert [turn.parent for turn in found.turns] == [None, 0]
        assert found.counts["rollout/forked_turns"] == 0
        assert json.loads(found.messages[0]["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
