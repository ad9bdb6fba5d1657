"""The engine processes of one node: those on CPU as forks of one server, those on GPUs as interpreters of their own.

(A fork is safe only while nothing has touched CUDA; nobody has run this on a GPU yet, so nothing is forked there.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.fork_server import ForkServer
from workers.group import WorkerFactory
from workers.processes import ProcessGroup, child_environment
from workers.transport import Packed


class EngineProcesses:
    """Starts groups of engines; the first that can be forked starts the server."""

    def __init__(self, log_dir: Path, log_name: str, device: str) -> None:
        """Nothing is started yet.

        Args:
            log_name: name of the server's log, of which there is one a node.
            device: `cpu` or `cuda`.
        """
        self._log_dir = log_dir
        self._log_name = log_name
        self._device = device
        self._server: ForkServer | None = None

    def start(
        self,
        name: str,
        factory: WorkerFactory | Packed,
        envs: Mapping[int, Mapping[str, str]],
        *,
        start_timeout_s: float,
        preload: Sequence[str],
    ) -> ProcessGroup:
        """Start replicas; they are still starting when this returns (`ProcessGroup.ready` waits).

        Args:
            envs: the replicas' numbers, each with its variables.
            preload: modules that the factory's worker needs and that take long to import; none asks for no fork.
        """
        numbers = list(envs)
        if preload and self._device == "cpu" and self._server is None and numbers:
            env = child_environment(envs[numbers[0]])
            self._server = ForkServer(env, preload, self._log_dir / f"{self._log_name}.log")
        return ProcessGroup(
            name,
            factory,
            len(numbers),
            {},
            self._log_dir,
            start_timeout_s=start_timeout_s,
            numbers=numbers,
            member_env=envs.__getitem__,
            wait=False,
            fork_server=self._server if preload else None,
        )

    def close(self) -> None:
        """End the server; the groups are closed before it."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
