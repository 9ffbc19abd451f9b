"""Parts of whole tensors, and whole tensors of parts: as torch.chunk cuts them, axis after axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from aiodaft.tensor.specs import Placements, text

__all__ = ["bounds", "coords", "cut", "holders", "joined"]


def coords(axes: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """The place of a rank on each axis; the last axis is the fastest."""
    places = []
    for size in reversed(tuple(axes.values())):
        rank, place = divmod(rank, size)
        places.append(place)
    return tuple(reversed(places))


def bounds(shape: Sequence[int], placements: Placements, axes: Mapping[str, int], rank: int) -> list[tuple[int, int]]:
    """The start and the length of a rank's part in each dimension."""
    part = [(0, length) for length in shape]
    for size, place, placement in zip(axes.values(), coords(axes, rank), placements, strict=True):
        if placement.is_shard():
            if type(placement) is not Shard:
                raise ValueError(f"parts of {text(placement)} are not contiguous")
            start, length = part[placement.dim]
            each = -(-length // size)
            first, end = min(length, each * place), min(length, each * (place + 1))
            part[placement.dim] = start + first, end - first
    return part


def cut(whole: Tensor, placements: Placements, axes: Mapping[str, int], rank: int) -> Tensor:
    """A view of the part of a rank. Of a sum, the first rank of its axis has all, and the others have zeros."""
    for dim, (start, length) in enumerate(bounds(whole.shape, placements, axes, rank)):
        whole = whole.narrow(dim, start, length)
    for place, placement in zip(coords(axes, rank), placements, strict=True):
        if isinstance(placement, Partial) and place and placement.reduce_op in ("sum", "product"):
            whole = torch.full_like(whole, placement.reduce_op == "product")
    return whole


def holders(placements: Placements, axes: Mapping[str, int]) -> list[int]:
    """The ranks whose parts make the whole: of replicas the first one."""
    places = [coords(axes, rank) for rank in range(math.prod(axes.values()))]
    return [
        rank
        for rank, at in enumerate(places)
        if not any(place and one.is_replicate() for place, one in zip(at, placements, strict=True))
    ]


def joined(
    parts: Mapping[int, Tensor], shape: Sequence[int], placements: Placements, axes: Mapping[str, int]
) -> Tensor:
    """The whole tensor of the parts of its `holders`, by rank.

    Raises:
        ValueError: A part has another shape, or a placement is a sum.
    """
    if any(one.is_partial() for one in placements):
        raise ValueError(f"parts of {', '.join(map(text, placements))} have to be reduced first")
    ranks = holders(placements, axes)
    first = parts[ranks[0]]
    whole = first.new_empty(tuple(shape))
    for rank in ranks:
        place = whole
        for dim, (start, length) in enumerate(bounds(shape, placements, axes, rank)):
            place = place.narrow(dim, start, length)
        if place.shape != parts[rank].shape:
            raise ValueError(f"the part of rank {rank} is {tuple(parts[rank].shape)}, not {tuple(place.shape)}")
        place.copy_(parts[rank])
    return whole
