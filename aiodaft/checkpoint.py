"""Saves sharded states to files, and loads them in any layout.

The files are those of safetensors, with whole tensors, and with the index of transformers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from aiodaft._protocol.groups.reshard import Grid, Piece, plan
from aiodaft._protocol.groups.safetensors import Part, Place, lay_out_files
from aiodaft._protocol.ids import CHECKPOINTS
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.checkpoints import Checkpoints, checkpoints_of
from aiodaft._runtime.groups.resharding import beside
from aiodaft.group import Group
from aiodaft.ref import Ref
from aiodaft.resharding import Layout, Sharded

if TYPE_CHECKING:
    import torch

__all__ = ["load", "save"]

Path: TypeAlias = str | os.PathLike[str]


class HasSharded(Protocol):
    def sharded(self) -> Sharded: ...


async def save(state: Sharded | HasSharded, path: Path) -> Ref[None]:
    """Begin to save a sharded state to a folder. Returns once all shards are there and fit; await the ref for the end.

    Each part is written by one of the ranks that have it, in the background. The path is there when all parts are on
    disk, and not before, whichever process is killed. All ranks have to see one file system.

    Shards that were returned by `aiodaft.borrow` are written from where they lie: do not change them before the end.
    To go on at once, lend a copy.

    Args:
        state: The shards with their layout, or a `Step` of aiodaft.tensor: its state after the steps that have begun.
        path: A folder that does not exist. What a killed save to this path has left beside it is removed.

    Raises:
        TypeError: The state is neither; or a shard is no dict of plain tensors.
        ValueError: A shard differs from its layout; or safetensors has no tensors of such a dtype.
        Exception: The error of the call for a shard.
        From the ref: FileExistsError, if there is something at the path, or another save to it goes on; OSError, of a
            file; DaftError, if a process is lost; BorrowError, if a shard was changed. Then there is no checkpoint.

    Cancellation: no save begins. To end one, cancel the ref.
    """
    if not isinstance(state, Sharded) and not hasattr(state, "sharded"):
        raise TypeError(f"state is of {type(state).__name__}: give Sharded(refs, layout), or a Step of aiodaft.tensor")
    shards = state if isinstance(state, Sharded) else state.sharded()
    grids = shards.layout._grids
    files, places = lay_out_files(grids)
    sources = await shards._sources()
    orders: dict[int, list[Piece]] = {}
    for piece in plan(grids, {name: _whole(grid) for name, grid in grids.items()}, [None]).sent[0]:
        orders.setdefault(piece.source, []).append(piece)
    actor = checkpoints_of(shards._caller, sources[0].peer, sources[0].label)
    given = Opaque({rank: sources[rank] for rank in orders})
    return actor.save(_absolute(path), files, places, orders, given)


async def load(path: Path, layout: Layout, *, to: Group[Any], verify: bool = True) -> Sharded:
    """Load a checkpoint in any layout. Returns one ref per member once the files are known to be whole.

    Each rank reads its own bytes from the files, and no others, after the ranks have verified the parts, each some.

    Args:
        path: A folder of `save`, or one of safetensors that transformers has saved.
        layout: The parts that the members get. It may leave out tensors.
        to: The members, by rank.
        verify: Whether to compare all bytes with their checksums first; those that others have saved have none.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: A file is half or corrupted; or the layout does not fit the tensors or the group. No tensor was
            loaded.

    Cancellation: nothing is loaded.
    """
    return await (await Saved.at(path, to)).load(layout, verify=verify)


class Saved:
    """A checkpoint that a group sees."""

    def __init__(self, path: str, group: Group[Any], places: Mapping[str, Place], parts: Sequence[Part]) -> None:
        self._path = path
        self.group = group
        self._parts = parts
        self.places = places

    @classmethod
    async def at(cls, path: Path, group: Group[Any]) -> Saved:
        """Look at a checkpoint, and at the headers of its files. Raises as `load`."""
        actor = _actors(Layout(group.axes or {"rank": len(group)}, {}), group)[0]
        absolute = _absolute(path)
        return cls(absolute, group, *await actor.look(absolute))

    async def load(self, layout: Layout, *, verify: bool = True, names: Mapping[str, str] | None = None) -> Sharded:
        """As `load`. `names`: the names that tensors of the layout have in the checkpoint."""
        actors = _actors(layout, self.group)
        places = self.places if names is None else {name: self.places[other] for name, other in names.items()}
        wholes = {name: _whole(Grid(one.dtype, one.itemsize, _uncut(one.shape), ())) for name, one in places.items()}
        made = plan(wholes, layout._grids, [None] * layout.size)
        if verify:
            wanted = {places[name] for name in layout._grids}
            await self._verify(actors, [part for part in self._parts if self.places[part.name] in wanted])
        loads = (
            actor.load(self._path, _of(pieces, places), layout._expected(rank), pieces)
            for rank, (actor, pieces) in enumerate(zip(actors, made.sent, strict=True))
        )
        return Sharded(cast("Iterable[Ref[dict[str, torch.Tensor]]]", loads), layout)

    async def _verify(self, actors: Sequence[Checkpoints], parts: Iterable[Part]) -> None:
        # Large ones first, in turns.
        parts = sorted(parts, key=lambda part: -prod(part.size) * self.places[part.name].itemsize)
        shares = [parts[rank :: len(actors)] for rank in range(len(actors))]
        checks = [
            actor.verify(self._path, _of(share, self.places), share)
            for actor, share in zip(actors, shares, strict=True)
            if share
        ]
        for result in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def _of(pieces: Iterable[Piece | Part], places: Mapping[str, Place]) -> dict[str, Place]:
    return {piece.name: places[piece.name] for piece in pieces}


def _absolute(path: Path) -> str:
    # The working directories of the ranks may differ.
    return os.path.abspath(path)


def _actors(layout: Layout, group: Group[Any]) -> list[Checkpoints]:
    return [beside(target, CHECKPOINTS, Checkpoints) for target in layout._targets(group)]


def _whole(grid: Grid) -> Grid:
    """The same tensor at one rank."""
    return Grid(grid.dtype, grid.itemsize, _uncut(grid.shape), ((0,) * len(grid.shape),))


def _uncut(shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((0, length) for length in shape)
