"""Shared-memory transports linked by hand: no loop, no sockets, every note waits until it is delivered."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from aiodaft_transport import Block, Grant, Transport
from aiodaft_transport.shm import ShmTransport


class Desk:
    """The callbacks of a process's loop, run when the test says so."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._waiting.append(callback)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        coro.close()
        raise AssertionError(f"shared memory needs no task, but {name} was started")

    def settle(self) -> None:
        """Deliver everything, also messages that follow from it."""
        while self._waiting:
            self._waiting.popleft()()


class HandLink:
    """A control link from one process to another one."""

    def __init__(self, desk: Desk, peer: str) -> None:
        self._desk = desk
        self._peer = peer
        self.target: Transport | None = None
        self.back: HandLink | None = None
        self.notes = 0
        self.fds = 0

    @property
    def peer(self) -> str:
        return self._peer

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self.notes += 1
        self.fds += len(fds)
        copies = [os.dup(fd) for fd in fds]
        self._desk.call_soon(lambda: self._deliver(note, copies))

    def _deliver(self, note: bytes, fds: list[int]) -> None:
        if self.target is not None and self.back is not None:
            self.target.note_received(self.back, note, fds)
        else:
            for fd in fds:
                os.close(fd)


class Office:
    """One producer and any number of consumers."""

    def __init__(self, *consumers: str, keep: int = 512 << 20) -> None:
        self.desk = Desk()
        self.producer = ShmTransport(self.desk, keep=keep)
        self.consumers: dict[str, ShmTransport] = {}
        self.to: dict[str, HandLink] = {}
        self.back: dict[str, HandLink] = {}
        for name in consumers:
            self.hire(name)

    def hire(self, name: str) -> None:
        """Add a consumer."""
        there, back = HandLink(self.desk, name), HandLink(self.desk, "producer")
        consumer = ShmTransport(self.desk)
        there.target, there.back = consumer, back
        back.target, back.back = self.producer, there
        self.consumers[name], self.to[name], self.back[name] = consumer, there, back

    def grant(self, block: Block, name: str = "consumer") -> Grant:
        grant = self.producer.grant(block, self.to[name])
        self.desk.settle()
        return grant

    def admit(self, block: Block, name: str = "consumer") -> Grant:
        grant = self.producer.admit(block, self.to[name])
        assert grant is not None
        self.desk.settle()
        return grant

    def place(self, grant: Grant, name: str = "consumer") -> memoryview:
        return self.consumers[name].place(grant, self.back[name])

    def fetch(self, grant: Grant, name: str = "consumer") -> memoryview:
        return at_once(self.consumers[name].fetch(grant, self.back[name]))

    def fetch_now(self, grant: Grant, name: str = "consumer") -> memoryview | None:
        return self.consumers[name].fetch_now(grant, self.back[name])

    def give(self, content: bytes, name: str = "consumer") -> tuple[Block, memoryview]:
        """A block with that content, and a consumer's view of it."""
        block = self.producer.allocate(len(content))
        block.view[:] = content
        return block, self.fetch(self.grant(block, name), name)

    def close(self) -> None:
        self.desk.settle()
        for transport in (self.producer, *self.consumers.values()):
            transport.close()
        self.desk.settle()


@contextmanager
def opened_office(*consumers: str, keep: int = 512 << 20) -> Generator[Office]:
    """An office that is closed at the end."""
    office = Office(*(consumers or ("consumer",)), keep=keep)
    try:
        yield office
    finally:
        office.close()


def at_once(fetching: Any) -> memoryview:
    """The result of a fetch that has nothing to wait for."""
    try:
        fetching.send(None)
    except StopIteration as end:
        result: memoryview = end.value
        return result
    fetching.close()
    raise AssertionError("the fetch waits")
