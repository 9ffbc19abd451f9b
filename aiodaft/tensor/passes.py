"""Passes over the instructions of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from aiodaft.tensor.instructions import Instruction, Slot, operation, slots_of
from aiodaft.tensor.operations import Cause, Gradient, Mark, Operation, Phase, Trace
from aiodaft.tensor.specs import Meta, Spec
from aiodaft.tensor.strategy import nearest
from aiodaft.tensor.views import written_arguments


class Step(NamedTuple):
    instruction: Instruction
    cause: Cause


def without_dead(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    needed, kept = set(wanted), list[Step]()
    for step in reversed(steps):
        one = step.instruction
        if one.kind in ("local", "send") or _mutates(one) or any(out in needed for out in one.outs):
            needed.update(slots_of((one.args, one.kwargs)))
            kept.append(step)
    return kept[::-1]


def _mutates(one: Instruction) -> bool:
    return one.kind == "op" and one.target is not None and operation(one.target)._schema.is_mutable


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
        stops = [
            key for key, bucket in open_.items() if bucket.outs & read or (_mutates(one) and bucket.sources & read)
        ]
        closed += [open_.pop(key) for key in stops]
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


Traced: TypeAlias = Operation | Mark | Gradient

SegmentKind: TypeAlias = Literal["F", "B", "W", "U"]
"""Forward; the gradient of the stage's input; the gradients of its parameters; the update, once a step."""


