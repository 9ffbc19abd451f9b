"""The node of this machine: its fork server, its node agent, and its claims on GPUs, in one process."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol
from weakref import WeakValueDictionary

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.ids import NODE, ActorId, PeerId, is_attached, node_of
from aiodaft._protocol.node.resources import Resources, device_named, gpu_names
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.logs.console import Console, Relay
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.nodes import CoordinatorContact, Nodes
from aiodaft._runtime.node.shipped_code import host_code
from aiodaft._runtime.node.worker import NodeOptions, Tenant
from aiodaft._runtime.node.workers import ExecLauncher, Launcher
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.capabilities import has_fork_server
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.gpu_claims import GpuClaims
from aiodaft.exceptions import DaftError, OutcomeUnknown, ProtocolError
from aiodaft_transport.system import usable_cpus

# Seconds that a controller gets to connect again after its connection broke.
_ORPHAN_GRACE: Final = 2.0


class Machine:
    """The resources that a machine offers to actors.

    Args:
        cpus: CPUs to offer. Default: the process's affinity.
        gpus: GPUs to offer. Default: all that the process may use.
        share_gpus: Whether other runtimes may use the same GPUs at the same time.
    """

    def __init__(
        self, env: Env, cpus: float | None, gpus: int | None, custom: Mapping[str, float] | None, *, share_gpus: bool
    ) -> None:
        machine = env.gpus()
        # The names of the GPUs in CUDA_VISIBLE_DEVICES.
        self.gpu_names = gpu_names(machine, os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
        self.claims = GpuClaims([] if share_gpus else [device_named(name, machine) for name in self.gpu_names])
        self.resources: Resources[Tenant] = Resources(
            cpus=usable_cpus() if cpus is None else cpus,
            gpus=len(self.gpu_names) if gpus is None else gpus,
            custom=custom,
            claims=self.claims,
        )


class LocalOwner(Protocol):
    """The owner in this process. It is told at once: callers that hear of an end find the actors being restarted."""

    def ended(self, peer: PeerId, error: OutcomeUnknown, *, wanted: bool) -> None: ...


class TellOwners:
    """Tells owners by messages, but for the one in this process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.here: LocalOwner | None = None

    def process_ended(self, owner: PeerId, peer: PeerId, error: OutcomeUnknown, *, wanted: bool) -> None:
        if self.here is not None and owner == self._peer.process.id:
            self.here.ended(peer, error, wanted=wanted)
        else:
            self._peer.owner(owner).process_ended.tell(peer, error, wanted)

    def actor_died(self, owner: PeerId, peer: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        self._peer.owner(owner).actor_died.tell(peer, actor, error)

    def locate(self, owner: PeerId, number: int, *, wait: bool) -> Awaitable[Location]:
        return self._peer.owner(owner).locate(number, wait)

    def node_draining(self, owner: PeerId, node: PeerId, grace: float) -> None:
        self._peer.owner(owner).node_draining.tell(node, grace)


class LocalNode:
    """Serves the machine in which it lives, as part of a peer."""

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
        self.owners = TellOwners(peer)
        self._code = host_code(peer)
        self.agent = NodeAgent(process, peer.connections, self.owners, nodes, self.launcher, machine, options)
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
        """In a forked child: leave the workers to the parent."""
        self.launcher.stay_behind()
        self._claims.close()
