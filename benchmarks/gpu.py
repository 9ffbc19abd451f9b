"""Tensors on one GPU, from actor to actor, next to copies within its memory and to CUDA IPC of torch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

from .gpu_actors import GpuHolder, TorchIpc
from .results import Bench, Sample, rate, seconds_of_one, timed

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# Bytes of large tensors, and how many are under way at once.
_LARGE: Final = MappingProxyType({64 * _MIB: 8, _GIB: 4})
_MANY: Final = 1000
# The most times that a sample does the same; and the bytes of large tensors that it moves.
_MOST: Final = 100
_SAMPLE: Final = _GIB
# Starting actors on a GPU takes seconds.
_STARTS: Final = 3
# Floors.
_COPY: Final = "one copy on the GPU"
_IPC: Final = {"torch IPC": False, "torch IPC, clone": True}

Make = Callable[[int], Ref[Any]]
Take = Callable[[Ref[Any]], Ref[int]]


class _Actors(NamedTuple):
    """The measured actors. A sample does the same `most` times at the most."""

    a: GpuHolder
    b: GpuHolder
    c: GpuHolder
    copier: GpuHolder
    ipc: TorchIpc
    most: int

    def repeats(self, size: int) -> int:
        """The number of times that a sample moves a tensor of so many bytes."""
        return max(2, min(self.most, _SAMPLE // size))

    async def move(self, make: Make, size: int, *, look: bool = False) -> None:
        """Have a tensor made by `a` and taken by `b`, or only read by it."""
        await (self.b.look if look else self.b.take)(make(size))

    def moves(self, make: Make, size: int, in_flight: int = 1, *, look: bool = False) -> Sample:
        """Measures the seconds that this takes, of so many under way."""
        move = partial(self.move, make, size, look=look)
        return _seconds(move, self._rounds(size, in_flight) * in_flight, in_flight)

    def copies(self, size: int, in_flight: int = 1) -> Sample:
        """Measures the seconds that a copy within the memory of the GPU takes."""
        return partial(self._floor, self.copier.copies, size, in_flight)

    def sends(self, size: int, in_flight: int, *, clone: bool) -> Sample:
        """Measures the seconds that a tensor takes with torch's own means."""
        return partial(self._floor, partial(self.ipc.send, clone=clone), size, in_flight)

    async def _floor(self, measure: Callable[[int, int, int], Ref[float]], size: int, in_flight: int) -> float:
        return await measure(size, self._rounds(size, in_flight), in_flight)

    def _rounds(self, size: int, in_flight: int) -> int:
        return max(1, self.repeats(size) // in_flight)


async def run(
    bench: Bench,
    holder: type[GpuHolder] = GpuHolder,
    large: Mapping[int, int] = _LARGE,
    many: int = _MANY,
    most: int = _MOST,
) -> None:
    """Measure tensors on a GPU.

    Args:
        bench: Gets the lines.
        holder: The class of the actors.
        large: Sizes of large tensors, and the number of them that are under way at once.
        many: The number of small tensors that are under way at once.
        most: The most times that a sample does the same.
    """
    if find_spec("torch") is None:
        print("gpu: there is no torch: left out", file=sys.stderr)
        return
    async with Runtime(preload=("torch",)) as rt:
        a = await rt.spawn(holder)
        name, free = await a.gpu()
        if not name:
            print("gpu: there is no GPU that torch can use: left out", file=sys.stderr)
            return
        print(f"gpu: {name}", file=sys.stderr)
        ipc = await rt.spawn(TorchIpc, holder.device)
        b, c, copier = await asyncio.gather(*(_in_use(rt, holder) for _ in range(3)))
        actors = _Actors(a, b, c, copier, ipc, most)
        before = await _traffic(rt)
        for size, in_flight in large.items():
            # The made tensors, their snapshots, the received ones, torch's cache, and the tensors of the floors.
            if free < (needed := 6 * in_flight * size):
                print(f"gpu: {_text(size)} needs {_text(needed)} of free memory: left out", file=sys.stderr)
                continue
            await _large(bench, actors, size, in_flight)
            await _second_consumer(bench, actors, size)
        await _small(bench, actors, many)
        await _messages(bench, rt, actors)
        after = await _traffic(rt)
        bench.add("through the host, lines above", after.host_bytes - before.host_bytes, "B", "<= 0")
        await _first_use(bench, rt, actors, holder, min(large))
        # It takes long, and is done by no user.
        slow = actors._replace(most=1)
        ours, floor = slow.moves(a.by_host, min(large)), slow.moves(a.fresh, min(large))
        await bench.compare(f"{_text(min(large))}, through the host", ours, floor, "within the GPU", size=min(large))
        await ipc.end()


async def _in_use(rt: Runtime, holder: type[GpuHolder]) -> GpuHolder:
    """An actor that has used the GPU."""
    actor = await rt.spawn(holder)
    await actor.gpu()
    return actor


def _text(size: int) -> str:
    unit, name = next(pair for pair in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")) if size >= pair[0])
    return f"{size // unit} {name}"


def _seconds(call: Callable[[], Awaitable[object]], count: int, in_flight: int = 1) -> Sample:
    """Measures the seconds that a call takes, of so many under way."""

    async def sample() -> float:
        return 1 / await rate(call, count, in_flight)

    return sample


async def _large(bench: Bench, actors: _Actors, size: int, in_flight: int) -> None:
    """Tensors of all kinds next to copies within the GPU, and lent ones next to those of torch."""
    a = actors.a
    for at_once, name in ((1, _text(size)), (in_flight, f"{_text(size)}, {in_flight} in flight")):
        for kind, make in (("fresh", a.fresh), ("kept", a.kept), ("lent", a.lent)):
            ours, floor = actors.moves(make, size, at_once), actors.copies(size, at_once)
            await bench.compare(f"{name}, {kind}", ours, floor, _COPY, size=size)
        for kind, make in (("fresh", a.fresh), ("lent", a.lent)):
            ours, floor = actors.moves(make, size, at_once, look=True), actors.copies(size, at_once)
            await bench.compare(f"{name}, {kind}, read only", ours, floor, _COPY, ">= 0.9", size=size)
        # Each with the same number of copies: of torch's, the producer must not write to the tensor meanwhile.
        for what, clone in _IPC.items():
            ours, floor = actors.moves(a.lent, size, at_once, look=not clone), actors.sends(size, at_once, clone=clone)
            await bench.compare(f"{name}, lent / {what}", ours, floor, what, ">= 1.0", size=size)


async def _second_consumer(bench: Bench, actors: _Actors, size: int) -> None:
    """Another process takes a tensor that one has, or both take it at once."""
    a, b, c, repeats = actors.a, actors.b, actors.c, actors.repeats(size)

    async def second(first_takes: Take, second_takes: Take) -> float:
        taken = 0.0
        for _ in range(repeats):
            ref = a.fresh(size)
            await first_takes(ref)
            taken += await timed(second_takes(ref))
        return taken / repeats

    async def to_both() -> None:
        ref = a.fresh(size)
        await asyncio.gather(b.take(ref), c.take(ref))

    consumer, reader = partial(second, b.take, c.take), partial(second, b.look, c.look)
    await bench.compare(f"{_text(size)}, second consumer", consumer, actors.copies(size), _COPY, size=size)
    await bench.compare(f"{_text(size)}, second reader", reader, actors.moves(a.number, _KIB), "an int")
    ours, floor = _seconds(to_both, repeats), actors.moves(a.fresh, size)
    await bench.compare(f"{_text(size)}, to two at once / to one", ours, floor, "one consumer", size=size)


async def _small(bench: Bench, actors: _Actors, many: int) -> None:
    """Small tensors, one at a time and many at once."""
    a, name = actors.a, "1 KiB by ref"
    fresh, lent, read = actors.moves(a.fresh, _KIB), actors.moves(a.lent, _KIB), actors.moves(a.lent, _KIB, look=True)
    for what, make in (("an int", a.number), ("a tensor of the host", a.of_host)):
        await bench.compare(f"{name} / {what}", fresh, actors.moves(make, _KIB), what)
    await bench.compare(f"{name}, lent, read only / an int", read, actors.moves(a.number, _KIB), "an int")
    for ours, kind, what, clone in (
        (read, "lent, read only", "torch IPC", False),
        (lent, "lent", "torch IPC, clone", True),
    ):
        floor = actors.sends(_KIB, 1, clone=clone)
        await bench.compare(f"{name}, {kind} / {what}", ours, floor, what, "<= 1.0")
    at_once, ints = (partial(rate, partial(actors.move, make, _KIB), many, many) for make in (a.lent, a.number))
    with_torch = actors.sends(_KIB, many, clone=True)

    async def sent() -> float:
        return 1 / await with_torch()

    name = f"1 KiB, lent, {many:,} in flight"
    await bench.compare(f"{name} / ints", at_once, ints, "ints", unit="1/s")
    await bench.compare(f"{name} / torch IPC, clone", at_once, sent, "torch IPC, clone", ">= 1.0", unit="1/s")


class _Traffic(NamedTuple):
    """The traffic between all processes."""

    messages: int
    host_bytes: int


async def _traffic(rt: Runtime) -> _Traffic:
    flows = (await rt.overview()).flows
    return _Traffic(sum(one.messages for one in flows), sum(one.payload_bytes - one.device_bytes for one in flows))


async def _messages(bench: Bench, rt: Runtime, actors: _Actors) -> None:
    """Messages of all processes for a tensor, without those that count them."""
    repeats = actors.repeats(_KIB)
    first, second = await _traffic(rt), await _traffic(rt)
    await seconds_of_one(partial(actors.move, actors.a.fresh, _KIB), repeats)
    third = await _traffic(rt)
    counting = second.messages - first.messages
    bench.add("a tensor from actor to actor", (third.messages - second.messages - counting) / repeats, "messages")


async def _first_use(bench: Bench, rt: Runtime, actors: _Actors, holder: type[GpuHolder], size: int) -> None:
    """The first transfer of two actors that have used the GPU, next to their later ones."""
    pairs: list[_Actors] = []

    async def first() -> float:
        a, b = await asyncio.gather(_in_use(rt, holder), _in_use(rt, holder))
        pairs.append(actors._replace(a=a, b=b))
        return await timed(b.take(a.fresh(size)))

    async def later() -> float:
        pair = pairs.pop()
        seconds = await pair.moves(pair.a.fresh, size)()
        await asyncio.gather(rt.stop(pair.a), rt.stop(pair.b))
        return seconds

    few = Bench(min(bench.turns, _STARTS))
    await few.compare(f"{_text(size)}, first of two actors", first, later, "a later one", unit="s")
    bench.results += few.results
