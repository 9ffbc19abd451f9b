"""Tensors that come to workers from other actors: from other workers, and the results of methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from aiodaft.checkpoint import Saved
from aiodaft.ref import Ref, Refs
from aiodaft.resharding import Layout, Sharding, reshard
from aiodaft.tensor.blocks import Cell
from aiodaft.tensor.operations import Input
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.recorder import Recorder, values_of
from aiodaft.tensor.specs import Meta, Placements, Spec, bounds, checked, coords, text
from aiodaft.tensor.worker import SEED, STEP, Worker

RANDOM = (SEED, STEP)


def sharding_of(spec: Spec, axes: Mapping[str, int], only: Mapping[str, int] | None = None) -> Sharding:
    """The layout of a placed tensor, of ranks at the place `only` on other axes."""
    dims: dict[int, list[str]] = {}
    for axis, placement in zip(axes, spec.placements, strict=True):
        if not isinstance(placement, Replicate):
            dims.setdefault(placement.dim, []).append(axis)  # type: ignore[attr-defined]  # a shard
    return Sharding(shape=spec.meta.shape, dtype=spec.meta.dtype, dims=dims, only=dict(only or {}))


async def moved(cell: Cell, here: Recorder, to: Recorder, placements: Placements) -> Cell:
    """The same tensor at other workers: each rank gets each of its elements once, from the processes that have them.

    Cancellation: the tensor is not there; nothing else changes.
    """
    cell = here.gathered(cell)
    here.flush()
    await here.settle(cell.block)
    source, there = cell.layout.spec, Spec(placements, cell.layout.spec.meta)
    plan = reshard(_layout(source, here.axes), _layout(there, to.axes))
    parts = await plan.move(here.group.all(Worker.shard, here.session, cell.number), to=to.group)
    made, _ = await _kept(to, parts, there)
    return made


async def adopted(recorder: Recorder, refs: Iterable[Ref[Tensor]], placements: Placements) -> Cell:
    """Results of methods as the parts of a tensor, where they are.

    Raises:
        TypeError: A result is no tensor.
        ValueError: There is not one ref for each rank, or the parts make no whole.
        Exception: The error of a call.

    Cancellation: the tensor is not there; nothing else changes.
    """
    parts = list(refs)
    axes, size = recorder.axes, len(recorder.group)
    if len(parts) != size:
        raise ValueError(f"there are {len(parts)} refs, and the group has {size} ranks: give one for each")
    made, metas = await _kept(recorder, parts, Spec(placements, Meta((), (), torch.float32)))
    shapes = [meta.shape for meta in metas]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"the parts differ in their numbers of dimensions: {', '.join(map(str, shapes))}")
    placements = checked(placements, len(shapes[0]))
    whole = list(shapes[0])
    for dim in range(len(whole)):
        along = [index for index, one in enumerate(placements) if one.is_shard(dim)]
        ranks = [rank for rank in range(size) if not any(_others(coords(axes, rank), along))]
        whole[dim] = sum(shapes[rank][dim] for rank in ranks)
    for rank, meta in enumerate(metas):
        want = tuple(length for _, length in bounds(whole, placements, axes, rank))
        if (meta.shape, meta.dtype) != (want, metas[0].dtype):
            raise ValueError(
                f"the part of rank {rank} is {meta.dtype} {meta.shape}; of {metas[0].dtype} {tuple(whole)} with "
                f"{', '.join(map(text, placements))} it has {want}"
            )
    meta = Meta(tuple(whole), tuple(torch.empty(whole, device="meta").stride()), metas[0].dtype)
    made.layout = recorder.entries.layout(Spec(placements, meta))
    return made


def layout_once(plan: Plan, tensors: Mapping[str, tuple[Input, int]], numbers: Iterable[str]) -> Layout:
    """The layout of a state of which each part is at one rank. Of replicas, the ranks take turns."""
    made = {name: _number(plan.axes) for name in numbers}
    by_size = sorted(tensors.items(), key=lambda item: -plan.specs[item[1][0].slot].meta.nbytes)
    for turn, (name, (one, _)) in enumerate(by_size):
        spec, only = plan.specs[one.slot], dict(plan.place_of(one.stage))
        for (axis, size), placement in zip(plan.inner.items(), spec.placements, strict=True):
            if placement.is_replicate():
                turn, only[axis] = divmod(turn, size)
        made[name] = sharding_of(spec, plan.inner, only)
    return Layout(plan.axes, made)


def _number(axes: Mapping[str, int]) -> Sharding:
    return Sharding(shape=(), dtype=torch.int64, only=dict.fromkeys(axes, 0))


async def saved_numbers(saved: Saved) -> dict[str, int]:
    names = saved.places.keys() & RANDOM
    if not names:
        return {}
    axes = saved.group.axes
    found = await (await saved.load(Layout(axes, dict.fromkeys(names, _number(axes)))))[0]
    return {name: int(number) for name, number in found.items()}


async def _kept(recorder: Recorder, parts: Iterable[Ref[Any]], spec: Spec) -> tuple[Cell, list[Meta]]:
    cell = recorder.reserve(spec)
    given: Refs[Tensor | dict[str, Tensor]] = Refs(list(parts))
    refs = recorder.group.each(Worker.adopt, given, recorder.session, cell.number)
    return cell, [Meta(*one) for one in await values_of(refs)]


def _layout(spec: Spec, axes: Mapping[str, int]) -> Layout:
    return Layout(axes, {"x": sharding_of(spec, axes)})


def _others(places: tuple[int, ...], along: list[int]) -> list[int]:
    return [place for index, place in enumerate(places) if index not in along]
