"""A cluster under faults, in virtual time: real coordinators and lease holders, a network and a store that fail.

`Broken` is raised if two nodes serve one name at the same time, if an epoch is granted twice, or if the end is not as
it should be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast

from aiodaft._protocol.coordination.records import (
    Change,
    HolderState,
    Kind,
    LeaseHolder,
    Member,
    NamedActor,
    Record,
    View,
)
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator, Deposed, StoreFailed
from aiodaft.exceptions import CoordinatorUnavailable, LeaseLost, NameNotFound, NameTaken

T = TypeVar("T")

LEASE: Final = 8.0
SKEW: Final = 0.5
FAULTS_UNTIL: Final = 30.0
QUIET: Final = 1.5 * LEASE
NAMES: Final = ("x", "y")
# Clocks differ in their pace by up to a hundredth.
_DRIFT: Final = 0.01
# Seconds for which a message is under way, at most.
_WAITS: Final = (0.0, 0.01, 0.3, 2.0)


class Broken(AssertionError):
    """A state that must never be, was."""


class Lost(Exception):
    """The connection broke: it is not known what became of the call."""


class World:
    """The world that all processes share: time, chance, the network, the stores, and the view from outside."""

    def __init__(self, seed: int, *, stored: bool) -> None:
        self.rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.stored = stored
        self.shared = SharedStore()
        self.cut: set[frozenset[str]] = set()
        self.waits = _WAITS
        self.granted: dict[int, NamedActor] = {}
        self.nodes: list[Node] = []
        self.is_over = False
        # A coordinator without a store is alone: a second one would know nothing of the first.
        self.servers = [Server(self, f"c{index}") for index in range(2 if stored else 1)]
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(self.loop.create_task(work))

    def clock(self) -> Callable[[], float]:
        pace, offset = 1 + self.rng.uniform(-_DRIFT, _DRIFT), self.rng.uniform(0, 1000)
        return lambda: self.loop.time() * pace + offset

    async def transit(self, one: str, other: str) -> None:
        """The way of a message; it is lost if the way is cut when it leaves or when it arrives."""
        way = frozenset((one, other))
        if way not in self.cut:
            await asyncio.sleep(self.rng.choice(self.waits) * self.rng.random())
        if way in self.cut:
            raise Lost

    def check(self) -> None:
        """Raise Broken if two nodes serve one name, or one epoch was granted twice."""
        for name in NAMES:
            serving = [node for node in self.nodes if node.serves(name)]
            if len(serving) > 1:
                raise Broken(f"{name} is served by {[(node.peer, node.names[name].epoch) for node in serving]}")

    def note(self, granted: NamedActor) -> None:
        known = self.granted.setdefault(granted.epoch, granted)
        if (known.name, known.peer, known.actor) != (granted.name, granted.peer, granted.actor):
            raise Broken(f"epoch {granted.epoch} is that of {known} and of {granted}")


class SharedStore:
    """The records of all coordinators, and the coordinator in charge."""

    def __init__(self) -> None:
        self.term = 0
        self.owner: object = None
        self.records: dict[tuple[Kind, str], Record] = {}

    def take(self, owner: object) -> Stored:
        self.owner = owner
        self.term += 1
        return Stored(self.term, tuple(self.records.values()))

    def write(self, owner: object, changes: Sequence[Change]) -> None:
        if self.owner is not owner:
            raise Deposed
        for change in changes:
            self.records.pop((change.kind, change.key), None)
            if change.record is not None:
                self.records[change.kind, change.key] = change.record


class FarStore:
    """The way of one coordinator to the store."""

    def __init__(self, world: World, server: Server) -> None:
        self._world = world
        self._server = server
        self._boots = server.boots
        self._has_opened = False

    async def open(self) -> Stored:
        return await self._ask(self._open)

    def _open(self) -> Stored:
        shared = self._world.shared
        if self._has_opened and shared.owner is not self:
            raise Deposed
        self._has_opened = True
        return shared.take(self)

    async def commit(self, changes: Sequence[Change]) -> None:
        await self._ask(lambda: self._world.shared.write(self, changes))

    async def lost(self) -> None:
        """The network does not tell."""
        await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None: ...

    async def _ask(self, act: Callable[[], T]) -> T:
        if self._boots != self._server.boots:
            raise StoreFailed("this process has ended")
        try:
            await self._world.transit(self._server.name, "store")
            answer = act()
            await self._world.transit("store", self._server.name)
        except Lost as lost:
            raise StoreFailed("no connection") from lost
        await self._server.resumed.wait()
        return answer


class Server:
    """A process with a coordinator."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self.coordinator: Coordinator | None = None
        self.resumed = asyncio.Event()
        self.resumed.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.boots = 0

    async def boot(self) -> None:
        """Start the process; with a store, this deposes the other coordinator."""
        self.crash()
        clock, world = self._world.clock(), self._world
        if world.stored:
            self.coordinator = Coordinator(FarStore(world, self), lease=LEASE, clock=clock)
        else:
            stored = Stored(term=self.boots, forgot=self.boots > 1)
            self.coordinator = Coordinator(stored=stored, lease=LEASE, clock=clock)
        self._start(self._run(self.coordinator))

    async def _run(self, coordinator: Coordinator) -> None:
        try:
            await coordinator.open()
        except CoordinatorUnavailable:
            return
        await coordinator.run()

    def crash(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self.coordinator = None
        self.boots += 1

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP and SIGCONT: as far as messages and the store go."""
        self.resumed.clear()
        self._world.loop.call_later(seconds, self.resumed.set)

    def _start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        # Called here, methods give coroutines; their types say what handles give.
        task = self._world.loop.create_task(cast("Coroutine[Any, Any, T]", work))
        self._tasks.add(task)
        return task

    async def handle(self, request: Callable[[Coordinator], Awaitable[T]]) -> T:
        """Answer a request that has arrived.

        Raises:
            Lost: The process ended meanwhile.
        """
        await self.resumed.wait()
        if self.coordinator is None:
            raise Lost
        task = self._start(request(self.coordinator))
        await asyncio.wait([task])
        await self.resumed.wait()
        if task.cancelled():
            raise Lost
        return task.result()


@dataclass(frozen=True)
class Session:
    """A connection of a node with a coordinator's process."""

    server: Server
    boots: int


class Node:
    """A node: it keeps its lease, and serves names as long as it holds that."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._clock = world.clock()
        self._incarnations = 0
        self._server = world.servers[0]
        # Seconds between two attempts at a name, at most.
        self._leisure = world.rng.choice((2.0, 20.0))
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.restart()

    def restart(self) -> None:
        """The process ends, and another one takes its place."""
        self._incarnations += 1
        self.peer = PeerId(f"node-{self._incarnations}@{self.name}")
        self.holder = LeaseHolder(SKEW)
        self.names: dict[str, NamedActor] = {}
        self.view, self.heard = View(Kind.NAME), dict[str, Record | None]()
        self._session: Session | None = None
        self._actors = 16

    def serves(self, name: str) -> bool:
        """Whether it would take a call for a name now."""
        return name in self.names and self.holder.state(self._clock()) is HolderState.HOLDING

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP and SIGCONT."""
        self.resumed.clear()
        self._world.loop.call_later(seconds, self.resumed.set)

    async def call(self, request: Callable[[Coordinator], Awaitable[T]], limit: float = LEASE) -> T:
        """Call the coordinator of the session; none of an earlier session, or of an earlier process here, answers."""
        session, peer = self._session, self.peer
        if session is None:
            raise Lost
        async with asyncio.timeout(limit):
            await self._world.transit(self.name, session.server.name)
            if session.boots != session.server.boots:
                raise Lost
            answer = await session.server.handle(request)
            await self._world.transit(session.server.name, self.name)
            await self.resumed.wait()
        if session is not self._session or peer != self.peer:
            raise Lost
        return answer

    # The lease.

    async def keep(self) -> None:
        while True:
            now, holder = self._clock(), self.holder
            await asyncio.sleep(max(0.1, holder.get_timer() - now))
            await self.resumed.wait()
            sent_at = self._clock()
            holder = self.holder
            holder.sent(sent_at)
            try:
                await self._prolong(holder, sent_at)
            except LeaseLost:
                self._lose(holder)
            except (CoordinatorUnavailable, Lost, TimeoutError, NameTaken):
                self._session = None
                if all(self.is_refused(server) for server in self._world.servers):
                    holder.unopposed(self._clock())
                others = [server for server in self._world.servers if server is not self._server]
                self._server = (others or [self._server])[0]
                await asyncio.sleep(LEASE / 8)
            self._world.check()

    def is_refused(self, server: Server) -> bool:
        """Whether the machine of a coordinator can be reached, and says that no coordinator runs there."""
        return server.coordinator is None and frozenset((self.name, server.name)) not in self._world.cut

    async def _prolong(self, holder: LeaseHolder, sent_at: float) -> None:
        state = holder.state(sent_at)
        is_member = state is not HolderState.OUTSIDE
        if self._session is not None and is_member:
            epoch = holder.epoch
            good_for = await self.call(lambda coordinator: coordinator.keepalive(epoch, {}), LEASE / 3)
            holder.kept(epoch, good_for, sent_at)
            return
        self._session = Session(self._server, self._server.boots)
        member = Member(self.name, self.peer, "tcp://x:1", epoch=holder.epoch if is_member else 0)
        names = self.claims(state)
        joined = await self.call(lambda coordinator: coordinator.join(member, names), LEASE / 3)
        holder.joined(joined.epoch, joined.good_for, joined.ttl, sent_at)
        self.names = {name: mine for name, mine in self.names.items() if mine in joined.names}

    def claims(self, state: HolderState) -> tuple[NamedActor, ...]:
        """The names that it claims: none that others may have by now."""
        return tuple(self.names.values()) if state is HolderState.HOLDING else ()

    def _lose(self, holder: LeaseHolder) -> None:
        if holder is self.holder:
            holder.lost(holder.epoch)
            self.names.clear()

    # Names.

    async def work(self) -> None:
        rng = self._world.rng
        while True:
            await asyncio.sleep(rng.random() * self._leisure)
            await self.resumed.wait()
            is_member = self._session is not None and self.holder.state(self._clock()) is not HolderState.OUTSIDE
            if self._world.is_over or not is_member:
                continue
            with suppress(CoordinatorUnavailable, LeaseLost, NameTaken, NameNotFound, Lost, TimeoutError):
                await rng.choice((self._take, self._take, self._make, self._give_up))(rng.choice(NAMES))
            self._world.check()

    def _new_actor(self, name: str) -> NamedActor:
        self._actors += 1
        return NamedActor(name, self.peer, ActorId(self._actors), "Model-1", ("m.Model",))

    async def _take(self, name: str) -> None:
        if name not in self.names:
            wanted = self._new_actor(name)
            self._begin_to_serve(await self.call(lambda coordinator: coordinator.register(wanted)))

    async def _make(self, name: str) -> None:
        wanted = self._new_actor(name)
        held = await self.call(lambda coordinator: coordinator.get_or_reserve(wanted))
        if held.reserved:
            actor = replace(self._new_actor(name), epoch=held.epoch)
            self._begin_to_serve(await self.call(lambda coordinator: coordinator.register(actor)))

    def _begin_to_serve(self, granted: NamedActor) -> None:
        self._world.note(granted)
        if granted.lease == self.holder.epoch:
            self.names[granted.name] = granted

    async def _give_up(self, name: str) -> None:
        held = self.names.pop(name, None)
        if held is not None:
            # Some messages come twice, or very late.
            again = self._world.rng.random() < 0.5
            await self.call(lambda coordinator: coordinator.release_name(name, held.epoch))
            if again:
                await asyncio.sleep(self._world.rng.random() * 20)
                await self.call(lambda coordinator: coordinator.release_name(name, held.epoch))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._world.rng.random() * 2)
            await self.resumed.wait()
            if self._session is not None:
                with suppress(CoordinatorUnavailable, Lost, TimeoutError):
                    await self._hear(self.view, self.heard)

    async def _hear(self, view: View, heard: dict[str, Record | None]) -> None:
        for change in view.take(await self.call(lambda coordinator: coordinator.watch_names("", view.revision))):
            if heard.get(change.key) == change.record:
                raise Broken(f"{self.peer} hears twice of {change}")
            heard[change.key] = change.record


