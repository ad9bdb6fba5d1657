"""Agents that are programs of any language, one process for each sample."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.schema import RolloutConfig
from rollout.turns.agent_values import give_rewards, row_of, seed_of
from rollout.turns.proxy.fields import MODEL
from rollout.turns.runner import EpisodeError, OpenSessions
from rollout.turns.session import Session
from workers.launch.lifeline import exit_text

PROGRAM = "program:"
_KEEPER = Path(__file__).with_name("keeper.py")
_ROW_BYTES = 100_000
"""Linux takes 128 KiB for a variable of the environment."""
_TAIL = 4000
_OUTPUT_BYTES = 1 << 20


def command_of(agent: str) -> list[str]:
    """The words of a command; no shell reads them.

    Raises:
        ValueError: there is none, quotes are not closed, or there is no such program.
    """
    try:
        words = shlex.split(agent.removeprefix(PROGRAM))
    except ValueError as error:
        raise ValueError(f"rollout.agent={agent}: {error}") from None
    if not words:
        raise ValueError(f"rollout.agent={agent}: there is no command")
    found = shutil.which(words[0])
    if found is None:
        raise ValueError(f"rollout.agent={agent}: there is no program {words[0]!r}")
    return [found, *words[1:]]


class ProgramRunner:
    """Plays each episode with a process of its own. It ends with its episode, and takes everything that it started along.

    Args:
        config: `agent`, the command. As many programs run at once as the engines serve sequences (`max_num_seqs` x `replicas`, shared between the
            processes of `proxy.processes`); the others wait in canonical order.
    """

    def __init__(self, config: RolloutConfig) -> None:
        assert config.agent is not None
        self._agent = config.agent
        self._command = command_of(config.agent)
        self._places = asyncio.Semaphore(max(1, config.max_num_seqs * config.replicas // config.proxy.processes))

    async def start(self, sessions: OpenSessions, base_url: str | None) -> None:
        """See `Runner`."""
        assert base_url is not None
        self._sessions, self._url = sessions, base_url

    async def admit(self, session: Session) -> None:
        """See `Runner`."""
        await self._places.acquire()

    async def run(self, session: Session) -> None:
        """See `Runner`."""
        try:
            code, output, errors = await self._play(session)
        finally:
            self._places.release()
        if code:
            if session.budget_ended:
                return
            raise EpisodeError(f"the program {exit_text(code if code < 128 else 128 - code)}{_tail(errors)}")
        if session.conversation.in_order():
            give_rewards(session, self._reward(output, errors), "the last line of the program's output")

    async def close(self) -> None:
        """See `Runner`; programs that still run end with their episodes."""

    async def _play(self, session: Session) -> tuple[int, bytes, bytes]:
        row = row_of(session).to_json(seed=seed_of(session))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-IS",
            str(_KEEPER),
            str(os.getpid()),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(session, row),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _, output, errors, code = await asyncio.gather(
                _write(process.stdin, row.encode() + b"\n"),
                _end_of(process.stdout),
                _end_of(process.stderr),
                process.wait(),
            )
        except BaseException:
            if process.returncode is None:
                process.terminate()  # the keeper kills the rest
            await asyncio.shield(process.wait())
            raise
        return code, output, errors

    def _environment(self, session: Session, row: str) -> dict[str, str]:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": self._url,
            "OPENAI_API_KEY": self._sessions.key_of(session),
            "OPENAI_MODEL": MODEL,
        }
        host = urlsplit(self._url).hostname or ""
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [environment.get(name, ""), host]))
        environment.pop("EXACTRL_ROW", None)
        if len(row.encode()) <= _ROW_BYTES:
            environment["EXACTRL_ROW"] = row
        return environment

    def _reward(self, output: bytes, errors: bytes) -> Any:
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        try:
            value = json.loads(last)
        except ValueError:
            value = last
        if isinstance(value, bool) or not isinstance(value, int | float | dict):
            said = f"is {last[:200]!r}" if last else "is missing"
            raise EpisodeError(
                f"the last line of the program's output {said}; it must be its reward: a number, or a JSON object from turns to numbers"
                f"{_tail(errors)}"
            )
        return value


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it does not read its row


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    """The end of what is written: a program may say more than is worth keeping."""
    found = b""
    while data := await stream.read(1 << 16):
        found = (found + data)[-_OUTPUT_BYTES:]
    return found


def _tail(errors: bytes) -> str:
    text = errors.decode(errors="replace").strip()[-_TAIL:]
    return f"; its error output ends with\n{text}" if text else "; it wrote no error output"
