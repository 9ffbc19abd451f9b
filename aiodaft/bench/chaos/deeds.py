"""The operations of a chaos run, each with the value that it must give if it gives one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiodaft.channel import Channel
from aiodaft.deadline import deadline

from .actors import Victim, made
from .plan import ACTORS, Deed, Op

__all__ = ["DEEDS", "MAY_FAIL", "WrongValue"]


class WrongValue(AssertionError):
    """An operation gave what it cannot give: the worst that can happen."""


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
            came.append(item)  # noqa: PERF401 - what came before an error is looked at
    finally:
        # Also of a stream that breaks off: nothing twice, nothing left out.
        _check(op, came, list(range(len(came))))
    _check(op, len(came), op.size)


async def _fan_out(op: Op, actors: Sequence[Victim]) -> None:
    source = actors[op.actors[0]].make(op.id, op.size)
    others = [index for index in range(ACTORS) if index != op.actors[0]]
    copies = [actors[index].flip(op.id + place, source) for place, index in enumerate(others, start=1)]
    came = await asyncio.gather(*copies, return_exceptions=True)
    errors = [copy for copy in came if isinstance(copy, BaseException)]
    for copy in came:
        if not isinstance(copy, BaseException):
            _check(op, copy, made(op.id, op.size)[::-1])
    if errors:
        raise errors[0]


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
    # Where one side was killed, nobody else tells the other that no more will come.
    await channel.aclose()
    items = await came
    _check(op, items, list(range(len(items))))
    await sent
    _check(op, len(items), op.size)


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


def _check(op: Op, came: Any, expected: Any) -> None:
    if came != expected:
        raise WrongValue(f"operation {op.id} ({op.deed.value}) gave {came!r:.60} instead of {expected!r:.60}")


DEEDS: Final[dict[Deed, Callable[[Op, Sequence[Victim]], Awaitable[None]]]] = {
    Deed.CALL: _call,
    Deed.WORK: _work,
    Deed.CHAIN: _chain,
    Deed.STREAM: _stream,
    Deed.FAN_OUT: _fan_out,
    Deed.NESTED: _nested,
    Deed.CHANNEL: _channel,
    Deed.TIMEOUT: _timeout,
    Deed.CANCEL: _cancel,
    Deed.DEADLINE: _deadline,
}

# These end their calls before they are done, also where nothing fails.
MAY_FAIL: Final = frozenset({Deed.TIMEOUT, Deed.CANCEL, Deed.DEADLINE})
