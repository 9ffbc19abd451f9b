"""The ownership of actors by a process: it places their blueprints on nodes, restarts them, and hears how they end.

A controller has this from the beginning, a worker from the first time that one of its actors uses its runtime.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextvars import copy_context
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple, TypeVar, cast

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import (
    FIRST_USER_ACTOR,
    SUPERVISOR,
    ActorId,
    PeerId,
    first_number_beside,
    is_attached,
    node_of,
)
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.node.resources import Demand, Wish
from aiodaft._protocol.supervision import Kind, Restart
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.diagnostics.process_view import Viewer, is_answered, stack_here
from aiodaft._runtime.node.membership import watch_members
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.nodes import CoordinatorContact, Nodes
from aiodaft._runtime.node.worker import Tenant, WorkerProcess
from aiodaft._runtime.objects.ref_state import UnhandledErrors
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.placing import FixedSites, Placing, Site
from aiodaft._runtime.process import Process
from aiodaft._runtime.supervision.child_spec import Enrolment
from aiodaft._runtime.supervision.directory import Directory, Root
from aiodaft.exceptions import DaftError, OutcomeUnknown, PeerLost, RuntimeClosed
from aiodaft.stack import ProcessStack, RuntimeStack

T = TypeVar("T")


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

    # The stage.

    @property
    @abstractmethod
    def is_open(self) -> bool: ...

    @property
    @abstractmethod
    def is_closed(self) -> bool: ...

    @property
    @abstractmethod
    def is_left_behind(self) -> bool:
        """Whether this process was forked from the one that owns the actors."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The id of the process; empty if it was never opened."""

    @abstractmethod
    def check_running(self, what: str) -> None:
        """Raise RuntimeClosed unless this is open; RuntimeError unless this is its loop."""

    @abstractmethod
    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that does not end with the task that asks for it.

        Raises:
            RuntimeClosed: This is not open.
        """

    @abstractmethod
    async def ready(self) -> None:
        """Know the nodes. Raises DaftError if that is not possible."""

    # For scopes.

    @property
    def coordinator(self) -> Coordinator:
        return self.contact.now

    def target(self, remote: PeerId, actor: ActorId, label: str, sink: UnhandledErrors | None = None) -> Target:
        """An actor, as this process calls it; `sink` gets the errors that no code sees."""
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
        """The name of the next actor of a class, such as "Model-2"."""
        self._labels[cls.__name__] += 1
        return f"{cls.__name__}-{self._labels[cls.__name__]}"

    def new_group(self, cls: type) -> str:
        self._group_labels[cls.__name__] += 1
        return f"{cls.__name__}-group-{self._group_labels[cls.__name__]}@{self.process.id}"

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
                # The process has ended.
                return None

        found = await asyncio.gather(*(node.processes() for node in self.nodes.agents()))
        others = (process for process in chain.from_iterable(found) if process.id != self.process.id)
        stacks = await asyncio.gather(*map(ask, others))
        return RuntimeStack((stack_here(waits), *filter(None, stacks)))


class WorkerOwner(Owner):
    """A worker as the owner of the actors that its actors spawn. They end with it."""

    def __init__(self, peer: Peer, root: Root, actor: ActorId) -> None:
        """`actor` is one that this process hosts."""
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


class Constraints(NamedTuple):
    """The arguments of `on(...)`; None where none was given."""

    cpus: float | None = None
    gpus: float | None = None
    resources: Mapping[str, float] | None = None
    node: str | None = None
    beside: Any = None
    patience: Patience | None = None
    restart: Restart | Kind | None = None
    max_queue: int | None = None
    labels: Mapping[str, str] | None = None
    near: tuple[Any, ...] = ()
    apart_from: tuple[Any, ...] = ()
    spread: bool = False
    wait: float | None = None
    name: str | None = None
    lifetime: str | None = None
    # The slices of a mesh; None: the nodes.
    within: FixedSites[NodeAgent] | None = None

    @property
    def is_named(self) -> bool:
        return self.name is not None or self.lifetime is not None

    def demand(self, cls: type) -> Demand:
        base: Demand = getattr(cls, "__aiodaft_demand__", Demand())
        if self.beside is not None:
            # An actor in another actor's process uses that process's GPUs.
            base = replace(base, gpus=0)
        return Demand(
            cpus=base.cpus if self.cpus is None else self.cpus,
            gpus=base.gpus if self.gpus is None else self.gpus,
            custom=base.custom if self.resources is None else dict(self.resources),
        )

    def patience_with(self, cls: type) -> Patience | None:
        """The patience with an actor of this class; None where neither `on` nor the class line gives one."""
        return self.patience or getattr(cls, "__aiodaft_patience__", None)


class Blueprint(NamedTuple):
    """An actor to be made: its class, the arguments of its constructor, and those of `on(...)`."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    constraints: Constraints

    @property
    def demand(self) -> Demand:
        return self.constraints.demand(self.cls)

    @property
    def max_queue(self) -> int | None:
        return self.constraints.max_queue or getattr(self.cls, "__aiodaft_max_queue__", None)


class Reserved(NamedTuple):
    """The share of an actor that is not made yet, and the node or slice that has reserved it."""

    site: Site[NodeAgent]
    wish: Wish[Tenant]


class Seat(NamedTuple):
    """The place of one member in a group."""

    label: str
    reserved: Reserved
    enrolment: Enrolment
