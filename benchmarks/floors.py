"""The bare floors: the cost of the same work without any framework."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, cast

import msgpack

from .results import rate, seconds_of_one, timed

_SERVE: Final = """
import asyncio, sys
from benchmarks.{module} import serve
try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop
with asyncio.Runner(loop_factory=new_event_loop) as runner:
    runner.run(serve(*sys.argv[1:]))
"""


@asynccontextmanager
async def serving(module: str, *fds: int, args: tuple[str, ...] = ()) -> AsyncGenerator[int, None]:
    """A process that runs the `serve` of a module, on the loop that actors have; its id. Waits for its end."""
    command = [sys.executable, "-c", _SERVE.format(module=module), *map(str, fds), *args]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=fds)
    try:
        yield process.pid
    finally:
        await process.wait()


class _Connection(asyncio.Protocol):
    """MessagePack over a stream socket."""

    def __init__(self) -> None:
        self.on_message: Callable[[Any], object] = self.send
        self.lost = asyncio.get_running_loop().create_future()
        self._messages = msgpack.Unpacker()
        self._pack = msgpack.Packer().pack

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._messages.feed(data)
        for message in self._messages:
            self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: Any) -> None:
        self.transport.write(self._pack(message))


async def _connect(connection: socket.socket) -> _Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(_Connection, sock=connection)
    return protocol


async def serve(fd: str) -> None:
    """Send back all data, until the other side ends."""
    connection = await _connect(socket.socket(fileno=int(fd)))
    await connection.lost


class Echo:
    """A process that sends back its messages."""

    def __init__(self, connection: _Connection, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    async def call(self, value: object = None) -> Any:
        """One round trip."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection.on_message = answer.set_result
        self._connection.send((1, value))
        return await answer

    async def round_trip(self, count: int, value: object = None) -> float:
        """Seconds that a round trip takes."""
        return await seconds_of_one(lambda: self.call(value), count)

    async def pipelined(self, count: int, in_flight: int) -> float:
        """Round trips per second, with `in_flight` concurrent callers."""
        loop = asyncio.get_running_loop()
        waiting: dict[int, asyncio.Future[Any]] = {}
        self._connection.on_message = lambda message: waiting.pop(message[0]).set_result(message[1])
        numbers = itertools.count()

        async def call() -> None:
            number = next(numbers)
            answer = waiting[number] = loop.create_future()
            self._connection.send((number, 1))
            await answer

        return await rate(call, count, in_flight)


@asynccontextmanager
async def open_echo() -> AsyncGenerator[Echo, None]:
    """A bare echo process."""
    mine, theirs = socket.socketpair()
    async with serving("floors", theirs.fileno()) as pid:
        theirs.close()
        async with echo_over(mine, pid) as echo:
            yield echo


@asynccontextmanager
async def echo_over(sock: socket.socket, pid: int = 0) -> AsyncGenerator[Echo, None]:
    """The process at the other end of a connection sends back its messages."""
    connection = await _connect(sock)
    try:
        yield Echo(connection, pid)
    finally:
        connection.transport.close()


async def open_server(host: str) -> int:
    """Send back the data that come to a port of this process; returns the port."""
    server = await asyncio.get_running_loop().create_server(_Connection, host, 0)
    return int(server.sockets[0].getsockname()[1])


@contextmanager
def apart(*pids: int) -> Generator[None, None, None]:
    """Keep this process on one CPU and others on another: else it is chance whether a message crosses cores."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        yield
        return
    os.sched_setaffinity(0, cpus[:1])
    for pid in pids:
        os.sched_setaffinity(pid, cpus[1:2])
    try:
        yield
    finally:
        for pid in (0, *pids):
            os.sched_setaffinity(pid, cpus)


class Copy:
    """One memcpy between two buffers that are in memory already."""

    def __init__(self, size: int) -> None:
        self._source = ctypes.create_string_buffer(b"\x01" * size, size)
        self._target = ctypes.create_string_buffer(b"\x02" * size, size)

    async def seconds(self) -> float:
        """Seconds that it takes."""
        start = time.perf_counter()
        ctypes.memmove(self._target, self._source, len(self._source))
        return time.perf_counter() - start


_EXCHANGE: Final = """
import mmap, os, sys, time
import numpy
count, size, repeats = map(int, sys.argv[1:])
half = count * size
places = numpy.frombuffer(mmap.mmap(-1, 2 * half), numpy.float32).reshape(2, count, -1)
signals = [[os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(count)] for _ in range(count)]
values = numpy.ones(size // 4, numpy.float32)
rank = 0
for other in range(1, count):
    if os.fork() == 0:
        rank = other
        break
for turn in range(-3, repeats):
    if turn == 0:
        start, cpu = time.perf_counter(), time.process_time()
    now = places[turn & 1]
    now[rank] = values
    for other in range(count):
        if other != rank:
            os.eventfd_write(signals[rank][other], 1)
    for other in range(count):
        if other != rank:
            os.eventfd_read(signals[other][rank])
    total = now[0] + now[1]
    for other in range(2, count):
        total += now[other]
if rank == 0:
    print((time.perf_counter() - start) / repeats, (time.process_time() - cpu) / repeats)
    for _ in range(1, count):
        os.wait()
"""


async def exchange(count: int, size: int, repeats: int) -> tuple[float, float]:
    """Seconds, and those of a CPU, in which each of some processes adds what all have, as bare as Python can."""
    command = [sys.executable, "-c", _EXCHANGE, str(count), str(size), str(repeats)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    wall, cpu = map(float, output.split())
    return wall, cpu


async def run_python(code: str) -> float:
    """Seconds from starting an interpreter to the end of some code."""
    # Installed packages have their bytecode cached; a development setting would compile them anew each time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    async def work() -> None:
        command = [sys.executable, "-c", code]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, env=environment)
        if await process.wait():
            raise RuntimeError(f"failed: {code!r}")

    return await timed(work())
