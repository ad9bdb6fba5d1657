"""The worker processes of one node: those on CPU as forks of servers, those on GPUs as interpreters of their own.

(A fork is safe only while nothing has touched CUDA; nobody has run this on a GPU yet, so nothing is forked there.)
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.launch.fork_server import ForkServer
from workers.launch.group import WorkerFactory
from workers.launch.processes import ProcessGroup, child_environment
from workers.launch.transport import Blob, Channel, Packed, from_blob

MOST_SERVERS = 8
"""Servers that can be handed over: one a list of modules, of which there are two."""
_CONTROLS = b"c"
"""Comes with the servers' sockets: descriptors travel only with bytes."""


class NodeProcesses:
    """Starts groups of workers. The first that names modules to import starts a server that has imported them,
    as a fork of one that has imported some of them (those that come first) if there is one."""

    def __init__(self, log_dir: Path, node: int, device: str) -> None:
        """Nothing is started yet.

        Args:
            node: a number of this node among the run's; in the names of the servers' logs.
            device: `cpu` or `cuda`.
        """
        self._log_dir = log_dir
        self._node = node
        self._device = device
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._inherited: Mapping[str, str] = dict(os.environ)

    def prepare(self, preloads: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
        """Begin to import what workers with these variables will need: a list of modules for each kind of worker."""
        for preload in preloads:
            self._server(tuple(preload), env)

    def start(
        self,
        name: str,
        factory: WorkerFactory | Packed,
        envs: Mapping[int, Mapping[str, str]],
        *,
        start_timeout_s: float,
        preload: Sequence[str],
    ) -> ProcessGroup:
        """Start workers; they are still starting when this returns (`ProcessGroup.ready` waits).

        Args:
            envs: the workers' numbers in their group, each with its variables.
            preload: modules that the factory's worker needs and that take long to import; none asks for no fork.
        """
        numbers = list(envs)
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
            fork_server=self._server(tuple(preload), envs[numbers[0]]) if numbers else None,
            inherited=self._inherited,
        )

    def hand_over(self, sock: socket.socket) -> None:
        """Give the servers to a process of this node at the other end of the stream `sock`, and with them this process's environment.

        They still end when this process ends or closes this object.
        """
        detached = {modules: server.detach() for modules, server in self._servers.items()}
        servers = [(modules, env, asked) for modules, (_, env, asked) in detached.items()]
        with contextlib.closing(Blob((self._inherited, servers))) as blob:
            Channel(sock).send([blob])
        socket.send_fds(sock, [_CONTROLS], [control.fileno() for control, _, _ in detached.values()])
        for control, _, _ in detached.values():
            control.close()

    def take_over(self, sock: socket.socket) -> None:
        """Receive what `hand_over` gives."""
        self._inherited, servers = from_blob(Channel(sock).receive()[0])
        _, fds, _, _ = socket.recv_fds(sock, len(_CONTROLS), MOST_SERVERS, socket.MSG_CMSG_CLOEXEC)
        for fd, (modules, env, asked) in zip(fds, servers, strict=True):
            self._servers[modules] = ForkServer.adopted(socket.socket(fileno=fd), env, asked)

    def close(self) -> None:
        """End the servers; the groups are closed before them."""
        servers, self._servers = self._servers, {}
        for server in reversed(servers.values()):
            server.close()

    def _server(self, preload: tuple[str, ...], env: Mapping[str, str]) -> ForkServer | None:
        if not preload or self._device != "cpu":
            return None
        if preload not in self._servers:
            log = self._log_dir / f"imports-{self._node}-{len(self._servers)}.log"
            less = [modules for modules in self._servers if modules == preload[: len(modules)]]
            base = self._servers[max(less, key=len)] if less else None
            self._servers[preload] = ForkServer(child_environment(env, self._inherited), preload, log, base)
        return self._servers[preload]
