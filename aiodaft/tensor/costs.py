"""Counts of a plan: floating-point operations and bytes, by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from aiodaft.tensor.instructions import Instruction, Slot, operation, slots_of
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Spec

__all__ = ["flops_of", "peak_of"]


def flops_of(instructions: Sequence[Instruction], specs: Mapping[int, Spec], rules: Rules) -> tuple[int, ...]:
    """Floating-point operations of matrix products, convolutions and attention, as torch's flop counter counts them."""
    total = [0] * rules.size
    for one in instructions:
        if one.kind != "op" or one.target is None:
            continue
        op = operation(one.target)
        count = flop_registry.get(op.overloadpacket)
        if count is None:
            continue
        outs = [None if out is None else rules.local_shapes(specs[out]) for out in one.outs]
        shapes = [rules.local_shapes(specs[number]) for number in slots_of((one.args, one.kwargs)) if number in specs]
        known: dict[Any, int] = {}
        for rank in range(rules.size):
            key = tuple(shape[rank] for shape in shapes)
            if key not in known:

                def local(value: Any, rank: int = rank) -> Any:
                    is_tensor = isinstance(value, Slot) and value.number in specs
                    return _shaped(rules.local_shapes(specs[value.number])[rank]) if is_tensor else value

                args, kwargs = tree_map(local, (one.args, dict(one.kwargs)))
                made = [shape and _shaped(shape[rank]) for shape in outs]
                known[key] = int(count(*args, **kwargs, out_val=made if len(made) > 1 else made[0]))
            total[rank] += known[key]
    return tuple(total)


def _shaped(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def peak_of(
    instructions: Sequence[Instruction],
    inputs: Sequence[int],
    outputs: Sequence[int],
    specs: Mapping[int, Spec],
    rules: Rules,
) -> tuple[int, ...]:
    """Bytes of the local tensors that are alive at one time at most, by rank; views cost nothing of their own."""
    base: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, one in enumerate(instructions):
        read = slots_of((one.args, one.kwargs))
        if read and _is_view(one):
            base |= {out: base.get(read[0], read[0]) for out in one.outs if out is not None}
        for number in (*read, *(out for out in one.outs if out is not None)):
            last[base.get(number, number)] = at
    none = (0,) * rules.size

    def size(number: int) -> tuple[int, ...]:
        return rules.local_bytes(specs[number]) if number in specs else none

    kept = {base.get(one, one) for one in (*inputs, *outputs)}
    ends: dict[int, list[int]] = {}
    for number, at in last.items():
        if number not in kept:
            ends.setdefault(at, []).append(number)
    now = [sum(column) for column in zip(none, *map(size, inputs), strict=True)]
    most = list(now)
    for at, one in enumerate(instructions):
        for out in one.outs:
            if out is not None and out not in base:
                now = [a + b for a, b in zip(now, size(out), strict=True)]
        most = [max(a, b) for a, b in zip(most, now, strict=True)]
        for number in ends.get(at, ()):
            now = [a - b for a, b in zip(now, size(number), strict=True)]
    return tuple(most)


def _is_view(instruction: Instruction) -> bool:
    if instruction.kind in ("alias", "split"):
        return True
    return instruction.kind == "op" and instruction.target is not None and _returns_view(instruction.target)


@cache
def _returns_view(target: str) -> bool:
    return any(one.alias_info is not None for one in operation(target)._schema.returns)
