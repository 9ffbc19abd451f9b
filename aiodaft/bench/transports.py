"""Transports without the runtime, between two processes, each against the bare thing it is made of."""

from __future__ import annotations

import array
import asyncio
import ctypes
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiodaft_transport import Grant, Key, Transport, Unreachable, check_name, open_transport
from aiodaft_transport.memory.address import address_of

from . import footprint
from .floors import Copy
from .results import Result, Sample, compare_speeds, compare_times

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_SIZES: Final = (_KIB, _MIB, 64 * _MIB)
_BUDGETS: Final = {"shm": ">= 0.7", "tcp": ">= 0.8", "ucx": ">= 0.9"}
_FLOORS: Final = {"shm": "one memcpy", "tcp": "blocking sockets", "ucx": "bare libucp GETs"}
_PACKET: Final = 64 << 10
_KEY: Final = Key(bytes(32))
_NOTE, _ASK, _ANSWER = b"N", b"Q", b"A"

_FAR: Final = """
import asyncio, socket, sys
from aiodaft.bench.transports import serve
asyncio.run(serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))
"""


class _Host:
    """Serves a transport from the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._loop.call_soon_threadsafe(callback)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        task = self._loop.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Connection:
    """A control link over a socket that keeps the borders of messages."""

    def __init__(self, name: str, peer: str, connection: socket.socket) -> None:
        self.peer = peer
        # The process at the other end, where that is known.
        self.pid = 0
        self.transport: Transport = open_transport(name, _Host(), _KEY, local="near" if peer == "far" else "far")
        self.lost = asyncio.get_running_loop().create_future()
        self.on_ask: Callable[[list[Any]], object] = lambda content: None
        self._answer: asyncio.Future[Any] | None = None
        self._socket = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._readable)

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([_NOTE + note], rights)

    def send(self, kind: bytes, content: Any) -> None:
        """Send something that is no note."""
        self._socket.send(kind + json.dumps(content).encode())

    async def ask(self, *content: Any) -> Any:
        """Have something done there."""
        self._answer = asyncio.get_running_loop().create_future()
        self.send(_ASK, content)
        return await self._answer

    def close(self) -> None:
        """End it."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self.transport.close()
        self._socket.close()

    def _readable(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET, 8)
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self.lost.set_result(None)
        elif data[:1] == _NOTE:
            self.transport.note_received(self, data[1:], list(fds))
        elif data[:1] == _ASK:
            self.on_ask(json.loads(data[1:]))
        elif self._answer is not None:
            self._answer.set_result(json.loads(data[1:]))


async def serve(name: str, connection: socket.socket) -> None:
    """The other process: grant a block, or be the other end of a floor, as it is asked."""
    link = Connection(name, "near", connection)
    blocks: dict[int, Any] = {}

    def asked(content: list[Any]) -> None:
        order, size, *rest = content
        if order == "prepare":
            blocks[size] = link.transport.allocate(size)
            ctypes.memset(blocks[size].address, 1, size)
        elif order == "release":
            blocks.pop(size).release()
        granted = [link.transport.grant(blocks[size], link) for _ in range(rest[0])] if order == "grant" else None
        link.send(_ANSWER, granted)
        if order == "send":
            _send_bare(rest[0], size, rest[1])

    link.on_ask = asked
    await link.lost


