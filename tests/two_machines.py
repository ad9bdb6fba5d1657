"""Two machines on this one, for tests and for people: as much of a cluster as one kernel can give.

    python -m tests.two_machines up                       # prints their names and addresses
    python -m tests.two_machines exec first-4711 ip addr  # a command on one of them
    python -m tests.two_machines down

Each has a network of its own with one address (10.77.0.1, 10.77.0.2), and a cable (a veth pair) joins the two: they reach each other and
themselves, nothing else, and nothing else reaches them. Each has processes, a host name, shared memory and an /etc/hosts of its own; the
files are this machine's, as on a cluster with a shared file system.

    maker (a test, or `hold` for `up`) ── unshare ── keeper, process 1 of the machine ── whatever `exec` starts there

Nothing has to be cleaned up: the keeper ends when its maker is gone, however it went; the kernel ends every process of a machine with
its process 1, and takes back the network when nobody uses it any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NAMES = ("first", "second")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PREFIX_LENGTH = 24
INTERFACE = "eth0"
PATIENCE_S = 30.0
"""Longest wait for the cable, and for an end that was asked for."""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


class NotAllowed(RuntimeError):
    """Namespaces can't be made here; the text says why."""


class Machine:
    """One of the two."""

    def __init__(self, name: str, address: str, pid: int) -> None:
        """
        Args:
            pid: its process 1, as it is numbered here.
        """
        self.name = name
        self.address = address
        self.pid = pid
        # As long as this is open the network outlives the processes, as a machine's does.
        self.network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._processes = os.stat(f"/proc/{pid}/ns/pid").st_ino

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` there, in the folder of whoever starts it."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, f"--wdns={os.getcwd()}", "--", *command]

    def processes(self) -> list[psutil.Process]:
        """All that run there, the keeper aside."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == self._processes
                if here and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        """SIGKILL to every process there at once; the kernel closes their connections, the other machine is told."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give back the network."""
        os.close(self.network)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """The machines, until the block is left or this process ends; their names carry its process id.

    Raises:
        NotAllowed: this machine or this user can't make them.
    """
    _check_allowed()
    names = [f"{name}-{os.getpid()}" for name in NAMES]
    hosts = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, names, strict=True))
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(_keeper(name, hosts)) for name in names]
        machines = [
            stack.enter_context(contextlib.closing(Machine(name, address, _process_1(keeper))))
            for name, address, keeper in zip(names, ADDRESSES, keepers, strict=True)
        ]
        _plug_in(*(machine.network for machine in machines))
        for keeper, address in zip(keepers, ADDRESSES, strict=True):
            _say(keeper, address)
        for keeper in keepers:
            _expect(keeper, "ready")
        yield machines[0], machines[1]


def running() -> list[tuple[str, int]]:
    """Names and keepers' process ids of all machines of this one, whoever made them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-m", "tests.two_machines", "keep"]:
            found.append((words[4], process.pid))
    return found


def _check_allowed() -> None:
    if sys.platform != "linux":
        raise NotAllowed("two machines on one need Linux's namespaces")
    missing = [program for program in ("unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        raise NotAllowed(f"two machines on one need {' and '.join(missing)} (of util-linux), which is not installed")
    if os.geteuid() != 0:
        raise NotAllowed("two machines on one need root: namespaces and their network belong to it")


@contextlib.contextmanager
def _keeper(name: str, hosts: str) -> Iterator[subprocess.Popen[str]]:
    """`unshare`, whose child is process 1 of a machine without a network yet."""
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    program = [sys.executable, "-m", "tests.two_machines", "keep", name, hosts]
    keeper = subprocess.Popen(
        [*unshare, "--", *program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the maker, who ends it
    )
    try:
        _expect(keeper, "made")
        yield keeper
    finally:
        keeper.kill()  # and with it, by --kill-child, process 1 and all of its machine
        keeper.communicate()


def _process_1(keeper: subprocess.Popen[str]) -> int:
    (child,) = psutil.Process(keeper.pid).children()
    return child.pid


def _say(keeper: subprocess.Popen[str], line: str) -> None:
    assert keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # why it is gone is what it last said
        print(line, file=keeper.stdin, flush=True)


def _expect(keeper: subprocess.Popen[str], word: str) -> None:
    assert keeper.stdout is not None
    said: list[str] = []
    while not said or said[-1] != word:
        line = keeper.stdout.readline()
        if not line:
            raise NotAllowed(f"two machines on one can't be made here: {' '.join(said) or 'unshare says nothing'}")
        said.append(line.strip())


def _plug_in(one: int, other: int) -> None:
    """A cable between two networks, given by descriptors; neither end is ever seen outside them."""
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as netlink:
            peer = {"ifname": INTERFACE, "net_ns_fd": other}
            netlink.link("add", ifname=INTERFACE, kind="veth", net_ns_fd=one, peer=peer)
    except NetlinkError as error:
        raise NotAllowed(f"two machines on one can't be joined by a veth pair: {error}") from error


def keep(name: str, hosts: str) -> None:
    """Process 1 of a machine: makes it its own, then waits until its maker is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the orphans that process 1 inherits
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    socket.sethostname(name)
    _mount("-t", "tmpfs", "shm", "/dev/shm")
    own = Path("/dev/shm/hosts")
    own.write_text(f"127.0.0.1 localhost\n{hosts}", encoding="ascii")
    _mount("--bind", str(own), "/etc/hosts")
    print("made", flush=True)
    address = sys.stdin.readline().strip()
    if address:
        _bring_up(address)
        print("ready", flush=True)
        sys.stdin.read()


def _mount(*arguments: str) -> None:
    # Not waited for as a child: the kernel buries it.
    done = subprocess.run(["mount", *arguments], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    if done.stdout:
        sys.exit(done.stdout)


def _bring_up(address: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        index = {link.get("ifname"): link["index"] for link in netlink.get_links()}
        netlink.addr("add", index=index[INTERFACE], address=address, prefixlen=PREFIX_LENGTH)
        for name in ("lo", INTERFACE):
            netlink.link("set", index=index[name], state="up")
        # The other end comes up when its keeper does this, and the kernel takes up to a second to notice.
        deadline = time.monotonic() + PATIENCE_S
        while netlink.link("get", index=index[INTERFACE])[0].get("IFLA_OPERSTATE") != "UP":
            if time.monotonic() > deadline:
                sys.exit(f"the cable is not up after {PATIENCE_S:g} s")
            time.sleep(0.05)


def hold() -> None:
    """Two machines until SIGTERM; what `up` leaves behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with two_machines() as machines:
            for machine in machines:
                print(machine.name, machine.address, flush=True)
            print("up", flush=True)
            while True:
                signal.pause()
    except NotAllowed as error:
        print(error, flush=True)


def up() -> int:
    """Make two machines that stay; those that an earlier `up` made are removed."""
    down()
    command = [sys.executable, "-m", "tests.two_machines", "hold"]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    for line in holder.stdout:
        if line.strip() == "up":
            return 0
        print(line, end="")
    return 1


def down() -> int:
    """Remove what `up` made; machines of tests that run meanwhile are theirs."""
    holders = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[1:] == ["-m", "tests.two_machines", "hold"]
    ]
    for holder in holders:
        with contextlib.suppress(psutil.NoSuchProcess):
            holder.terminate()
    psutil.wait_procs(holders, timeout=PATIENCE_S)
    return 0


def execute(name: str, command: Sequence[str]) -> int:
    """Become `command` on the machine `name`."""
    found = dict(running())
    if name not in found:
        print(f"there is no machine {name!r}; there are: {', '.join(found) or 'none (up makes two)'}", file=sys.stderr)
        return 1
    words = Machine(name, "", found[name]).command(command)
    os.execvp(words[0], words)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    if arguments[:1] == ["keep"]:
        keep(*arguments[1:])
        return 0
    if arguments[:1] == ["hold"]:
        hold()
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.two_machines", description="Two machines on this one.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="make them and print their names")
    commands.add_parser("down", help="remove them")
    run = commands.add_parser("exec", help="run a command on one of them")
    run.add_argument("name")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    given = parser.parse_args(arguments)
    if given.command == "exec":
        return execute(given.name, given.words)
    return up() if given.command == "up" else down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
