"""A transport's other end in a process of its own, linked by a socketpair that carries notes and descriptors.

Run as a script it is that process; imported, it is how a test starts one and talks to it.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ends import LocalHost
from transport_probes import mappings, memfds, segments_mapped

from aiodaft_transport import Grant, Transport, TransportError, open_transport
from aiodaft_transport.shm import ShmTransport

_PACKET = 64 << 10
_NOTE, _STREAM, _REQUEST, _REPLY = b"N", b"S", b"Q", b"A"


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes that differ with the seed; the same in every process."""
    block = hashlib.shake_128(seed.to_bytes(8, "big")).digest(min(nbytes, 8191))
    return (block * (nbytes // 8191 + 1))[:nbytes]


def numbers_in(view: memoryview) -> list[int]:
    """The numbers of the MiBs of a block that `Served.fill` filled."""
    return [int.from_bytes(view[start : start + 8], "little") for start in range(0, len(view), 1 << 20)]


def digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content).hexdigest()


class FarError(Exception):
    """An error that was raised in the other process."""


class SocketLink:
    """A control link over a socket that keeps the borders of messages."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)
        self.on_note: Callable[[bytes, list[int]], None] = lambda note, fds: None
        self.on_stream: Callable[[socket.socket], None] = lambda stream: stream.close()
        self.on_request: Callable[[int, str, list[Any]], None] = lambda number, method, args: None
        self.on_reply: Callable[[int, bool, Any], None] = lambda number, ok, value: None
        self.lost = asyncio.Event()
        self.fds_sent = 0

    @property
    def peer(self) -> str:
        return self._peer

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self.fds_sent += len(fds)
        self._send(_NOTE + note, fds)

    def send_stream(self, stream: socket.socket) -> None:
        """Give the peer the other end of a stream."""
        with stream:
            self._send(_STREAM, [stream.fileno()])

    def send_message(self, kind: bytes, *content: Any) -> None:
        self._send(kind + json.dumps(content).encode(), ())

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.lost.set()

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if self.lost.is_set():
            return
        try:
            self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        except (BrokenPipeError, ConnectionResetError):
            # The end of it is noticed by reading.
            return

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _PACKET, 8, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self.lost.set()
        elif data[:1] == _NOTE:
            self.on_note(data[1:], list(fds))
        elif data[:1] == _STREAM:
            self.on_stream(socket.socket(fileno=fds[0]))
        elif data[:1] == _REQUEST:
            self.on_request(*json.loads(data[1:]))
        else:
            self.on_reply(*json.loads(data[1:]))


@dataclass
class FarEnd:
    """A test's view of the other process."""

    process: subprocess.Popen[bytes]
    connection: SocketLink
    # The test's own end.
    transport: Transport
    host: LocalHost
    _asked: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _last: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, method: str, *args: Any) -> Any:
        """Have a method of `Served` run there."""
        self._last += 1
        answer = self._asked[self._last] = asyncio.get_running_loop().create_future()
        self.connection.send_message(_REQUEST, self._last, method, list(args))
        return await answer

    def answered(self, number: int, ok: bool, value: Any) -> None:
        answer = self._asked.pop(number)
        if ok:
            answer.set_result(value)
        else:
            answer.set_exception(FarError(value))

    async def fetch(self, grant: Grant) -> memoryview:
        """Get a block here that was granted there."""
        return await self.transport.fetch(grant, self.connection)

    def give(self, nbytes: int, seed: int) -> tuple[Any, Grant]:
        """A block of this process that is granted to the other."""
        block = self.transport.allocate(nbytes)
        block.view[:] = pattern(nbytes, seed)
        return block, self.transport.grant(block, self.connection)

    async def kill(self) -> None:
        """SIGKILL it, and wait until the link says so."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        await self.connection.lost.wait()
        self.transport.peer_lost(self.connection.peer)

    async def settle(self) -> None:
        """Wait until both have handled every note that was under way."""
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)
            if not self.connection.lost.is_set():
                await self.ask("settle")


@asynccontextmanager
async def open_far_end(name: str, *, peer: str = "far", beside: FarEnd | None = None) -> AsyncGenerator[FarEnd, None]:
    """Start a process with the other end of a transport; with `beside`, another peer of the same near end."""
    host = LocalHost() if beside is None else beside.host
    own = open_transport(name, host) if beside is None else beside.transport
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        process = _started(far.fileno(), name, str(far.fileno()))
    connection = SocketLink(near, peer)
    end = FarEnd(process, connection, own, host)
    connection.on_note = lambda note, fds: own.note_received(connection, note, fds)
    connection.on_stream = lambda stream: own.stream_came(peer, stream)
    connection.on_reply = end.answered
    host.deliver[peer] = connection.send_stream
    try:
        yield end
    finally:
        connection.close()
        process.wait()
        own.peer_lost(peer)
        if beside is None:
            own.close()
            for _ in range(5):
                await asyncio.sleep(0)
            await host.aclose()


def _started(fd: int, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *args], pass_fds=[fd])


class Served:
    """The answers of the other process."""

    def __init__(self, transport: Transport, connection: SocketLink) -> None:
        self._transport = transport
        self._connection = connection
        self._blocks: dict[str, Any] = {}
        self._views: dict[str, memoryview] = {}

    async def settle(self) -> None:
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)

    async def produce(self, name: str, nbytes: int, seed: int) -> Grant:
        block = self._blocks[name] = self._transport.allocate(nbytes)
        block.view[:] = pattern(nbytes, seed)
        return self._transport.grant(block, self._connection)

    async def fill(self, name: str, nbytes: int) -> Grant:
        """Touches every page, takes no memory beside the block, and numbers each MiB."""
        block = self._blocks[name] = self._transport.allocate(nbytes)
        ctypes.memset(block.address, 1, nbytes)
        for start in range(0, nbytes, 1 << 20):
            block.view[start : start + 8] = (start >> 20).to_bytes(8, "little")
        return self._transport.grant(block, self._connection)

    async def grant_again(self, name: str) -> Grant:
        return self._transport.grant(self._blocks[name], self._connection)

    async def release(self, name: str) -> None:
        self._blocks.pop(name).release()

    async def block_digest(self, name: str) -> str:
        return digest(self._blocks[name].view)

    async def fetch(self, name: str, grant: list[Any]) -> str:
        self._views[name] = await self._transport.fetch(tuple(grant), self._connection)
        return digest(self._views[name])

    async def write(self, name: str, start: int, nbytes: int, value: int) -> str:
        self._views[name][start : start + nbytes] = bytes([value]) * nbytes
        return digest(self._views[name])

    async def view_digest(self, name: str) -> str:
        return digest(self._views[name])

    async def drop(self, name: str) -> None:
        del self._views[name]
        await self.settle()

    async def live_blocks(self) -> int:
        return self._transport.arena.live_blocks()  # type: ignore[attr-defined, no-any-return]  # the pools have it

    async def memory(self) -> list[int]:
        """Segments mapped, mappings, and segments of peers that are known."""
        known = self._transport.mapped_segments() if isinstance(self._transport, ShmTransport) else 0
        return [segments_mapped(), mappings(), known]

    async def turns(self) -> int:
        """The number of times that UCX had something to do."""
        return self._transport.driver.turns  # type: ignore[attr-defined, no-any-return]  # UCX has it

    async def open_segments(self) -> int:
        return memfds()


async def serve(name: str, fd: int) -> None:
    """Answer the questions until the link ends."""
    host = LocalHost()
    transport = open_transport(name, host)
    connection = SocketLink(socket.socket(fileno=fd), "near")
    host.deliver["near"] = connection.send_stream
    connection.on_stream = lambda stream: transport.stream_came("near", stream)
    served = Served(transport, connection)

    async def answer(number: int, method: str, args: list[Any]) -> None:
        try:
            connection.send_message(_REPLY, number, True, await getattr(served, method)(*args))
        except (TransportError, KeyError) as error:
            connection.send_message(_REPLY, number, False, f"{type(error).__name__}: {error}")

    connection.on_note = lambda note, fds: transport.note_received(connection, note, fds)
    connection.on_request = lambda *request: host.create_task(answer(*request), name=request[1])
    await connection.lost.wait()
    # Nothing is closed: the rest that a process leaves must not depend on its last breath.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
