"""A cluster with a node on each host of a test network, and controllers in the test that are on one of the hosts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from far_actors import Far
from network_namespaces import Host, Network

import aiodaft
from aiodaft._runtime.connections import dialing
from aiodaft.exceptions import DaftError, OutcomeUnknown

PORT: Final = 7777
# The folder with actors of tests.
_SUPPORT: Final = str(Path(__file__).parent)


class _SocketsOf:
    """The socket module, but new sockets are those of a host."""

    def __init__(self, host: Host) -> None:
        self.socket = lambda family, kind, protocol: host.open_socket(family, kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class HostCluster:
    """Nodes with the names of their hosts; the first one has the coordinator."""

    def __init__(self, net: Network, key_file: Path, *, ipv6: bool) -> None:
        self.net = net
        self.key_file = key_file
        self._ipv6 = ipv6

    def start(self, *hosts: Host) -> None:
        """Start nodes, and wait until they are members."""
        nodes = [self.launch(host) for host in hosts]
        for host, node in zip(hosts, nodes, strict=True):
            assert node.stdout is not None
            assert node.stdout.readline().strip() == self.address_of(host), f"{host.name} does not listen"

    def launch(self, host: Host) -> subprocess.Popen[str]:
        """Start a node; when it is a member, it prints its address."""
        first = self.net.hosts[0]
        command = ["up"] if host is first else ["join", self.address_of(first)]
        arguments = [*command, "--listen", self.address_of(host), "--key-file", str(self.key_file), "--cpus", "8"]
        environment = {**os.environ, "PYTHONPATH": _SUPPORT}
        argv = [sys.executable, "-m", "aiodaft.cli", *arguments]
        return host.popen(argv, stdout=subprocess.PIPE, text=True, env=environment)

    def address_of(self, host: Host) -> str:
        """The address at which the node of a host listens."""
        return f"tcp://[{host.address6}]:{PORT}" if self._ipv6 else f"tcp://{host.address}:{PORT}"

    def nodes_as_seen_by(self, host: Host) -> list[str]:
        """The names of the members, as `aiodaft ps` shows them on a host."""
        argv = [sys.executable, "-m", "aiodaft.cli", "ps", self.address_of(host), "--key-file", str(self.key_file)]
        return [line.split()[0] for line in host.run(argv).stdout.splitlines() if not line.startswith(" ")]

    @contextmanager
    def controllers_on(self, host: Host) -> Generator[None, None, None]:
        """The controllers of this process are on a host: they do not listen, and the connections they open are its."""
        before = dialing.socket
        dialing.socket = _SocketsOf(host)  # type: ignore[assignment]  # as good as the module
        try:
            yield
        finally:
            dialing.socket = before

    def runtime(self, host: Host, **options: Any) -> aiodaft.Runtime:
        """A runtime that is attached to the node of a host."""
        return aiodaft.Runtime(self.address_of(host), key_file=self.key_file, **options)


@contextmanager
def cluster_on(net: Network, key_file: Path, *, ipv6: bool = False) -> Generator[HostCluster, None, None]:
    """A cluster with a node on each host; it ends with the block."""
    made = subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", str(key_file)], capture_output=True)
    assert made.returncode == 0, made.stderr
    cluster = HostCluster(net, key_file, ipv6=ipv6)
    first, *others = net.hosts
    try:
        cluster.start(first)
        cluster.start(*others)
        yield cluster
    finally:
        for host in net.hosts:
            host.end_processes()


async def spawn_on(rt: aiodaft.Runtime, host: Host) -> Far:
    """An actor on a host."""
    return await rt.on(node=host.name).spawn(Far)


async def use_all(cluster: HostCluster) -> None:
    """Start the fork servers of all hosts, which stay: the first actor does."""
    one = cluster.net.hosts[0]
    with cluster.controllers_on(one):
        async with cluster.runtime(one) as rt:
            for host in cluster.net.hosts:
                await spawn_on(rt, host)


async def spawn_when_there(rt: aiodaft.Runtime, host: Host) -> Far:
    """An actor on a host whose node may have to become a member first."""
    while True:
        try:
            return await spawn_on(rt, host)
        except (ValueError, DaftError):
            await asyncio.sleep(0.01)


async def is_lost(call: Awaitable[object]) -> bool:
    """Whether a call fails because it is not known what became of it."""
    with pytest.raises(OutcomeUnknown) as failed:
        await call
    return failed.value.executed is not False


def network_bytes(host: Host) -> int:
    """The bytes that went over the cable of a host."""
    line = next(line for line in host.run(["cat", "/proc/self/net/dev"]).stdout.splitlines() if "eth0:" in line)
    fields = line.split(":")[1].split()
    return int(fields[0]) + int(fields[8])


@pytest.fixture
async def on_host_three(cluster: HostCluster) -> AsyncIterator[aiodaft.Runtime]:
    """The runtime of a controller on host three; the coordinator is on host one."""
    three = cluster.net.hosts[2]
    with cluster.controllers_on(three):
        async with cluster.runtime(three, unhandled="log", stop_grace=0.5, cancel_grace=0.5) as made:
            yield made
