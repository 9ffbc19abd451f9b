"""A process gets the streams that it asked for, and its transport those that others opened."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from rooms import ELSEWHERE, HERE, THERE, Bench

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections import connections
from aiodaft._runtime.connections.connections import FROM_AFAR, UNASKED, DataStreams
from aiodaft.exceptions import ActorDied, DaftError, ResourceExhausted
from aiodaft_transport import PeerGone

ATTACHED = PeerId("controller-1@there")


class Agency(Bench):
    """A process whose node agent is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = DataStreams(self.process, self._ask, lambda peer, stream: self.taken.append((peer, stream)))
        self.asked: list[tuple[PeerId, int]] = []
        self.taken: list[tuple[PeerId, socket.socket]] = []
        self.answer: DaftError | None = None
        self.made: list[socket.socket] = []

    async def _ask(self, peer: PeerId, number: int) -> None:
        self.asked.append((peer, number))
        if self.answer is not None:
            raise self.answer

    def stream(self) -> socket.socket:
        """One end of a stream."""
        self.made += socket.socketpair()
        return self.made[-1]

    def open(self, peer: PeerId) -> asyncio.Task[socket.socket]:
        return asyncio.get_running_loop().create_task(self.streams.open(peer))

    async def opening(self, peer: PeerId, asked: int = 1) -> asyncio.Task[socket.socket]:
        """A stream that so many were asked for with it."""
        opening = self.open(peer)
        while len(self.asked) < asked:
            await asyncio.sleep(0)
        return opening


@pytest.fixture
async def agency() -> AsyncIterator[Agency]:
    made = Agency()
    yield made
    for stream in (*made.made, *(stream for _, stream in made.taken)):
        stream.close()
    await made.process.tasks.aclose()


async def test_a_stream_goes_to_what_asked_for_it_in_whatever_order_they_come(agency: Agency) -> None:
    first, second = await agency.opening(THERE), await agency.opening(ELSEWHERE, 2)
    assert agency.asked == [(THERE, 1), (ELSEWHERE, 2)]
    streams = agency.stream(), agency.stream()
    agency.streams.came(ELSEWHERE, 2, streams[1])
    agency.streams.came(THERE, 1, streams[0])
    assert (await first, await second) == streams
    assert agency.taken == []


async def test_a_stream_that_another_process_opened_goes_to_the_transport(agency: Agency) -> None:
    waiting = await agency.opening(THERE)
    stream = agency.stream()
    agency.streams.came(THERE, UNASKED, stream)
    assert agency.taken == [(THERE, stream)]
    assert not waiting.done()
    waiting.cancel()


async def test_a_stream_that_comes_after_a_cancellation_is_closed(agency: Agency) -> None:
    opening, stream = await agency.opening(THERE), agency.stream()
    opening.cancel()
    await asyncio.wait([opening])
    agency.streams.came(THERE, 1, stream)
    assert stream.fileno() == -1


async def test_a_stream_that_comes_together_with_a_cancellation_is_closed(agency: Agency) -> None:
    opening, stream = await agency.opening(THERE), agency.stream()
    agency.streams.came(THERE, 1, stream)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert stream.fileno() == -1


async def test_a_node_agent_that_knows_no_way_says_why(agency: Agency) -> None:
    agency.answer = ActorDied("it was killed")
    with pytest.raises(PeerGone, match=f"no stream to {THERE}: it was killed"):
        await agency.streams.open(THERE)
    agency.answer = ResourceExhausted("no descriptors")
    with pytest.raises(ResourceExhausted, match="no descriptors"):
        await agency.streams.open(THERE)


async def test_the_loss_of_a_process_fails_its_streams_and_no_others(agency: Agency) -> None:
    lost, other = await agency.opening(THERE), await agency.opening(ELSEWHERE, 2)
    agency.streams.peer_lost(THERE)
    with pytest.raises(PeerGone, match=f"{THERE} is gone"):
        await lost
    assert not other.done()
    other.cancel()


async def test_a_stream_of_a_controller_that_cannot_be_taken_fails_those_that_wait_for_one(agency: Agency) -> None:
    waiting, other = await agency.opening(ATTACHED), await agency.opening(THERE, 2)
    # One that this process connects to itself: streams that the other one opens were not asked for.
    agency.streams.lost(THERE, FROM_AFAR, ResourceExhausted("no descriptors"))
    agency.streams.lost(ATTACHED, FROM_AFAR, ResourceExhausted("no descriptors"))
    with pytest.raises(ResourceExhausted, match="no descriptors"):
        await waiting
    agency.streams.lost(THERE, 2, ResourceExhausted("none for it"))
    with pytest.raises(ResourceExhausted, match="none for it"):
        await other


async def test_a_stream_that_is_lost_on_its_way_is_not_waited_for(
    agency: Agency, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PATIENCE", 0.01)
    with pytest.raises(PeerGone, match=f"a stream of {ATTACHED} did not come within 0.01 s"):
        await agency.streams.open(ATTACHED)


async def test_a_process_opens_a_stream_to_itself_alone(agency: Agency) -> None:
    stream = await agency.streams.open(HERE)
    agency.made.append(stream)
    ((peer, other),) = agency.taken
    stream.send(b"x")
    assert (peer, other.recv(1), agency.asked) == (HERE, b"x", [])
