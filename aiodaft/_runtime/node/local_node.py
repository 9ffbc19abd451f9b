"""The node of this machine: its fork server, its node agent, and its claims on GPUs, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from aiodaft._protocol.ids import NODE, PeerId, is_attached, node_of
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.logs.console import Console, Relay
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.nodes import CoordinatorContact, Nodes
from aiodaft._runtime.node.shipped_code import host_code
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.node.workers import ExecLauncher, Launcher
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.capabilities import has_fork_server
from aiodaft.exceptions import DaftError, ProtocolError

# Seconds that a controller gets to connect again after its connection broke.
_ORPHAN_GRACE: Final = 2.0


class LocalNode:
    def __init__(
        self,
        peer: Peer,
        nodes: Nodes,
        coordinator: CoordinatorContact,
        machine: Machine,
        options: NodeOptions,
        console: Console,
    ) -> None:
        env, process = peer.process.env, peer.process
        launcher: Callable[..., Launcher] = env.launcher or (WorkerLauncher if has_fork_server() else ExecLauncher)
        self._peer = peer
        self._nodes = nodes
        # The last connection of each controller that has one no more, until it connects again or is given up.
        self._broken: dict[PeerId, Connection] = {}
        self._claims = machine.claims
        self.launcher = launcher(process.loop, options, env.timeouts, console)
        self._console = console
        # To programs on other machines, while workers write to them.
        self._relays: WeakValueDictionary[PeerId, Relay] = WeakValueDictionary()
        self.launcher.relay_to = self._relay_to
        self._code = host_code(peer)
        self.agent = NodeAgent(process, peer.connections, peer.owner, nodes, self.launcher, machine, options)
        self.agent.draining.unneeded = lambda worker: peer.agent_of(worker).unneeded()
        self.agent.tell_levels = lambda worker, levels: peer.agent_of(worker).set_levels.tell(levels)
        self._coordinator = coordinator
        self.agent.on_ended = self._process_ended
        self.agent.on_left = coordinator.free_names
        peer.connections.explain = self._explain
        peer.add_actor(NODE, "node agent", self.agent)

    def _relay_to(self, program: PeerId) -> Relay | None:
        if not program:
            return None
        relay = self._relays.get(program)
        if relay is None:
            send = self._peer.owner(program).show
            relay = self._relays[program] = Relay(self._peer.process, send, self._console)
        return relay

    def _process_ended(self, ended: PeerId) -> None:
        self._coordinator.free_names(ended, None)

    async def _explain(self, connection: Connection, reason: Exception) -> DaftError:
        if is_attached(connection.remote):
            self._owner_lost(connection, reason)
        ending = await self.agent.exit_report(connection.remote, self._peer.graphs.in_flight(connection))
        # A process that breaks the protocol is cut off and ends; callers need to know the former.
        return reason if isinstance(reason, ProtocolError) else ending

    def _owner_lost(self, connection: Connection, reason: Exception) -> None:
        """End the workers of a controller, unless it connects again."""

        def end() -> None:
            now = connections.get(owner)
            if self._broken.get(owner) is not connection:
                # It connected again, and that connection, which broke as well, has a grace of its own.
                return
            if now is not None and now.is_awaited():
                loop.call_later(_ORPHAN_GRACE, end)
                return
            del self._broken[owner]
            if now is None or now.lost is not None:
                self.agent.owner_lost(owner, f"its owner is gone: {reason}")

        owner, connections, loop = connection.remote, self._peer.connections, self._peer.process.loop
        self._broken[owner] = connection
        if connection.dismissed:
            end()
        else:
            loop.call_later(_ORPHAN_GRACE, end)

    def node_gone(self, name: str) -> None:
        """A node is no member any more: the processes of this one cannot wait for those of that one."""
        if name != node_of(self._peer.process.id):
            process, peer = self._nodes.server_of(name), self._peer
            peer.process.create_task(peer.lose_node(name, process), name=f"lose node {name}")
            for worker in self.launcher.workers:
                peer.agent_of(worker).lose_node.tell(name, process)

    async def aclose(self) -> None:
        """End all workers, after the peer has closed its connections to them."""
        await self.launcher.aclose()
        self._code.close()
        self._claims.close()

    def abandon(self) -> None:
        self.launcher.abandon()
        self._code.close()
        self._claims.close()

    def stay_behind(self) -> None:
        self.launcher.stay_behind()
        self._claims.close()
