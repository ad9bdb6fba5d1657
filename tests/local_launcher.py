"""Workers in processes of this machine, without Ray or torchrun: for tests of what happens in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.launch.group import WorkerFactory, WorkerGroup
from workers.launch.launcher import Launcher, Place
from workers.launch.node_host import NodeHost
from workers.launch.switchboard import Switchboard


class LocalLauncher(Launcher):
    """A launcher with this machine alone.

    Args:
        log_dir: for the workers' output.
        env: their variables.
        preload: what their fork server imports.
        silence_s: longest silence of a worker.
    """

    def __init__(
        self, log_dir: Path, env: Mapping[str, str] = {}, preload: Sequence[str] = (), silence_s: float = 60.0
    ) -> None:
        super().__init__(Switchboard(silence_s))
        self.board = self._board
        self.logs = log_dir
        self.host = self._here = NodeHost(log_dir, "cpu", env, preload)

    def trainer_group(self, factory: WorkerFactory, num_ranks: int) -> WorkerGroup:
        raise NotImplementedError("ranks need a launcher that lets them meet")

    def engine_places(self, name: str, replicas: int, gpus: int) -> list[Place]:
        return [Place(self.host, {}) for _ in range(replicas)]

    def close(self) -> None:
        super().close()
        self.host.close()
        self._board.close()
