"""A cluster of nodes on this machine, each a process of its own, for tests."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiodaft._runtime.connections.identity import Identity, load_identity
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import LaunchFailed
from aiodaft.launch.started_node import StartedNode


@dataclass(frozen=True)
class LocalCluster:
    """Some nodes, n1 and so on, the first with the coordinator.

    Attributes:
        address: The address of the first node.
        key_file: The key of the cluster.
        pids: The process of each node.
    """

    address: str
    key_file: Path
    pids: dict[str, int]


@asynccontextmanager
async def local_cluster(count: int, options: Sequence[str]) -> AsyncGenerator[LocalCluster]:
    """Start nodes with these options of `aiodaft up`; they end with the block, and with this process.

    Raises:
        LaunchFailed: One did not come up, or no key can be made.
    """
    with tempfile.TemporaryDirectory(prefix="aiodaft-cluster-") as folder:
        key_file = Path(folder, "key")
        await _make_key(key_file)
        nodes = _Nodes(load_identity(key_file), options)
        try:
            address = await nodes.start("n1", "up")
            async with asyncio.TaskGroup() as group:
                for number in range(2, count + 1):
                    group.create_task(nodes.start(f"n{number}", "join", address))
            yield LocalCluster(address, key_file, {name: node._process.pid for name, node in nodes.started.items()})
        finally:
            await nodes.aclose()


class _Nodes:
    def __init__(self, identity: Identity, options: Sequence[str]) -> None:
        self._identity, self._options = identity, options
        self._tasks = TaskOwner("nodes of a test")
        self.started: dict[str, StartedNode] = {}

    async def start(self, name: str, *command: str) -> str:
        """Start a node; returns its address."""
        words = [*command, "--name", name, "--listen", "tcp://127.0.0.1:0", "--key-stdin", *self._options]
        command_line = [sys.executable, "-m", "aiodaft.cli", *words]
        node = self.started[name] = await StartedNode.start(name, command_line, self._identity, self._tasks)
        return await node.address

    async def aclose(self) -> None:
        # The first one last: the others leave in order.
        for node in reversed(self.started.values()):
            node.end()
        for node in reversed(self.started.values()):
            await node.wait_end()
        await self._tasks.aclose()


async def _make_key(path: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    making = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiodaft.cli", "key", "new", str(path), stdout=pipe, stderr=pipe
    )
    _, problem = await making.communicate()
    if making.returncode:
        raise LaunchFailed(f"no key for the cluster: {problem.decode(errors='replace').strip()}")
