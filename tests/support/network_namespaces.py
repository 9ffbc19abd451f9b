"""Several hosts on one machine: network namespaces on one switch, with faults that tests choose.

Nothing has a name outside of its namespace. Each namespace has a keeper, which ends the processes in it when the test
ends or is killed; the kernel removes the rest: no run leaves anything. Needs root or user namespaces, iproute2 and
util-linux.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

TOOLS: Final = ("ip", "nsenter", "ss", "tc", "unshare")
_NETWORK_4: Final = ipaddress.IPv4Network("10.77.0.0/24")
_NETWORK_6: Final = ipaddress.IPv6Network("fd77::/64")
# A namespace lives as long as this process, and everything in it ends with the test. It makes sockets for the test,
# which does not have to enter the namespace.
_KEEPER: Final = """
import os, signal, socket, sys
socket.sethostname(sys.argv[1])
with socket.socket(fileno=int(sys.argv[2])) as test:
    test.send(b"ready")
    while wanted := test.recv(16):
        with socket.socket(*map(int, wanted.split())) as made:
            socket.send_fds(test, [b"!"], [made.fileno()])
here, found = os.readlink("/proc/self/ns/net"), True
while found:
    found = False
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            if os.readlink(f"/proc/{pid}/ns/net") == here:
                found = True
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
"""
# Numbers of the kernel's classic BPF: the operations, and where it gives a random number.
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _JUMP_IF_EQUAL, _JUMP_IF_ABOVE, _RETURN = 0x20, 0x28, 0x30, 0x15, 0x25, 0x06
_RANDOM: Final = (1 << 32) - 0x1000 + 56
_DROP, _GO_ON = 2, (1 << 32) - 1


class NotPossible(Exception):
    """This machine does not let tests make namespaces; the text says why."""


class CommandFailed(NotPossible):
    """A tool for networks has failed."""


@dataclass(frozen=True)
class _Namespace:
    """A network and a host name of their own."""

    keeper: subprocess.Popen[bytes]
    test: socket.socket
    enter: tuple[str, ...]

    def run(self, *argv: str, stdin: str = "") -> str:
        done = subprocess.run([*self.enter, *argv], input=stdin, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise CommandFailed(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True, eq=False)
class Host:
    """A host name, two addresses, and the processes that run there."""

    name: str
    address: str
    address6: str
    namespace: _Namespace = field(repr=False)
    _started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False)

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host. It ends with the test at the latest."""
        return [*self.namespace.enter, *argv]

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen.

        The pid is that of `argv`; processes that still run when the hosts are removed are killed.
        """
        process = subprocess.Popen(self.command(argv), **options)
        self._started.append(process)
        return process

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """As subprocess.run, with its output as text and an error for a failure."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 20, "check": True}
        return subprocess.run(self.command(argv), **(settings | options))

    def open_socket(
        self, family: socket.AddressFamily = socket.AF_INET, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> socket.socket:
        """A socket of this host, for the test itself."""
        self.namespace.test.send(f"{family:d} {kind:d}".encode())
        _, descriptors, _, _ = socket.recv_fds(self.namespace.test, 1, 1)
        return socket.socket(fileno=descriptors[0])

    def listen(self, family: socket.AddressFamily = socket.AF_INET, port: int = 0) -> socket.socket:
        """A listening socket at an address of this host."""
        listener = self.open_socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.address if family == socket.AF_INET else self.address6, port))
        listener.listen()
        return listener

    def reset_connections(self, peer: Host) -> int:
        """End all TCP connections with another host as an administrator does, by RST. Returns how many there were."""
        ended = self.namespace.run("ss", "-HntK", f"( dst {peer.address} or dst [{peer.address6}] )")
        return len(ended.splitlines())

    def pids(self) -> set[int]:
        """Every living process on the host, also one that no other of the test has as a child."""
        keeper = self.namespace.keeper.pid
        here = os.readlink(f"/proc/{keeper}/ns/net")
        found: set[int] = set()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if pid != keeper and os.readlink(f"/proc/{pid}/ns/net") == here:
                    found.add(pid)
        return found

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every process on the host."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_processes(self) -> None:
        """Kill every process on the host, and wait for its end."""
        while self.pids():
            self.send_signal(signal.SIGKILL)
            os.sched_yield()
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self._started.clear()


