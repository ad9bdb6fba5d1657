"""Workers for the tests of the groups; children import them from here."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # methods that need torch import it, so that most of these processes start in a moment
    import torch


class Part:
    """An attribute of a worker, reached by a dotted name."""

    def double(self, value: int) -> int:
        return 2 * value


class Unusual(BaseException):
    """As torch's CheckpointException is."""


class Toy:
    """Does a little of everything."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.part = Part()
        self.weights: dict[str, torch.Tensor] = {}

    def add(self, value: int, *, factor: int = 1) -> int:
        self.total += value * factor
        return self.total

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def text_hash(self) -> int:
        """Moves with PYTHONHASHSEED, so it shows what was in force when the interpreter started."""
        return hash("exactrl")

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def session(self) -> int:
        return os.getsid(0)

    def speak(self) -> None:
        print("printed by python")
        print("complained by python", file=sys.stderr)
        ctypes.CDLL(None).puts(b"put by C")
        ctypes.CDLL(None).fflush(None)

    def fail(self, message: str) -> None:
        print("about to fail")
        raise ValueError(message)

    def fail_unusually(self) -> None:
        raise Unusual("no Exception")

    def fail_if(self, should: bool) -> str:
        if should:
            raise ValueError("only one of us")
        return "fine"

    def crash(self) -> None:
        print("last words", flush=True)
        ctypes.string_at(0)

    def leave(self, code: int) -> None:
        os._exit(code)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def sleep_somehow(self, natively: bool) -> str:
        """Five seconds in Python, or in C without the interpreter's lock, as torch and vLLM work."""
        ctypes.CDLL(None).sleep(5) if natively else time.sleep(5.0)
        return "awake"

    def spawn_sleeper(self) -> int:
        return subprocess.Popen(["sleep", "300"]).pid

    def echo(self, value: object) -> object:
        return value

    def unpicklable(self) -> object:
        return lambda: None

    def negate(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.neg_()

    def make_weights(self) -> dict[str, torch.Tensor] | None:
        if int(os.environ.get("RANK", "0")) != 0:
            return None
        import torch

        return {"w": torch.arange(100_000, dtype=torch.float64), "b": torch.ones((), dtype=torch.bfloat16)}

    def load(self, *, weights: dict[str, torch.Tensor]) -> float:
        self.weights = weights
        return float(weights["w"].sum() + weights["b"])

    def all_reduce(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value + dist.get_rank()], dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor)

    def fail_on_rank(self, rank: int) -> None:
        """The others are in a collective that never ends."""
        import torch.distributed as dist

        if dist.get_rank() == rank:
            raise ValueError(f"rank {rank} fails")
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """A collective that the last rank does not join."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(100)
        dist.all_reduce(torch.zeros(1))


class ToyEngine(Toy):
    """Takes requests: pairs of a word and what to do with it; several are in work at a time.

    `("count", n)` is done after n steps, `("until", path)` when there is such a file, and the rest misbehave.
    """

    work = "generate"

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.open: dict[int, tuple[str, Any]] = {}

    def load_weights(self, *, version: int) -> list[int]:
        """Returns the requests that are in work, of which there must be none."""
        self.version = version
        return list(self.open)

    def add(self, number: int, request: tuple[str, Any]) -> None:
        if request[0] == "refused":
            raise ValueError(f"{request[1]} is too long")
        self.open[number] = request

    def step(self) -> list[tuple[int, Any]]:
        time.sleep(0.005)
        finished: list[tuple[int, Any]] = []
        for number, (word, detail) in list(self.open.items()):
            if word == "spoil":
                self.open.clear()
                raise RuntimeError("the step fails")
            if word == "crash":
                self.crash()
            if word == "unreadable":
                finished.append((number, Unreadable()))
            elif word == "until" and Path(detail).exists():
                finished.append((number, (detail, self.version)))
            elif word == "count" and detail <= 1:
                finished.append((number, (word, self.version)))
            elif word == "count":
                self.open[number] = (word, detail - 1)
            elif word == "echo":
                finished.append((number, (detail, self.version)))
        for number, _ in finished:
            del self.open[number]
        return finished


class Unreadable:
    """Can be packed but not unpacked."""

    def __reduce__(self) -> Any:
        return _refuse_to_be_read, ()


def _refuse_to_be_read() -> None:
    raise LookupError("not here")


class HalfStuck(Toy):
    """A collective that never ends, which another worker has left."""

    def work(self, stuck: bool) -> None:
        if not stuck:
            raise ValueError("half of us")
        ctypes.CDLL(None).sleep(100)


class Stubborn(Toy):
    """Does not end when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        time.sleep(300)


class Broken:
    """Can't be built."""

    def __init__(self) -> None:
        print("building", flush=True)
        raise RuntimeError("no such model")


class Slow:
    """Takes too long to build."""

    def __init__(self) -> None:
        time.sleep(60)
