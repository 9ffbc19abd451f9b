"""States that move from N to M ranks, next to one memcpy of its new shard at each receiver, all at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from aiodaft.actor import Actor
from aiodaft.group import Group
from aiodaft.member import current_group
from aiodaft.methods import method
from aiodaft.reading import borrow
from aiodaft.ref import Refs
from aiodaft.resharding import Layout, ReshardPlan, Sharding, reshard
from aiodaft.runtime import Runtime

from .results import Bench, timed

if TYPE_CHECKING:
    import torch

_MIB: Final = 1 << 20
_TENSORS: Final = 16
_COLUMNS: Final = 2048


class Member(Actor):
    """A rank with a shard, and other memory of the same size for the memcpy."""

    def __init__(self, layout: Layout) -> None:
        import torch  # noqa: PLC0415 - optional package

        rank = current_group().rank
        parts = ((name, layout.part(name, rank)) for name in _names())
        shapes = {name: tuple(one.stop - one.start for one in part) for name, part in parts if part is not None}
        self.state = {name: torch.ones(shape) for name, shape in shapes.items()}
        self.other = {name: torch.zeros(shape) for name, shape in shapes.items()}

    @method
    async def weights(self) -> dict[str, torch.Tensor]:
        """Lend the shard."""
        return borrow(self.state)

    @method
    async def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take a new shard, in place of the one before."""
        self.new = state

    @method
    async def copy(self) -> None:
        """Copy the shard to memory that has been written to before."""
        for name, tensor in self.state.items():
            self.other[name].copy_(tensor)


async def run(bench: Bench, sizes: Sequence[int] = (64 * _MIB, 1024 * _MIB)) -> None:
    """Measure moves of states of so many bytes."""
    async with Runtime() as rt:
        for nbytes in sizes:
            for before, after in ((4, 3), (2, 4)):
                await _one(rt, bench, nbytes, before, after)


async def _one(rt: Runtime, bench: Bench, nbytes: int, before: int, after: int) -> None:
    source, destination = _layout(nbytes, before), _layout(nbytes, after)
    plan = reshard(source, destination)
    async with rt.group(before, Member, source) as old, rt.group(after, Member, destination) as new:
        ours, floor = partial(_move, plan, old, new), partial(_copies, new)
        name = f"{before} to {after} ranks, {nbytes // _MIB:,} MiB"
        await bench.compare(name, ours, floor, "one memcpy per receiver", size=nbytes)


async def _move(plan: ReshardPlan, old: Group[Member], new: Group[Member]) -> float:
    return await timed(_moved(plan, old, new))


async def _moved(plan: ReshardPlan, old: Group[Member], new: Group[Member]) -> None:
    shards: Refs[Mapping[str, torch.Tensor]] = old.all(Member.weights)
    await new.each(Member.load, await plan.move(shards, to=new))


async def _copies(new: Group[Member]) -> float:
    return await timed(new.all(Member.copy))


def _names() -> list[str]:
    return [f"w{index}" for index in range(_TENSORS)]


def _layout(nbytes: int, ranks: int) -> Layout:
    """Tensors that are cut by rows, and as many that are cut by columns."""
    import torch  # noqa: PLC0415 - optional package

    rows = nbytes // (_TENSORS * _COLUMNS * 4)
    return Layout(
        {"tp": ranks},
        {
            name: Sharding(shape=(rows, _COLUMNS), dtype=torch.float32, dims={index % 2: "tp"})
            for index, name in enumerate(_names())
        },
    )