class Network:
    """Hosts on one switch, and the faults between them."""

    def __init__(self, switch: _Namespace, hosts: tuple[Host, ...]) -> None:
        self.hosts: Final = hosts
        self._switch: Final = switch
        # A command per fault, on the switch: setting one again replaces it.
        self._tc([f"qdisc add dev {_port(host)} clsact" for host in hosts])

    def drop(self, source: Host, destination: Host, percent: float = 100) -> None:
        """Lose packets of one direction without a word, all or a random part. Neighbour discovery goes on."""
        preference = 1 + self.hosts.index(destination)
        program = _drop_packets_to(destination, percent)
        self._tc([f"filter replace dev {_port(source)} ingress pref {preference} handle 1 bpf da bytecode {program}"])

    def lose(self, percent: float) -> None:
        """Lose a random part of all packets."""
        for source in self.hosts:
            self._isolate(source, self.hosts, percent)

    def partition(self, *hosts: Host) -> None:
        """Cut these off from the others, in both directions; they still reach each other."""
        others = [host for host in self.hosts if host not in hosts]
        for host in hosts:
            self._isolate(host, others)
        for other in others:
            self._isolate(other, hosts)

    def limit(self, host: Host, bits_per_second: int) -> None:
        """Limit the traffic of a host, in both directions."""
        bucket = f"tbf rate {bits_per_second}bit burst 16kb latency 500ms"
        self._tc([f"qdisc replace dev {_port(host)} root {bucket}"])
        host.namespace.run("tc", "-batch", "-", stdin=f"qdisc replace dev eth0 root {bucket}\n")

    def unplug(self, host: Host) -> None:
        """Pull the cable: the host sees that it has no carrier, the others see silence."""
        self._switch.run("ip", "link", "set", _port(host), "down")

    def plug(self, host: Host) -> None:
        """Plug the cable in again."""
        self._switch.run("ip", "link", "set", _port(host), "up")

    def heal(self) -> None:
        """End every fault. Data that TCP has not given up yet arrive at its next attempt."""
        for host in self.hosts:
            self.plug(host)
            for namespace, device in ((self._switch, _port(host)), (host.namespace, "eth0")):
                if " tbf " in namespace.run("tc", "qdisc", "show", "dev", device):
                    namespace.run("tc", "qdisc", "del", "dev", device, "root")
        self._tc([f"filter del dev {_port(host)} ingress" for host in self.hosts])

    def _isolate(self, source: Host, destinations: Iterable[Host], percent: float = 100) -> None:
        for destination in destinations:
            if destination is not source:
                self.drop(source, destination, percent)

    def _tc(self, commands: list[str]) -> None:
        self._switch.run("tc", "-batch", "-", stdin="".join(f"{command}\n" for command in commands))


@contextmanager
def network(*names: str) -> Generator[Network, None, None]:
    """Hosts that reach each other by TCP, each under its name; skips the test where they cannot be made."""
    with ExitStack() as stack:
        try:
            made = _make(stack, names)
        except NotPossible as error:
            pytest.skip(f"no network namespaces here (root, or `unshare -rn`, iproute2 and util-linux): {error}")
        yield made


