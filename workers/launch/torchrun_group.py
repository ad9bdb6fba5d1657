"""The loop on every rank, under `torchrun`, `accelerate launch` or a plain start as a single rank.

    rank 0: loop ── own worker ──┐                      engine replica i belongs to node i % nodes, as a child
    rank 1: loop ── own worker ──┴─ gather ── results   process of that node's first rank

Every rank runs the same loop and therefore makes the same calls in the same order; each does its own share and all see the
same results in the same order. Who fails how:
- a *trainer* method that raises ends its rank at once with its own traceback: the others may be waiting in a collective inside
  that method, so nothing may be asked of them; torchrun then ends them;
- an *engine* that fails, and `on_main`, are told to every rank, since all of them are waiting for just that: each rank raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from workers.launch.calls import Hosted, traceback_text
from workers.launch.group import Modules, WorkerError, WorkerFactory, WorkerGroup
from workers.launch.node_processes import NodeProcesses
from workers.launch.processes import ProcessGroup

T = TypeVar("T")
log = logging.getLogger(__name__)


class TorchrunLauncher:
    """A `Launcher` whose ranks are the processes that run the loop."""

    def __init__(
        self,
        run_dir: Path,
        *,
        device: str = "cpu",
        process_env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        modules: Modules = Modules(),  # noqa: B008, it is frozen
        on_close: Callable[[], None] | None = None,
        exit_stack: contextlib.ExitStack | None = None,
    ) -> None:
        """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or be the only one.

        Args:
            process_env: variables that every engine gets.
            timeout_s: longest wait for the other ranks, in one collective or one gathering of results.
            modules: only those of engines matter; the ranks are this process and its like, and import for themselves.
            on_close: what `close` does first.
            exit_stack: what `close` undoes last, also when this fails.

        Raises:
            RuntimeError, ValueError: from torch.distributed, when ranks are missing.
        """
        self._on_close = on_close
        self._exit_stack = exit_stack or contextlib.ExitStack()
        self._run_dir = run_dir
        self._device = device
        self._process_env = dict(process_env or {})
        self._timeout_s = timeout_s
        self._preload = modules.engines
        self._groups: list[WorkerGroup] = []
        try:
            self._join_ranks()
        except BaseException:
            self._exit_stack.close()
            raise

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        """See `Launcher.trainer_group`; the worker is built here, on every rank.

        Raises:
            ValueError: `num_ranks` is not the number of ranks that were started.
        """
        if num_ranks != self.world_size:
            raise ValueError(f"{num_ranks} trainer ranks were asked for, but {self.world_size} were started")
        return self._keep(_TrainerGroup(factory, self.world_size, self._timeout_s))

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
        """See `Launcher.engine_group`; the replicas are dealt to the nodes, and are children of a node's first rank."""

        def start(numbers: Sequence[int]) -> ProcessGroup:
            envs = {number: {**self._process_env, **env, **self._visible(number, gpus)} for number in numbers}
            group = self._engines.start(name, factory, envs, start_timeout_s=start_timeout_s, preload=self._preload)
            if wait:
                group.ready()
            return group

        return self._keep(_EngineGroup(start, replicas, self.rank, self._leaders, self._timeout_s))

    def on_main(self, function: Callable[[], T]) -> T:
        """See `Launcher.on_main`. The other ranks raise rank 0's exception, with its traceback as a note when it has left it behind."""
        from workers.launch.distributed import broadcast_object

        if not self.is_main:
            status, value = broadcast_object(None, self._main_group)
            if status == "error":
                raise value
            return value
        try:
            result = function()
            message: tuple[str, Any] = ("ok", result)
            return broadcast_object(message, self._main_group)[1]
        except Exception as error:
            broadcast_object(("error", _portable(error)), self._main_group)
            raise

    def close(self) -> None:
        """End the engines and leave the process group; no rank waits for another here."""
        import torch.distributed as dist

        if self._on_close is not None:
            self._on_close()
        groups, self._groups = self._groups, []
        for group in reversed(groups):
            group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._exit_stack.close()

    def _join_ranks(self) -> None:
        from workers.launch import distributed

        store = None
        if "RANK" not in os.environ:
            store = distributed.open_store("127.0.0.1", 1, self._timeout_s)
            os.environ.update(distributed.rank_variables(0, 1, 0, "127.0.0.1", store.port))
            self._exit_stack.callback(_forget_rank_variables)
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.is_main = self.rank == 0
        if self.world_size > 1 and os.environ.get("MASTER_PORT") == "0":
            raise ValueError(
                "MASTER_PORT=0: each rank would wait at a port of its own; use `torchrun --standalone`, or name a port"
            )
        distributed.init_process_group(
            self._device, self.rank, self.world_size, self.local_rank, self._timeout_s, store
        )
        self._main_group = distributed.object_group(self._timeout_s)
        local_ranks = distributed.gather_objects(self.local_rank, self._main_group)
        self._leaders = [rank for rank, local in enumerate(local_ranks) if local == 0]
        self._engines = NodeProcesses(self._run_dir / "logs", self.rank, self._device)
        self._exit_stack.callback(self._engines.close)
        if self.rank in self._leaders:
            self._engines.prepare([self._preload], self._process_env)

    def _keep(self, group: WorkerGroup) -> WorkerGroup:
        self._groups.append(group)
        return group

    def _visible(self, number: int, gpus: int) -> dict[str, str]:
        """On CUDA: a replica sees its own GPUs of the node, in turn, so that with one GPU each it shares a rank's. Not verified on a machine with GPUs."""
        if self._device != "cuda":
            return {}
        import torch

        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        first = number // len(self._leaders) * gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[(first + i) % count] for i in range(gpus))}


