"""Two ends of a transport in one process, for the conformance checks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conformance import LoopbackControl

from aiodaft_transport import Transport, open_transport


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


@dataclass
class LocalHost:
    """Serves a transport from the running loop."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # By peer: takes the other end of a stream to it.
    deliver: dict[str, Callable[[socket.socket], object]] = field(default_factory=dict)
    # The test's function in place of a connection.
    connecting: Callable[[str], Awaitable[socket.socket]] | None = None

    def __post_init__(self) -> None:
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._loop.call_soon_threadsafe(callback)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def connect(self, peer: str, /) -> socket.socket:
        if self.connecting is not None:
            return await self.connecting(peer)
        ours, theirs = tcp_pair()
        self.deliver[peer](theirs)
        return ours

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@dataclass
class LocalEnd:
    transport: Transport
    control: LoopbackControl
    host: LocalHost

    def live_blocks(self) -> int:
        return self.transport.arena.live_blocks()  # type: ignore[attr-defined, no-any-return]  # the pools have it


@dataclass
class LocalPair:
    producer: LocalEnd
    consumer: LocalEnd

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


@asynccontextmanager
async def open_pair(name: str, **options: Any) -> AsyncGenerator[LocalPair, None]:
    """Two ends in this process; `options` are arguments of the transport's class."""
    producer = _end(name, "consumer", options)
    consumer = _end(name, "producer", options)
    producer.host.deliver["consumer"] = partial(consumer.transport.stream_came, "producer")
    consumer.host.deliver["producer"] = partial(producer.transport.stream_came, "consumer")
    producer.control.connect(consumer.transport, consumer.control)
    consumer.control.connect(producer.transport, producer.control)
    pair = LocalPair(producer, consumer)
    try:
        yield pair
    finally:
        await pair.settle()
        producer.transport.close()
        consumer.transport.close()
        await producer.host.aclose()
        await consumer.host.aclose()


def _end(name: str, peer: str, options: dict[str, Any]) -> LocalEnd:
    host = LocalHost()
    return LocalEnd(_open(name, host, options), LoopbackControl(peer), host)


def _open(name: str, host: LocalHost, options: dict[str, Any]) -> Transport:
    if not options:
        return open_transport(name, host)
    from aiodaft_transport.ucx.transport import UcxTransport

    assert name == "ucx"
    return UcxTransport(host, **options)
