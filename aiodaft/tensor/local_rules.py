"""The rules of functions of local tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate

from aiodaft.tensor.instructions import ByRank, Instruction, Slot
from aiodaft.tensor.local_functions import named
from aiodaft.tensor.own_rules import Lowers
from aiodaft.tensor.specs import Meta, Placement, Placements, Spec, placed

__all__ = ["by_local_rule"]

_TAPE: Final = Meta((0,), (1,), torch.int64)


def by_local_rule(lowers: Lowers, op: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
    """The results of `aiodaft.local` or of its backward, or NotImplemented."""
    if op is torch.ops.aiodaft.local.default:
        return _forward(lowers, *args)
    if op is torch.ops.aiodaft.local_backward.default:
        return _backward(lowers, *args)
    return NotImplemented


def _forward(lowers: Lowers, name: str, tensors: Sequence[Slot]) -> list[Slot]:
    inputs, outputs, target = _placements(lowers, name)
    given = [lowers.redistribute(one.number, want) for one, want in zip(tensors, inputs, strict=True)]
    metas = _metas(name, [lowers.spec(number).meta for number in given])
    specs = [Spec(one, meta) for one, meta in zip(outputs, metas, strict=True)]
    local = [lowers.rules.local_shapes(one) for one in specs]
    shapes = ByRank(tuple([list(one[rank]) for one in local] for rank in range(lowers.rules.size)))
    replicas = tuple(Replicate() for _ in lowers.rules.axes)
    outs = tuple(lowers.new(one) for one in (*specs, Spec(replicas, _TAPE)))
    lowers.emit(Instruction("local", target, (shapes, *map(Slot, given)), {}, outs))
    return [*map(Slot, outs)]


def _backward(lowers: Lowers, name: str, grads: Sequence[Slot], tensors: Sequence[Slot], tape: Slot) -> list[Slot]:
    inputs, outputs, _ = _placements(lowers, name)
    wanted = [tuple(Replicate() if one.is_partial() else one for one in placements) for placements in outputs]
    given = [lowers.redistribute(one.number, want) for one, want in zip(grads, wanted, strict=True)]
    apart = [any(not one[axis].is_replicate() for one in outputs) for axis in range(len(lowers.rules.axes))]
    outs = []
    for slot, placements in zip(tensors, inputs, strict=True):
        meta = lowers.spec(slot.number).meta
        # A rank has its term of the gradient of a replica.
        terms = [Partial() if one.is_replicate() and cut else one for one, cut in zip(placements, apart, strict=True)]
        outs.append(lowers.new(Spec(tuple(terms), meta)))
    lowers.emit(Instruction("local", f"{name}, backward", (tape, *map(Slot, given)), {}, tuple(outs)))
    return [*map(Slot, outs)]


def _placements(lowers: Lowers, name: str) -> tuple[list[Placements], list[Placements], str]:
    """Of inputs and outputs, and the target; all ranks do the whole if the group lacks an axis."""
    function, axes = named(name), lowers.rules.axes

    def on_axes(given: Mapping[str, Placement]) -> Placements:
        return placed(given, axes) if is_known else tuple(Replicate() for _ in axes)

    is_known = function.axes <= axes.keys()
    target = name if is_known else f"{name}, whole"
    return [on_axes(one) for one in function.inputs], [on_axes(one) for one in function.outputs], target


def _metas(name: str, metas: Sequence[Meta]) -> list[Meta]:
    with FakeTensorMode():
        tensors = [torch.empty_strided(one.shape, one.stride, dtype=one.dtype) for one in metas]
        outputs = torch.ops.aiodaft.local.default(name, tensors)
    return [Meta.of(one) for one in outputs[:-1]]
