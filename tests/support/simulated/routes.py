"""The network between simulated hosts: TCP connections whose packets take their time, wait, or get lost."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final, NamedTuple

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.dialing import ANSWER_DEADLINE
from aiodaft._runtime.connections.far import Authenticated, receive_message
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import PeerLost
from aiodaft_transport import Key
from aiodaft_transport.handshake import Purpose
from simulated.network import End, Packet, SimulatedNetwork
from simulated.simulated_loop import SimulatedProcess, settle

# Seconds after which TCP gives up a connection whose other end does not answer: at least, and at most.
_GIVE_UP: Final = (5.0, 14.0)
# The longest that TCP waits before it sends a packet again.
_AGAIN: Final = 1.0
# The message of both ends in place of the handshake, and of TLS.
_MARK: Final = b"+"

OnAccept = Callable[[Authenticated], object]


class Routes:
    """The ways between hosts, and the packets under way on them."""

    def __init__(self, net: SimulatedNetwork, delay: float) -> None:
        self.net = net
        self.loop = net.loop
        # The longest that a packet is under way between two hosts.
        self.delay = delay
        # The doors by host.
        self.doors: dict[str, Door] = {}
        # Packets that were sent between two hosts, in one direction.
        self.packets: Counter[tuple[str, str]] = Counter()
        self._down: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()
        self._held: list[tuple[str, str, Callable[[], object]]] = []
        # Ends of connections between hosts; those that are cut off are given up, unless the ways change before.
        self._ends: list[FarEnd] = []
        self._changes = 0

    def is_down(self, host: str) -> bool:
        return host in self._down

    def blocks(self, source: str, target: str) -> bool:
        """Whether packets from one host do not reach the other one."""
        return (source, target) in self._dropped or bool(self._down & {source, target})

    def are_cut(self, one: str, other: str) -> bool:
        """Whether no connection of two hosts works, because one direction does not."""
        return self.blocks(one, other) or self.blocks(other, one)

    def deliver(self, source: str, target: str, arrive: Callable[[], object]) -> None:
        """Have a packet arrive; one that cannot is sent again until it does."""
        self.packets[source, target] += 1
        self._deliver_at(self.arrival(), source, target, arrive)

    def arrival(self) -> float:
        return self.loop.time() + self.loop.rng.random() * self.delay

    def _deliver_at(self, when: float, source: str, target: str, arrive: Callable[[], object]) -> None:
        def come() -> None:
            if self.blocks(source, target):
                self._held.append((source, target, arrive))
            else:
                arrive()

        self.loop.at(when, come)

    # Faults.

    def drop(self, source: str, target: str) -> None:
        """Lose the packets from one host to another, until `heal`."""
        self.loop.note("drop", source, target)
        self._dropped.add((source, target))
        self._give_up_later()

    def heal(self) -> None:
        """Every host that is not down reaches every other one again."""
        self.loop.note("heal")
        self._dropped.clear()
        self._send_again()

    def unplug(self, host: str) -> None:
        self._down.add(host)
        self._give_up_later()

    def plug(self, host: str) -> None:
        self._down.discard(host)
        self._send_again()

    def reset(self, one: str, other: str) -> None:
        self.loop.note("reset", one, other)
        for end in self._open_ends():
            if (end.here, end.there) == (one, other):
                end.reset()
                end.far.reset()

    def _send_again(self) -> None:
        self._changes += 1
        self._give_up_later()
        held, self._held = self._held, []
        for source, target, arrive in held:
            self._deliver_at(self.loop.time() + self.loop.rng.random() * _AGAIN, source, target, arrive)

    def _give_up_later(self) -> None:
        for end in self._open_ends():
            if self.are_cut(end.here, end.there) and end.doomed_at != self._changes:
                end.doomed_at = self._changes
                self.loop.later(self.loop.rng.uniform(*_GIVE_UP), self._give_up, end, self._changes)

    def _give_up(self, end: FarEnd, changes: int) -> None:
        if self._changes == changes:
            end.fail(errno.ETIMEDOUT)

    def _open_ends(self) -> list[FarEnd]:
        self._ends = [end for end in self._ends if not (end.closed or end.broken)]
        return self._ends

    # Connections.

    def connect(self, client: SimulatedProcess, server: SimulatedProcess) -> tuple[socket.socket, socket.socket]:
        one, other = FarEnd(self, client.host, server.host), FarEnd(self, server.host, client.host)
        self._ends += [one, other]
        return self.net.join(one, client, other, server)


class FarEnd(End):
    """One end of a TCP connection."""

    def __init__(self, routes: Routes, here: str, there: str) -> None:
        super().__init__(routes.net)
        self.routes = routes
        self.here = here
        self.there = there
        # The number of changes of ways at which it was found cut off.
        self.doomed_at = -1

    @property
    def far(self) -> FarEnd:
        assert isinstance(self.other, FarEnd)
        return self.other

    @property
    def refuses(self) -> bool:
        # That the other side is gone has to be told first.
        return self.closed or self.broken

    def travel(self, packet: Packet | None) -> None:
        if packet is not None:
            self.load += len(packet.data)
        self.under_way.append(packet or Packet(b""))
        self.last_arrival = max(self.last_arrival, self.routes.arrival())
        self.routes.packets[self.there, self.here] += 1
        self.routes._deliver_at(self.last_arrival, self.there, self.here, self._come)

    def _come(self) -> None:
        if not self.under_way:
            # It was lost with the host that sent it.
            return
        packet = self.under_way.popleft()
        if self.closed or self.broken:
            self.routes.deliver(self.here, self.there, self.far.reset)
        elif packet.data:
            self.arrived.append(packet)
        else:
            self.ended = True
        self.net.wake(self)

    def close(self) -> None:
        if self.closed:
            return
        is_down = self.routes.is_down(self.here)
        if self.broken or self.arrived or is_down:
            # Unread data at the time of the close resets a connection, too.
            if is_down:
                self.far.under_way.clear()
            self.closed = True
            self.net.drop(self)
            self.routes.deliver(self.here, self.there, self.far.reset)
        else:
            super().close()

    def reset(self) -> None:
        self.fail(errno.ECONNRESET)

    def fail(self, number: int) -> None:
        """The connection does not work any more; this end learns it."""
        if not (self.closed or self.broken):
            self.routes.loop.note("lost", sorted(self.fds), errno.errorcode[number])
            self.under_way.clear()
            self.ended = self.broken = True
            self.errno = number
            self.net.wake(self)

    def cut(self) -> None:
        self.fail(errno.ECONNRESET)


class Door(NamedTuple):
    """The port of a node; see `far.Door`."""

    routes: Routes
    process: SimulatedProcess
    on_accept: dict[Purpose, OnAccept]

    async def open(self, address: Address) -> Address:
        """Listen, at any port of the host."""
        self.routes.doors[self.process.host] = self
        self.process.on_death.append(self.close)
        return address

    def close(self) -> None:
        if self.routes.doors.get(self.process.host) is self:
            del self.routes.doors[self.process.host]

    def admit(self, came: Authenticated, purpose: Purpose) -> None:
        """Tell the other side that it was let in, and hand its connection over."""
        try:
            came.sock.send(_MARK)
        except OSError:
            came.sock.close()
        else:
            self.on_accept[purpose](came)


class HostNetwork:
    """The way of one simulated host's processes to others; see `far.Network`."""

    reached_by: tuple[str, ...] = ()

    def __init__(self, routes: Routes, host: str, key: Key) -> None:
        self._routes = routes
        self._host = host
        self.key = key
        self.cluster = "simulated"

    def packed(self) -> bytes:
        return b"what makes a simulated process a member"

    def door(self, tasks: TaskOwner, on_control: OnAccept, on_data: OnAccept) -> Door:
        context = copy_context()

        def within(on_accept: OnAccept) -> OnAccept:
            return lambda came: context.copy().run(on_accept, came)

        callbacks = {Purpose.CONTROL: within(on_control), Purpose.DATA: within(on_data)}
        return Door(self._routes, self._routes.loop.current, callbacks)

    async def dial(self, address: str, local: PeerId, to: PeerId, purpose: Purpose) -> tuple[socket.socket, Key]:
        try:
            async with asyncio.timeout(ANSWER_DEADLINE):
                return await self._connect(parse_address(address).host, local, to, purpose)
        except OSError as error:
            raise PeerLost(f"no connection to {to} at {address}: {error!r}", executed=False) from error

    async def _connect(self, host: str, local: PeerId, to: PeerId, purpose: Purpose) -> tuple[socket.socket, Key]:
        routes, process = self._routes, self._routes.loop.current
        await self._wait(self._host, host)
        await self._wait(host, self._host)
        door = routes.doors.get(host)
        if door is None:
            raise ConnectionRefusedError(f"nothing listens at {host}")
        ours, theirs = routes.connect(process, door.process)
        session = Key(routes.loop.rng.randbytes(32))
        routes.loop.within(door.process, door.admit, Authenticated(theirs, local, to, session), purpose)
        try:
            await receive_message(ours, len(_MARK), start=_MARK)
        except BaseException:
            ours.close()
            raise
        return ours, session

    async def _wait(self, source: str, target: str) -> None:
        loop = self._routes.loop
        came: asyncio.Future[None] = loop.create_future()
        self._routes.deliver(source, target, partial(loop.within, loop.current, settle, came, None))
        await came

    async def secure(self, sock: socket.socket, session: Key, *, server: bool) -> socket.socket:
        try:
            async with asyncio.timeout(ANSWER_DEADLINE):
                sock.send(_MARK)
                await receive_message(sock, len(_MARK), start=_MARK)
        except OSError as error:
            sock.close()
            raise PeerLost(f"the connection ended before it was secured: {error!r}", executed=False) from error
        except BaseException:
            sock.close()
            raise
        return sock

    async def protect(self, stream: socket.socket, session: Key, *, server: bool) -> socket.socket:
        return stream

    async def receive(self, sock: socket.socket, size: int) -> bytes:
        return await receive_message(sock, size, start=b"")
