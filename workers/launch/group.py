"""How the loop speaks to its workers: one protocol, the same under Ray and under torchrun.

A *worker* is any object built by a picklable factory; a *group* holds `size` of them and calls a method on all at once.
Under torchrun the loop runs on every rank, each rank calls its own worker and the results are gathered, so that every rank
sees the same list in rank order. Under Ray one driver calls remote actors. Engines are always processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
WorkerFactory = Callable[[], Any]
"""Picklable; called in the worker's own process."""


class WorkerGroup(Protocol):
    """`size` workers that are called together."""

    size: int

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        """Call `method` (dotted names reach into attributes: `actor.update`) on every worker; results in rank order.

        Args:
            sharded: one positional argument a worker (length `size`); None sends none.
            common: keyword arguments that every worker gets. A `Handle` from `export` arrives as its value.

        Raises:
            WorkerError: a worker raised or died; carries its traceback and the tail of its log.
        """
        ...

    def export(self, method: str, /, **common: Any) -> Any:
        """Like `run`, but worker 0's result stays close to the workers: a handle to be passed to another group's `run`.

        The method is also given `everywhere: bool`. True: every worker must return the value (the loop runs on every rank and
        each rank passes its own copy on to its engines). False: only worker 0's is used and the others may return None.
        """
        ...

    def close(self) -> None:
        """End every worker; safe to call twice."""
        ...


@dataclass(frozen=True)
class Modules:
    """What takes long to import. Where forks are possible, a process of each node begins to import it when the launcher is made."""

    ranks: Sequence[str] = ()
    """For every trainer rank."""
    engines: Sequence[str] = ()
    """For every engine."""


class Launcher(Protocol):
    """Creates groups and hides where the loop runs."""

    is_main: bool
    """True in the one process that writes files and talks to the tracker."""

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """FSDP ranks: torch.distributed is initialised with `num_ranks` before `factory` is called."""
        ...

    def engine_group(
        self,
        name: str,
        factory: WorkerFactory,
        replicas: int,
        env: Mapping[str, str],
        *,
        start_timeout_s: float = 300.0,
        gpus: int = 1,
        wait: bool = True,
    ) -> WorkerGroup:
        """Engines: `replicas` processes of their own, `env` in place before their interpreter starts, logs in `logs/{name}-{i}.log`.

        With `wait=False` it returns while they start, so that several groups start side by side; the first call waits, and raises
        what went wrong at the start. `env` is laid over the process environment that the launcher gives every process. `gpus`: GPUs that one replica sees
        (its tensor-parallel size); no meaning on CPU.
        """
        ...

    def on_main(self, function: Callable[[], T]) -> T:
        """Run `function` in the main process only; every process gets its result, or raises its error."""
        ...

    def close(self) -> None:
        """End everything this launcher started."""
        ...


class WorkerError(RuntimeError):
    """A worker failed. The message holds the worker's own traceback, so it is what the user sees."""


def deal(items: Sequence[T], size: int) -> list[list[T]]:
    """Deal items to workers like cards: item `slot * size + rank` goes to `rank`.

    Example:
        >>> deal([0, 1, 2, 3, 4, 5], 2)
        [[0, 2, 4], [1, 3, 5]]
    """
    return [list(items[rank::size]) for rank in range(size)]


def undeal(per_rank: Sequence[Sequence[T]]) -> list[T]:
    """Inverse of `deal`: back to the order before dealing.

    Example:
        >>> undeal([[0, 2, 4], [1, 3, 5]])
        [0, 1, 2, 3, 4, 5]
    """
    total = sum(len(items) for items in per_rank)
    size = len(per_rank)
    return [per_rank[i % size][i // size] for i in range(total)]