def _send_bare(port: int, size: int, count: int) -> None:
    content = memoryview(bytearray(b"\x01") * size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _configure(connection)
        for _ in range(count):
            connection.recv(1)
            connection.sendall(content)


@asynccontextmanager
async def open_far(name: str) -> AsyncGenerator[Connection, None]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", _FAR, name, str(theirs.fileno())]
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
    link = Connection(name, "far", mine)
    link.pid = process.pid
    try:
        yield link
    finally:
        link.close()
        await process.wait()


async def run(turns: int) -> list[Result]:
    """Measure every transport that works here."""
    results: list[Result] = []
    for name in _BUDGETS:
        try:
            check_name(name)
        except Unreachable as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        async with open_far(name) as link:
            results += [await _measure(link, name, size, turns) for size in _SIZES]
            if name == "shm":
                results.append(await _second_consumer(link, turns))
            if name == "ucx":
                results.append(await footprint.idle(link))
        async with open_far(name) as link:
            # In processes that have done nothing else.
            results += await footprint.memory(link, name)
    return results


async def _second_consumer(link: Connection, turns: int) -> Result:
    """What the first one read already: mapped again, and a byte of each page read."""
    size = 64 * _MIB

    async def ours() -> float:
        (grant,) = await link.ask("grant", size, 1)
        start = time.perf_counter()
        view = await link.transport.fetch(tuple(grant), link)
        bytes(view[::4096])
        seconds = time.perf_counter() - start
        del view
        return seconds

    floor = Copy(size).seconds
    await ours()
    await floor()
    return await compare_speeds("shm, 64 MiB, second consumer", size, ours, floor, "one memcpy", turns, ">= 5.0")


async def _measure(link: Connection, name: str, size: int, turns: int) -> Result:
    repeats = max(1, min(50, 32 * _MIB // size))
    await link.ask("prepare", size)

    mapped = name == "shm"
    own = ctypes.create_string_buffer(b"\x02" * size, size)

    async def ours() -> float:
        grants = await link.ask("grant", size, repeats)
        start = time.perf_counter()
        for grant in grants:
            view = await link.transport.fetch(tuple(grant), link)
            if mapped:
                # Reading moves the bytes: one copy, as in the floor.
                ctypes.memmove(own, address_of(view), size)
            del view
        return (time.perf_counter() - start) / repeats

    floor = await _floor_of(link, name, size, repeats)
    for _ in range(3):
        # The first ones fill the pools, and connect.
        await ours()
        await floor()
    if size < _MIB:
        return await compare_times(f"{name}, {size // _KIB} KiB", ours, floor, _FLOORS[name], turns)
    budget = _BUDGETS[name] if size == 64 * _MIB else ""
    return await compare_speeds(f"{name}, {size // _MIB} MiB", size, ours, floor, _FLOORS[name], turns, budget)


async def _floor_of(link: Connection, name: str, size: int, repeats: int) -> Sample:
    if name == "shm":
        return Copy(size).seconds
    if name == "tcp":
        return lambda: _bare_sockets(link, size, repeats)
    (grant,) = await link.ask("grant", size, 1)
    return _bare_gets(link, tuple(grant), repeats)


async def _bare_sockets(link: Connection, size: int, repeats: int) -> float:
    """Ask for the bytes with one byte, and receive them into the same buffer again and again."""
    target = memoryview(bytearray(b"\x02") * size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await link.ask("send", size, listener.getsockname()[1], repeats + 1)
        connection, _ = listener.accept()
    with connection:
        _configure(connection)
        start = 0.0
        for number in range(repeats + 1):
            if number == 1:
                # The first one opens the window and touches the buffer.
                start = time.perf_counter()
            connection.send(b"?")
            received = 0
            while received < size:
                received += connection.recv_into(target[received:])
        return (time.perf_counter() - start) / repeats


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, 4 * _MIB)


def _bare_gets(link: Connection, grant: Grant, repeats: int) -> Sample:
    """One GET after the other over the same connection, into the same registered memory, spinning meanwhile."""
    from aiodaft_transport.ucx.transport import UcxTransport  # noqa: PLC0415 - loads libucp's binding

    transport = link.transport
    assert isinstance(transport, UcxTransport)
    remote, segment = transport.source_of(grant, link)
    assert remote.endpoint is not None
    _, offset, size, _ = grant
    landing = transport.landing.allocate(int(size))
    worker, endpoint = transport.driver.worker, remote.endpoint.handle
    target, memory = landing.address, transport.landing.memory_of(landing.segment, worker)
    key = segment.rkey = segment.rkey or worker.unpack(endpoint, segment.packed)
    source = segment.address + int(offset)

    async def sample() -> float:  # noqa: RUF029 - what measures is async
        start = time.perf_counter()
        for _ in range(repeats):
            if not worker.get(endpoint, target, landing.nbytes, source, key, memory, 0):
                while not worker.completed:
                    worker.progress()
                worker.completed.clear()
        return (time.perf_counter() - start) / repeats

    return sample
