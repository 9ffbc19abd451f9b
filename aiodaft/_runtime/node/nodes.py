"""The nodes of a cluster, as a process of it knows them, and the node of this machine, if this process serves it.

A runtime of one machine has one node, without a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary

from aiodaft._protocol.connections.address import is_name, parse_address
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import COORDINATOR, NODE, ActorId, PeerId, is_attached, node_of
from aiodaft._protocol.node.resources import Stock
from aiodaft._protocol.numbers import Latest
from aiodaft._protocol.placement import NodeView
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.far import Network, who_listens
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.logs.console import Console, Relay
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.shipped_code import host_code
from aiodaft._runtime.node.worker import Machine, NodeOptions, Tenant
from aiodaft._runtime.node.workers import ExecLauncher, Launcher
from aiodaft._runtime.peer import NodeContact, Peer
from aiodaft._runtime.platform.capabilities import has_fork_server
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import (
    ActorDied,
    DaftError,
    OutcomeUnknown,
    PeerLost,
    ProtocolError,
    RuntimeClosed,
    VersionMismatch,
)

_PAUSE: Final = 0.5


class CoordinatorContact:
    def __init__(self, caller: Caller, nodes: Nodes) -> None:
        self._caller = caller
        self._nodes = nodes
        # The address at which a node has found the coordinator at first. The host may be a name, which leads
        # elsewhere later.
        self.joined_at: str | None = None
        # The last address of the coordinator, also if its node is no member any more.
        self._address: str | None = None
        # Processes, and actors of processes that live, that have ended with names which may not be free yet.
        self._ended: dict[tuple[PeerId, ActorId | None], None] = {}
        self._freeing = False

    @property
    def now(self) -> Coordinator:
        process = self._caller.process.coordinator
        self._note_address()
        return cast("Coordinator", self._caller.handle(process, COORDINATOR, "coordinator", Coordinator))

    def _note_address(self) -> None:
        with suppress(PeerLost):
            self._address = self._nodes.address_of(self._caller.process.coordinator)

    @property
    def is_closed(self) -> bool:
        return self._caller.process.closed is not None

    def free_names(self, process: PeerId, actor: ActorId | None) -> None:
        """An actor, or all of a process, has ended: free its names as soon as the coordinator answers."""
        self._ended[process, actor] = None
        if not self._freeing and not self.is_closed:
            self._freeing = True
            self._caller.process.create_task(self._free_names(), name="free names")

    async def _free_names(self) -> None:
        # A message that got lost would leave a reservation, for which others wait.
        while self._ended:
            ended = next(iter(self._ended))
            try:
                await self.now.release(*ended)
                del self._ended[ended]
            except DaftError as error:
                logger.debug("the names of %s are not free yet: %s", ended, error)
                await asyncio.sleep(_PAUSE)
        self._freeing = False

    async def find_again(self) -> bool:
        """Look whether another process is the coordinator now; False if there is none where it may be."""
        process, nodes, far = self._caller.process, self._nodes, self._caller.connections.far
        self._note_address()
        addresses = [self.joined_at, self._address]
        if process.options.agent != process.id and (node := nodes.member(node_of(process.options.agent))) is not None:
            # First, because nothing refuses a connection to the address of a machine that is gone.
            addresses.insert(0, node.address)
        if far is None or not any(addresses):
            return True
        # The machine that a name led to may refuse while its new machine is not known here yet.
        may_be = self.joined_at is not None and is_name(parse_address(self.joined_at).host)
        for address in dict.fromkeys(filter(None, addresses)):
            try:
                if await self._is_at(address, far.network):
                    return True
                may_be = True
            except DaftError as error:
                tell = logger.warning if isinstance(error, VersionMismatch) else logger.debug
                tell("%s", error)
                # The machine is there, and says that nothing listens. Any other failure leaves it open.
                may_be = may_be or not isinstance(error.__cause__, ConnectionRefusedError)
        return may_be

    async def _is_at(self, address: str, network: Network) -> bool:
        process, nodes = self._caller.process, self._nodes
        found = await who_listens(network, process.id, address)
        if found.has_coordinator:
            if nodes.server_of(found.node_name) != found.node:
                # A new process, or the news that its predecessor is gone came after it was found.
                nodes.add(Member(found.node_name, found.node, address))
        elif found.coordinator == process.coordinator:
            return False
        else:
            # That node has found another one, and knows where it is.
            await nodes.learn_from(found.node)
        process.coordinator = found.coordinator
        return True


# Seconds that a node has to end a process, before this one goes on without an answer.
_PATIENCE: Final = 10.0

Errand: TypeAlias = Callable[[NodeAgent], object]


class Absence(NamedTuple):
    """A node that is no member any more: the process that served it, and the messages for it if it comes back."""

    process: PeerId
    errands: list[Errand]


class Site(NamedTuple):
    """A node, or a slice of it: its name, labels and agent, and the slice."""

    name: str
    labels: Mapping[str, str]
    agent: NodeAgent
    within: Tenant | None = None

    def unseen(self) -> NodeView:
        return NodeView(self.name, self.labels, Stock({}, {}, ()))


class Nodes:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._here = caller.process.options.node
        self._members: dict[str, Member] = {}
        self._absent = Latest[str, Absence](caller.process.env.remembered)
        self._agents: dict[PeerId, NodeAgent] = {}
        self._changed = asyncio.Event()
        # The processes of nodes that are being drained, and until when, on the clock of `Env`.
        self.draining: dict[PeerId, float] = {}
        self._leaving = asyncio.Lock()
        self.on_joined: Callable[[Member], object] = lambda member: None
        # Called with the name of a node that is no member any more, or is another incarnation.
        self.on_gone: Callable[[str], object] = lambda name: None

    def add(self, member: Member) -> None:
        before = self._members.get(member.name)
        self._members[member.name] = member
        self._wake()
        if before is not None and before.peer != member.peer:
            self._gone(before)
        absence = self._absent.pop(member.name, None)
        if absence is not None and absence.process == member.peer:
            for errand in absence.errands:
                errand(self._agent(member))
        if before is None or before.epoch != member.epoch:
            self.on_joined(member)

    async def learn_from(self, process: PeerId) -> None:
        """Add the nodes that another one knows. Raises DaftError if it does not answer."""
        for member in await self.of(process).members():
            self.add(member)

    def remove(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            self._absent[name] = Absence(member.peer, [])
            self._wake()
            self._gone(member)

    def forget(self, name: str, known: Member | None) -> None:
        """The same, unless there was news of the node since it was `known`."""
        if self._members.get(name) is known:
            self.remove(name)

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def _gone(self, member: Member) -> None:
        self._agents.pop(member.peer, None)
        self.draining.pop(member.peer, None)
        self.on_gone(member.name)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def server_of(self, name: str) -> PeerId | None:
        member = self._members.get(name)
        return None if member is None else member.peer

    def is_draining(self, process: PeerId) -> bool:
        """Whether the node of a process is being drained, as far as this process was told."""
        return bool(self.draining) and self.server_of(node_of(process)) in self.draining

    def is_member(self, name: str) -> bool:
        return name in self._members

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.name)

    def named(self, name: str) -> NodeAgent:
        member = self._members.get(name)
        if member is None:
            raise ActorDied(f"the node {name!r} is not in the cluster any more", executed=False)
        return self._agent(member)

    def agents(self) -> list[NodeAgent]:
        return [self._agent(member) for member in self.members()]

    def of(self, peer: PeerId) -> NodeAgent:
        """The agent of the node where a process is, or was.

        Raises:
            ActorDied: The node is not in the cluster any more.
        """
        return self._agent(self._member(peer))

    def _tell(self, peer: PeerId, errand: Errand) -> None:
        name = node_of(peer)
        if name in self._members:
            errand(self._agent(self._members[name]))
        elif name in self._absent:
            self._absent[name].errands.append(errand)

    async def vacate(
        self, peer: PeerId, actor: ActorId, reason: str, *, keep: bool = False, answers: bool = True
    ) -> None:
        """Remove an actor of this process from its node; see `NodeAgent.vacate`.

        Nothing if this process ends. A node that is silent, or gone, does it when it is back.
        """
        if not self.is_member(node_of(peer)):
            self.tell_to_vacate(peer, actor, reason, keep=keep)
            return
        with suppress(OutcomeUnknown, RuntimeClosed):
            vacate = self.of(peer).vacate
            try:
                async with asyncio.timeout(_PATIENCE):
                    await vacate(self._caller.process.id, peer, actor, reason, keep, answers)
            except (TimeoutError, PeerLost):
                # Perhaps only the connection broke.
                vacate.tell(self._caller.process.id, peer, actor, reason, keep, answers)

    def tell_to_vacate(self, peer: PeerId, actor: ActorId, reason: str, *, keep: bool = False) -> None:
        owner = self._caller.process.id
        self._tell(peer, lambda node: node.vacate.tell(owner, peer, actor, reason, keep))

    @asynccontextmanager
    async def in_turn(self, patience: float) -> AsyncGenerator[None]:
        """Have an actor leave its node when others have left theirs, or after that many seconds.

        A call that is under way at one of them may wait for a call of another: that one serves it if it is not leaving.
        """
        taken = False
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                taken = await self._leaving.acquire()
        try:
            yield
        finally:
            if taken:
                self._leaving.release()

    def tell_moved(self, peer: PeerId, actor: ActorId) -> None:
        owner = self._caller.process.id
        self._tell(peer, lambda node: node.moved.tell(owner, peer, actor))

    async def kill(self, peer: PeerId, reason: str) -> None:
        """Kill a process; nothing if this process ends. A node that is gone does it if it comes back."""
        if not self.is_member(node_of(peer)):
            self._tell(peer, lambda node: node.kill.tell(peer, reason))
            return
        with suppress(OutcomeUnknown, RuntimeClosed):
            kill = self.of(peer).kill
            try:
                await kill(peer, reason)
            except PeerLost:
                kill.tell(peer, reason)

    def contact(self, peer: PeerId) -> NodeContact:
        return self.of(peer)

    def address_of(self, peer: PeerId) -> str:
        """The address at which the node of a process listens.

        Raises:
            PeerLost: The node is not in the cluster any more. It is not known whether the process has ended.
        """
        try:
            return self._member(peer).address
        except ActorDied as error:
            raise PeerLost(str(error), executed=False) from None

    def process_of(self, peer: PeerId) -> PeerId:
        return self._member(peer).peer

    def name_of(self, peer: PeerId) -> str:
        return node_of(peer) or self._here

    def site_of(self, peer: PeerId) -> Site:
        return self._site(self._member(peer))

    def known(self) -> list[Site]:
        return [self._site(member) for member in self.members()]

    def differ(self, known: Sequence[Site]) -> Coroutine[Any, Any, None] | None:
        """Wait until there are other nodes than these; None in a runtime of one machine."""
        return None if "" in self._members else self._wait_others(known)

    async def _wait_others(self, known: Sequence[Site]) -> None:
        while self.known() == known:
            await self._changed.wait()

    def _member(self, peer: PeerId) -> Member:
        member = self._members.get(node_of(peer))
        if member is None:
            raise ActorDied(f"there is no process {peer}: its node is not in the cluster", executed=False)
        return member

    def _site(self, member: Member) -> Site:
        return Site(member.name or self._here, member.labels, self._agent(member))

    def _agent(self, member: Member) -> NodeAgent:
        process = member.peer
        agent = self._agents.get(process)
        if agent is None:
            handle = self._caller.handle(process, NODE, f"node agent of {process}", NodeAgent)
            agent = self._agents[process] = cast("NodeAgent", handle)
        return agent


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
