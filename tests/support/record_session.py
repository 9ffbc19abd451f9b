"""Records the messages between a program and a worker: `python tests/support/record_session.py > FILE`.

Record a session for each new wire version, as tests/protocol/session_<version>.txt, and never again once a release
speaks it. The first line names the two processes; each other one has the bytes that one of them (`>` the program, `<`
the worker) wrote at once, in hexadecimal.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

import aiodaft
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.process import Env


class Color(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: float
    names: tuple[str, ...]


class Pair(NamedTuple):
    first: Any
    second: Any


class Recorded(aiodaft.Actor):
    """The actor of the session. Its source may change; its answers may not."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    @aiodaft.method
    async def add(self, *numbers: Any) -> Any:
        self.value += sum(numbers) * self.step
        return self.value

    @aiodaft.method
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @aiodaft.method
    async def fail(self, text: str) -> None:
        # Files of the machine that records are of no use to others.
        sys.tracebacklimit = 0
        raise LookupError(text)

    @aiodaft.method
    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    @aiodaft.method(ordered=False)
    async def wait(self) -> None:
        await asyncio.Event().wait()


async def converse(actor: Recorded) -> None:
    """The program's part. One thing after the other, so that it is the same each time."""
    await actor.add(1, 2)
    await actor.add(actor.add(3), -1)
    await actor.echo(None, True, 1 << 80, -1.5, "\u00e9", b"\0\xff", [1, {"a": (2,)}], {3}, key=[])
    await actor.echo(Point(0.5, ("a", "b")), Pair(Color.RED, Point(1, ())), pair=Pair(1, None))
    # Pickled values.
    await actor.echo(frozenset({Color.RED}), range(3), ValueError("said"))
    with suppress(LookupError):
        await actor.fail("said")
    assert [number async for number in actor.count(3)] == [0, 1, 2]
    async with aiodaft.deadline(25):
        await actor.add(0)
    waiting = actor.wait()
    await actor.add(0)
    waiting.cancel()
    await waiting.ready()


def tapped(sock: socket.socket, record: list[tuple[str, bytes]]) -> socket.socket:
    """A socket that leads where `sock` does, and its data are recorded."""
    ours, theirs = socket.socketpair()
    sock.setblocking(True)

    def pump(source: socket.socket, sink: socket.socket, mark: str) -> None:
        # The other end may be gone first.
        with sink, suppress(OSError):
            while data := source.recv(1 << 16):
                record.append((mark, data))
                sink.sendall(data)

    for pumped in ((theirs, sock, ">"), (sock, theirs, "<")):
        threading.Thread(target=pump, args=pumped, daemon=True).start()
    return ours


async def main() -> None:
    # Not this file as `__main__`, whose classes would be sent by value.
    from record_session import Recorded, converse

    record: list[tuple[str, bytes]] = []
    names: list[str] = []
    attach = Connections.attach

    def attach_tapped(self: Connections, remote: PeerId, sock: socket.socket) -> Any:
        names[:] = self._process.id, remote
        return attach(self, remote, tapped(sock, record))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "attach", attach_tapped)
        async with aiodaft.Runtime(preload=(), env=Env(hostname=lambda: "host")) as rt:
            await converse(await rt.spawn(Recorded, 10, step=2))
    sys.stdout.write(" ".join(names) + "\n")
    for mark, data in record:
        sys.stdout.write(f"{mark} {data.hex()}\n")


if __name__ == "__main__":
    asyncio.run(main())
