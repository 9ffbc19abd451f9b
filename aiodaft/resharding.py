"""Moves tensors from the ranks of one group to those of another that lays them out differently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, cast

from aiodaft._protocol.groups.reshard import Grid, Rule, bundle, lay_out, plan, relayed
from aiodaft._protocol.groups.roster import Axes
from aiodaft._protocol.ids import RESHARDING
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.resharding import Expected, Resharding, Source, beside, resharding_of
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft.actor import target_of
from aiodaft.group import Group
from aiodaft.ref import Ref, Refs

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "ReshardPlan", "Sharded", "Sharding", "reshard"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The layout of one tensor over the axes of a group; an axis that is not named has replicas.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        dims: The axis over which a dimension is sharded, or several of them, the last one the fastest.
        only: The coordinates in an axis at which ranks have the tensor, such as `{"pp": 0}` for the first stage.
        lengths: The lengths of the parts of a dimension. Default: as DTensor, over one axis after the other
            ceil(length / parts) each; the last parts are shorter or empty. 10 over 2 x 2 are 3, 2, 3 and 2.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    dims: Mapping[int, str | Sequence[str]] = field(default_factory=dict)
    only: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    lengths: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def _rule(self) -> Rule:
        dims = {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in self.dims.items()}
        only = {axis: (at,) if isinstance(at, int) else tuple(at) for axis, at in self.only.items()}
        return Rule(tuple(self.shape), dims, only, self.lengths)


class Layout:
    """The parts of tensors that each rank of a group has.

    Args:
        axes: Names and sizes of the axes of the group. Ranks are row-major: the last axis is the fastest.
        tensors: The layout of each tensor.

    Raises:
        ValueError: A tensor does not fit its shape or the axes; the message names it.
    """

    def __init__(self, axes: Mapping[str, int], tensors: Mapping[str, Sharding]) -> None:
        self._axes = Axes.of(axes, prod(axes.values()))
        self._grids: dict[str, Grid] = {
            name: lay_out(name, one._rule(), str(one.dtype).removeprefix("torch."), one.dtype.itemsize, self._axes)
            for name, one in tensors.items()
        }

    @property
    def axes(self) -> Mapping[str, int]:
        """Names and sizes of the axes."""
        return self._axes.sizes

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._axes.count

    def __repr__(self) -> str:
        return f"<Layout of {len(self._grids)} tensors over {self._axes}>"

    def part(self, name: str, rank: int) -> tuple[slice, ...] | None:
        """The part of a tensor that a rank has: `whole[layout.part("w", 2)]`. None if it has nothing of it.

        Raises:
            KeyError: There is no such tensor.
        """
        box = self._grids[name].box(rank)
        return None if box is None else tuple(slice(start, stop) for start, stop in box)

    def shard(self, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The shard of a rank, as views of the whole tensors.

        Raises:
            KeyError: A tensor is missing.
        """
        parts = {name: self.part(name, rank) for name in self._grids}
        return {name: tensors[name][part] for name, part in parts.items() if part is not None}

    def nbytes(self, rank: int) -> int:
        """Bytes of the shard of a rank."""
        boxes = ((grid, grid.box(rank)) for grid in self._grids.values())
        return sum(grid.bytes_in(box) for grid, box in boxes if box is not None)

    def _targets(self, group: Group[Any]) -> list[Target]:
        """The members of a group that has this layout."""
        _check_count(len(group), self.size, "members")
        if group.axes and dict(group.axes) != dict(self.axes):
            raise ValueError(f"the group has axes {dict(group.axes)}, and the layout has {dict(self.axes)}")
        return [cast("Target", target_of(member)) for member in group._roster.members]

    def _expected(self, rank: int) -> list[Expected]:
        shapes = ((name, grid.dtype, grid.shard_shape(rank)) for name, grid in self._grids.items())
        return [(name, dtype, shape) for name, dtype, shape in shapes if shape is not None]


class Sharded(Refs[dict[str, "torch.Tensor"]]):
    """A state in shards: the refs of one call of a group, in the order of ranks, and their layout.

    As other refs of a group, they are arguments: `group.each(Model.load, state)`.

    Args:
        refs: The shards by rank, each a dict of names and tensors.
        layout: The part of each tensor that each rank has.

    Attributes:
        layout: The layout.

    Raises:
        ValueError: There is not one shard for each rank.
    """

    __slots__ = ("layout",)

    def __init__(self, refs: Iterable[Ref[Mapping[str, torch.Tensor]]], layout: Layout) -> None:
        super().__init__(cast("Sequence[Ref[dict[str, torch.Tensor]]]", tuple(refs)))
        _check_count(len(self), layout.size, "shards")
        self.layout = layout

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharded, (self._refs, self.layout)

    @property
    def _caller(self) -> Caller:
        return state_of(self[0]).process.part(Caller)

    async def _sources(self) -> list[Source]:
        """The shards and their processes, once all exist and fit."""
        for ref in self:
            await ref.ready()
        # All errors have been seen, and the first one is raised.
        for ref in [ref for ref in self if ref.exception() is not None]:
            await ref
        sources = [Source(state_of(ref).producer, f"rank {rank} of the source", ref) for rank, ref in enumerate(self)]
        checks = [
            resharding_of(self._caller, peer, label).check(Opaque(shard), rank, self.layout._expected(rank))
            for rank, (peer, label, shard, _) in enumerate(sources)
        ]
        for result in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        return sources


