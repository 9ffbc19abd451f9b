"""A node's place in its cluster: it joins, says that it is alive, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import Final, NamedTuple, TypeAlias, cast

from aiodaft._protocol.coordination.records import Batch, HolderState, Kind, LeaseHolder, Member, NamedActor, View
from aiodaft._protocol.ids import PeerId, node_of
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.far import FarConnections, Network, Welcome, who_listens
from aiodaft._runtime.logs.console import ConsoleThread
from aiodaft._runtime.node.nodes import CoordinatorContact, Nodes
from aiodaft._runtime.node.shipped_code import host_code
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.tasks import log_error, logger
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError, LeaseLost, NameTaken, PeerLost, ProtocolError

FreeResources: TypeAlias = Callable[[], Mapping[str, float]]

# Seconds by which the clocks of two machines may drift apart during a lease.
_SKEW: Final = 0.5
# Seconds for which the predecessor of a node may keep its name: more than a lease.
_PREDECESSOR: Final = 15.0
_LEAVING: Final = 2.0
_PAUSE: Final = 0.5


class Membership:
    def __init__(self, process: Process, coordinator: CoordinatorContact, member: Member, free: FreeResources) -> None:
        self._clock = process.env.monotonic
        self._coordinator = coordinator
        self._member = member
        self._free = free
        self._holder = LeaseHolder(_SKEW)
        self._names: dict[str, NamedActor] = {}
        self._names_known = 0
        # Names that the node has lost with its lease, or to a coordinator that had forgotten them.
        self._lost: dict[str, NamedActor] = {}
        # Processes with names that have ended, as far as the coordinator has not heard of it.
        self._ended: set[PeerId] = set()
        self._unsettled = asyncio.Event()
        # Called repeatedly while the coordinator does not answer and the lease is over.
        self.on_alone: Callable[[], object] = lambda: None
        # Called with the time until which the lease is sure, when all names are.
        self.on_prolonged: Callable[[float], object] = lambda until: None
        self.on_replaced: Callable[[NamedActor], Awaitable[object]] = _is_there
        self.on_ousted: Callable[[DaftError], object] = lambda why: None
        self.is_there: Callable[[NamedActor], Awaitable[bool]] = _is_there

    async def join(self) -> float:
        """Become a member. Returns the seconds of a lease.

        A node that was started again waits for the end of its predecessor's lease.

        Raises:
            NameTaken: Another node has the name.
            DaftError: The coordinator does not answer.
        """
        until = self._clock() + _PREDECESSOR
        while True:
            try:
                return await self._join()
            except NameTaken as error:
                if self._clock() > until:
                    raise
                logger.info("node %s waits: %s", self._member.name, error)
                await asyncio.sleep(_PAUSE)

    async def _join(self) -> float:
        sent_at, epoch = self._clock(), self._holder.epoch
        member = replace(self._member, epoch=epoch, free=self._free())
        before = dict(self._names)
        # Others may have the names of a node that is fenced, also if the coordinator has forgotten that.
        holds = self._holder.state(sent_at) is HolderState.HOLDING
        granted = await self._coordinator.now.join(member, tuple(before.values()) if holds else ())
        self._holder.joined(granted.epoch, granted.good_for, granted.ttl, sent_at)
        noted = {name: held for name, held in self._names.items() if before.get(name) != held}
        known = {held.name: held for held in granted.names if held.peer not in self._ended}
        self._names = {**known, **noted}
        self._lose({name: held for name, held in before.items() if name not in self._names})
        self._settled()
        return granted.ttl

    def _lose(self, names: Mapping[str, NamedActor]) -> None:
        if names:
            self._lost |= names
            self._unsettled.set()

    def _settled(self) -> None:
        if not self._lost:
            self.on_prolonged(self.until)

    @property
    def until(self) -> float:
        return self._holder.fence_at

    async def stay(self) -> None:
        """Keep the lease until this is cancelled; after a loss, join again."""
        answered = True
        while True:
            await asyncio.sleep(max(0.0, self._holder.get_timer() - self._clock()) if answered else _PAUSE)
            self._holder.state(self._clock())
            try:
                await self._keep()
                answered = True
            except NameTaken as error:
                self.on_ousted(error)
                return
            except DaftError as error:
                logger.warning("node %s: the coordinator does not answer: %s", self._member.name, error)
                if self._holder.is_alone(self._clock()):
                    self.on_alone()
                asked_at = self._clock()
                if not await self._coordinator.find_again():
                    self._holder.unopposed(asked_at)
                    self._settled()
                answered = False

    async def _keep(self) -> None:
        sent_at, epoch = self._clock(), self._holder.epoch
        self._holder.sent(sent_at)
        try:
            good_for = await self._coordinator.now.keepalive(epoch, self._free())
            self._holder.kept(epoch, good_for, sent_at)
            self._settled()
        except LeaseLost as error:
            logger.warning("node %s joins again: %s", self._member.name, error)
            await self._join_again()

    async def _join_again(self) -> None:
        try:
            # A coordinator that was started again knows neither the node nor its names.
            await self._join()
        except LeaseLost:
            self._holder.lost(self._holder.epoch)
            self._holder.epoch = 0
            await self._join()

    async def settle(self) -> None:
        """Free the names of processes that have ended, and give living actors those that they have lost.

        Until this is cancelled: questions that the coordinator does not answer are repeated.
        """
        while True:
            await self._unsettled.wait()
            self._unsettled.clear()
            try:
                for process in list(self._ended):
                    await self._coordinator.now.release(process, None)
                    self._ended.remove(process)
                await self._take_back()
            except DaftError:
                await asyncio.sleep(_PAUSE)
                self._unsettled.set()

    async def _take_back(self) -> None:
        """Give actors the names again that they have lost, unless others have them now."""
        for name, held in list(self._lost.items()):
            there = await self.is_there(held)
            granted: NamedActor | None = None
            if there and name in self._lost:
                try:
                    granted = await self._coordinator.now.register(replace(held, lease=0, epoch=0))
                except NameTaken as error:
                    logger.warning("%s was replaced: %s", held.label, error)
                    # Before the lease counts for the others.
                    await self.on_replaced(held)
            if self._lost.pop(name, None) is None and granted is not None:
                self._coordinator.now.release_name.tell(name, granted.epoch)
            elif granted is not None:
                self.note_name(granted)
        self._settled()

    async def leave(self) -> None:
        with suppress(DaftError, TimeoutError):
            async with asyncio.timeout(_LEAVING):
                await self._coordinator.now.leave(self._holder.epoch)

    async def watch_names(self) -> None:
        while True:
            try:
                self._note_names(await self._coordinator.now.watch_names("", self._names_known))
            except DaftError:
                await asyncio.sleep(_PAUSE)

    def note_name(self, granted: NamedActor) -> None:
        self._names[granted.name] = granted

    def process_ended(self, process: PeerId) -> None:
        for names in (self._names, self._lost):
            for name in [name for name, held in names.items() if held.peer == process]:
                del names[name]
                self._ended.add(process)
                self._unsettled.set()

    def _note_names(self, batch: Batch) -> None:
        self._names_known = batch.revision
        for change in batch.changes:
            if isinstance(change.record, NamedActor) and change.record.lease == self._holder.epoch:
                self._names[change.key] = change.record
                continue
            # Another actor has it, or none. A new coordinator may not list it yet.
            held = self._names.pop(change.key, None)
            over = self._holder.state(self._clock()) is not HolderState.HOLDING
            if held is not None and (over or isinstance(change.record, NamedActor)):
                # That was not because the actor is gone; at least, that has to be asked.
                self._lose({change.key: held})


async def _is_there(held: NamedActor) -> bool:  # noqa: RUF029 - others have to ask
    return True


async def watch_names(coordinator: CoordinatorContact, prefix: str) -> AsyncGenerator[tuple[str, ...], None]:
    """The names of actors, now and whenever they, or the actors, are others; also by the next coordinator."""
    view, told = View(Kind.NAME), False
    while True:
        try:
            changes = view.take(await coordinator.now.watch_names(prefix, view.revision))
        except DaftError:
            if coordinator.is_closed:
                raise
            await asyncio.sleep(_PAUSE)
            await coordinator.find_again()
            continue
        if changes or not told:
            told = True
            yield tuple(sorted(name for name, held in view.records.items() if not cast("NamedActor", held).reserved))


async def watch_members(coordinator: CoordinatorContact, nodes: Nodes) -> None:
    view, loop = View(Kind.MEMBER), asyncio.get_running_loop()
    while True:
        try:
            batch = await coordinator.now.watch_members(view.revision)
            changes = view.take(batch)
        except DaftError as error:
            if coordinator.is_closed:
                return
            logger.warning("the coordinator does not answer: %s", error)
            await asyncio.sleep(_PAUSE)
            await coordinator.find_again()
            continue
        except Exception as error:  # noqa: BLE001 - it would know of no node any more
            log_error("the list of nodes cannot be read", error)
            view = View(Kind.MEMBER)
            await asyncio.sleep(_PAUSE)
            continue
        for change in changes:
            if isinstance(change.record, Member):
                nodes.add(change.record)
            elif batch.whole:
                # A coordinator that was started again may not know of it yet: it gets time to join again.
                loop.call_later(_PREDECESSOR, nodes.forget, change.key, nodes.member(change.key))
            else:
                nodes.remove(change.key)


# Seconds before each attempt to connect to a node again; the last one is repeated.
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


class Cluster(NamedTuple):
    address: str
    network: Network
    welcome: Welcome


async def find_cluster(address: str, network: Network, local: PeerId) -> Cluster:
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
        self._missed: set[PeerId] = set()
        # Called when a node is connected again, until it raises no DaftError: messages of the node from meanwhile are
        # lost.
        self.on_back: Callable[[PeerId], Awaitable[None]]
        nodes.add(Member(cluster.welcome.node_name, cluster.welcome.node, cluster.address))

    async def ready(self) -> None:
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
        """The nodes end the workers when they see these connections end."""
        await self.console.aclose()

    def abandon(self) -> None:
        self.console.abandon()

    def stay_behind(self) -> None:
        """Do nothing: in a forked child, all of this belongs to the parent."""
