"""The connection to one process: a session over a socket, and later over a pair of rings in shared memory.

             attach          RING_USED sent                  RING_USED received
    waiting --------> socket --------------> ring to the peer ------------------> rings
       |                |                           |                               |
       +----------------+-------------+-------------+-------------------------------+
                                      | close, BYE, or the end of the socket
                                      v
                                    lost

State             Attributes                        Messages go to    Messages come from
waiting           no `_socket`                      the session       -
socket            `_socket`                         the socket        the socket
ring to the peer  `_socket`, `_send_queue.ring`     the ring          the socket
rings             `_socket`, both rings             the ring          the ring
lost              `lost`                            nowhere           -

RING_USED is the last message of its direction on the socket. After it the socket carries only descriptors, each with
a dummy byte; the end of the socket shows that the peer is gone.

The connection writes the first message of a turn of the event loop at once, and the others together at the end of it.
While short turns with several messages follow each other, it writes all messages of a turn together: each write wakes
the peer, and a wake-up costs more than a message. A message that depends on an earlier one (`follow`) is no reason to
hold that one back: the peer works on it while this process goes on.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import finalize, ref

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.connections.session import STALL, Definitions, Session, Upgrade
from aiodaft._protocol.ids import CallId, PeerId, can_share_memory
from aiodaft._runtime.connections.ring_poller import SPACE, Descriptors, RingPair, RingPoller, SendQueue
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.platform.tasks import log_error
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.definitions import Definition, Named
from aiodaft.exceptions import DaftError, Overloaded, PeerLost, ProtocolError, RemoteProtocolError

# The bytes that one read handles at most, so that many calls do not block the loop for long.
_READ_SIZE: Final = 16 << 10
# The messages that are written together at most.
_BATCH: Final = 64
# After so many turns in a row that took at most so many seconds and had several messages, the first one waits for the
# others. Before that, the peer works while this process goes on.
BURSTS: Final = 8
_SHORT: Final = 200e-6

Handler: TypeAlias = Callable[[Any, Message], object]


class Connection:
    # When the messages of this turn began to be collected, and how many turns up to the last one were bursts.
    _corked_at = 0.0
    _bursts = 0
    _watching_stall = False

    def __init__(
        self,
        process: Process,
        session: Session[Any],
        remote: PeerId,
        ring_poller: RingPoller,
        handlers: Sequence[Handler],
        on_lost: Callable[[Connection, Exception], object],
        on_dropped: Callable[[Connection, Message], object],
    ) -> None:
        self.session = session
        self.remote = remote
        self.peer: str = remote
        self.lost: Exception | None = None
        # Whether it ever had a socket. If not, no message was sent.
        self.connected = False
        # It leads to another machine: no descriptor and no shared memory goes over it.
        self.far = False
        # It was lost, and the process at the other end seems to live: another connection may be made.
        self.renewable = False
        # Since the connection was lost: the error with which its calls fail.
        self.explanation: asyncio.Future[DaftError] | None = None
        # No other process knows better why it was lost.
        self.explained = False
        self.dismissed = False
        # Known before there is a socket.
        self.shares_memory = can_share_memory(process.id, remote)
        self.reached_by: tuple[str, ...] = ()
        self.traffic = Traffic()
        self.definitions: Definitions[Definition] = Definitions()
        self._call_soon, self._clock = process.call_soon, process.env.monotonic
        self._handlers = handlers
        self._on_lost = on_lost
        self._on_dropped = on_dropped
        self._loop = loop = process.loop
        self._sockets = process.env.sockets
        self._pack, self._packed, self._take = session.send, session.packed, session.data_to_send
        self._socket: socket.socket | None = None
        self._buffer = bytearray(_READ_SIZE)
        self._descriptors = Descriptors(self._sockets)
        self._ring_poller = ring_poller
        self._send_queue = SendQueue(loop, self.traffic, ring_poller.look, self._broken, self._sockets)
        self.upgrade = Upgrade(makes=process.id < remote)
        # Rings that this process has offered to the peer, and the descriptor that is sent with RING_USED.
        self.offer: tuple[RingPair, int] | None = None
        # The rings, once the peer sends its messages through them.
        self._ring: RingPair | None = None
        self._over: list[CallId] = []
        # Packed messages that are not written, and those among them that depend on earlier ones.
        self._collected = self._followers = 0
        self._turn = -1
        self._corked = False
        # The last received message is being handled: its answer is written at once.
        self._prompt = False

    def has_room(self, *, own: bool) -> bool:
        return self.connected and (self.session.has_room_for_own if own else self.session.has_room)

    @property
    def is_up(self) -> bool:
        return self.connected and self.lost is None

    def traffic_so_far(self) -> Traffic:
        ring = self._send_queue.ring or self._ring
        return self.traffic if ring is None else _with_rings(self.traffic, ring)

    def is_awaited(self) -> bool:
        return not self.connected and self.lost is None

    def attach(self, sock: socket.socket, *, far: bool = False) -> None:
        sock.setblocking(False)
        self.far = far
        self._socket = sock
        self.connected = True
        self._send_queue.attach(sock)
        if self.lost is None:
            self._loop.add_reader(sock.fileno(), self._readable)
            self._write()

    def send(self, message: Message) -> None:
        if self.lost is None:
            self._pack(message)
            self._sent_one()

    def send_soon(self, message: Message) -> None:
        """Send a message at the end of this turn, together with the messages until then."""
        self.flush_soon()
        self.send(message)

    def tell_over(self, number: CallId) -> None:
        """Send a call's end at the end of this turn, with the others."""
        if self.lost is None:
            self._over.append(number)
            if len(self._over) == 1:
                self._sent_one()

    def follow(self) -> None:
        """Note that the next message depends on an earlier one, which is not held back for it."""
        self._followers += 1

    def flush(self) -> None:
        self._write()

    def tell(self, defined: Sequence[Named]) -> None:
        for thing, name, source in defined:
            if self.lost is None and self.definitions.tell(name):
                self.send(m.define(name, source))
                finalize(thing, _take_back_soon, ref(self), name).atexit = False

    def take_back(self, name: bytes) -> None:
        """The object with this name is gone. Safe during a garbage collection."""
        self._call_soon(partial(self._take_back, name))

    def _take_back(self, name: bytes) -> None:
        if self.definitions.take_back(name):
            # Behind the calls that wait: these may have it.
            self.send_in_turn(m.forget(name))

    def define_came(self, message: Message) -> None:
        name, source = m.read_define(message)
        self.definitions.hear(name, Definition(source))

    def forget_came(self, message: Message) -> None:
        self.definitions.forget(m.read_forget(message))

    def send_in_turn(self, message: Message) -> None:
        if self.lost is None:
            self.session.line_up(message)
            self._sent_one()

    def _sent_one(self) -> None:
        self.traffic.messages_sent += 1
        self._collected += 1
        if self._corked:
            if self._prompt or self._collected >= _BATCH:
                # The peer works while this process goes on. More writes for the same message pay only to a ring.
                self._prompt = self._prompt and self._send_queue.ring is not None
                self._write()
        elif self._ring is None:
            if self._bursts < BURSTS:
                self._write()
            self.flush_soon()
        elif self._turn != (turn := self._ring_poller.turns):
            self._turn = turn
            self._write()
        else:
            self.flush_soon()

    def flush_soon(self) -> None:
        if not self._corked:
            self._corked = True
            self._corked_at = self._clock()
            if self._ring is None:
                self._loop.call_soon(self._uncork)
            else:
                self._ring_poller.before_looking(self._uncork)

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self.send_fds(m.note(transport, note, len(fds)), fds)

    def send_fds(self, message: Message, fds: Sequence[int]) -> None:
        """Send a message with descriptors, in order with all other messages.

        Raises:
            OSError: There is no room for the descriptors until they are sent. The message is not sent.
        """
        if self.lost is not None:
            return
        if not fds:
            self.send(message)
            return
        # The caller may close its descriptors before they are sent.
        self._send_with(message, self._sockets.dup_all(fds))

    def _send_with(self, message: Message, fds: Sequence[int]) -> None:
        self._take_packed()
        self.traffic.messages_sent += 1
        self._pack(message)
        self._take_packed(tuple(fds))
        self._send_queue.flush()

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with the message that is being handled.

        Raises:
            RemoteProtocolError: The peer did not send them.
            OSError: The peer sent them, and this process had no room for them.
        """
        if not self._descriptors.some_came and self._ring is not None and self._socket is not None:
            # The peer sent them before their message.
            with suppress(OSError):
                _, ancillary, flags, _ = self._socket.recvmsg(1, SPACE)
                self._descriptors.add(ancillary, flags)
        try:
            return self._descriptors.take(count)
        except LookupError as error:
            raise RemoteProtocolError(f"{self.remote} announced descriptors that did not come: {error}") from None

    def submit(
        self,
        call_id: CallId,
        call: Any,
        message: Message | None,
        cost: int = 0,
        admitted: bool = False,
        own: bool = False,
        ordered: bool = True,
    ) -> None:
        if own:
            self.session.submit_own(call_id, call, message)
            self._sent_one()
            return
        try:
            sent = self.session.submit(call_id, call, message, cost, admitted, ordered)
        except Overloaded:
            if message is not None:
                self._on_dropped(self, message)
            raise
        if not sent and not self._watching_stall:
            self._watching_stall = True
            self._loop.call_later(STALL, self._look_for_stall)
        self._sent_one()

    def _look_for_stall(self) -> None:
        self._watching_stall = self.lost is None and self.session.look_for_stall()
        if self._watching_stall:
            self._loop.call_later(STALL, self._look_for_stall)
        self.flush_soon()

    def provide(self, call_id: CallId, message: Message, cost: int) -> None:
        self.session.provide(call_id, message, cost)
        self.flush_soon()

    def withdraw(self, call_id: CallId) -> bool:
        message = self.session.unsent(call_id)
        if message is not None:
            self._on_dropped(self, message)
        withdrawn = self.session.withdraw(call_id)
        if self._packed and self._socket is not None:
            self.flush_soon()
        return withdrawn

    def abandon(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.drop_offer()
        ring = self._take_ring()
        if ring is not None:
            ring.close()

    def close(self, reason: Exception) -> None:
        if self.lost is None:
            self._write()
        if self.lost is not None:
            return
        self.lost = reason
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self.drop_offer()
        self._drop_rings()
        self._descriptors.close()
        # Lost connections are kept for a while.
        self._buffer = bytearray()
        self.session.close()
        self._on_lost(self, reason)

    def _uncork(self) -> None:
        self._corked = False
        # Of several messages, one was written at once, unless it waited.
        several = self._collected - self._followers > (self._bursts >= BURSTS)
        self._bursts = self._bursts + 1 if several and self._clock() - self._corked_at < _SHORT else 0
        self._write()

    def _take_packed(self, fds: tuple[int, ...] = ()) -> None:
        if self._packed:
            self._send_queue.add(self._take(), fds)

    def _write(self) -> None:
        if self._over:
            over, self._over = self._over, []
            self._pack(m.over(over))
        if self._packed and self._socket is not None:
            self._collected = self._followers = 0
            self._send_queue.write(self._take())

    def drop_offer(self) -> None:
        if self.offer is not None:
            (ring, mark), self.offer = self.offer, None
            ring.close()
            self._sockets.close(mark)

    def use_offer(self, message: Message) -> None:
        """The peer has taken the offered rings; see `write_rings`."""
        if self.offer is not None:
            (ring, mark), self.offer = self.offer, None
            self.write_rings(ring, message, mark)

    def write_rings(self, ring: RingPair, message: Message, mark: int) -> None:
        """Send RING_USED with its descriptor, and all later messages through a ring. Takes over the descriptor."""
        if self.lost is None:
            self._send_with(message, (mark,))
        else:
            self._sockets.close(mark)
        if self.lost is not None:
            ring.close()
            return
        self._take_packed()
        self._send_queue.ring = ring

    def read_rings(self) -> None:
        ring = self._send_queue.ring
        if ring is not None:
            self._ring = ring
            self._ring_poller.add(ring, self)

    def ring_readable(self) -> None:
        if self._ring is not None:
            self._receive(self._ring.reader.read(_READ_SIZE))

    def ring_writable(self) -> None:
        self._send_queue.flush()

    def _drop_rings(self) -> None:
        ring = self._take_ring()
        if ring is not None:
            self._ring_poller.remove(ring)
            ring.close()

    def _take_ring(self) -> RingPair | None:
        self.traffic = self.traffic_so_far()
        ring, self._ring = self._send_queue.ring or self._ring, None
        self._send_queue.close()
        return ring

    def introduce(self, other: Connection) -> None:
        ends = self._sockets.pair()
        for connection, remote, end in ((self, other.remote, ends[0]), (other, self.remote, ends[1])):
            with end:
                connection.send_fds(m.introduce(remote), (end.fileno(),))

    def _readable(self) -> None:
        wakeups = self._ring_poller.wakeups
        try:
            wakeups.collecting = True
            try:
                self._read_socket()
            finally:
                wakeups.collecting = False
            wakeups.run()
        finally:
            # uvloop reports a socket that has data and an error only once. The program may go on after a SystemExit.
            code = 0 if self._socket is None else self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._broken(OSError(code, os.strerror(code)))

    def _read_socket(self) -> None:
        if self._socket is None:
            return
        if self._ring is not None:
            self._look_for_end(self._socket)
            return
        try:
            count, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], SPACE)
        except BlockingIOError:
            return
        except OSError as error:
            self._broken(error)
            return
        if ancillary or flags:
            self._descriptors.add(ancillary, flags)
        if not count:
            self.close(PeerLost(f"the connection to {self.remote} ended"))
            return
        self.traffic.control_received += count
        self._receive(memoryview(self._buffer)[:count])

    def _look_for_end(self, sock: socket.socket) -> None:
        """Readable although messages use the rings: there is a descriptor, or it has ended."""
        try:
            ended = not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self._broken(error)
            return
        self.catch_up()
        if ended and self._socket is not None:
            self.close(PeerLost(f"the connection to {self.remote} ended"))

    def _receive(self, data: bytes | memoryview) -> None:
        corked, self._corked = self._corked, True
        try:
            messages = self.session.receive_data(data)
            if messages:
                self.traffic.messages_received += len(messages)
                handlers, last = self._handlers, messages.pop()
                for message in messages:
                    handlers[message[0]](self, message)
                self._prompt = True
                handlers[last[0]](self, last)
        except ProtocolError as error:
            self.close(error)
        except Exception as error:  # noqa: BLE001 - see below
            # Invalid content in a valid frame, or a bug in this process: the calls of this connection must fail.
            log_error(f"a message from {self.remote} cannot be handled", error)
            wrong = RemoteProtocolError(
                f"{self.remote} sent a message that cannot be handled: {type(error).__name__}: {error}"
            )
            wrong.__cause__ = error
            self.close(wrong)
        finally:
            self._prompt, self._corked = False, corked
        if not corked:
            self._write()

    def _broken(self, error: OSError) -> None:
        # The socket cannot be written any more. Messages that the peer has sent are still handled.
        self._send_queue.drop()
        if self._socket is not None and self.catch_up():
            lost = PeerLost(f"the connection to {self.remote} broke: {error}")
            # Lost connections are kept: do not keep the frames of the writer or the error that it handles.
            lost.__cause__ = error.with_traceback(None)
            error.__context__ = None
            self.close(lost)

    def catch_up(self) -> bool:
        """Returns False if a message closed the connection."""
        while self._ring is not None and self._ring.reader.filled:
            self.ring_readable()
        if self._ring is None:
            # `_buffer` may hold the messages that are being handled.
            buffer = bytearray(_READ_SIZE)
            with suppress(BlockingIOError, OSError):
                while self._socket is not None:
                    count, ancillary, flags, _ = self._socket.recvmsg_into([buffer], SPACE)
                    self._descriptors.add(ancillary, flags)
                    if not count:
                        break
                    self._receive(memoryview(buffer)[:count])
        return self._socket is not None


def _with_rings(traffic: Traffic, ring: RingPair) -> Traffic:
    sent, received = ring.writer.head, ring.reader.tail
    return replace(
        traffic,
        control_sent=traffic.control_sent + sent,
        control_received=traffic.control_received + received,
        ring_sent=sent,
        ring_received=received,
    )


def _take_back_soon(found: ref[Connection], name: bytes) -> None:
    connection = found()
    if connection is not None:
        connection.take_back(name)
