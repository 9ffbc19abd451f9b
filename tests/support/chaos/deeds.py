"""The operations of a chaos run, each with the value that it must give if it gives one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiodaft.channel import Channel
from aiodaft.deadlines import deadline
from aiodaft.exceptions import DaftError
from aiodaft.graph import compile as compile_graph
from aiodaft.group import Group
from aiodaft.queue import open_queue
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

from .actors import Lump, Victim, made, parcel
from .plan import ACTORS, Deed, Op

__all__ = ["ALONE", "DEEDS", "MAY_FAIL", "Cast", "WrongValue"]


class Cast(list[Victim]):
    """All actors.

    Attributes:
        runtime: Has made them.
        crew: Those among them that are a group.
    """

    def __init__(self, runtime: Runtime, crew: Group[Victim]) -> None:
        super().__init__()
        self.runtime = runtime
        self.crew = crew


class WrongValue(AssertionError):
    """An operation gave an impossible value: the worst fault of all."""


async def _call(op: Op, actors: Sequence[Victim]) -> None:
    _check(op, await actors[op.actors[0]].make(op.id, op.size), made(op.id, op.size))


async def _work(op: Op, actors: Sequence[Victim]) -> None:
    data = made(op.id, op.size)
    _check(op, await actors[op.actors[0]].flip(op.id, data), data[::-1])


async def _chain(op: Op, actors: Sequence[Victim]) -> None:
    a, b, c = (actors[index] for index in op.actors)
    last = c.flip(op.id + 2, b.flip(op.id + 1, a.make(op.id, op.size)))
    _check(op, await last, made(op.id, op.size))


async def _stream(op: Op, actors: Sequence[Victim]) -> None:
    came: list[int] = []
    try:
        async for item in actors[op.actors[0]].count(op.id, op.size):
            came.append(item)  # noqa: PERF401 - items before an error are checked
    finally:
        # Also of a stream that breaks off: nothing twice, nothing left out.
        _check(op, came, list(range(len(came))))
    _check(op, len(came), op.size)


async def _fan_out(op: Op, actors: Sequence[Victim]) -> None:
    source = actors[op.actors[0]].make(op.id, op.size)
    others = [index for index in range(ACTORS) if index != op.actors[0]]
    copies = [actors[index].flip(op.id + place, source) for place, index in enumerate(others, start=1)]
    came = await asyncio.gather(*copies, return_exceptions=True)
    _check_each(op, came, [made(op.id, op.size)[::-1]] * len(copies))


async def _nested(op: Op, actors: Sequence[Victim]) -> None:
    a, b, _ = (actors[index] for index in op.actors)
    _check(op, await a.ask(op.id, b, op.size), made(op.id + 1, op.size))


async def _channel(op: Op, actors: Sequence[Victim]) -> None:
    channel = Channel[int](4)
    sent = actors[op.actors[0]].send(op.id, channel, op.size)
    came = actors[op.actors[1]].receive(op.id + 1, channel)
    # Typeshed wants its own futures; asyncio takes refs.
    either: Any = (sent, came)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    # If one side was killed, no other process tells the other side that no more will come.
    await channel.aclose()
    items = await came
    _check(op, items, list(range(len(items))))
    await sent
    _check(op, len(items), op.size)


async def _own_channel(op: Op, actors: Sequence[Victim]) -> None:
    came = await actors[op.actors[0]].keep_to_itself(op.id, Channel[bytes](4), op.size)
    _check(op, came, [parcel(op.id, index) for index in range(op.size)])


async def _crowd(op: Op, actors: Sequence[Victim]) -> None:
    channel = Channel[tuple[int, int, bytes]](4)
    senders, receiver = op.actors[:2], actors[op.actors[2]]
    sent = [actors[index].pour(op.id + which, channel, which, op.size) for which, index in enumerate(senders)]
    there, here = receiver.draw(op.id + 2, channel), asyncio.gather(_collect(channel))
    sending = asyncio.gather(*sent, return_exceptions=True)
    # A receiver that ends before the channel is closed has failed. Typeshed wants its own futures; asyncio takes refs.
    parts: Any = (sending, there, here)
    await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    await channel.aclose()
    errors = [error for error in await sending if error is not None]
    ((mine, error),) = await here
    piles = [mine]
    try:
        piles.append(await there)
    except DaftError as died:
        errors.append(died)
    if error is not None:
        errors.append(error)
    came = [item[:2] for pile in piles for item in pile]
    _check(op, len(set(came)), len(came))
    for sender, index, item in (item for pile in piles for item in pile):
        _check(op, item, parcel(op.id + sender, index))
    if errors:
        raise errors[0]
    for pile in piles:
        for sender in range(2):
            order = [item[1] for item in pile if item[0] == sender]
            _check(op, order, sorted(order))
    _check(op, sorted(came), [(sender, index) for sender in range(2) for index in range(op.size)])


async def _collect(channel: Channel[Any]) -> tuple[list[Any], DaftError | None]:
    came: list[Any] = []
    try:
        async for item in channel:
            came.append(item)  # noqa: PERF401 - items before an error are checked
    except DaftError as error:
        return came, error
    return came, None


async def _graph(op: Op, actors: Sequence[Victim]) -> None:
    a, b, _ = (actors[index] for index in op.actors)
    data = made(op.id, op.size)

    def flip_twice(first: Ref[int], second: Ref[int], x: Ref[bytes]) -> Ref[bytes]:
        return b.flip(second, a.flip(first, x))

    async with compile_graph(flip_twice) as graph:
        runs = [graph(op.id, op.id + 1, data), graph(op.id + 2, op.id + 3, data)]
        # Beside it, an ordinary call.
        beside = a.flip(op.id + 4, data)
        came = await asyncio.gather(*runs, beside, return_exceptions=True)
    _check_each(op, came, (data, data, data[::-1]))


async def _share(op: Op, actors: Cast) -> None:
    ranks = range(len(actors.crew))
    came = await asyncio.gather(*actors.crew.all(Victim.share, op.id, op.size), return_exceptions=True)
    joined = b"".join(made(op.id + rank, op.size) for rank in ranks)
    _check_each(op, came, [(joined, op.id + (rank - 1) % len(ranks)) for rank in ranks])


async def _map(op: Op, actors: Cast) -> None:
    jobs = [(op.id + place, made(op.id + place, op.size)) for place in range(ACTORS)]
    came = [copy async for copy in actors.crew.map(Victim.turn, jobs, return_exceptions=True)]
    _check_each(op, came, [data[::-1] for _, data in jobs])


async def _queue(op: Op, actors: Cast) -> None:
    a, b, _ = (actors[index] for index in op.actors)
    parcels = [parcel(op.id, index) for index in range(op.size)]
    async with open_queue(actors.runtime, {"drain": ["item"]}, capacity=6, storages=2) as queue:
        filled, drained = a.fill(op.id, queue, op.size), b.drain(op.id + 1, queue)
        # Typeshed wants its own futures; asyncio takes refs.
        either: Any = (filled, drained)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not filled.done():
            # A queue that nobody drains is full.
            filled.cancel()
        await queue.finish()
        came = await drained
    _check(op, came, parcels[: len(came)])
    await filled
    _check(op, len(came), op.size)


async def _threads(op: Op, actors: Sequence[Victim]) -> None:
    a, b, _ = (actors[index] for index in op.actors)
    data = made(op.id, op.size)
    # The actor's thread, its loop and its helper thread make and take large values at once.
    came = await asyncio.gather(
        a.flip(op.id, data), a.make(op.id + 1, op.size), b.wait_on_thread(op.id + 2, a, op.size), return_exceptions=True
    )
    _check_each(op, came, (data[::-1], made(op.id + 1, op.size), made(op.id + 3, op.size)))


async def _fork(op: Op, actors: Sequence[Victim]) -> None:
    a = actors[op.actors[0]]
    data = made(op.id, op.size)
    await a.fork(op.id, Lump(data))
    # These come to where the value of the first call was, unless a child still looks at it.
    other = made(op.id + 1, op.size)
    came = await asyncio.gather(*(a.flip(op.id + place, other) for place in (1, 2)))
    _check(op, came, [other[::-1]] * 2)
    _check(op, await a.let_go(op.id + 3, op.id) or 0, 0)


async def _timeout(op: Op, actors: Sequence[Victim]) -> None:
    async with asyncio.timeout(0.2):
        _check(op, await actors[op.actors[0]].nap(op.id, op.size), op.size)


async def _cancel(op: Op, actors: Sequence[Victim]) -> None:
    ref = actors[op.actors[0]].nap(op.id, op.size)
    asyncio.get_running_loop().call_later(0.1, ref.cancel)
    _check(op, await ref, op.size)


async def _deadline(op: Op, actors: Sequence[Victim]) -> None:
    async with deadline(0.2):
        _check(op, await actors[op.actors[0]].nap(op.id, op.size), op.size)


def _check_each(op: Op, came: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check the values, and raise the first error among them."""
    for one, right in zip(came, expected, strict=True):
        if not isinstance(one, BaseException):
            _check(op, one, right)
    if errors := [one for one in came if isinstance(one, BaseException)]:
        raise errors[0]


