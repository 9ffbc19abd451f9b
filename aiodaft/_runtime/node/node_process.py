"""A node of a cluster: the process that serves one machine. The first node has the coordinator, too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.coordination.records import Kind, Member, NamedActor, View, check_node_name
from aiodaft._protocol.ids import COORDINATOR, SUPERVISOR, PeerId, is_attached, node_of
from aiodaft._protocol.node.worker import period_of
from aiodaft._runtime.connections.connections import FROM_AFAR
from aiodaft._runtime.connections.far import ANY_NODE, Answer, Authenticated, FarConnections, Network, who_listens
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.diagnostics.attach import Greeting, Visits
from aiodaft._runtime.diagnostics.process_view import is_answered
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.options import Logs
from aiodaft._runtime.node.membership import Membership, watch_members
from aiodaft._runtime.node.nodes import CoordinatorContact, LocalNode, Nodes
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.node.workers import Launcher
from aiodaft._runtime.peer import OwnerContact, Peer
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Env, ProcessOptions, closed, opened
from aiodaft._runtime.serialization.errors import encoded_text
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.methods import method
from aiodaft.ref import Ref


class NodePort:
    def __init__(self, peer: Peer, far: FarConnections, launcher: Launcher) -> None:
        self._peer = peer
        self._far = far
        self._launcher = launcher

    def control_came(self, came: Authenticated) -> None:
        peer, remote, wanted, (sock, _, _, session) = self._peer, PeerId(came.sender), PeerId(came.to), came
        connections = peer.connections
        if wanted == ANY_NODE:
            # It closes the connection when it knows which node this is.
            self._far.refuse(sock, session, Answer.USED)
        elif wanted == peer.process.id:
            peer.process.create_task(self._far.accept(remote, sock, session), name=f"be connected to {remote}")
        elif wanted in self._launcher.workers:
            self._hand_on(sock, wanted, m.admit(remote, session.secret()))
        elif (known := connections.get(wanted)) is not None and known.far and known.lost is None:
            # A controller, which no connection can be handed to.
            peer.agent_of(wanted).connect.tell(remote)
            self._far.refuse(sock, session, Answer.LATER)
        else:
            self._far.refuse(sock, session, Answer.GONE)

    def data_came(self, came: Authenticated) -> None:
        sender, wanted, connections = PeerId(came.sender), PeerId(came.to), self._peer.connections
        if wanted == self._peer.process.id:
            connections.stream_from_afar(sender, came.sock, came.session)
        elif wanted in self._launcher.workers:
            self._hand_on(came.sock, wanted, m.data(sender, FROM_AFAR, came.session.secret()))
        else:
            came.sock.close()

    def _hand_on(self, sock: socket.socket, wanted: PeerId, message: m.Message) -> None:
        try:
            with sock:
                self._peer.connections.to(wanted).send_fds(message, (sock.fileno(),))
        except OSError as error:
            logger.warning("a connection of another machine could not be handed to %s: %s", wanted, error)


class Fencing:
    """Tells workers with named actors of the lease, and ends actors that were replaced."""

    def __init__(self, peer: Peer, local: LocalNode, membership: Membership) -> None:
        self._peer = peer
        self._local = local
        self._membership = membership
        # Workers in which actors have, or had, names.
        self._guarded: set[PeerId] = set()
        local.agent.on_named = self._named
        membership.on_prolonged = self._prolonged
        membership.on_replaced = self._end
        membership.is_there = self._is_there

    def _named(self, granted: NamedActor) -> None:
        self._membership.note_name(granted)
        # A supervised actor has the name by its owner, which is elsewhere.
        if not granted.supervised and granted.peer in self._local.launcher.workers:
            self._guarded.add(granted.peer)
            self._peer.agent_of(granted.peer).guard.tell(granted.actor, self._membership.until)

    def _prolonged(self, until: float) -> None:
        self._guarded &= self._local.launcher.workers.keys()
        for worker in self._guarded:
            self._peer.agent_of(worker).prolong.tell(until)

    async def _end(self, held: NamedActor) -> None:
        worker = self._local.launcher.workers.get(held.peer)
        if worker is None or held.supervised or held.actor not in worker.actors:
            return
        reason = f"its name {held.name!r} went to another actor while its node had no lease"
        if len(worker.actors) > 1:
            # Else its process ends, and callers hear the reason.
            with suppress(DaftError):
                await self._peer.agent_of(held.peer).stop(held.actor, reason, 0.0)
        await self._local.agent.vacate(worker.owner, held.peer, held.actor, reason)

    async def _is_there(self, held: NamedActor) -> bool:
        if held.supervised:
            connection = self._peer.connections.get(held.peer)
            return connection is not None and connection.lost is None
        report: Ref[object] = self._peer.agent_of(held.peer).report(held.actor)
        if await is_answered(report, self._peer.process.env.timeouts.report):
            with suppress(DaftError):
                await report
                return True
            return False
        return True


class KeptActors(OwnerContact):
    """Owns the actors of a node that outlive their programs: the log tells how they fail."""

    @method
    async def process_ended(self, peer: str, error: OutcomeUnknown, wanted: bool) -> None:
        """Do nothing: callers have the error."""

    @method
    async def actor_died(self, peer: str, actor: int, error: OutcomeUnknown) -> None:
        logger.error("an actor died while no call was under way: %s", error)

    @method
    async def node_draining(self, node: str, grace: float) -> None:
        """Do nothing: they run on until the grace is over."""

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        # The exception itself may be of a class that no node can import.
        logger.error("%s\n%s", what, encoded_text(encoded))


# Seconds that the other nodes have to leave.
_PATIENCE: Final = 10.0


class NodeProcessOptions(NamedTuple):
    """The options of `aiodaft up` and `aiodaft join`.

    Attributes:
        join: The address of another node of the cluster; None: this is the first one.
        network: The way to the other machines, with the key of the cluster.
        process: Those of its workers in runtimes; the ids are filled in.
    """

    name: str
    listen: str
    join: str | None
    network: Network
    labels: Mapping[str, str]
    process: ProcessOptions
    node: NodeOptions


class NodeProcess:
    def __init__(self, options: NodeProcessOptions, machine: Machine, coordinator: Coordinator, env: Env) -> None:
        check_node_name(options.name)
        self._options = options
        self._machine = machine
        self._coordinator = coordinator
        self._env = env
        self._over = asyncio.Event()
        self.is_alone = False
        self.problem: str | None = None
        # The tasks that are of no use any more once the node leaves.
        self._member_tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self._options.name

    async def open(self) -> str:
        """Listen, and become a member of the cluster. Returns the address.

        Raises:
            OSError: The address cannot be used, or no node listens at the other one.
            HandshakeError: That node has another key.
            NameTaken: Another node has the name.
            CoordinatorUnavailable: The coordinator does not answer, or its store cannot be opened.
        """
        options, network = self._options, self._options.network
        local = self._env.new_peer_id("node", options.name)
        other = None if options.join is None else await who_listens(network, local, options.join)
        coordinator = local if other is None else other.coordinator
        process = options.process._replace(
            id=local, cluster=network.cluster, owner=local, agent=local, coordinator=coordinator
        )
        peer = self._peer = Peer(process, network.key, self._env)
        far = peer.connections.far = FarConnections(peer.process, network, peer.connections)
        nodes = self._nodes = Nodes(peer.caller)
        contact = CoordinatorContact(peer.caller, nodes)
        contact.joined_at = options.join if other is not None and other.has_coordinator else None
        peer.nodes = nodes
        self._local = LocalNode(peer, nodes, contact, self._machine, options.node, Console(Logs()))
        peer.add_actor(SUPERVISOR, "supervisor", KeptActors())
        nodes.on_gone = self._local.node_gone
        # Its whole machine may be stopped; nothing else would say so if it has the coordinator.
        far.on_silent = lambda node: self._local.node_gone(node_of(node))
        self._local.agent.on_end = self.end
        self._local.launcher.on_server_lost = self._server_lost
        self._local.launcher.on_visit = self._visited
        opened(peer.process, peer.stay_behind)
        peer.on_forked = self._local.stay_behind
        port = NodePort(peer, far, self._local.launcher)
        self._door = network.door(peer.process.tasks, port.control_came, port.data_came)
        address = self._address = str(await self._door.open(parse_address(options.listen, to_listen=True)))
        member = Member(options.name, local, address, options.labels, self._machine.resources.stock().totals)
        nodes.add(member)
        tasks = peer.process.tasks
        if other is None:
            await self._coordinator.open()
            peer.add_actor(COORDINATOR, "coordinator", self._coordinator)
            tasks.create_task(self._coordinator.run(), name="end leases")
        else:
            nodes.add(Member(other.node_name, other.node, cast("str", options.join)))
            await nodes.learn_from(other.node)
        self._stay(peer, nodes, contact, member)
        lease = await self._membership.join()
        self._env.timeouts.silence = period_of(lease)
        self._member_tasks.append(tasks.start(self._membership.stay(), name="stay a member"))
        return address

    def _stay(self, peer: Peer, nodes: Nodes, coordinator: CoordinatorContact, member: Member) -> None:
        self._membership = Membership(peer.process, coordinator, member, self._machine.resources.free)
        self._membership.on_ousted = self._ousted
        Fencing(peer, self._local, self._membership)
        agent, release = self._local.agent, self._local.agent.on_ended

        def ended(process: PeerId) -> None:
            self._membership.process_ended(process)
            release(process)

        agent.on_ended = ended
        tasks = peer.process.tasks
        self._member_tasks += [
            tasks.start(self._membership.watch_names(), name="watch names"),
            tasks.start(self._membership.settle(), name="settle names"),
            tasks.start(watch_members(coordinator, nodes), name="watch members"),
        ]

    def end(self) -> None:
        self._over.set()

    def drain(self, grace: float) -> None:
        """Take no new actors, and have `run` end when those that are here are gone, or after `grace` seconds."""
        self._local.agent.draining.begin(grace)

    def _server_lost(self, why: str) -> None:
        if not self._over.is_set():
            self.problem = f"its fork server is gone: {why}"
            self.end()

    def _visited(self, fork_server: int) -> None:
        peer = self._peer
        programs = [remote for remote, there in peer.connections.items() if there.is_up and is_attached(remote)]
        programs = [program for program in programs if node_of(program) == self._options.name]
        for program in programs:
            peer.agent_of(program).visited.tell(fork_server)
        own = peer.process.id
        greeting = Greeting(own, own, listens=self._address, attached=len(programs))
        Visits(peer.process, {}).begin(fork_server, greeting)

    def _ousted(self, why: DaftError) -> None:
        self.problem = f"another node has taken its place: {why}"
        self.end()

    def end_when_alone(self) -> None:
        """Have `run` end when the coordinator does not answer for a lease. Call it after `open`."""

        def alone() -> None:
            self.is_alone = True
            self.end()

        self._membership.on_alone = alone

    async def run(self) -> None:
        await self._over.wait()

    async def wait_nodes(self, is_right: Callable[[int], bool]) -> None:
        """Wait until the number of nodes in the cluster is right. Call it at the node with the coordinator."""
        view = View(Kind.MEMBER)
        while not is_right(len(view.records)):
            view.take(await self._coordinator.watch_members(view.revision))

    async def end_others(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(
                    *(self._nodes.named(name).end() for name in self._others()), return_exceptions=True
                )
                await self.wait_nodes(lambda count: count == 1)

    def _others(self) -> list[str]:
        return [member.name for member in self._nodes.members() if member.name != self._options.name]

    async def aclose(self) -> None:
        self._door.close()
        for task in self._member_tasks:
            task.cancel()
        await self._membership.leave()
        if self._local.agent.draining.begun:
            # The others hear from the coordinator, if it is here, which names go on with them.
            await asyncio.sleep(self._env.timeouts.blame)
        closed(self._peer.process)
        try:
            await self._peer.aclose("its node was stopped")
            await self._coordinator.aclose()
        finally:
            await self._local.aclose()
