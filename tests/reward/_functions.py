"""Reward functions that misbehave in every way that people have met; run in the pool's processes."""

import asyncio
import itertools
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def length(response: str) -> float:
    return float(len(response))


def sees(
    prompt: str, response: str, answer: Any, extra: dict[str, Any], messages: list[dict[str, Any]], factor: int = 1
):
    return factor * (len(prompt) + 10 * len(response) + 100 * answer + 1000 * extra["level"] + 10000 * len(messages))


def ends_with_eos(response: str, response_with_special_tokens: str) -> float:
    return float(response_with_special_tokens == response + "<eos>")


def all_end_with_eos(responses_with_special_tokens: list[str]) -> list[bool]:
    return [text.endswith("<eos>") for text in responses_with_special_tokens]


def batch_rank(responses: list[str]) -> list[int]:
    return [sorted(responses).index(response) for response in responses]


async def slow_length(response: str, seconds: float = 0.5) -> float:
    await asyncio.sleep(seconds)
    return float(len(response))


_calls = itertools.count(1)


def given(response_token_ids: list[int], turn_token_ids: list[list[int]], what: str) -> Any:
    return eval(what, {"ids": response_token_ids, "turns": turn_token_ids, "calls": next(_calls)})


def first_tokens(responses_token_ids: list[list[int]]) -> list[Any]:
    return [{"tokens": [float(ids[0])] + [0.0] * (len(ids) - 1)} for ids in responses_token_ids]


def meet(mine: Path, theirs: Path) -> None:
    """Say that this side has begun, and wait until the other says so; two calls that work one after the other never meet."""
    mine.touch()
    for _ in range(3000):
        if theirs.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(f"{mine.name} has begun, but {theirs.name} has not")


def _write_into_sockets(data: bytes | None) -> None:
    """Into every socket of this process, as a function that looks for the pool's connection could; None closes them."""
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(fd) if data is None else os.write(fd, data)
        except OSError:
            pass


class _RunsWhenUnpickled:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def _harmful(path: list[str]) -> bytes:
    pickled = pickle.dumps(_RunsWhenUnpickled("".join(path)))
    return struct.pack("!i", len(pickled)) + pickled


class _Odd(float):
    """A number that can't be looked at."""

    what = "float"

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __float__(self) -> float:
        if self.what == "float":
            raise RuntimeError("no float")
        return 1.0


class _OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


class _OddClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    def __repr__(self) -> str:
        return "half a pair: \ud800"


def _odd(what: str) -> Any:
    match what:
        case "large":
            return 10**400
        case "larger":
            return 10**5000
        case "float":
            return _Odd()
        case "repr":
            return [_Odd()]
        case "class":
            return _OddClass()
        case "error":
            raise _OddError
        case "surrogate":
            raise ValueError("half a pair: \ud800")
    raise AssertionError(what)


def by_response(response: str) -> Any:
    """What the response says is what happens."""
    match response.split():
        case ["give", number]:
            return float(number)
        case ["none"]:
            return None
        case ["string"]:
            return "1.0"
        case ["list"]:
            return [1.0]
        case ["raise"]:
            raise KeyError("broken on purpose")
        case ["exit", code]:
            os._exit(int(code))
        case ["sys.exit"]:
            sys.exit(0)
        case ["sleep"]:
            time.sleep(3600)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return float(seconds)
        case ["meet", mine, theirs]:
            meet(Path(mine), Path(theirs))
            return 1.0
        case ["spin"]:
            while True:
                pass
        case ["thread"]:
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            return 1.0
        case ["fork", file]:
            child = os.fork()
            if child == 0:
                time.sleep(3600)
            Path(file).write_text(f"{os.getpid()} {child}")
            time.sleep(3600)
        case ["fork-and-return", file]:
            child = os.fork()
            if child == 0:
                return 2.0
            Path(file).write_text(f"{child}")
            return 1.0
        case ["spawn", file]:
            child = subprocess.Popen(["sleep", "3600"]).pid
            Path(file).write_text(f"{os.getpid()} {child}")
            os._exit(3)
        case ["double-fork", file]:
            first = os.fork()
            if first == 0:
                os.setsid()
                if os.fork() > 0:
                    os._exit(0)
                os.setsid()
                Path(file).write_text(str(os.getpid()))
                time.sleep(3600)
            os.waitpid(first, 0)
            while not (Path(file).exists() and Path(file).read_text()):
                time.sleep(0.01)
            return 1.0
        case ["flood", mebibytes]:
            print("the first line")
            for _ in range(int(mebibytes)):
                sys.stdout.write("x" * (1 << 20) + "\n")
            print("the last line")
            return 1.0
        case ["connection", what, *path]:
            _write_into_sockets(
                {"close": None, "pickle": _harmful(path), "text": b"hello\n", "forged": b"[0, [9.0]]\n"}[what]
            )
            return 1.0
        case ["odd", what]:
            return _odd(what)
        case ["print", lines]:
            for line in range(int(lines)):
                print("noise", line)
                print("noise", line, file=sys.stderr)
            return 1.0
        case ["numpy"]:
            import numpy as np

            return np.float32(0.5)
        case ["numpy-bool"]:
            import numpy as np

            return np.bool_(True)
        case ["bool"]:
            return True
    raise AssertionError(response)


async def async_by_response(response: str) -> Any:
    if response.startswith("await"):
        await asyncio.sleep(float(response.split()[1]))
        return 1.0
    return by_response(response)


def batch_of(responses: list[str], what: str) -> Any:
    if what == "short":
        return [1.0] * (len(responses) - 1)
    if what == "number":
        return 1.0
    if what == "one none":
        return [None, *[1.0] * (len(responses) - 1)]
    if what.startswith("odd"):
        return [_odd(what.split()[1]), *[1.0] * (len(responses) - 1)]
    if what == "numpy":
        import numpy as np

        return np.ones(len(responses))
    if what == "sleep":
        time.sleep(3600)
    raise AssertionError(what)


class Counter:
    count = 0


def changing(response: str) -> float:
    Counter.count += 1
    return float(Counter.count)


def nothing_to_see() -> float:
    return 1.0


def both_forms(response: str, responses: list[str]) -> float:
    return 1.0


not_a_function = 3
