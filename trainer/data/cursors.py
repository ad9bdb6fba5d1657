"""Where a source of prompts is read next: pass after pass over loaded rows, or window after window of a stream."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from determinism.seeds import derive_seed, permutation
from rollout.types import Prompt
from trainer.data.sources import SourceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One source of prompts, loaded (`prompts`) or read row by row (`stream`)."""

    name: str
    weight: float
    prompts: tuple[Prompt, ...] = ()
    """Every prompt, in the source's order; empty for a stream."""
    stream: Callable[[int], Iterator[Prompt | None]] | None = None
    """Streaming: prompts from a row number on; None stands for a row that the length policy dropped."""
    window: int = 0
    """Streaming: rows read and shuffled together."""


class Cursor(Protocol):
    """The position in a source, and the way to read on from there."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, all of one pass; None ends a pass early when it has fewer left."""
        ...

    def state_dict(self) -> dict[str, int]:
        """The position."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position."""
        ...


class RowCursor:
    """Reads a loaded source pass after pass."""

    def __init__(self, source: Source, seed: int, shuffle: bool) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._pass = 0
        self._position = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Prompt]:
        left = len(self._order) - self._position
        if left < count:
            if left:
                logger.info(
                    "data source %r: pass %d ends; its last %d rows are fewer than a batch takes and are left out",
                    self._source.name,
                    self._pass,
                    left,
                )
            self._pass += 1
            self._position = 0
            self._order = self._order_of(self._pass)
            if len(self._order) < count:
                raise too_few(self._source.name, len(self._order), count)
        rows = self._order[self._position : self._position + count]
        self._position += count
        return [self._source.prompts[row] for row in rows]

    def state_dict(self) -> dict[str, int]:
        return {"pass": self._pass, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._pass, self._position = state["pass"], state["position"]
        self._order = self._order_of(self._pass)

    def _order_of(self, number: int) -> list[int]:
        rows = len(self._source.prompts)
        if not self._shuffle:
            return list(range(rows))
        return permutation(rows, derive_seed(self._seed, "data_order", self._source.name, number))


class StreamCursor:
    """Reads a stream in windows of rows, each shuffled in itself.

    The order within window w of pass p is a function of (seed, source name, p, w). Windows begin at multiples of the window size,
    counted in rows of the source, so a position is found again by skipping to its window.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._rows: list[Prompt] = []
        self._last = False
        self._position = 0
        self._go_to(0, 0, 0)

    def take(self, count: int) -> list[Prompt]:
        taken = self._read(count)
        if len(taken) < count:
            logger.info(
                "data source %r: pass %d ends; its last %d rows are fewer than a batch takes and are left out",
                self._source.name,
                self._pass,
                len(taken),
            )
            self._go_to(self._pass + 1, 0, 0)
            taken = self._read(count)
        if len(taken) < count:
            raise too_few(self._source.name, len(taken), count)
        return taken

    def check(self, count: int) -> None:
        """Raise SourceError where the first window already shows that a pass has fewer than `count` rows."""
        if self._window == 0 and self._last and len(self._rows) < count:
            raise too_few(self._source.name, len(self._rows), count)

    def state_dict(self) -> dict[str, int]:
        return {"pass": self._pass, "window": self._window, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._go_to(state["pass"], state["window"], state["position"])

    def _read(self, count: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._rows):
                if self._last:
                    break
                self._window += 1
                self._position = 0
                self._fill()
                continue
            step = min(count - len(taken), len(self._rows) - self._position)
            taken += self._rows[self._position : self._position + step]
            self._position += step
        return taken

    def _go_to(self, number: int, window: int, position: int) -> None:
        assert self._source.stream is not None
        self._pass, self._window, self._position = number, window, position
        self._reader = self._source.stream(window * self._source.window)
        self._fill()

    def _fill(self) -> None:
        rows = list(itertools.islice(self._reader, self._source.window))
        self._last = len(rows) < self._source.window
        seed = derive_seed(self._seed, "data_window", self._source.name, self._pass, self._window)
        order = permutation(len(rows), seed) if self._shuffle else range(len(rows))
        self._rows = [row for row in (rows[index] for index in order) if row is not None]


def too_few(name: str, rows: int, count: int) -> SourceError:
    """The error for a source with fewer rows than a batch takes from it."""
    return SourceError(
        f"data source {name!r} has {rows} rows, and a step takes up to {count} from it; "
        "give it more rows, or lower its weight or data.prompts_per_step"
    )