class ReshardPlan:
    """A plan of `reshard`, for any number of moves.

    Attributes:
        source: The layout that the tensors have.
        destination: The layout that they get.
        sent: For each rank of the source the bytes that it sends in a move.
        received: For each rank of the destination the bytes that it gets from other processes.
    """

    def __init__(self, source: Layout, destination: Layout, *, colocated: bool, relays: bool) -> None:
        self.source = source
        self.destination = destination
        self._relays = relays
        self._together = min(source.size, destination.size) if colocated else 0
        homes = [rank if rank < self._together else None for rank in range(destination.size)]
        grids = source._grids, destination._grids
        self._plan = made = relayed(*grids, homes, source.size) if relays else plan(*grids, homes)
        self.received = tuple(sum(piece.nbytes for piece in pieces) for pieces in made.sent)
        sent = [0] * source.size
        for pieces in made.sent:
            for piece in pieces:
                if piece.source < source.size:
                    sent[piece.source] += piece.nbytes
        self.sent = tuple(sent)
        # The orders for each rank of the destination.
        self._orders = [self._order(rank) for rank in range(destination.size)]

    @property
    def bytes(self) -> int:
        """Bytes that a move sends between processes: none can send fewer."""
        return sum(self.received)

    def __repr__(self) -> str:
        return f"<ReshardPlan: {self.bytes:,} bytes from {self.source.size} to {self.destination.size} ranks>"

    async def move(self, shards: Refs[Mapping[str, torch.Tensor]], *, to: Group[Any]) -> Sharded:
        """Move tensors to the members of a group. Returns one ref per member when the old shards are known to fit.

        The new shards are made in the processes of the members, in CPU memory; parts come straight from the processes
        of the old shards, and the bytes do not change. Pass each ref to its member, `group.each(Model.load, new)`,
        which gets the tensors themselves, and may keep and change them.

        A rank has its old shard, its new one, and at most as much as the largest tensor on the way, or 512 KiB if that
        is more. To save a copy of the old shard, return it from its method as `aiodaft.borrow(state)`; do not change it
        until all new shards are done. Tensors on a GPU are read there.

        Args:
            shards: The shards by rank, each a dict of names and tensors, as one call of the old group returned them.
            to: The members that get the new shards, by rank.

        Raises:
            TypeError: A shard is no dict of plain tensors.
            ValueError: The number of shards or members differs from the layout; a tensor of a shard differs in name,
                shape or dtype; or ranks that share a process by the plan do not. Nothing was moved.
            Exception: The error of the call for a shard.
            DaftError: A process with an old shard is lost. If it dies later, the refs of the shards that need it raise
                this; other refs are not affected.

        Cancellation: no move begins. To end a move, cancel its refs.
        """
        state = Sharded(shards, self.source)
        targets = self.destination._targets(to)
        sources = await state._sources()
        for rank in range(self._together):
            if sources[rank].peer != targets[rank].remote:
                raise ValueError(
                    f"the plan is for ranks that share processes (colocated=True), and {targets[rank].label} is in "
                    f"another process than the shard of rank {rank}"
                )
        for target in targets if self._relays else ():
            if isinstance(target, FollowingTarget):
                await target.arrive()
        moved: list[Ref[dict[str, torch.Tensor]]] = []
        for rank, target in enumerate(targets):
            moved.append(self._receive(target, rank, sources))
            sources.append(Source(target.remote, target.label, moved[-1], pending=True))
        return Sharded(moved, self.destination)

    def _receive(self, target: Target, rank: int, sources: Sequence[Source]) -> Ref[dict[str, torch.Tensor]]:
        new, kept, parcels, bound, ranks = self._orders[rank]
        actor: Resharding = beside(target, RESHARDING, Resharding)
        received = actor.receive(new, kept, parcels, bound, Opaque({one: sources[one] for one in ranks}))
        return cast("Ref[dict[str, torch.Tensor]]", received)

    def _order(self, rank: int) -> tuple[Any, ...]:
        made = self._plan
        kept = [[tuple(piece) for piece in parcel] for parcel in bundle(made.kept[rank], made.parcel)]
        parcels = [[tuple(piece) for piece in parcel] for parcel in made.schedule(rank)]
        ranks = sorted({piece.source for piece in (*made.sent[rank], *made.kept[rank])})
        return self.destination._expected(rank), kept, parcels, made.bound, ranks


def reshard(source: Layout, destination: Layout, *, colocated: bool = False, relays: bool = False) -> ReshardPlan:
    """Plan the way of tensors from one layout to another. The plan is computed once, and serves any number of moves.

    Each rank of the destination gets each of its elements once. Of replicas, the rank sends that has the fewest bytes
    to send so far.

    Args:
        source: The layout that the tensors have.
        destination: The layout that they get. It may leave out tensors.
        colocated: Rank i of both is in the same process, as with the same group, or with `rt.on(with_=group)`: elements
            that the process has are not sent. The larger of the two has further ranks.

        relays: Members with the same shard pass it on: each process sends an element to two of them at most. They must
            not change it before all refs of a move are done. With one that dies, those that it sends to fail.

    Raises:
        ValueError: The source lacks a tensor, or part of it, or has it in another shape or dtype.
    """
    return ReshardPlan(source, destination, colocated=colocated, relays=relays)


def _check_count(found: int, expected: int, what: str) -> None:
    if found != expected:
        raise ValueError(f"there are {found} {what}, and the layout has {expected} ranks")
