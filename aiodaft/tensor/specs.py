"""The layout of a tensor over named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["Meta", "Placement", "Placements", "Spec", "checked", "placed", "text", "unplaced", "untext"]

Placements: TypeAlias = tuple[Placement, ...]
"""One placement for each axis, in the order of the axes."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape, stride in elements and dtype of a whole tensor."""

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
    """A whole tensor and its placement on each axis."""

    placements: Placements
    meta: Meta

    def at(self, placements: Placements) -> Spec:
        """The same tensor, placed otherwise."""
        return Spec(placements, self.meta)


def placed(given: Mapping[str, Placement], axes: Mapping[str, int]) -> Placements:
    """`{"tp": Shard(0)}` as one placement for each axis; an axis that is not named has replicas.

    Raises:
        ValueError: An axis is not one of `axes`.
    """
    if unknown := given.keys() - axes.keys():
        raise ValueError(f"there is no axis {', '.join(sorted(unknown))}: the axes are {', '.join(axes)}")
    return tuple(given.get(axis, Replicate()) for axis in axes)


def checked(placements: Placements, dims: int) -> Placements:
    """The placements of a tensor with so many dimensions, of which none counts from the end.

    Raises:
        ValueError: A placement cuts a dimension that the tensor has not.
    """
    made = []
    for one in placements:
        if isinstance(one, Shard):
            if not -dims <= one.dim < dims:
                raise ValueError(f"{text(one)} cuts a dimension that a tensor with {dims} has not")
            one = Shard(one.dim % dims)
        made.append(one)
    return tuple(made)


def unplaced(placements: Placements, axes: Mapping[str, int]) -> dict[str, Placement]:
    """The placements that are not replicas, by axis."""
    return {axis: one for axis, one in zip(axes, placements, strict=True) if not one.is_replicate()}


def text(placement: Placement) -> str:
    """`S(0)`, `R` or `P(sum)`."""
    match placement:
        case Shard(dim=dim):
            return f"S({dim})"
        case Replicate():
            return "R"
        case Partial(reduce_op=operation):
            return f"P({operation})"
    return str(placement)


def untext(text: str) -> Placement:
    """The placement of `S(0)`, `R`, `P` or `P(max)`.

    Raises:
        ValueError: It is none of these.
    """
    kind, _, inner = text.strip().removesuffix(")").partition("(")
    if kind == "R" and not inner:
        return Replicate()
    if kind == "S" and inner.removeprefix("-").isdigit():
        return Shard(int(inner))
    if kind == "P" and inner in ("", "sum", "avg", "min", "max", "product"):
        return Partial(inner or "sum")
    raise ValueError(f"{text!r} is no placement: write R, S(dim) or P(sum), P(avg), P(min), P(max), P(product)")
