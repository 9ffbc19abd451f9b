"""Two ends of a transport in one process, for the conformance checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from conformance import LoopbackControl

from aiodaft_transport import Key, Transport, open_transport
from aiodaft_transport.tcp import TcpTransport

KEY = Key(bytes(range(32)))


@dataclass
class LocalHost:
    """Serves a transport from the running loop."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def call_soon(self, callback: Callable[[], object], /) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@dataclass
class LocalEnd:
    transport: Transport
    control: LoopbackControl

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
    host = LocalHost()
    producer = LocalEnd(_open(name, host, "producer", options), LoopbackControl("consumer"))
    consumer = LocalEnd(_open(name, host, "consumer", options), LoopbackControl("producer"))
    producer.control.connect(consumer.transport, consumer.control)
    consumer.control.connect(producer.transport, producer.control)
    pair = LocalPair(producer, consumer)
    try:
        yield pair
    finally:
        await pair.settle()
        producer.transport.close()
        consumer.transport.close()
        await host.aclose()


def _open(name: str, host: LocalHost, local: str, options: dict[str, Any]) -> Transport:
    if not options:
        return open_transport(name, host, KEY, local=local)
    if name == "tcp":
        return TcpTransport(host, KEY, name=local, **options)
    from aiodaft_transport.ucx.transport import UcxTransport

    assert name == "ucx"
    return UcxTransport(host, **options)