def _make(stack: ExitStack, names: Sequence[str]) -> Network:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NotPossible(f"{', '.join(missing)} not found")
    # A user who is not root is so in a user namespace, which the switch brings.
    rootless = os.geteuid() != 0
    unshare = ("unshare", "--net", "--uts")
    switch = _start(stack, "switch", (*unshare, *(("--user", "--map-root-user") * rootless)), rootless)
    _await_start(switch)
    enter_user = ("nsenter", f"--user=/proc/{switch.keeper.pid}/ns/user", "--preserve-credentials", "--") * rootless
    namespaces = [_start(stack, name, (*enter_user, *unshare), rootless) for name in names]
    for namespace in namespaces:
        _await_start(namespace)
    hosts = tuple(
        Host(name, str(_NETWORK_4[number]), str(_NETWORK_6[number]), namespace)
        for number, (name, namespace) in enumerate(zip(names, namespaces, strict=True), 1)
    )
    for host in hosts:
        stack.callback(host.end_processes)
    _connect(switch, hosts)
    return Network(switch, hosts)


def _connect(switch: _Namespace, hosts: Sequence[Host]) -> None:
    commands = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
    for host in hosts:
        commands.append(f"link add {_port(host)} type veth peer name eth0 netns {host.namespace.keeper.pid}")
        commands.append(f"link set {_port(host)} master switch up")
    switch.run("ip", "-batch", "-", stdin="\n".join(commands))
    for host in hosts:
        commands = [
            "link set lo up",
            f"addr add {host.address}/{_NETWORK_4.prefixlen} dev eth0",
            f"addr add {host.address6}/{_NETWORK_6.prefixlen} dev eth0 nodad",
            "link set eth0 up",
        ]
        host.namespace.run("ip", "-batch", "-", stdin="\n".join(commands))


def _start(stack: ExitStack, name: str, make: tuple[str, ...], rootless: bool) -> _Namespace:
    test, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(test)
    with its:
        keeper = subprocess.Popen(
            [*make, sys.executable, "-ISc", _KEEPER, name, str(its.fileno())],
            pass_fds=[its.fileno()],
            stderr=subprocess.PIPE,
        )
    stack.callback(_end, keeper, test)
    spaces = ("user", "net", "uts") if rootless else ("net", "uts")
    enter = ("nsenter", *(f"--{space}=/proc/{keeper.pid}/ns/{space}" for space in spaces))
    return _Namespace(keeper, test, (*enter, *(("--preserve-credentials",) * rootless), "--"))


def _end(keeper: subprocess.Popen[bytes], test: socket.socket) -> None:
    test.close()
    with keeper:
        keeper.wait(timeout=10)


def _await_start(namespace: _Namespace) -> None:
    namespace.test.settimeout(10)
    if not namespace.test.recv(16):
        assert namespace.keeper.stderr is not None
        raise NotPossible(namespace.keeper.stderr.read().decode().strip())


def _port(host: Host) -> str:
    """The switch's end of a host's cable."""
    return f"to-{host.name}"


def _drop_packets_to(host: Host, percent: float) -> str:
    """A program for the packet filter, in tc's notation: the number of instructions, then each with its operands."""
    address4, address6 = int(ipaddress.IPv4Address(host.address)), int(ipaddress.IPv6Address(host.address6))
    # Jumps count instructions from the next one on: to the lottery (9), or to the end (12).
    program = [
        (_LOAD_HALF, 0, 0, 12),
        (_JUMP_IF_EQUAL, 0, 2, socket.ntohs(socket.htons(0x0800))),
        (_LOAD_WORD, 0, 0, 30),
        (_JUMP_IF_EQUAL, 5, 8, address4),
        (_JUMP_IF_EQUAL, 0, 7, 0x86DD),
        (_LOAD_BYTE, 0, 0, 20),
        (_JUMP_IF_EQUAL, 5, 0, socket.IPPROTO_ICMPV6),
        (_LOAD_WORD, 0, 0, 50),
        (_JUMP_IF_EQUAL, 0, 3, address6 & 0xFFFFFFFF),
        (_LOAD_WORD, 0, 0, _RANDOM),
        (_JUMP_IF_ABOVE, 1, 0, int(percent / 100 * 0xFFFFFFFF)),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _GO_ON),
    ]
    return ",".join([str(len(program)), *(" ".join(map(str, instruction)) for instruction in program)]).join("''")
