"""Payload over byte streams: works between any two processes.

The process makes the streams (see `Host.connect`), so this transport neither listens nor knows a key: between hosts a
stream is a TCP connection whose ends have proved the cluster key, on one host a socketpair. The consumer requests the
parts of the blocks that it was granted; a large block comes in several parts, each over a stream of its own. Bytes go
from the block straight into the socket, and from the socket straight into the buffer of the value.

Threads move the bytes, because a copy into or out of the kernel runs without the interpreter lock. No socket is waited
for alone: a peer that does not read, or sends nothing, holds up no other transfer.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, cast

from aiodaft_transport.abc import BasePull, PeerTransport, Remote, size_of
from aiodaft_transport.exceptions import GrantError, PeerGone, TransportError
from aiodaft_transport.memory import Arena, ArenaBlock, Block, Regions, Unmapped, check_target, exposed_view
from aiodaft_transport.system import Doorbell, start_thread, usable_cpus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiodaft_transport.abc import Control, Grant, Host


# The most bytes that one system call copies.
_STEP: Final = 4 << 20
# A thread of a machine with fewer processors fills any of its networks; others have more to do.
_PROCESSORS_PER_THREAD: Final = 4
_MOST_THREADS: Final = 4


class _Move(BasePull[None]):
    def __init__(self, connection: socket.socket, memory: memoryview, event: int) -> None:
        super().__init__()
        self.connection = connection
        self.memory = memory
        self.event = event
        self.moved = 0
        # Set by the loop: move nothing more.
        self.stopped = False
        # Set by the thread: it does not use the memory any more.
        self.ended = False

    def step(self) -> bool:
        """Returns whether all are moved."""
        part = self.memory[self.moved : self.moved + _STEP]
        try:
            if self.event == selectors.EVENT_WRITE:
                self.moved += self.connection.send(part)
            else:
                count = self.connection.recv_into(part)
                if not count:
                    raise PeerGone(f"the stream ended after {self.moved} of {len(self.memory)} bytes")
                self.moved += count
        except BlockingIOError:
            return False
        return self.moved == len(self.memory)

    def end(self, error: Exception | None) -> None:
        if error is not None:
            self.set_error(error)
        elif not self.done.done():
            self.done.set_result(None)
        self.set_over()


class _Thread:
    def __init__(self, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._call_soon = call_soon
        # New and stopped moves.
        self._orders: deque[_Move] = deque()
        self._closing = False
        self.load = 0
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._wakeup = opened.enter_context(closing(Doorbell()))
            self._selector.register(self._wakeup.fd, selectors.EVENT_READ)
            self._thread = start_thread(self._run, name="aiodaft moves payload")
            opened.pop_all()

    def order(self, move: _Move) -> None:
        self._orders.append(move)
        self._wakeup.ring()

    def close(self) -> None:
        self._closing = True
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        with self._selector:
            while not self._closing:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._take_orders()
                    else:
                        self._step(key.data)
            left = [key.data for key in self._selector.get_map().values() if key.data is not None]
            for move in (*left, *self._orders):
                self._end(move, TransportError("the transport is closed"))

    def _take_orders(self) -> None:
        self._wakeup.heard()
        while self._orders:
            move = self._orders.popleft()
            if move.stopped:
                self._end(move, None)
            else:
                self._selector.register(move.connection, move.event, move)

    def _step(self, move: _Move) -> None:
        try:
            if move.step():
                self._end(move, None)
        except (OSError, PeerGone) as error:
            # Its frames refer to the memory.
            self._end(move, error.with_traceback(None))

    def _end(self, move: _Move, error: Exception | None) -> None:
        # A move may be stopped when it has just ended.
        if not move.ended:
            move.ended = True
            with suppress(KeyError):
                self._selector.unregister(move.connection)
            self._call_soon(partial(move.end, error))


class Mover:
    """Threads start when they are needed and the system has one; while there is none, the loop makes the moves."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads: list[_Thread] = []
        self._most = min(_MOST_THREADS, max(1, usable_cpus() // _PROCESSORS_PER_THREAD))
        self._closed = False

    async def send(self, connection: socket.socket, memory: memoryview) -> None:
        """The connection does not block.

        Raises:
            OSError: The connection broke.
            TransportError: The transport is closed.

        Cancellation: ends the move; raised once the memory is not used any more.
        """
        await self._move(connection, memory, selectors.EVENT_WRITE)

    async def receive(self, connection: socket.socket, memory: memoryview) -> None:
        """Fill `memory` from a connection that does not block.

        Raises:
            OSError: The connection broke.
            PeerGone: The stream ended.
            TransportError: The transport is closed.

        Cancellation: as with `send`.
        """
        await self._move(connection, memory, selectors.EVENT_READ)

    def close(self) -> None:
        self._closed = True
        while self._threads:
            self._threads.pop().close()

    async def _move(self, connection: socket.socket, memory: memoryview, event: int) -> None:
        if self._closed:
            raise TransportError("the transport is closed")
        thread, move = self._least_loaded(), _Move(connection, memory, event)
        if thread is None:
            await _move_here(move)
            return
        thread.load += 1
        thread.order(move)
        try:
            await move.done
        except BaseException:
            if not (move.is_over or self._closed):
                move.stopped = True
                thread.order(move)
            await move.wait_over()
            raise
        finally:
            thread.load -= 1

    def _least_loaded(self) -> _Thread | None:
        if len(self._threads) < self._most and all(thread.load for thread in self._threads):
            with suppress(OSError):
                self._threads.append(_Thread(self._host.call_soon))
        return min(self._threads, key=lambda thread: thread.load, default=None)


async def _move_here(move: _Move) -> None:
    loop, descriptor = asyncio.get_running_loop(), move.connection.fileno()
    add, remove = (
        (loop.add_writer, loop.remove_writer)
        if move.event == selectors.EVENT_WRITE
        else (loop.add_reader, loop.remove_reader)
    )
    while not move.step():
        ready = asyncio.Event()
        add(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            remove(descriptor)


_REQUEST: Final = struct.Struct("<QQQ")  # id of a grant; where the wanted part begins, and its bytes
_REPLY: Final = struct.Struct("<Q")  # bytes of the whole block, the part follows; 0: not granted
_RETURN: Final = struct.Struct("<Q")  # note: id of a grant that is returned unused
_SOCKET_BUFFER: Final = 4 << 20
# Up to this size, a thread of its own costs more than it saves the loop.
_SHORT: Final = 1 << 20
_PART: Final = 16 << 20
_MOST_PARTS: Final = 4
_IDLE_STREAMS: Final = 4
_MAX_STREAMS: Final = 8


class _Remote(Remote):
    def __init__(self) -> None:
        super().__init__()
        self.idle: list[socket.socket] = []
        # In use, here or by the peer.
        self.open: set[socket.socket] = set()
        self.turn = asyncio.Semaphore(_MAX_STREAMS)
        # Of the grants of which a part was sent.
        self.unsent: dict[int, int] = {}

    def take_back(self, number: int) -> bool:
        self.unsent.pop(number, None)
        return super().take_back(number)

    def sent(self, number: int, block: Block | Unmapped, nbytes: int) -> None:
        """With the last part, the grant ends."""
        left = self.unsent[number] = self.unsent.get(number, block.nbytes) - nbytes
        if left <= 0 or self.granted.get(number) is not block:
            self.take_back(number)


class TcpTransport(PeerTransport[Block, _Remote]):
    name: ClassVar[str] = "tcp"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.arena = Arena(shared=False)
        self.landing = Arena(shared=False)
        # A socket sends from any memory: unregistering undoes nothing.
        self._regions = Regions(self.arena.next_number, lambda number: None)
        self._mover = Mover(host)

    def pools(self) -> Sequence[Arena]:
        return self.arena, self.landing

    def allocate(self, nbytes: int) -> ArenaBlock:
        return self.arena.allocate(nbytes)

    async def fetch(self, grant: Grant, control: Control) -> memoryview:
        with self._declining(grant, control):
            landing = self.landing.allocate(size_of(grant))
        try:
            await self.fetch_into(grant, control, landing.view)
        except BaseException:
            landing.release()
            raise
        return exposed_view(landing.segment.region, landing.offset, landing.nbytes, landing.release)

    async def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> None:
        _, _, nbytes, number = cast(tuple[int, int, int, int], grant)
        with self._declining(grant, control):
            check_target(target, nbytes)
            remote = self._remote(control)
            size = -(-nbytes // max(1, min(_MOST_PARTS, nbytes // _PART)))
            if size == nbytes:
                await self._pull(control.peer, remote, number, target, 0)
                return
            try:
                async with asyncio.TaskGroup() as parts:
                    for start in range(0, nbytes, size):
                        parts.create_task(self._pull(control.peer, remote, number, target, start, size))
            except BaseExceptionGroup as errors:
                # The first part that failed has cancelled the others.
                raise errors.exceptions[0] from None

    def decline(self, grant: Grant, control: Control) -> None:
        control.send_note(self.name, _RETURN.pack(cast(int, grant[3])))

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        if len(note) != _RETURN.size:
            raise GrantError(f"{control.peer} sent an invalid note")
        if control.peer in self.remotes:
            self.remotes[control.peer].take_back(*_RETURN.unpack(note))

    def stream_came(self, peer: str, stream: socket.socket) -> None:
        if self._closed:
            stream.close()
            return
        # One that was granted nothing gets no bytes.
        remote = self.remotes.setdefault(peer, _Remote())
        remote.open.add(stream)
        self._host.create_task(self._serve(stream, remote), name="tcp serve")

    def close(self) -> None:
        self._closed = True
        self._lose_all()
        self._mover.close()
        self.arena.close()
        self.landing.close()

    def _meet(self, control: Control) -> _Remote:
        return _Remote()

    def _offer(self, block: Block, remote: _Remote) -> tuple[int, int]:
        return 0, 0

    def _part(self, remote: _Remote) -> None:
        for stream in remote.open:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for stream in remote.idle:
            stream.close()

    async def _serve(self, stream: socket.socket, remote: _Remote) -> None:
        with stream:
            try:
                with suppress(PeerGone, OSError):
                    _configure(stream)
                    while not self._closed:
                        await self._answer(stream, remote)
            finally:
                remote.open.discard(stream)

    async def _answer(self, stream: socket.socket, remote: _Remote) -> None:
        loop = asyncio.get_running_loop()
        request = bytearray(_REQUEST.size)
        await _receive(stream, memoryview(request))
        number, start, nbytes = _REQUEST.unpack(request)
        block = cast("Block | Unmapped | None", remote.granted.get(number))
        if block is None or not 0 < nbytes <= block.nbytes - start:
            await loop.sock_sendall(stream, _REPLY.pack(0))
            return
        # The memory is used until the part is sent, even if another part fails.
        block.take_grant()
        try:
            # In one packet with the bytes that follow. There is room: the peer has read all earlier answers.
            stream.send(_REPLY.pack(block.nbytes), socket.MSG_MORE)
            if isinstance(block, Unmapped):
                await self._send_copy(stream, block, start, nbytes)
            else:
                await self._send(stream, block.view[start : start + nbytes])
            remote.sent(number, block, nbytes)
        except BaseException:
            remote.take_back(number)
            raise
        finally:
            block.return_grant()

    async def _send(self, stream: socket.socket, part: memoryview) -> None:
        if part.nbytes <= _SHORT:
            await asyncio.get_running_loop().sock_sendall(stream, part)
        else:
            await self._mover.send(stream, part)

    async def _send_copy(self, stream: socket.socket, block: Unmapped, start: int, nbytes: int) -> None:
        copy = self.arena.allocate(nbytes)
        try:
            await block.read_into(copy.address, start, nbytes)
            await self._send(stream, copy.view)
        except BaseException:
            # A device may still write to it.
            copy.retire()
            raise
        finally:
            copy.release()

    @asynccontextmanager
    async def _stream(self, peer: str, remote: _Remote) -> AsyncGenerator[socket.socket, None]:
        """A stream that failed is closed."""
        stream = remote.idle.pop() if remote.idle else await self._connect(peer, remote)
        remote.open.add(stream)
        reusable = False
        try:
            yield stream
            reusable = True
        finally:
            remote.open.discard(stream)
            if reusable and len(remote.idle) < _IDLE_STREAMS and self.remotes.get(peer) is remote:
                remote.idle.append(stream)
            else:
                stream.close()

    async def _connect(self, peer: str, remote: _Remote) -> socket.socket:
        try:
            stream = await self._host.connect(peer)
        except OSError as error:
            raise PeerGone(f"there is no stream to {peer}: {error}") from error
        if self.remotes.get(peer) is not remote:
            stream.close()
            raise PeerGone(f"{peer} is gone")
        _configure(stream)
        return stream

    async def _pull(
        self, peer: str, remote: _Remote, number: int, target: memoryview, start: int, size: int | None = None
    ) -> None:
        part = target if size is None else target[start : start + size]
        async with remote.turn, self._stream(peer, remote) as stream:
            try:
                stream.send(_REQUEST.pack(number, start, len(part)))
                reply, short = bytearray(_REPLY.size), len(part) <= _SHORT
                # The beginning of a short part comes with it.
                received = await _receive(stream, memoryview(reply), more=part if short else None)
                (length,) = _REPLY.unpack(reply)
                if length != len(target):
                    raise GrantError(f"grant {number} was for {len(target)} bytes but the peer has {length}")
                if short:
                    await _receive(stream, part, received - len(reply))
                else:
                    await self._mover.receive(stream, part)
            except OSError as error:
                raise PeerGone(f"the stream broke: {error}") from error


def _configure(stream: socket.socket) -> None:
    stream.setblocking(False)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)


async def _receive(stream: socket.socket, memory: memoryview, received: int = 0, more: memoryview | None = None) -> int:
    """Fill `memory` from an offset on, then `more` with bytes that come with its last one; returns the end of all."""
    while received < len(memory):
        try:
            # Bytes that are here already cost no turn of the loop.
            count = stream.recvmsg_into([memory[received:]] if more is None else [memory[received:], more])[0]
        except BlockingIOError:
            await _wait_readable(stream)
            continue
        if not count:
            raise PeerGone(f"the stream ended after {received} of {len(memory)} bytes")
        received += count
    return received


async def _wait_readable(stream: socket.socket) -> None:
    loop, descriptor = asyncio.get_running_loop(), stream.fileno()
    readable = loop.create_future()
    loop.add_reader(descriptor, _wake, readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
