"""Rings: written bytes are read, whole and in order; a sleeping reader is woken; nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._runtime.connections import ring_poller as rings
from aiodaft._runtime.connections.ring_poller import CAPACITY, RingPair, RingPoller, barrier, offer_rings, take_rings


def make_pair() -> tuple[RingPair, RingPair]:
    first, (memory, theirs, ours) = offer_rings()
    # As they come through a socket: the other side has descriptors of its own.
    second = take_rings(memory, os.dup(theirs), os.dup(ours))
    os.close(memory)
    return first, second


@pytest.fixture
def pair() -> Iterator[tuple[RingPair, RingPair]]:
    first, second = make_pair()
    yield first, second
    first.close()
    second.close()


def rang(ring: RingPair) -> bool:
    try:
        return bool(os.eventfd_read(ring.doorbell))
    except BlockingIOError:
        return False


_SIZES = st.integers(1, 2 * CAPACITY)
_ACTIONS = st.lists(st.tuples(st.sampled_from(["write", "read"]), _SIZES), max_size=30)


@given(_ACTIONS)
@settings(max_examples=60, deadline=None)
def test_bytes_come_out_as_they_went_in(actions: list[tuple[str, int]]) -> None:
    first, second = make_pair()
    source, sent, received = random.Random(1), b"", b""
    try:
        for action, size in actions:
            if action == "write":
                data = source.randbytes(size)
                room = CAPACITY - (len(sent) - len(received))
                count = first.writer.write(data)
                assert count == min(size, room)
                sent += data[:count]
            else:
                received += second.reader.read(size)
            assert second.reader.filled == (len(received) < len(sent))
        received += second.reader.read(CAPACITY)
        assert received == sent
    finally:
        first.close()
        second.close()


def test_both_directions_are_apart(pair: tuple[RingPair, RingPair]) -> None:
    first, second = pair
    first.writer.write(b"there")
    second.writer.write(b"back")
    assert (first.reader.read(10), second.reader.read(10)) == (b"back", b"there")


def test_who_sleeps_is_woken_once_and_who_looks_is_not(pair: tuple[RingPair, RingPair]) -> None:
    first, second = pair
    if rings.ORDERED:
        first.writer.write(b"x")
        assert not rang(second)
    second.reader.sleep()
    barrier()
    first.writer.write(b"y")
    assert rang(second)
    if rings.ORDERED:
        first.writer.write(b"z")
        assert not rang(second)


def test_a_full_ring_rings_the_writer_when_there_is_room(pair: tuple[RingPair, RingPair]) -> None:
    first, second = pair
    assert first.writer.write(bytes(CAPACITY + 1)) == CAPACITY
    assert first.writer.wait_for_room()
    assert not rang(first)
    second.reader.read(1)
    assert rang(first)
    assert first.writer.write(b"ab") == 1
    second.reader.read(10)
    assert not first.writer.wait_for_room()


def test_memory_of_another_size_is_refused_and_nothing_stays_open() -> None:
    memory = os.memfd_create("other")
    with pytest.raises(ValueError, match="two rings"):
        take_rings(memory, os.eventfd(0), os.eventfd(0))
    os.close(memory)


class Collector:
    """Takes the data that come, and passes them on to the task that waits."""

    def __init__(self, ring: RingPair) -> None:
        self.ring = ring
        self.data = b""
        self.wanted = 0
        self.complete = asyncio.Event()
        self.room = asyncio.Event()

    def ring_readable(self) -> None:
        self.data += self.ring.reader.read(4096)
        if len(self.data) >= self.wanted:
            self.complete.set()

    def ring_writable(self) -> None:
        self.room.set()

    async def take(self, count: int) -> bytes:
        self.wanted = count
        if len(self.data) < count:
            self.complete.clear()
            await self.complete.wait()
        taken, self.data = self.data[:count], self.data[count:]
        return taken


@pytest.mark.parametrize("looking", [True, False])
async def test_no_wake_up_is_lost_between_two_pollers(pair: tuple[RingPair, RingPair], looking: bool) -> None:
    """A thousand round trips, polling and asleep; a lost wake-up would hang."""
    loop = asyncio.get_running_loop()
    ends = [Collector(ring) for ring in pair]
    pollers = [RingPoller(loop), RingPoller(loop)]
    for poller, end in zip(pollers, ends, strict=True):
        poller.pace.may_poll &= looking
        poller.add(end.ring, end)
    try:
        for number in range(1000):
            data = number.to_bytes(2, "big")
            for here, there in ((0, 1), (1, 0)):
                pollers[here].look()
                ends[here].ring.writer.write(data)
                assert await ends[there].take(2) == data
    finally:
        for poller, end in zip(pollers, ends, strict=True):
            poller.remove(end.ring)


async def test_a_poller_without_traffic_falls_asleep(pair: tuple[RingPair, RingPair]) -> None:
    first, second = pair
    poller = RingPoller(asyncio.get_running_loop())
    end = Collector(second)
    poller.add(second, end)
    # Nothing but the doorbell wakes it: there is no turn of the loop that it asked for.
    while poller.polling:
        await asyncio.sleep(0)
    first.writer.write(b"x")
    assert await end.take(1) == b"x"
    poller.remove(second)


async def test_no_ring_is_polled_while_a_thread_of_the_process_works(pair: tuple[RingPair, RingPair]) -> None:
    """Polling would keep the interpreter from the thread."""
    poller = RingPoller(asyncio.get_running_loop())
    end = Collector(pair[1])
    poller.add(pair[1], end)
    poller.pace.threads = 1
    poller.look()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not poller.polling
    poller.remove(pair[1])


async def test_messages_are_handled_in_the_context_of_no_sender(pair: tuple[RingPair, RingPair]) -> None:
    """A task that sends starts the polling, and the messages found may belong to another task."""
    first, second = pair
    variable: ContextVar[str] = ContextVar("variable", default="none")
    seen: list[str] = []

    class Reader(Collector):
        def ring_readable(self) -> None:
            seen.append(variable.get())
            super().ring_readable()

    poller = RingPoller(asyncio.get_running_loop())
    end = Reader(second)
    poller.add(second, end)
    while poller.polling:
        await asyncio.sleep(0)

    def send() -> None:
        variable.set("the sender's")
        poller.look()

    copy_context().run(send)
    first.writer.write(b"x")
    await end.take(1)
    poller.remove(second)
    assert seen == ["none"]


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_poller_that_is_interrupted_goes_on(pair: tuple[RingPair, RingPair], asleep: bool) -> None:
    """Such as by Ctrl-C in a notebook, where the loop goes on with the next cell."""

    class Interruption(BaseException):
        pass

    class Reader(Collector):
        interrupted = False

        def ring_readable(self) -> None:
            if not self.interrupted:
                self.interrupted = True
                raise Interruption
            super().ring_readable()

    loop, told = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    poller, end = RingPoller(loop), Reader(pair[1])
    poller.add(pair[1], end)
    while poller.polling and asleep:
        await asyncio.sleep(0)
    pair[0].writer.write(b"x")
    while not told:
        await asyncio.sleep(0)
    pair[0].writer.write(b"y")
    assert await end.take(2) == b"xy"
    assert [type(error) for error in told] == [Interruption]
    poller.remove(pair[1])
