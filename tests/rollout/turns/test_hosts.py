"""Processes that play episodes, with the driver between them and the engines; the engine here is a process with scripted answers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import ProxyConfig, RolloutConfig, TurnsConfig
from rollout.engines import RolloutEngines
from rollout.episodes import Rollout
from rollout.turns.host import SessionHost
from rollout.turns.players import make_runner
from rollout.turns.rollouts import AuditError, SessionHosts
from rollout.turns.runner import EpisodeError
from rollout.types import Episode, Generation, GenerationRequest, Sampling
from tests.local_launcher import LocalLauncher
from tests.rollout.turns.scripted import codec, digits, spec_of, user


class ScriptedEngine:
    """Answers with three digits, one request at a time, the last first."""

    work = "generate"

    def __init__(self) -> None:
        self.codec = codec()
        self.open: list[tuple[int, GenerationRequest]] = []

    def add(self, number: int, request: GenerationRequest) -> None:
        if self.codec.decode(request.prompt_token_ids).startswith("broken"):
            raise ValueError("this engine does not like the prompt")
        self.open.append((number, request))

    def step(self) -> list[tuple[int, Generation]]:
        number, request = self.open.pop()
        ids = (*self.codec.encode_text(digits(request)), self.codec.tokenizer.eos_token_id)
        return [(number, Generation(request.key, ids, (-1.0,) * len(ids), "stop", 0))]

    def close(self) -> None:
        pass


class TwoTries:
    """Asks again until the answer is even, three times at most."""

    def __init__(self, *_: Any) -> None:
        self.begun = 0

    async def start(self, sessions: Any, base_url: str | None) -> None:
        assert base_url is None

    async def admit(self, session: Any) -> None:
        pass

    async def run(self, session: Any) -> None:
        self.begun += 1
        question = session.spec.prompt.text
        if "raise" in question:
            raise EpisodeError("no luck")
        if "wait" in question:
            await asyncio.sleep(60)
        (turn,) = await session.generate(session.spec.prompt.messages)
        for _ in range(2):
            await asyncio.sleep((self.begun * 7 % 5) / 1000)
            if int(turn.message["content"]) % 2 == 0:
                break
            words = f"No. {time.time_ns()}" if "clock" in question else "No."
            (turn,) = await session.generate([user(words)], parent=turn)
        session.set_reward(float(int(turn.message["content"]) % 2 == 0))

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()


def rollout(launcher: LocalLauncher, hosts: int = 1, replicas: int = 1, audit: int = 0, **limits: Any) -> Rollout:
    engines = RolloutEngines(launcher.engine_group("rollout", ScriptedEngine, replicas))
    config = RolloutConfig(environment="scripted", turns=TurnsConfig(**limits), proxy=ProxyConfig(processes=hosts))
    host = functools.partial(SessionHost, config=config, context=512, make_codec=codec, make_runner=TwoTries)
    found = SessionHosts(launcher.local_group("sessions", host, hosts), engines, audit=audit)
    found.open()
    return Rollout(engines, codec().decode, 5, hosts=found)


def episodes(made: Rollout, question: str = "2 + 3?", n: int = 24) -> list[Episode]:
    prompt = spec_of(codec(), question).prompt
    sampling = Sampling(max_new_tokens=16, temperature=1.0)
    return made.start([prompt], sampling, n=n, split="train", step=1).result()


@pytest.fixture(scope="module")
def single(launcher: LocalLauncher) -> Rollout:
    return rollout(launcher, timeout_s=2.0)


def test_neither_hosts_nor_replicas_nor_delays_change_an_episode(launcher: LocalLauncher, single: Rollout) -> None:
    expected = episodes(single)
    assert [episode.key.sample for episode in expected] == list(range(24))
    assert {len(episode.turns) for episode in expected} == {1, 2, 3}
    assert episodes(single) == expected
    assert episodes(rollout(launcher, hosts=2, replicas=3)) == expected


def test_an_episode_says_what_happened(single: Rollout) -> None:
    episode = next(episode for episode in episodes(single) if len(episode.turns) == 2)
    assert [message["role"] for message in episode.conversation] == ["user", "assistant", "user", "assistant"]
    assert episode.text == episode.messages[-1]["content"]
    assert episode.reward == 1.0
    assert len(episode.rows) == 1
    assert sum(episode.response_mask) == sum(len(turn.token_ids) for turn in episode.turns)


def test_two_hundred_episodes_at_once_leave_none_open(single: Rollout) -> None:
    assert len(episodes(single, n=200)) == 200
    assert single.hosts is not None
    assert not single.hosts._open
    assert single.hosts._running == [0]


@pytest.mark.parametrize(
    ("question", "why"), [("raise", "no luck"), ("wait", "longer than rollout.turns.timeout_s=2 s")]
)
def test_a_failed_episode_says_why_and_the_others_go_on(single: Rollout, question: str, why: str) -> None:
    (failed,) = episodes(single, question, n=1)
    assert failed.failure is not None
    assert failed.failure.startswith("task/7 (task 0, sample 0): ")
    assert why in failed.failure
    assert all(episode.failure is None for episode in episodes(single, n=2))


def test_an_engine_that_fails_ends_all_episodes(launcher: LocalLauncher) -> None:
    with pytest.raises(Exception, match="does not like the prompt"):
        episodes(rollout(launcher), "broken", n=3)


def test_the_audit_finds_a_clock(launcher: LocalLauncher) -> None:
    audited = rollout(launcher, audit=24)
    assert len(episodes(audited)) == 24
    with pytest.raises(AuditError, match=r"task/7 \(task 0, sample \d+\) was played twice .* turn 1, prompt_ids"):
        episodes(audited, "clock?")


class Unusable(TwoTries):
    async def start(self, sessions: Any, base_url: str | None) -> None:
        raise ValueError("there is no file my_env.py")


def test_code_that_cannot_be_used_is_found_before_the_first_episode(launcher: LocalLauncher) -> None:
    host = functools.partial(
        SessionHost, config=RolloutConfig(environment="x"), context=512, make_codec=codec, make_runner=Unusable
    )
    engines = RolloutEngines(launcher.engine_group("rollout", ScriptedEngine, 1))
    with pytest.raises(Exception, match=r"there is no file my_env\.py"):
        SessionHosts(launcher.local_group("sessions", host, 1), engines).open()


AGENT = """
import asyncio, random

async def run(session, row):
    said, tries = list(row.messages), 0
    while True:
        await asyncio.sleep(random.random() / 100)
        answer = await session.client.chat.completions.create(model=session.model, messages=said)
        tries += 1
        if int(answer.choices[0].message.content) % 2 == 0 or tries == 3:
            return float(int(answer.choices[0].message.content) % 2 == 0)
        said += [answer.choices[0].message, {"role": "user", "content": "No."}]
"""


def test_an_agent_plays_as_the_same_code_beside_the_session(
    launcher: LocalLauncher, single: Rollout, tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    config = RolloutConfig(agent=f"{file}:run", proxy=ProxyConfig(processes=2))
    engines = RolloutEngines(launcher.engine_group("rollout", ScriptedEngine, 2))
    host = functools.partial(SessionHost, config=config, context=512, make_codec=codec, make_runner=make_runner)
    found = SessionHosts(launcher.local_group("sessions", host, 2), engines)
    found.open()
    assert len(set(found.addresses)) == 2
    assert episodes(Rollout(engines, codec().decode, 5, hosts=found)) == episodes(single)
