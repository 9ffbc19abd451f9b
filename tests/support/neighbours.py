"""Processes without processes, that have actors, graphs and channels; their connections are calls of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rooms import Bench

from aiodaft._protocol.channels.channel import Kind, Leaving, Message
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.call import Caller, Request
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.channels import Channels
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.connections.route import Loopback, Traffic
from aiodaft._runtime.graphs.graph_value import GraphContext, Opaque
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.objects.transfer import Objects
from aiodaft.exceptions import DaftError, PeerLost
from aiodaft.methods import specs_of


class Link:
    """One end of a connection. A message comes in a later turn of the loop, unless the test holds it back."""

    def __init__(self, near: Neighbour, far: Neighbour) -> None:
        self.near, self.far = near, far
        self.remote = far.process.id
        self.lost: Exception | None = None
        self.dismissed = False
        self.traffic = Traffic()
        self.session = SimpleNamespace(calls={}, waiting=0)
        # The messages of the time in which the link was held.
        self.held: deque[m.Message] | None = None

    def send(self, message: m.Message) -> None:
        self.near.sent.append((self.remote, message[0]))
        if self.held is not None:
            self.held.append(message)
        elif self.lost is None:
            self.near.process.loop.call_soon(self.far.arrived, self.near, message)

    send_in_turn = send

    def hold(self) -> None:
        self.held = deque()

    def let_go(self, *, last_first: bool = False) -> None:
        """Send the held messages."""
        held, self.held = self.held or deque(), None
        for message in reversed(held) if last_first else held:
            self.near.process.loop.call_soon(self.far.arrived, self.near, message)


class Neighbour(Bench):
    """A process. As its own connections, it leads to the others; it passes on messages about channels itself."""

    def __init__(self, name: PeerId, all_of_them: dict[PeerId, Neighbour]) -> None:
        super().__init__(name=name)
        self._all = all_of_them
        all_of_them[name] = self
        self._links: dict[PeerId, Link] = {}
        self.ring_poller = RingPoller(self.process.loop)
        handlers: list[Any] = []
        this: Any = self
        self.loopback = Loopback(self.process, handlers, this)
        self.objects = Objects(self.process, this, self.store, this)
        self.host = Host(self.process, self.store, self.ring_poller)
        self.caller = Caller(self.process, this, self.objects, self.host.actors)
        self.outgoing = Outgoing(self.caller, this)
        self.caller.sender = this
        # The messages to other processes: the receiver, and the kind of the message.
        self.sent: list[tuple[PeerId, int]] = []
        self.graphs = Graphs(
            GraphContext(self.process, this, self.objects, self.outgoing, self.host.actors, self.agent_of)
        )
        self.channels = Channels(self.caller)
        self.process.provide(Caller, self.caller)
        self.process.provide(Graphs, self.graphs)
        self.process.provide(Channels, self.channels)
        self.handlers = {**self.graphs.handlers, m.BORROW: self.objects.refs.borrow_came}
        handlers += [self.handlers.get(kind) for kind in range(m.KINDS)]
        # The messages about channels that were sent: the receiver, and the kind.
        self.told: list[tuple[PeerId, Kind]] = []
        self.errors: list[BaseException] = []
        self.objects.on_unheld = lambda error, what: self.errors.append(error)

    def want_rings(self, route: Any) -> None:
        """There are no rings here."""

    def host_actor(self, instance: Any) -> HostedActor:
        number = ActorId(FIRST_USER_ACTOR + len(self.host.actors))
        hosted = HostedActor(self.host, number, f"{type(instance).__name__}-{number}", specs_of(type(instance)).get)
        hosted.instance = instance
        self.host.actors[number] = hosted
        return hosted

    def handle(self, of: Neighbour, hosted: HostedActor) -> Any:
        """A handle of another process's actor here."""
        return self.caller.handle(of.process.id, hosted.id, hosted.name, type(hosted.instance))

    def arrived(self, sender: Neighbour, message: m.Message) -> None:
        link = self.to(sender.process.id)
        if link.lost is None:
            self.handlers[message[0]](link, message)

    def lose(self, remote: PeerId) -> None:
        """The connection to a process is lost, and explained."""
        link = self.to(remote)
        link.lost = PeerLost(f"{remote} ended")
        self.graphs.owner_lost(remote)
        self.graphs.connection_lost(remote, PeerLost(f"{remote} ended"))
        self.objects.refs.peer_lost(remote)
        self.channels.peer_lost(remote, Leaving.DIED)

    # As its connections.

    def to(self, remote: PeerId) -> Any:
        return self._links.setdefault(remote, Link(self, self._all[remote]))

    def route_to(self, remote: PeerId) -> Any:
        return self.loopback if remote == self.process.id else self.to(remote)

    def make(self, remote: PeerId, towards: str) -> Any:
        """The counter of the calls that wait behind runs; none are made."""
        return SimpleNamespace()

    def get(self, remote: PeerId) -> Any:
        return self._links.get(remote)

    async def explanation(self, link: Link) -> Exception:
        return PeerLost(f"{link.remote} ended")

    async def why_lost(self, route: Any, otherwise: str) -> Exception:
        return PeerLost(f"{route.remote} ended" if route.lost is not None else otherwise)

    # As the owner of its objects, and as the agents of others.

    async def borrow(self, owner: PeerId, number: CallId) -> None:
        self._all[owner].objects.refs.lend(number, self.process.id)

    def give_back(self, owner: PeerId, number: CallId) -> None:
        self._all[owner].objects.refs.take_back(number, self.process.id)

    def running_call(self, owner: PeerId, number: CallId) -> None: ...

    def agent_of(self, remote: PeerId) -> Any:
        graphs, owner = self._all[remote].graphs, self.process.id

        def install(number: int, plan: Opaque) -> Awaitable[None]:
            return graphs.install(owner, number, plan.content)

        async def uninstall(number: int) -> None:
            graphs.uninstall(owner, number)

        def step_failed(number: int, run: int, why: DaftError) -> None:
            self.process.call_soon(partial(graphs.step_failed, number, run, why))

        def run_failed(number: int, run: int, why: DaftError) -> None:
            self.process.call_soon(partial(graphs.run_failed, owner, number, run, why))

        def edge_cut(number: int, receiver: PeerId, why: DaftError) -> None:
            self.process.call_soon(partial(graphs.edge_cut, number, owner, receiver, why))

        def edge_failed(number: int, sender: PeerId, why: DaftError) -> None:
            self.process.call_soon(partial(graphs.edge_failed, owner, number, sender, why))

        return SimpleNamespace(
            edge_cut=SimpleNamespace(tell=edge_cut),
            edge_failed=SimpleNamespace(tell=edge_failed),
            install=install,
            uninstall=uninstall,
            step_failed=SimpleNamespace(tell=step_failed),
            run_failed=SimpleNamespace(tell=run_failed),
        )

    # As the sender of messages about channels.

    def submit(self, request: Request) -> None:
        to, (maker, number, kind, ticket, body) = request.target.remote, request.args
        self.told.append((to, Kind(kind)))
        message = Message(Kind(kind), ticket, body)
        self.process.loop.call_soon(self._all[to].channel_message, (maker, number), self.process.id, message)

    def channel_message(self, channel_id: Any, sender: PeerId, message: Message) -> None:
        if self.to(sender).lost is None:
            self.channels.run(channel_id, self.channels.table.handle(channel_id, sender, message))


async def close(neighbours: list[Neighbour]) -> None:
    """End the runs that they have under way."""
    for neighbour in neighbours:
        await neighbour.host.aclose("the test is over")
        await neighbour.process.tasks.aclose()
        await neighbour.process.helper_thread.aclose()


async def settled(*what: asyncio.Future[Any]) -> None:
    """Turn the loop until all of it is done."""
    while not all(future.done() for future in what):
        await asyncio.sleep(0)
