"""Joins small all_reduces into few large ones, as DistributedDataParallel does (Li et al., VLDB 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aiodaft.tensor.instructions import Instruction, Slot, slots_of
from aiodaft.tensor.specs import Spec

__all__ = ["with_buckets"]

LIMIT = 25 << 20
"""Bytes of a bucket, as in DistributedDataParallel."""


@dataclass
class _Bucket:
    members: list[int] = field(default_factory=list)
    outs: set[int] = field(default_factory=set)
    size: int = 0


def with_buckets(
    instructions: Sequence[Instruction],
    specs: Mapping[int, Spec],
    shapes: Callable[[Spec], tuple[tuple[int, ...], ...]],
    new: Callable[[], int],
    limit: int = LIMIT,
) -> tuple[list[Instruction], dict[int, int]]:
    """Joins the all_reduces of one axis, operation and dtype whose results nobody needs before the last of them.

    Returns the instructions, and the tensor of the joined all_reduce by those that it stands for.
    """
    joined = _joined(instructions, specs, shapes, limit)
    last = {bucket.members[-1]: bucket for bucket in joined}
    gone = {at for bucket in joined for at in bucket.members}
    result: list[Instruction] = []
    stands_for: dict[int, int] = {}
    for at, one in enumerate(instructions):
        if (bucket := last.get(at)) is not None:
            members = [instructions[i] for i in bucket.members]
            flat, total = new(), new()
            parts = [member.args[0] for member in members]
            outs = [member.outs[0] for member in members]
            by_rank = [shapes(specs[part.number]) for part in parts]
            result += [
                Instruction("join", None, (parts,), {}, (flat,)),
                Instruction("all_reduce", one.target, (Slot(flat), one.args[1]), {}, (total,)),
                Instruction("split", None, (Slot(total), [_same(shape) for shape in by_rank]), {}, tuple(outs)),
            ]
            stands_for |= {out: total for out in outs if out is not None}
        elif at not in gone:
            result.append(one)
    return result, stands_for


def _joined(
    instructions: Sequence[Instruction],
    specs: Mapping[int, Spec],
    shapes: Callable[[Spec], tuple[tuple[int, ...], ...]],
    limit: int,
) -> list[_Bucket]:
    open_: dict[tuple[str | None, object, torch.dtype], _Bucket] = {}
    closed: list[_Bucket] = []
    for at, one in enumerate(instructions):
        read = set(slots_of((one.args, one.kwargs)))
        closed += [open_.pop(key) for key in list(open_) if open_[key].outs & read]
        if one.kind != "all_reduce" or len(set(shapes(specs[one.args[0].number]))) > 1:
            continue
        spec = specs[one.args[0].number]
        size = math.prod(shapes(spec)[0]) * spec.meta.dtype.itemsize
        key = (one.target, one.args[1], spec.meta.dtype)
        if key in open_ and open_[key].size + size > limit:
            closed.append(open_.pop(key))
        bucket = open_.setdefault(key, _Bucket())
        bucket.members.append(at)
        bucket.outs.update(out for out in one.outs if out is not None)
        bucket.size += size
    return [bucket for bucket in (*closed, *open_.values()) if len(bucket.members) > 1]


def _same(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return list(shapes[0])
