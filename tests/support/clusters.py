"""Clusters of nodes on this machine, as real processes; each node has a port of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from travellers import Traveller
from warm_servers import Commands

import aiodaft
from aiodaft.cli.__main__ import main

_COMMAND = (sys.executable, "-m", "aiodaft.cli")
NODES = Commands("aiodaft.cli.__main__", "aiodaft.cli.node", "aiodaft._runtime.node.node_process")
# Seconds that a node has to come up, or to end.
_PATIENCE = 50.0


class NodeDied(Exception):
    """A node ended before it said where it listens."""


class RunningNode:
    """The process of one node."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.process = process
        self.name = name
        assert process.stdout is not None
        # A node prints where it listens, or ends.
        self.address = process.stdout.readline().strip()
        if not self.address:
            raise NodeDied(f"{name} ended with status {process.wait(_PATIENCE)}")

    def end(self) -> int:
        """Tell it to end; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_PATIENCE)


class Cluster:
    """Some nodes; the first one has the coordinator."""

    def __init__(self, key_file: Path, stack: ExitStack) -> None:
        self.key_file = key_file
        self._stack = stack
        self.nodes: list[RunningNode] = []

    @property
    def address(self) -> str:
        return self.nodes[0].address

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which programs find the cluster."""
        return {**os.environ, "AIODAFT_KEY_FILE": str(self.key_file), "AIODAFT_ADDRESS": self.address}

    def add(self, name: str, *options: str) -> RunningNode:
        """Start another node."""
        command = ["join", self.address] if self.nodes else ["up"]
        self.nodes.append(self._start(name, *command, "--listen", "tcp://127.0.0.1:0", *options))
        return self.nodes[-1]

    def restart_first(self, *options: str) -> None:
        """Kill the first node, and start it again at the same address."""
        first = self.nodes[0]
        first.process.kill()
        first.process.wait(_PATIENCE)
        self.start_again(first, *options)

    def start_again(self, node: RunningNode, *options: str) -> None:
        """Start a node again that has ended, at the same address."""
        place = self.nodes.index(node)
        command = ["join", self.address] if place else ["up"]
        self.nodes[place] = self._start(node.name, *command, "--listen", node.address, *options)

    def command(self, *arguments: str) -> list[str]:
        """A command of `aiodaft`, for `environment`."""
        return [*_COMMAND, *arguments]

    def run(self, *arguments: str, timeout: float = 50) -> subprocess.CompletedProcess[str]:
        """Run a command of `aiodaft` to its end, and return its output."""
        command = self.command(*arguments)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)

    def _start(self, name: str, *options: str) -> RunningNode:
        process = NODES.start(self.command(*options, "--name", name, "--key-file", str(self.key_file), "--cpus", "8"))
        self._stack.callback(_ended, process)
        return RunningNode(process, name)


def _ended(process: subprocess.Popen[str]) -> None:
    """Make sure that a process has ended."""
    with process:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def start_fork_servers(cluster: Cluster, **options: Any) -> None:
    """Have each node start its fork server, which stays; `options` of a runtime."""

    async def use_all() -> None:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, **options) as rt:
            for node in cluster.nodes:
                await rt.on(node=node.name).spawn(Traveller)

    asyncio.run(use_all())


@contextmanager
def cluster_of(key_file: Path, *names: str, options: Sequence[str] = ()) -> Generator[Cluster]:
    """A cluster with these nodes, which ends with the block; the first one is started with options."""
    made = CliRunner().invoke(main, ["key", "new", str(key_file)])
    assert made.exit_code == 0, made.output
    with ExitStack() as stack:
        cluster = Cluster(key_file, stack)
        for number, name in enumerate(names):
            cluster.add(name, *(() if number else options))
        yield cluster


# Fixtures: a module that uses them says `cluster = two_nodes` and `rt = attached`.


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of n1 and n2, whose fork servers run."""
    with cluster_of(tmp_path_factory.mktemp("cluster") / "key", "n1", "n2") as made:
        start_fork_servers(made)
        yield made


@pytest.fixture
async def attached(cluster: Cluster) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime that is attached to the first node of the cluster of the module."""
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as made:
        yield made