class _TrainerGroup:
    """The local worker on each rank; results are gathered."""

    def __init__(self, factory: WorkerFactory, world_size: int, timeout_s: float) -> None:
        import torch.distributed as dist

        from workers.launch.distributed import object_group

        self.size = world_size
        self._rank = dist.get_rank()
        self._objects = object_group(timeout_s)
        self._worker: Hosted | None = self._call("its start", lambda: Hosted(factory))

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        from workers.launch.distributed import gather_objects

        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{method}: {len(sharded)} sharded arguments for {self.size} ranks")
        arguments = [] if sharded is None else [sharded[self._rank]]
        mine = self._call(method, lambda: self._hosted().call(method, arguments, common))
        return gather_objects(mine, self._objects)

    def export(self, method: str, /, **common: Any) -> Any:
        """This rank's own result is the handle: the value is made by a collective, so every rank has it already."""
        return self._call(method, lambda: self._hosted().call(method, [], {"everywhere": True, **common}))

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _hosted(self) -> Hosted:
        assert self._worker is not None, "not closed"
        return self._worker

    def _call(self, method: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            message = f"trainer-{self._rank} (pid {os.getpid()}) raised in {method}\n{traceback_text(error)}"
            raise WorkerError(message) from error


class _EngineGroup:
    """This rank's replicas, seen by all ranks."""

    def __init__(
        self,
        start: Callable[[Sequence[int]], ProcessGroup],
        replicas: int,
        rank: int,
        leaders: Sequence[int],
        timeout_s: float,
    ) -> None:
        from workers.launch.distributed import object_group

        self.size = replicas
        self._objects = object_group(timeout_s)
        self._leaders = leaders
        self._numbers = list(range(leaders.index(rank), replicas, len(leaders))) if rank in leaders else []
        self._local: ProcessGroup | None = None
        try:
            self._local = self._together(lambda: start(self._numbers))[1]
        except BaseException:
            self.close()
            raise

    def run(self, method: str, sharded: Sequence[Any] | None = None, /, **common: Any) -> list[Any]:
        if sharded is not None and len(sharded) != self.size:
            raise ValueError(f"{method}: {len(sharded)} sharded arguments for {self.size} workers")
        mine = None if sharded is None else [sharded[number] for number in self._numbers]
        return self._together(lambda: self._owned().run(method, mine, **common), share=True)[0]

    def export(self, method: str, /, **common: Any) -> Any:
        return self.run(method, everywhere=False, **common)[0]

    def close(self) -> None:
        if self._local is not None:
            self._local.close()

    def _owned(self) -> ProcessGroup:
        assert self._local is not None, "built in __init__"
        return self._local

    def _together(self, function: Callable[[], Any], share: bool = False) -> tuple[list[Any], Any]:
        """Run `function` on every rank; (all results in replica order when they are to be shared, the own result).

        Raises:
            WorkerError: it failed on some rank; all ranks raise the message of the first of them.
        """
        from workers.launch.distributed import gather_objects

        mine: Any = None
        failure = None
        try:
            mine = function()
        except WorkerError as error:
            failure = str(error)
        except Exception as error:
            failure = traceback_text(error)
        everybody = gather_objects((failure, mine if share and failure is None else None), self._objects)
        failures = [text for text, _ in everybody if text is not None]
        if failures:
            if mine is not None and self._local is None:
                mine.close()  # our replicas started, another rank's did not
            raise WorkerError(failures[0])
        if not share:
            return [], mine
        owned = [everybody[rank][1] for rank in self._leaders]
        return [owned[i % len(owned)][i // len(owned)] for i in range(self.size)], mine


def _portable(error: Exception) -> Exception:
    """The exception as another process can have it: itself when it survives pickling, else a `WorkerError`; with its traceback as a note."""
    import pickle

    text = traceback_text(error)
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(text)
    copy.add_note(f"In the main process:\n{text}")
    return copy


def _forget_rank_variables() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
