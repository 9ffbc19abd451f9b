"""Ends of the device transport: two in one process, or one in a process of its own (this module, run as a script)."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance import LoopbackControl
from ends import LocalHost
from far_end import SocketLink, digest, pattern
from host_devices import Gate, HostDriver

from aiodaft._runtime.platform.threads import HelperThread
from aiodaft_transport import Block, Grant, TransportError, Unreachable
from aiodaft_transport.cuda.device import DeviceBlock, Driver, Landing, Span
from aiodaft_transport.cuda.transport import CudaTransport
from aiodaft_transport.memory import ALIGNMENT, address_of, check_target

T = TypeVar("T")


class ThreadedHost(LocalHost):
    """Serves a device transport from the running loop."""

    def __init__(self) -> None:
        super().__init__()
        self._helper_thread = HelperThread("device tests", asyncio.get_running_loop())

    def in_thread(self, job: Callable[[], T], /) -> Awaitable[T]:
        return self._helper_thread.run(job)

    async def aclose(self) -> None:
        await super().aclose()
        await self._helper_thread.aclose()


class LandingPlace:
    """Provides memory of a process's own devices: the one that the bytes come from if it is there, else the first."""

    def __init__(self, driver: HostDriver, stream: int = 7) -> None:
        self._driver = driver
        self.stream = stream
        self.landed: list[tuple[int, int]] = []

    def __call__(self, source: bytes, nbytes: int) -> Landing:
        if not self._driver.identities:
            raise Unreachable("this process sees no device")
        known = source in self._driver.identities
        device = self._driver.identities.index(source) if known else 0
        self.landed.append((device, nbytes))
        memory = bytearray(nbytes + ALIGNMENT)
        start = -address_of(memory) % ALIGNMENT
        owner = memoryview(memory)[start : start + nbytes]
        return Landing(owner, device, address_of(owner), nbytes, self.stream)


class DeviceEnd:
    """One end: a transport on devices of its own."""

    def __init__(self, name: str, *devices: int) -> None:
        self.host = ThreadedHost()
        self.driver = HostDriver(*devices)
        self.open_driver: Callable[[], Driver] = lambda: self.driver
        self.land = LandingPlace(self.driver)
        self.transport = CudaTransport(self.host, lambda: self.open_driver(), self.land, local=name)

    def memory(self, nbytes: int, seed: int, device: int = 0) -> int:
        """Address of new device memory with a pattern in it."""
        address = self.driver.allocate(device, nbytes)
        ctypes.memmove(address, pattern(nbytes, seed), nbytes)
        return address

    def capture(self, address: int, nbytes: int, *, stream: int = 0, device: int = 0) -> DeviceBlock:
        """A block with a snapshot of device memory, once the stream has come to it."""
        return self.transport.capture(device, [Span(0, address, nbytes)], nbytes, stream, None)

    async def filled(self, nbytes: int, seed: int) -> DeviceBlock:
        """A filled block; the memory that it was made from is gone."""
        address = self.memory(nbytes, seed)
        block = self.capture(address, nbytes)
        await filled(block)
        self.driver.free(0, address)
        return block

    async def aclose(self) -> None:
        await self.host.aclose()
        self.transport.close()
        assert self.transport.segments == 0
        # Memory of the test.
        for address in list(self.driver.allocated):
            self.driver.free(0, address)
        self.driver.check_empty()


async def filled(block: DeviceBlock) -> None:
    """Wait until the device is done with a block."""
    done = asyncio.Event()
    block.on_filled(done.set)
    await done.wait()


@dataclass
class DevicePair:
    """Two ends in this process."""

    producer: DeviceEnd
    consumer: DeviceEnd
    there: LoopbackControl
    back: LoopbackControl

    def grant(self, block: DeviceBlock) -> Grant:
        return self.producer.transport.grant(block, self.there)

    async def fetch(self, grant: Grant) -> Any:
        # A grant travels behind the notes that it needs.
        await asyncio.sleep(0)
        return await self.consumer.transport.fetch(grant, self.back)

    async def settle(self) -> None:
        """Wait until every note and every job of the helper threads has been handled."""
        for _ in range(4):
            for end in (self.producer, self.consumer):
                await end.host.in_thread(int)
            for _ in range(10):
                await asyncio.sleep(0)


@asynccontextmanager
async def open_pair(consumer_devices: tuple[int, ...] = (0,)) -> AsyncGenerator[DevicePair, None]:
    """Two ends in this process, with devices of their own."""
    producer, consumer = DeviceEnd("producer", 0), DeviceEnd("consumer", *consumer_devices)
    pair = DevicePair(producer, consumer, LoopbackControl("consumer"), LoopbackControl("producer"))
    pair.there.connect(consumer.transport, pair.back)
    pair.back.connect(producer.transport, pair.there)
    try:
        yield pair
    finally:
        await pair.settle()
        await consumer.aclose()
        await producer.aclose()


