"""The ownership of actors by a process: it places their blueprints on nodes, restarts them, and hears how they end.

A controller has this from the beginning, a worker from the first time that one of its actors uses its runtime.
"""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from contextvars import copy_context
from itertools import chain, count
from typing import Any, Final, TypeVar, cast

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.coordination.records import Member, NamedActor
from aiodaft._protocol.diagnostics.failures import Unhandled
from aiodaft._protocol.ids import (
    FIRST_USER_ACTOR,
    SUPERVISOR,
    ActorId,
    PeerId,
    first_number_beside,
    is_attached,
    node_of,
)
from aiodaft._protocol.node.worker import Patience
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.diagnostics.process_view import Viewer, is_answered, stack_here
from aiodaft._runtime.node.membership import watch_members
from aiodaft._runtime.node.nodes import CoordinatorContact, Nodes
from aiodaft._runtime.node.worker import Tenant, WorkerProcess
from aiodaft._runtime.objects.ref_state import RefState, UnhandledErrors
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.placing import Placing
from aiodaft._runtime.platform.tasks import log_error, logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.supervision.directory import Directory, Root
from aiodaft.actor import Handle
from aiodaft.exceptions import CallCancelled, DaftError, OutcomeUnknown, PeerLost, RuntimeClosed
from aiodaft.stack import ProcessStack, RuntimeStack

T = TypeVar("T")

# Seconds after which the coordinator is asked again.
_PAUSE: Final = 0.5

# Seconds until an actor is made, from which on the imports of its process are slow.
SLOW: Final = 2.0


