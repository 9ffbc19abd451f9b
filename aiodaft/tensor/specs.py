"""The layout of a tensor over named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Placements: TypeAlias = tuple[Placement, ...]
"""One placement for each axis, in the order of the axes."""


@dataclass(frozen=True, slots=True)
class Meta:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Spec:
    placements: Placements
    meta: Meta

    def at(self, placements: Placements) -> Spec:
        return Spec(placements, self.meta)


def placed(given: Mapping[str, Placement], axes: Mapping[str, int]) -> Placements:
    if unknown := given.keys() - axes.keys():
        raise ValueError(f"there is no axis {', '.join(sorted(unknown))}: the axes are {', '.join(axes)}")
    return tuple(given.get(axis, Replicate()) for axis in axes)


def checked(placements: Placements, dims: int) -> Placements:
    """The placements of a tensor with so many dimensions, of which none counts from the end."""
    made = []
    for one in placements:
        if isinstance(one, Shard):
            if not -dims <= one.dim < dims:
                raise ValueError(f"{text(one)} cuts a dimension that a tensor with {dims} has not")
            one = Shard(one.dim % dims)
        made.append(one)
    return tuple(made)


def unplaced(placements: Placements, axes: Mapping[str, int]) -> dict[str, Placement]:
    return {axis: one for axis, one in zip(axes, placements, strict=True) if not one.is_replicate()}


def text(placement: Placement) -> str:
    match placement:
        case Shard(dim=dim):
            return f"S({dim})"
        case Replicate():
            return "R"
        case Partial(reduce_op=operation):
            return f"P({operation})"
    return str(placement)


def untext(text: str) -> Placement:
    """The placement of `S(0)`, `R`, `P` or `P(max)`."""
    kind, _, inner = text.strip().removesuffix(")").partition("(")
    if kind == "R" and not inner:
        return Replicate()
    if kind == "S" and inner.removeprefix("-").isdigit():
        return Shard(int(inner))
    if kind == "P" and inner in ("", "sum", "avg", "min", "max", "product"):
        return Partial(inner or "sum")
    raise ValueError(f"{text!r} is no placement: write R, S(dim) or P(sum), P(avg), P(min), P(max), P(product)")


def coords(axes: Mapping[str, int], rank: int) -> tuple[int, ...]:
    places = []
    for size in reversed(tuple(axes.values())):
        rank, place = divmod(rank, size)
        places.append(place)
    return tuple(reversed(places))


def bounds(shape: Sequence[int], placements: Placements, axes: Mapping[str, int], rank: int) -> list[tuple[int, int]]:
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
    places = [coords(axes, rank) for rank in range(math.prod(axes.values()))]
    return [
        rank
        for rank, at in enumerate(places)
        if not any(place and one.is_replicate() for place, one in zip(at, placements, strict=True))
    ]


def joined(
    parts: Mapping[int, Tensor], shape: Sequence[int], placements: Placements, axes: Mapping[str, int]
) -> Tensor:
    """The whole tensor of the parts of its `holders`, by rank."""
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