@dataclass
class Stages:
    """The operations of each stage.

    Attributes:
        at: The stage of each tensor; none of those that belong to no stage.
        where: The stage and kind of each tensor that an operation of a stage makes.
        free: The operations that belong to no stage, by the tensors that they make.
    """

    count: int
    steps: dict[tuple[int, SegmentKind], list[Traced]] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    where: dict[int, tuple[int, SegmentKind]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    free: dict[int, Traced] = field(default_factory=dict)


def split(trace: Trace, cuts: Sequence[str]) -> Stages:
    stages = Stages(len(cuts) + 1)
    modules = list(dict.fromkeys(one.module for one in trace.operations if isinstance(one, Mark) and one.side == "out"))
    for cut in cuts:
        if cut not in modules:
            raise ValueError(f"stages: no module {cut!r} gives a tensor; the nearest are {nearest(cut, modules)}")
    _forward(trace, cuts, stages)
    backward = _backward(trace, cuts, stages)
    _weights(stages, backward)
    _update(trace, stages)
    for place, steps in stages.steps.items():
        stages.where |= {out: place for step in steps for out in outs_of(step)}
    return stages


def reads_of(step: Traced) -> list[int]:
    return slots_of((step.args, step.kwargs)) if isinstance(step, Operation) else [step.source]


def outs_of(step: Traced) -> list[int]:
    return [one for one in step.outs if one is not None] if isinstance(step, Operation) else [step.out]


def phase_of(step: Traced) -> Phase:
    return "update" if isinstance(step, Gradient) else step.cause.phase


def _forward(trace: Trace, cuts: Sequence[str], stages: Stages) -> None:
    roles = {one.slot: one.role for one in trace.inputs}
    # Whether a tensor depends on parameters, and on arguments.
    depends = {slot: (role == "parameter", role == "argument") for slot, role in roles.items()}
    for step in trace.operations:
        if phase_of(step) != "forward":
            continue
        read = reads_of(step)
        needs = [any(depends[one][which] for one in read) for which in (0, 1)]
        is_cut = isinstance(step, Mark) and step.side == "out" and not step.gradient and step.module in cuts
        for out in outs_of(step):
            depends[out] = (needs[0], needs[1])
        if not all(needs) and not is_cut:
            stages.free |= dict.fromkeys(outs_of(step), step)
            continue
        stage = max((stages.at[one] for one in read if one in stages.at), default=0)
        if is_cut and isinstance(step, Mark):
            if stage != cuts.index(step.module):
                raise ValueError(
                    f"stages: {step.module} ends in stage {stage}, and stands at place {cuts.index(step.module)}: give "
                    "the modules in the order in which they end, each once"
                )
            stage += 1
        _put(stages, step, stage, "F")


def _backward(trace: Trace, cuts: Sequence[str], stages: Stages) -> list[Traced]:
    made: set[int] = set()
    backward: list[Traced] = []
    for step in trace.operations:
        if phase_of(step) != "backward":
            continue
        read = [one for one in reads_of(step) if one in stages.at]
        if not read:
            stages.free |= dict.fromkeys(outs_of(step), step)
            continue
        gradients = [stages.at[one] for one in read if one in made]
        stage = min(gradients) if gradients else max(stages.at[one] for one in read)
        stage -= isinstance(step, Mark) and step.side == "out" and step.module in cuts
        made.update(outs_of(step))
        stages.at |= dict.fromkeys(outs_of(step), stage)
        backward.append(step)
    return backward


def _weights(stages: Stages, backward: Sequence[Traced]) -> None:
    """B is all that another stage depends on, W the rest."""
    needed: set[int] = set()
    for step in reversed(backward):
        stage = stages.at[_first(step)]
        read = reads_of(step)
        needed.update(one for one in read if stages.at.get(one, stage) != stage)
        if needed.intersection(outs_of(step)):
            needed.update(read)
    for step in backward:
        kind: SegmentKind = "B" if needed.intersection(outs_of(step)) else "W"
        stages.steps.setdefault((stages.at[_first(step)], kind), []).append(step)


def _update(trace: Trace, stages: Stages) -> None:
    names = {one.name: one.slot for one in trace.inputs if one.role == "parameter"}
    sizes = {slot: meta.nbytes for slot, meta in trace.metas.items()}
    for step in trace.operations:
        if isinstance(step, Gradient):
            stages.owners[names[step.parameter]] = stages.at.get(step.source, 0)
    users: dict[int, int] = {}
    for (stage, _), steps in stages.steps.items():
        for number in (number for step in steps for number in reads_of(step)):
            users[number] = min(stage, users.get(number, stage))
    kept = [one.slot for one in trace.inputs if one.role in ("parameter", "buffer")]
    stages.owners |= {slot: users[slot] for slot in kept if slot in users and slot not in stages.owners}
    held = dict(stages.owners)
    held |= {
        one.slot: stages.owners.get(names[one.parameter], 0)
        for one in trace.inputs
        if one.role == "state" and one.parameter
    }
    stages.owners |= _homes(trace, [slot for slot in kept if slot not in stages.owners], held, sizes)
    held |= stages.owners
    for step in trace.operations:
        if phase_of(step) != "update":
            continue
        read = [(sizes[number], held[number]) for number in reads_of(step) if number in held]
        if isinstance(step, Gradient):
            stage = stages.owners[names[step.parameter]]
        elif not read and (micro := [stages.at[number] for number in reads_of(step) if number in stages.at]):
            _put(stages, step, max(micro), "F")  # Of values of forward alone, such as `loss.detach()`.
            continue
        elif not read:
            stages.free |= dict.fromkeys(outs_of(step), step)
            continue
        else:
            # A write is at the stage of its target.
            written = _written(step)
            stage = max(read)[1] if written is None else held.get(written, max(read)[1])
        held |= dict.fromkeys(outs_of(step), stage)
        _put(stages, step, stage, "U")


def _written(step: Traced) -> int | None:
    written = written_arguments(step.target, step.args, step.kwargs) if isinstance(step, Operation) else []
    return written[0] if written else None


def _homes(trace: Trace, slots: Sequence[int], held: Mapping[int, int], sizes: Mapping[int, int]) -> dict[int, int]:
    """The stages of tensors that the update alone reads, such as averages: that of the parameters they meet."""
    homes, alone, stages = dict.fromkeys(slots, 0), {slot: {slot} for slot in slots}, dict(held)
    for step in trace.operations:
        if phase_of(step) != "update" or isinstance(step, Gradient):
            continue
        read = reads_of(step)
        met = set[int]().union(*(alone[number] for number in read if number in alone))
        if at := [(sizes[number], stages[number]) for number in read if number in stages]:
            stage = max(at)[1]
            homes |= dict.fromkeys(met, stage)
            stages |= dict.fromkeys([*met, *outs_of(step)], stage)
            alone = {number: roots - met for number, roots in alone.items() if roots - met}
        elif met:
            alone |= dict.fromkeys(outs_of(step), met)
    return homes


def _put(stages: Stages, step: Traced, stage: int, kind: SegmentKind) -> None:
    stages.at |= dict.fromkeys(outs_of(step), stage)
    stages.steps.setdefault((stage, kind), []).append(step)


def _first(step: Traced) -> int:
    return outs_of(step)[0]