async def disturb(world: World) -> None:
    """One fault after the other, until the time for faults is over; then everything is well again."""
    rng = world.rng
    ends = [node.name for node in world.nodes]
    servers = [server.name for server in world.servers]
    while world.loop.time() < FAULTS_UNTIL:
        await asyncio.sleep(rng.random() * 3)
        node, server = rng.choice(world.nodes), rng.choice(world.servers)
        lasts = rng.choice((1.0, LEASE, 2 * LEASE)) * rng.uniform(0.5, 1.3)
        match rng.choices(range(6), weights=(4, 1, 1, 3, 1, 1))[0]:
            case 0:
                cut(world, frozenset((rng.choice(ends), rng.choice(servers))), lasts)
            case 1:
                cut(world, frozenset((server.name, "store")), lasts)
            case 2:
                server.crash()
                await asyncio.sleep(rng.random() * LEASE / 2)
                await server.boot()
            case 3:
                node.stop_for(lasts)
            case 4 if world.stored:
                server.stop_for(lasts)
            case _:
                node.restart()
        world.check()
    for one in (*world.nodes, *world.servers):
        one.resumed.set()


def cut(world: World, way: frozenset[str], lasts: float) -> None:
    world.cut.add(way)
    world.loop.call_later(lasts, world.cut.discard, way)


