"""Placements in the words of resharding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import Replicate

from aiodaft.resharding import Sharding
from aiodaft.tensor.shards import bounds, coords
from aiodaft.tensor.specs import Spec

__all__ = ["sharding_of"]


def sharding_of(spec: Spec, axes: Mapping[str, int], only: Mapping[str, int] | None = None) -> Sharding:
    """The layout of a placed tensor.

    Args:
        spec: The tensor.
        axes: The axes that its placements are for.
        only: The place on another axis at which ranks have it.
    """
    dims: dict[int, list[str]] = {}
    for axis, placement in zip(axes, spec.placements, strict=True):
        if not isinstance(placement, Replicate):
            dims.setdefault(placement.dim, []).append(axis)  # type: ignore[attr-defined]  # a shard
    lengths = {}
    for dim, names in dims.items():
        along = [index for index, axis in enumerate(axes) if axis in names]
        ranks = [rank for rank in range(torch.Size(axes.values()).numel()) if not _others(coords(axes, rank), along)]
        lengths[dim] = [bounds(spec.meta.shape, spec.placements, axes, rank)[dim][1] for rank in ranks]
    return Sharding(shape=spec.meta.shape, dtype=spec.meta.dtype, dims=dims, lengths=lengths, only=dict(only or {}))


def _others(places: tuple[int, ...], along: list[int]) -> bool:
    """Whether a rank is elsewhere than at the beginning of another axis."""
    return any(place for index, place in enumerate(places) if index not in along)