def _check(op: Op, came: Any, expected: Any) -> None:
    if came != expected:
        raise WrongValue(f"operation {op.id} ({op.deed.value}) gave {came!r:.60} instead of {expected!r:.60}")


DEEDS: Final[dict[Deed, Callable[[Op, Cast], Awaitable[None]]]] = {
    Deed.CALL: _call,
    Deed.WORK: _work,
    Deed.CHAIN: _chain,
    Deed.STREAM: _stream,
    Deed.FAN_OUT: _fan_out,
    Deed.NESTED: _nested,
    Deed.CHANNEL: _channel,
    Deed.OWN_CHANNEL: _own_channel,
    Deed.CROWD: _crowd,
    Deed.GRAPH: _graph,
    Deed.SHARE: _share,
    Deed.MAP: _map,
    Deed.QUEUE: _queue,
    Deed.THREADS: _threads,
    Deed.FORK: _fork,
    Deed.TIMEOUT: _timeout,
    Deed.CANCEL: _cancel,
    Deed.DEADLINE: _deadline,
}

# These need one actor, and the controller.
ALONE: Final = frozenset({
    Deed.CALL, Deed.WORK, Deed.STREAM, Deed.OWN_CHANNEL, Deed.FORK, Deed.TIMEOUT, Deed.CANCEL, Deed.DEADLINE,
})  # fmt: skip
# These end their calls before they are done, also where nothing fails.
MAY_FAIL: Final = frozenset({Deed.TIMEOUT, Deed.CANCEL, Deed.DEADLINE})