class Owner(ABC):
    peer: Peer
    process: Process
    nodes: Nodes
    placing: Placing
    directory: Directory

    def __init__(self, first_number: int = FIRST_USER_ACTOR) -> None:
        self._labels: Counter[str] = Counter()
        self._group_labels: Counter[str] = Counter()
        self._actor_numbers = count(first_number)
        # The processes that have slowly imported the same packages.
        self._imports: Counter[tuple[str, ...]] = Counter()

    def _own(self, peer: Peer, root: Root) -> None:
        """Begin, as part of this process. `root` hears of ends and errors."""
        process = self.process = peer.process
        self.peer = peer
        self.objects, self.connections, self.agent_of = peer.objects, peer.connections, peer.agent_of
        self.nodes = Nodes(peer.caller)
        self.nodes.on_gone = lambda name: process.create_task(self._node_gone(name, root), name=f"lose node {name}")
        self.nodes.on_joined = self._node_joined
        peer.caller.is_draining = self.nodes.is_draining
        self.contact = CoordinatorContact(peer.caller, self.nodes)
        self.placing = Placing(lambda coro, name: process.tasks.start(coro, name=name))
        self.directory = Directory(peer.caller, self.nodes, root)
        self.directory.on_over = lambda number: self.contact.free_names(process.id, number)
        process.part(Viewer).supervised = self.directory.look
        peer.add_actor(SUPERVISOR, "supervisor", self.directory)

    def note_imports(self, label: str, seconds: float, packages: tuple[str, ...]) -> None:
        """Say once that several processes import the same large packages, each by itself."""
        self._imports[packages] += 1
        if packages and seconds >= SLOW and self._imports[packages] == 2:
            logger.warning(
                "%s was made in %.1f s, in which its process imported %s, as that of another actor did: "
                "Runtime(preload=%r) has them imported once, for all actors",
                label, seconds, " and ".join(packages), packages,
            )  # fmt: skip

    def _node_joined(self, node: Member) -> None:
        if is_attached(self.process.id) and node.name == node_of(self.process.id):
            # It may have been started again. Others reach this process through it.
            self.peer.connect(node.peer)
        if self.directory.processes_on(node.name):
            self.process.tasks.start_ahead(self._node_back(node.peer), name=f"look after {node.name}")

    async def _node_back(self, node: PeerId) -> None:
        """Restart the actors that have ended on a node while it could not tell this process."""
        agent, had = self.nodes.of(node), self.directory.processes_on(node_of(node))
        living = {process.id for process in await agent.processes()}
        for peer in sorted(had - living):
            error = await agent.exit_report(peer, 0)
            self.directory.ended(peer, cast("OutcomeUnknown", error), wanted=False)

    async def _node_gone(self, name: str, root: Root) -> None:
        self.placing.forget(name)
        if await self.connections.hears_from(name):
            return
        error = PeerLost(f"the node {name!r} is not in the cluster any more")
        self.process.note_failure("node", name, error)

        def is_idle(remote: PeerId) -> bool:
            connection = self.connections.get(remote)
            return connection is None or connection.lost is not None or not any(connection.session.under_way())

        # Whether calls are under way is asked before these fail.
        root.node_gone(name, error, is_idle)
        self.connections.lose_node(name, self.nodes.server_of(name))
        self.directory.node_gone(name, error)

    @property
    @abstractmethod
    def is_open(self) -> bool: ...

    @property
    @abstractmethod
    def is_closed(self) -> bool: ...

    @property
    @abstractmethod
    def is_left_behind(self) -> bool: ...

    @property
    @abstractmethod
    def name(self) -> str:
        """The id of the process; empty if it was never opened."""

    @abstractmethod
    def check_running(self, what: str) -> None:
        """Raise RuntimeClosed unless this is open; RuntimeError unless this is its loop."""

    @abstractmethod
    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...

    @abstractmethod
    async def ready(self) -> None:
        """Know the nodes. Raises DaftError if that is not possible."""

    @property
    def coordinator(self) -> Coordinator:
        return self.contact.now

    def target(self, remote: PeerId, actor: ActorId, label: str, sink: UnhandledErrors | None = None) -> Target:
        return Target(self.peer.caller, remote, actor, label, sink)

    @property
    def patience(self) -> Patience:
        """With actors of which neither the class nor `on` says otherwise."""
        return Patience(*self.process.options.patience)

    def follow(self, owner: PeerId, location: Location, label: str, sink: UnhandledErrors) -> FollowingTarget:
        return self.peer.followers.get(owner, location, label, sink)

    def new_tenant(self) -> Tenant:
        return Tenant(self.process.id, ActorId(next(self._actor_numbers)))

    def new_label(self, cls: type) -> str:
        self._labels[cls.__name__] += 1
        return f"{cls.__name__}-{self._labels[cls.__name__]}"

    def new_group(self, cls: type) -> str:
        self._group_labels[cls.__name__] += 1
        return f"{cls.__name__}-group-{self._group_labels[cls.__name__]}@{self.process.id}"

    @asynccontextmanager
    async def reserved(self, name: str, cls: type) -> AsyncGenerator[NamedActor]:
        """The actor with a name; or a reservation (`.reserved`), if there is none, which ends if the block raises.

        While another process makes an actor of that name, this waits.
        """
        tenant = self.new_tenant()
        try:
            yield await self.coordinator.get_or_reserve(NamedActor(name, *tenant, cls.__name__, _names_of(cls)))
        except BaseException:
            if not self.is_closed:
                # Also if it is not known whether it was granted.
                self.process.create_task(self._give_back(name, tenant), name=f"give back the name {name!r}")
            raise

    async def _give_back(self, name: str, tenant: Tenant) -> None:
        # Others wait for it: also a coordinator that is started again has to know.
        while not self.is_closed:
            try:
                await self.coordinator.unreserve(name, *tenant)
            except DaftError as error:
                logger.debug("the name %r is not given back yet: %s", name, error)
                await asyncio.sleep(_PAUSE)
            else:
                return

    async def register(self, target: Target, cls: type, name: str, epoch: int = 0) -> None:
        """Give a name to an actor; `epoch`: that of the reservation, if there is one.

        Raises:
            NameTaken: Another actor has it.
            LeaseLost: The reservation is over, or the actor's node is not in the cluster.
        """
        supervised = isinstance(target, FollowingTarget)
        wanted = NamedActor(name, *target.identity, target.label, _names_of(cls), supervised=supervised, epoch=epoch)
        granted = await self.coordinator.register(wanted)
        await self.nodes.of(granted.peer).named(granted)

    async def found(self, named: NamedActor, cls: type, sink: UnhandledErrors) -> Handle:
        """A handle of the actor with a name.

        Raises:
            TypeError: It is of another class.
            ActorDied: It is gone, and is not restarted.
        """
        if _names_of(cls)[0] not in named.class_names:
            raise TypeError(f"{named.name!r} is {named.label}, which is no {cls.__name__}")
        if not named.supervised:
            return Handle(self.target(named.peer, named.actor, named.label, sink), cls)
        if named.peer == self.process.id:
            return Handle(await self.directory.address(named.actor), cls)
        followed = self.follow(named.peer, Location(NOWHERE, named.actor), named.label, sink)
        await followed.arrive()
        return Handle(followed, cls)

    async def stack(self, patience: float) -> RuntimeStack:
        """The stacks of every process, each of which gets `patience` seconds to answer; then the kernel is asked."""
        await self.ready()
        waits, now = self.peer.deadlocks.waits, self.process.env.monotonic

        async def ask(process: WorkerProcess) -> ProcessStack | None:
            asked_at = now()
            asked = self.agent_of(process.id).stack()
            if not await is_answered(asked, patience):
                dump = await self.nodes.of(process.id).dump(process.id)
                return ProcessStack(process.id, process.pid, process.actors, now() - asked_at, dump=dump)
            try:
                return await asked
            except DaftError:
                return None

        found = await asyncio.gather(*(node.processes() for node in self.nodes.agents()))
        others = (process for process in chain.from_iterable(found) if process.id != self.process.id)
        stacks = await asyncio.gather(*map(ask, others))
        return RuntimeStack((stack_here(waits), *filter(None, stacks)))