class _HostBlock:
    """A device block as the conformance checks want it: filled by its holder."""

    def __init__(self, end: DeviceEnd, nbytes: int) -> None:
        self.block = end.transport.pool(0).allocate(nbytes)
        self.block.filled = True
        start = self.block.offset
        self.view = memoryview(end.driver.mapped[self.block.segment.address])[start : start + nbytes]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class _HostSide:
    """The device transport as one of host memory; everything but `allocate` is the real one."""

    name = "cuda"

    def __init__(self, end: DeviceEnd) -> None:
        self._end = end

    def allocate(self, nbytes: int) -> Block:
        return _HostBlock(self._end, nbytes)  # type: ignore[return-value]  # by attribute access

    def grant(self, block: Any, control: Any) -> Any:
        return self._end.transport.grant(block.block, control)

    async def fetch_into(self, grant: Any, control: Any, target: memoryview) -> None:
        try:
            check_target(target, target.nbytes)
        except ValueError:
            # Of no interest to a device, which writes wherever it is told to.
            self._end.transport.decline(grant, control)
            raise
        memory = Landing(target, 0, address_of(target), target.nbytes, self._end.land.stream)
        await self._end.transport.fetch_into(grant, control, memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end.transport, name)


class _CheckedEnd:
    def __init__(self, end: DeviceEnd, control: Any) -> None:
        self.transport: Any = _HostSide(end)
        self.control = control
        self.live_blocks = end.transport.live_blocks


class CheckedPair:
    """The pair for the conformance checks."""

    def __init__(self, pair: DevicePair) -> None:
        self.producer: Any = _CheckedEnd(pair.producer, pair.there)
        self.consumer: Any = _CheckedEnd(pair.consumer, pair.back)
        self.settle = pair.settle


class FarDevices:
    """A test's view of an end in a process of its own."""

    def __init__(self, near: DeviceEnd, process: subprocess.Popen[bytes], connection: SocketLink) -> None:
        self.near = near
        self.process = process
        self.connection = connection
        self._asked: dict[int, asyncio.Future[Any]] = {}
        connection.on_note = lambda note, fds: near.transport.note_received(connection, note, fds)
        connection.on_reply = self._answered

    async def ask(self, method: str, *args: Any) -> Any:
        """Have a method of `_Served` run there."""
        number = len(self._asked)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.connection.send_message(b"Q", number, method, list(args))
        return await answer

    def _answered(self, number: int, ok: bool, value: Any) -> None:
        assert ok, value
        self._asked[number].set_result(value)

    async def kill(self) -> None:
        """SIGKILL it, and wait until the link says so."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        await self.connection.lost.wait()
        self.near.transport.peer_lost("far")


@asynccontextmanager
async def open_far_devices(*devices: int) -> AsyncGenerator[FarDevices, None]:
    """An end in a process of its own that sees these devices, and one here that sees device 0."""
    near_socket, far_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far_socket:
        process = _started(far_socket.fileno(), *map(str, devices))
    near = DeviceEnd("near", 0)
    far = FarDevices(near, process, SocketLink(near_socket, "far"))
    try:
        yield far
    finally:
        far.connection.close()
        process.wait()
        near.transport.peer_lost("far")
        await near.aclose()


def _started(fd: int, *devices: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, str(fd), *devices], pass_fds=[fd])


class _Served:
    """The answers of the other process."""

    def __init__(self, end: DeviceEnd, connection: SocketLink) -> None:
        self._end = end
        self._connection = connection
        self._blocks: dict[str, DeviceBlock] = {}
        self._gates: list[Gate] = []
        self._fetching: list[asyncio.Task[Any]] = []

    async def produce(self, name: str, nbytes: int, seed: int) -> Grant:
        block = self._blocks[name] = await self._end.filled(nbytes, seed)
        return self._end.transport.grant(block, self._connection)

    async def release(self, name: str) -> None:
        self._blocks.pop(name).release()

    async def fetch(self, grant: list[Any]) -> str:
        return digest(await self._end.transport.fetch(tuple(grant), self._connection))

    async def begin(self, grant: list[Any]) -> None:
        """Be in the middle of a fetch."""
        self._gates.append(self._end.driver.hold(self._end.land.stream))
        coro = self._end.transport.fetch(tuple(grant), self._connection)
        self._fetching.append(asyncio.get_running_loop().create_task(coro))
        while not self._end.driver.mapped:
            await asyncio.sleep(0)

    async def live_blocks(self) -> int:
        gc.collect()
        return self._end.transport.live_blocks()

    async def landed(self) -> list[tuple[int, int]]:
        return self._end.land.landed


async def _serve(fd: int, devices: list[int]) -> None:
    end = DeviceEnd("far", *devices)
    connection = SocketLink(socket.socket(fileno=fd), "near")
    served = _Served(end, connection)

    async def answer(number: int, method: str, args: list[Any]) -> None:
        try:
            connection.send_message(b"A", number, True, await getattr(served, method)(*args))
        except TransportError as error:
            connection.send_message(b"A", number, True, f"{type(error).__name__}: {error}")

    connection.on_note = lambda note, fds: end.transport.note_received(connection, note, fds)
    connection.on_request = lambda *request: end.host.create_task(answer(*request), name=request[1])
    await connection.lost.wait()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), list(map(int, sys.argv[2:]))))
