"""Collectives on refs and in methods, next to gloo: the same actors call it as the ranks of an SPMD program do.

Both begin with tensors that exist. A collective of aiodaft is begun by this process, and is over when every member has
a result of its own, in new memory, and this process knows it; or is begun by each member, in a loop. One of gloo is
begun by each member, in a loop that makes no call, and changes the member's tensor in place. The slowest member counts.
The root of a broadcast of gloo goes on while the others receive; here each one is over before the next begins, and in
the lines with several in flight so many are begun at a time. torch has the threads that it takes.

With `AIODAFT_ADDRESS`, that of one of two nodes on two hosts, also over the link between them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any, Final

from aiodaft._runtime.platform.linux import interface_to, interfaces
from aiodaft.actor import Actor
from aiodaft.collectives import all_gather, all_reduce, broadcast
from aiodaft.group import Group
from aiodaft.member import CurrentGroup, Planned, current_group
from aiodaft.methods import method
from aiodaft.ref import Refs
from aiodaft.runtime import Runtime

from .floors import Copy, exchange
from .results import Bench, rate, seconds_of_one

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_SIZES: Final = (_KIB, _MIB, 64 * _MIB)
# The number of broadcasts of a size that are under way, and the budget.
_IN_FLIGHT: Final = {_MIB: {1: "", 8: ">= 1.0"}}


class Rank(Actor):
    """A member of collectives of aiodaft, and of a process group of torch."""

    def __init__(self) -> None:
        self._joined = ExitStack()
        self._tensor: Any = None
        self._plan: Planned | None = None

    @method
    def join(self, link: str | None) -> None:
        """Join the process group; over the interface that leads to an address, if one is given."""
        interface = None
        if link is not None:
            here = interface_to(link)
            interface = next(name for name, found in interfaces().items() if here in found)
        self._joined.enter_context(current_group().process_group("gloo", interface=interface))

    @method
    def leave(self) -> None:
        """Leave it."""
        self._joined.close()

    @method
    def make(self, size: int) -> Any:
        """A tensor of so many bytes, for both."""
        import torch  # noqa: PLC0415 - optional package

        self._tensor = torch.zeros(size // 4)
        return self._tensor

    @method
    def gloo(self, name: str, repeats: int) -> float:
        """Seconds that a collective takes, of so many one after the other."""
        import torch.distributed  # noqa: PLC0415 - optional package

        dist: Any = torch.distributed
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            if name == "all_reduce":
                dist.all_reduce(self._tensor)
            else:
                dist.broadcast(self._tensor, 0)
        return (time.perf_counter() - start) / repeats

    @method
    async def all_reduce(self, repeats: int) -> float:
        """Seconds that one in methods takes, of so many one after the other."""
        group: CurrentGroup[Rank] = current_group()
        await group.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            await group.all_reduce(self._tensor)
        return (time.perf_counter() - start) / repeats

    @method
    def planned(self, repeats: int) -> tuple[float, float]:
        """Seconds, and those of a CPU, that one of a plan takes, of so many one after the other."""
        with_plan = self._plan = self._plan or current_group().plan().result()
        for _ in range(3):
            with_plan.all_reduce(self._tensor).result()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            with_plan.all_reduce(self._tensor).result()
        return (time.perf_counter() - start) / repeats, (time.process_time() - cpu) / repeats

    @method
    async def copy(self, size: int) -> float:
        """Seconds that one memcpy takes."""
        floor = Copy(size)
        await floor.seconds()
        return await floor.seconds()


async def run(
    bench: Bench, most: int = 64 * _MIB, counts: Sequence[int] = (2, 4), crowds: Sequence[int] = (2, 4, 8, 16)
) -> None:
    """Measure collectives of values of up to `most` bytes: over `counts` of members, and from one to `crowds`."""
    sizes = [size for size in _SIZES if size <= most]
    async with Runtime() as rt:
        for count in counts:
            group = await rt.group(count, Rank)
            await asyncio.gather(*group.all(Rank.join, None))
            for size in sizes:
                budget = ">= 1.0" if size >= _MIB else ""
                await _next_to_gloo(bench, group, size, "all_reduce", budget)
                for in_flight, its_budget in _IN_FLIGHT.get(size, {1: budget}).items():
                    await _next_to_gloo(bench, group, size, "broadcast", its_budget, in_flight=in_flight)
                await _in_methods(bench, group, size, budget)
                await _planned(bench, group, size)
            await asyncio.gather(*group.all(Rank.leave))
            await _gather(bench, group, min(most, 16 * _MIB))
            await rt.stop(group)
        for count in crowds:
            group = await rt.group(count + 1, Rank)
            await asyncio.gather(*group.all(Rank.join, None))
            await _next_to_gloo(bench, group, min(most, 16 * _MIB), "broadcast")
            await asyncio.gather(*group.all(Rank.leave))
            await rt.stop(group)
    await _between_hosts(bench, sizes)


async def _between_hosts(bench: Bench, sizes: list[int]) -> None:
    address = os.environ.get("AIODAFT_ADDRESS")
    if not address:
        print("not measured: collectives between hosts need $AIODAFT_ADDRESS, of one of two nodes", file=sys.stderr)
        return
    async with Runtime() as rt:
        if len(await rt.nodes()) < 2:
            print(f"not measured: there is only one node at {address}", file=sys.stderr)
            return
        group = await rt.on(spread=True).group(2, Rank)
        await asyncio.gather(*group.all(Rank.join, address))
        for size in sizes:
            for name in ("all_reduce", "broadcast"):
                await _next_to_gloo(bench, group, size, name, apart=True)
        await asyncio.gather(*group.all(Rank.leave))


async def _next_to_gloo(
    bench: Bench,
    group: Group[Rank],
    size: int,
    name: str,
    budget: str = "",
    *,
    apart: bool = False,
    in_flight: int = 1,
) -> None:
    others = list(group)[1:]
    repeats = _repeats(size)
    if name == "all_reduce":
        begin: Callable[[Refs[Any]], Refs[Any]] = all_reduce
        line = f"{_amount(size)}, all_reduce, {len(group)} {'hosts' if apart else 'members'}"
    else:
        begin = lambda refs: broadcast(refs[0], others)  # noqa: E731 - the other one has a name
        line = f"{_amount(size)}, broadcast, to {'another host' if apart else len(others)}"
        line += f", {in_flight} in flight" if in_flight > 1 else ""

    async def ours() -> float:
        # A host keeps the values that came from another one as long as their owner does: each operation needs new
        # values.
        values = cycle([await _made(group, size) for _ in range(repeats if apart else 1)])
        return 1 / await rate(lambda: _all_ready(begin(next(values))), repeats, in_flight)

    theirs = partial(_slowest, lambda: group.all(Rank.gloo, name, repeats))
    await bench.compare(line, ours, theirs, "gloo", budget, size=_of(size))


async def _in_methods(bench: Bench, group: Group[Rank], size: int, budget: str) -> None:
    await _made(group, size)
    ours = partial(_slowest, lambda: group.all(Rank.all_reduce, _repeats(size)))
    theirs = partial(_slowest, lambda: group.all(Rank.gloo, "all_reduce", _repeats(size)))
    line = f"{_amount(size)}, all_reduce in methods, {len(group)} members"
    await bench.compare(line, ours, theirs, "gloo", budget, size=_of(size))


async def _planned(bench: Bench, group: Group[Rank], size: int) -> None:
    await _made(group, size)
    count, repeats = len(group), 20 * _repeats(size) if size < _MIB else 4 * _repeats(size)

    async def ours(of: int) -> float:
        return max(found[of] for found in await group.all(Rank.planned, repeats))

    async def floor(of: int) -> float:
        return (await exchange(count, size, repeats))[of]

    line, less = f"{_amount(size)}, planned all_reduce, {count} members", "<= 2.0" if size < _MIB else ">= 0.67"
    await bench.compare(line, partial(ours, 0), partial(floor, 0), "bare exchange", less, size=_of(size))
    await bench.compare(f"{line}, CPU", partial(ours, 1), partial(floor, 1), "bare exchange", less, size=_of(size))
    theirs = partial(_slowest, lambda: group.all(Rank.gloo, "all_reduce", _repeats(size)))
    budget = "<= 1.0" if size < _MIB else ">= 2.5" if size > _MIB else ">= 1.0"
    await bench.compare(line, partial(ours, 0), theirs, "gloo", budget, size=_of(size))


async def _gather(bench: Bench, group: Group[Rank], size: int) -> None:
    """All members at once: each gets a list of all tensors, and copies as many bytes."""
    refs = await _made(group, size)
    ours = partial(seconds_of_one, lambda: _all_ready(all_gather(refs)), 1)
    floor = partial(_slowest, lambda: group.all(Rank.copy, size * len(group)))
    line = f"{_amount(size)}, all_gather, {len(group)} members"
    await bench.compare(line, ours, floor, "one memcpy each", size=_of(size * len(group)))


def _repeats(size: int) -> int:
    return max(1, min(50, 16 * _MIB // size))


def _amount(size: int) -> str:
    return f"{size // _KIB} KiB" if size < _MIB else f"{size // _MIB} MiB"


def _of(size: int) -> int:
    """The bytes for which speeds are given; small values have times."""
    return 0 if size < _MIB else size


async def _made(group: Group[Rank], size: int) -> Refs[Any]:
    refs = group.all(Rank.make, size)
    await _all_ready(refs)
    return refs


async def _all_ready(refs: Refs[Any]) -> None:
    await asyncio.gather(*(ref.ready() for ref in refs))


async def _slowest(sample: Callable[[], Refs[float]]) -> float:
    return max(await sample())