class WorkerOwner(Owner):
    """A worker as the owner of the actors that its actors spawn. They end with it."""

    def __init__(self, peer: Peer, root: Root, actor: ActorId) -> None:
        super().__init__(first_number_beside(actor))
        self._own(peer, root)
        self._learning = asyncio.Lock()
        self._knows_nodes = False
        agent = peer.process.options.agent
        self.nodes.add(Member(node_of(agent), agent, ""))

    @property
    def is_open(self) -> bool:
        return self.process.closed is None

    @property
    def is_closed(self) -> bool:
        return self.process.closed is not None

    @property
    def is_left_behind(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.process.id

    def check_running(self, what: str) -> None:
        self.process.check_open(what)
        if not self.process.is_here:
            raise RuntimeError(f"{what} in a thread: use `async def` methods, or `asyncio.run_coroutine_threadsafe`")

    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        if self.process.closed is not None:
            coro.close()
            raise RuntimeClosed(self.process.closed)
        return self.process.tasks.start(coro, name=name)

    async def ready(self) -> None:
        async with self._learning:
            if self._knows_nodes:
                return
            process = self.process
            await self.nodes.learn_from(process.options.agent)
            if node_of(process.id):
                context = copy_context()
                # The first call keeps its context no longer than it runs.
                context.run(current_call.set, None)
                watching = watch_members(self.contact, self.nodes)
                context.run(process.tasks.create_task, watching, name="watch members")
            self._knows_nodes = True


def _names_of(cls: type) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


class ScopeErrors:
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.closing = False
        self.kept = Unhandled()
        # Refs with errors that no code has seen.
        self.held: dict[RefState, None] = {}
        self._task: asyncio.Task[Any] | None = None
        self._cancelled_task = False

    def fail(self, error: BaseException, what: str) -> None:
        """Cancel the body because of an error that no code will see; the block raises the error."""
        if not self.comes_of_closing(error):
            self.kept.add(error)
            self._stop_body(error, what)

    def _stop_body(self, error: BaseException, what: str) -> None:
        if self._task is None:
            # Opened without a block.
            log_error(what, error)
        elif not self.closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        if not self.comes_of_closing(state.error):
            self.held[state] = None

    def settle(self, state: RefState) -> None:
        self.held.pop(state, None)

    def comes_of_closing(self, error: BaseException | None) -> bool:
        return self.closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled)

    def begin(self) -> None:
        self._task = asyncio.current_task()

    @property
    def has_cancelled(self) -> bool:
        return self._cancelled_task

    async def uncancel(self, error: BaseException | None) -> bool:
        """Take back the cancellation by `fail`; False if there was none, or if other code cancelled the task too."""
        if not self._cancelled_task:
            return False
        if not isinstance(error, asyncio.CancelledError):
            # The body ended before the scope's cancellation reached it: the cancellation arrives here.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                logger.debug("the scope's own cancellation arrived after its body")
        task = self._task
        return task is None or task.uncancel() == 0

    def after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """The group to raise instead of the error of the body; None: raise that error as it is."""
        for _, one in self.unseen():
            self.kept.add(one)
        return self.kept.group(None if isinstance(error, asyncio.CancelledError) else error)

    def unseen(self) -> list[tuple[str, BaseException]]:
        """The errors of refs that no code has seen, each with the name of the failed part; called once, at the end."""
        if self.held and not self._owner.is_closed:
            # A raised error refers to frames, and these to refs: only the garbage collector frees such a cycle.
            gc.collect()
            self._owner.objects.drop_now()
        # Other threads may mark errors as seen meanwhile.
        unseen = [state for state in list(self.held) if not state.seen]
        self.held = {}
        for state in unseen:
            state.seen = True
        what = "{} failed, and no code saw the error"
        return [(what.format(state.label), state.error) for state in unseen if state.error is not None]


class InnerErrors(ScopeErrors):
    """Errors of the actors of a block that is no scope, such as a mesh, are those of the scope around it."""

    def __init__(self, owner: Owner, around: ScopeErrors) -> None:
        super().__init__(owner)
        self._around = around

    def fail(self, error: BaseException, what: str) -> None:
        if not self.comes_of_closing(error):
            self._around.fail(error, what)

    def hold(self, state: RefState) -> None:
        if not self.comes_of_closing(state.error):
            self._around.hold(state)

    def settle(self, state: RefState) -> None:
        self._around.settle(state)
