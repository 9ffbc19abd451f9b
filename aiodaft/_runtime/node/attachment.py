"""A controller that uses the nodes of a cluster: it is connected to one of them, and learns of the others from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain, repeat
from typing import Final, NamedTuple

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import PeerId, node_of
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.far import FarConnections, Network, Welcome, who_listens
from aiodaft._runtime.logs.relay import ConsoleThread
from aiodaft._runtime.node.contact import CoordinatorContact
from aiodaft._runtime.node.membership import watch_members
from aiodaft._runtime.node.nodes import Nodes
from aiodaft._runtime.node.shipped_code import host_code
from aiodaft._runtime.peer import Peer
from aiodaft.exceptions import DaftError, PeerLost, ProtocolError

# Seconds before each attempt to connect to a node again; the last one is repeated.
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


class Cluster(NamedTuple):
    """A cluster, as it is found at the address of one of its nodes."""

    address: str
    network: Network
    welcome: Welcome


async def find_cluster(address: str, network: Network, local: PeerId) -> Cluster:
    """Ask who listens at an address.

    Raises:
        PeerLost: No node of this cluster does.
    """
    return Cluster(address, network, await who_listens(network, local, address))


class Attachment:
    """The link of a controller to its node, in place of a node of its own."""

    def __init__(
        self, peer: Peer, nodes: Nodes, coordinator: CoordinatorContact, cluster: Cluster, console: ConsoleThread
    ) -> None:
        self._peer = peer
        self._nodes = nodes
        self._coordinator = coordinator
        self.console = console
        far = peer.connections.far = FarConnections(peer.process, cluster.network, peer.connections)
        far.on_silent = self._node_silent
        peer.connections.explain = self._explain
        peer.nodes = nodes
        host_code(peer)
        # The nodes that it connects to again.
        self._missed: set[PeerId] = set()
        # Called when a node is connected again, until it raises no DaftError: messages of the node from meanwhile are
        # lost.
        self.on_back: Callable[[PeerId], Awaitable[None]]
        nodes.add(Member(cluster.welcome.node_name, cluster.welcome.node, cluster.address))

    async def ready(self) -> None:
        """Learn of the nodes, and go on doing so.

        Raises:
            DaftError: The cluster cannot be reached.
        """
        await self._nodes.learn_from(self._peer.process.options.agent)
        self._peer.process.create_task(watch_members(self._coordinator, self._nodes), name="watch members")

    async def _explain(self, connection: Connection, reason: Exception) -> DaftError:
        remote, peer = connection.remote, self._peer
        if isinstance(reason, ProtocolError):
            return reason
        if remote == self._nodes.server_of(node_of(remote)):
            if remote not in self._missed:
                self._missed.add(remote)
                peer.process.create_task(self._connect_again(remote), name=f"connect to {remote} again")
            return PeerLost(f"the connection to the node {remote} ended: {reason}")
        return await self._nodes.of(remote).exit_report(remote, peer.graphs.in_flight(connection))

    def _node_silent(self, node: PeerId) -> None:
        # Its whole machine may be stopped; nothing else would say so if it has the coordinator.
        losing = self._peer.lose_node(node_of(node), node)
        self._peer.process.create_task(losing, name=f"lose the processes of {node}")

    async def _connect_again(self, node: PeerId) -> None:
        """Connect to a node, before it takes this process for dead if that is possible."""
        try:
            for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
                await asyncio.sleep(pause)
                if self._nodes.server_of(node_of(node)) != node:
                    return
                with suppress(DaftError):
                    await self.on_back(node)
                    return
        finally:
            self._missed.discard(node)

    async def aclose(self) -> None:
        """The nodes end the workers, when they see that the connections of this process have ended."""
        await self.console.aclose()

    def abandon(self) -> None:
        """As `aclose`, without a running loop. Blocks."""
        self.console.abandon()

    def stay_behind(self) -> None:
        """Do nothing: in a forked child, all of this belongs to the parent."""