async def end_well(world: World) -> None:
    """Raise Broken unless everything has come back."""
    world.cut.clear()
    world.waits = _WAITS[:2]
    for server in world.servers:
        server.crash()
    # Their writes to the store arrive.
    await asyncio.sleep(max(_WAITS))
    server = world.servers[0]
    await server.boot()
    await asyncio.sleep(QUIET)
    world.is_over = True
    await asyncio.sleep(LEASE / 2)
    coordinator = server.coordinator
    assert coordinator is not None
    members = {member.name: member for member in await coordinator.members()}
    names = {named.name: named for named in await coordinator.names("")}
    if not {named.lease for named in names.values()} <= {member.epoch for member in members.values()}:
        raise Broken(f"names of nodes that are gone: {names}")
    for node in world.nodes:
        known = members.get(node.name)
        if known is None or known.peer != node.peer or node.holder.epoch != known.epoch:
            raise Broken(f"{node.peer} is not a member: {members}")
        for name, mine in node.names.items():
            if node.serves(name) and names.get(name) != mine:
                raise Broken(f"{node.peer} serves {mine}, and the coordinator knows {names.get(name)}")
        if node.heard != {**dict.fromkeys(node.heard), **names}:
            raise Broken(f"{node.peer} has heard {node.heard}; there are {names}")


async def history(seed: int, *, stored: bool) -> int:
    """One history. Returns the number of grants."""
    world = World(seed, stored=stored)
    world.nodes = [Node(world, f"n{index}") for index in range(3)]
    for server in world.servers:
        await server.boot()
    for node in world.nodes:
        for work in (node.keep, node.work, node.watch):
            world.start(work())
    story = world.loop.create_task(tell(world))
    done, _ = await asyncio.wait([story, *world.tasks], return_when=asyncio.FIRST_EXCEPTION)
    for server in world.servers:
        server.crash()
    for task in {story, *world.tasks} - done:
        task.cancel()
    for task in done:
        if not task.cancelled():
            task.result()
    return len(world.granted)


async def tell(world: World) -> None:
    await disturb(world)
    await end_well(world)
    for task in world.tasks:
        task.cancel()
