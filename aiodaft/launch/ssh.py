"""Nodes on machines that `ssh` reaches."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiodaft._protocol.coordination.records import check_node_name
from aiodaft._runtime.connections.identity import load_identity
from aiodaft._runtime.platform.tasks import TaskOwner, see_through
from aiodaft.exceptions import LaunchFailed
from aiodaft.launch.started_node import StartedNode

__all__ = ["ssh"]

# No question is asked, and a host that is gone is noticed.
_COMMAND: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@asynccontextmanager
async def ssh(
    hosts: Sequence[str],
    *,
    key_file: str | os.PathLike[str] | None = None,
    python: str | None = None,
    command: Sequence[str] = _COMMAND,
    node_options: Sequence[str] = (),
    patience: float = 60.0,
) -> AsyncGenerator[str]:
    """Run a node on each host for the time of the block; gives the address of the cluster.

    The node of the first host has the coordinator. Each node listens on one free port, of the address that the ssh
    connection came to on the first host, and of the interface to the first host on the others. The nodes end with the
    block, and when this process is killed: each ends with its ssh connection.

    Args:
        hosts: The destinations of `ssh`, "user@" included; the rest names the node, as in `rt.on(node="host1")`.
        key_file: The key of the cluster. Default: $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key. The hosts need no copy:
            the key goes over the ssh connections, and is not written there.
        python: The interpreter on the hosts; it needs aiodaft. Default: the path of the one that runs here.
        command: The command that runs `ssh`, with its options.
        node_options: More options for `aiodaft up` and `aiodaft join`, such as ("--gpus", "8").
        patience: Seconds that all nodes have to come up.

    Raises:
        LaunchFailed: A node did not come up. It has the last lines that ssh and the node said on standard error, where
            all of them are.
        KeyFileError: The key cannot be read.
        ValueError: There are no hosts, or one cannot name a node.

    Cancellation: the nodes end. Leaving the block waits until they have ended, at most 15 s.
    """
    names = [check_node_name(host.rpartition("@")[2]) for host in hosts]
    if isinstance(hosts, str) or not names or len(set(names)) < len(names):
        raise ValueError(f"hosts={hosts!r}: a list of different hosts is needed")
    identity, tasks = load_identity(key_file), TaskOwner("aiodaft.launch.ssh")
    nodes: list[StartedNode] = []

    async def start(host: str, name: str, *arguments: str) -> StartedNode:
        words = [python or sys.executable, "-m", "aiodaft.cli", *arguments, "--key-stdin", "--name", name]
        # Without exec a shell would stay.
        remote = f"exec {shlex.join([*words, *node_options])}"
        # A name that begins with a hyphen is no option.
        started = await StartedNode.start(name, [*command, "--", host, remote], identity, tasks)
        nodes.append(started)
        return started

    try:
        try:
            async with asyncio.timeout(patience):
                address = await (await start(hosts[0], names[0], "up", "--listen", "ssh")).address
                others = [
                    await start(host, name, "join", address) for host, name in zip(hosts[1:], names[1:], strict=True)
                ]
                await asyncio.gather(*(other.address for other in others))
        except TimeoutError:
            late = "".join(node.said for node in nodes if node.address.cancelled() or not node.address.done())
            raise LaunchFailed(f"not all nodes came up within {patience:g} s{late}") from None
        yield address
    finally:
        await see_through(tasks.start(_end(nodes), name="end"))


async def _end(nodes: Sequence[StartedNode]) -> None:
    # The first one has the coordinator: it is the last one, so that the others can leave.
    for some in (nodes[1:], nodes[:1]):
        for node in some:
            node.end()
        await asyncio.gather(*(node.wait_end() for node in some))
