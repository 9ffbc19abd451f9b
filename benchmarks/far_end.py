"""Another process with a transport, which grants blocks as it is asked, or is the other end of a floor."""

from __future__ import annotations

import array
import asyncio
import ctypes
import json
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft_transport import open_transport

from .floors import serving

_PACKET: Final = 64 << 10
_SOCKET_BUFFER: Final = 4 << 20
_NOTE, _STREAM, _ASK, _ANSWER = b"N", b"S", b"Q", b"A"


class FarEnd:
    """The other process: the host and the connection of this process's transport, over a socket that keeps messages."""

    def __init__(self, name: str, peer: str, connection: socket.socket, pid: int = 0) -> None:
        self.peer = peer
        self.pid = pid
        self.on_ask: Callable[[list[Any]], object] = list
        self._answer: asyncio.Future[Any] | None = None
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("far end")
        self.lost = self._loop.create_future()
        self.transport = open_transport(name, self)
        self._loop.add_reader(connection.fileno(), self._readable)

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._loop.call_soon_threadsafe(callback)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        self._tasks.create_task(coro, name=name)

    async def connect(self, peer: str, /) -> socket.socket:
        """A TCP connection; the other process gets its other end."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        with theirs:
            socket.send_fds(self._socket, [_STREAM], [theirs.fileno()])
        return ours

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([_NOTE + note], rights)

    async def ask(self, *content: Any) -> Any:
        """Have something done there, see `serve`."""
        self._answer = self._loop.create_future()
        self._socket.send(_ASK + json.dumps(content).encode())
        return await self._answer

    def answer(self, content: Any) -> None:
        """Answer the question."""
        self._socket.send(_ANSWER + json.dumps(content).encode())

    async def fetch(self, grant: Sequence[Any]) -> memoryview:
        """Bring granted bytes here."""
        return await self.transport.fetch(tuple(grant), self)

    def close(self) -> None:
        """End the connection, and with it the other process."""
        self._loop.remove_reader(self._socket.fileno())
        self.transport.close()
        self._socket.close()

    def _readable(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET, 8)
        kind, content = data[:1], data[1:]
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self.lost.set_result(None)
        elif kind == _NOTE:
            self.transport.note_received(self, content, fds)
        elif kind == _STREAM:
            self.transport.stream_came(self.peer, socket.socket(fileno=fds[0]))
        elif kind == _ASK:
            self.on_ask(json.loads(content))
        elif self._answer is not None:
            self._answer.set_result(json.loads(content))


async def serve(fd: str, name: str) -> None:
    """The other process."""
    near = FarEnd(name, "near", socket.socket(fileno=int(fd)))
    blocks: dict[int, Any] = {}

    def asked(content: list[Any]) -> None:
        order, size, *rest = content
        if order == "prepare":
            blocks[size] = near.transport.allocate(size)
            ctypes.memset(blocks[size].address, 1, size)
        elif order == "release":
            blocks.pop(size).release()
        near.answer([near.transport.grant(blocks[size], near) for _ in range(rest[0])] if order == "grant" else None)
        if order == "send":
            _send_bare(size, *rest)

    near.on_ask = asked
    await near.lost


def _send_bare(size: int, port: int, count: int) -> None:
    content = memoryview(bytearray(b"\x01") * size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        configure(connection)
        for _ in range(count):
            connection.recv(1)
            connection.sendall(content)


def configure(connection: socket.socket) -> None:
    """Set the options that the `tcp` transport sets."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


@asynccontextmanager
async def open_far_end(name: str) -> AsyncGenerator[FarEnd, None]:
    """Another process that has this transport."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    async with serving("far_end", theirs.fileno(), args=(name,)) as pid:
        theirs.close()
        far = FarEnd(name, "far", mine, pid)
        try:
            yield far
        finally:
            far.close()
