"""Payload over byte streams: works between any two processes.

The process makes the streams (see `Host.connect`), so this transport neither listens nor knows a key: between hosts a
stream is a TCP connection whose ends have proved the cluster key, on one host a socketpair. The consumer requests the
parts of the blocks that it was granted; a large block comes in several parts, each over a stream of its own. Bytes go
from the block straight into the socket, and from the socket straight into the buffer of the value: Python copies
nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, Final, cast

from aiodaft_transport.abc import size_of
from aiodaft_transport.exceptions import GrantError, PeerGone
from aiodaft_transport.memory import Arena, ArenaBlock, Block, Regions, Unmapped, check_target, exposed_view
from aiodaft_transport.mover import Mover
from aiodaft_transport.peers import PeerTransport, Remote

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiodaft_transport.abc import Control, Grant, Host

_REQUEST: Final = struct.Struct("<QQQ")  # id of a grant; where the wanted part begins, and its bytes
_REPLY: Final = struct.Struct("<Q")  # bytes of the whole block, the part follows; 0: not granted
_RETURN: Final = struct.Struct("<Q")  # note: id of a grant that is returned unused
_SOCKET_BUFFER: Final = 4 << 20
# Up to this size, a thread of its own costs more than it saves the loop.
_SHORT: Final = 1 << 20
# The smallest part, and the most parts, of a block that comes over several streams.
_PART: Final = 16 << 20
_MOST_PARTS: Final = 4
# Idle streams kept open to one peer, and the most in use at a time.
_IDLE_STREAMS: Final = 4
_MAX_STREAMS: Final = 8


class _Remote(Remote):
    """A peer, and the streams to and from it."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: list[socket.socket] = []
        # In use, here or by the peer.
        self.open: set[socket.socket] = set()
        self.turn = asyncio.Semaphore(_MAX_STREAMS)
        # Bytes that were not sent yet, of the grants of which a part was sent.
        self.unsent: dict[int, int] = {}

    def take_back(self, number: int) -> bool:
        self.unsent.pop(number, None)
        return super().take_back(number)

    def sent(self, number: int, block: Block | Unmapped, nbytes: int) -> None:
        """Part of a granted block was sent; with the last part, the grant ends."""
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
        # If parts were requested, this may return the grant twice, which does no harm.
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
        # The number of the grant says all.
        return 0, 0

    def _part(self, remote: _Remote) -> None:
        for stream in remote.open:
            # The user of the stream sees the end, and closes it.
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for stream in remote.idle:
            stream.close()

    # The producer's side.

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

    # The consumer's side.

    @asynccontextmanager
    async def _stream(self, peer: str, remote: _Remote) -> AsyncGenerator[socket.socket, None]:
        """Lend a stream to a peer; one that failed is closed. May wait for a new one."""
        stream = remote.idle.pop() if remote.idle else await self._connect(peer, remote)
        # From now on, `peer_lost` ends it.
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
        """Bring a part of a block; None: all of it."""
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
    """Fill `memory` from an offset on, then `more` with bytes that come with its last one; returns the end of all.

    Raises:
        PeerGone: The stream ended.
        OSError: It broke.
    """
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
