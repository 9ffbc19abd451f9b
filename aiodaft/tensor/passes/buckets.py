"""Joins small all_reduces into few large ones, as DistributedDataParallel does (Li et al., VLDB 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aiodaft.tensor.instructions import Instruction, Slot, operation, slots_of
from aiodaft.tensor.passes.step import Step
from aiodaft.tensor.specs import Meta, Spec

__all__ = ["with_buckets"]

LIMIT = 25 << 20
"""Bytes of a bucket, as in DistributedDataParallel."""


@dataclass
class _Bucket:
    members: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    outs: set[int] = field(default_factory=set)
    size: int = 0


def with_buckets(
    steps: Sequence[Step],
    specs: Mapping[int, Spec],
    shapes: Callable[[Spec], tuple[tuple[int, ...], ...]],
    new: Callable[[Meta], int],
    limit: int = LIMIT,
) -> tuple[list[Step], dict[int, int]]:
    """Joins the all_reduces of one axis, operation and dtype whose results nobody needs before the last of them.

    Returns the steps, and the tensor of the joined all_reduce by those that it stands for.
    """
    joined = _joined(steps, specs, shapes, limit)
    last = {bucket.members[-1]: bucket for bucket in joined}
    gone = {at for bucket in joined for at in bucket.members}
    result: list[Step] = []
    stands_for: dict[int, int] = {}
    for at, step in enumerate(steps):
        if (bucket := last.get(at)) is not None:
            members = [steps[i].instruction for i in bucket.members]
            parts = [member.args[0] for member in members]
            outs = [member.outs[0] for member in members]
            by_rank = [shapes(specs[part.number]) for part in parts]
            elements = sum(math.prod(shape[0]) for shape in by_rank)
            meta = Meta((elements,), (1,), specs[parts[0].number].meta.dtype)
            flat, total = new(meta), new(meta)
            joined_up = (
                Instruction("join", None, (parts,), {}, (flat,)),
                Instruction(
                    "all_reduce", step.instruction.target, (Slot(flat), step.instruction.args[1]), {}, (total,)
                ),
                Instruction("split", None, (Slot(total), [list(shape[0]) for shape in by_rank]), {}, tuple(outs)),
            )
            result += [Step(one, step.cause) for one in joined_up]
            stands_for |= {out: total for out in outs if out is not None}
        elif at not in gone:
            result.append(step)
    return result, stands_for


def _joined(
    steps: Sequence[Step],
    specs: Mapping[int, Spec],
    shapes: Callable[[Spec], tuple[tuple[int, ...], ...]],
    limit: int,
) -> list[_Bucket]:
    open_: dict[tuple[str | None, object, torch.dtype], _Bucket] = {}
    closed: list[_Bucket] = []
    for at, step in enumerate(steps):
        one = step.instruction
        read = set(slots_of((one.args, one.kwargs)))
        writes = one.kind == "op" and one.target is not None and operation(one.target)._schema.is_mutable
        closed += [
            open_.pop(key)
            for key, bucket in list(open_.items())
            if bucket.outs & read or (writes and bucket.sources & read)
        ]
        if one.kind != "all_reduce" or len(set(shapes(specs[one.args[0].number]))) > 1:
            continue
        spec = specs[one.args[0].number]
        size = math.prod(shapes(spec)[0]) * spec.meta.dtype.itemsize
        key = (one.target, one.args[1], spec.meta.dtype)
        if key in open_ and open_[key].size + size > limit:
            closed.append(open_.pop(key))
        bucket = open_.setdefault(key, _Bucket())
        bucket.members.append(at)
        bucket.sources.add(one.args[0].number)
        bucket.outs.update(out for out in one.outs if out is not None)
        bucket.size += size
    return [bucket for bucket in (*closed, *open_.values()) if len(bucket.members) > 1]
