"""Leaves out the instructions that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiodaft.tensor.instructions import Instruction, operation, slots_of
from aiodaft.tensor.passes.step import Step

__all__ = ["without_dead"]


def without_dead(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    """The instructions that the wanted tensors depend on, and those that write to a tensor."""
    needed, kept = set(wanted), list[Step]()
    for step in reversed(steps):
        one = step.instruction
        if _writes(one) or any(out in needed for out in one.outs):
            needed.update(slots_of((one.args, one.kwargs)))
            kept.append(step)
    return kept[::-1]


def _writes(instruction: Instruction) -> bool:
    if instruction.kind != "op" or instruction.target is None:
        return instruction.kind in ("local", "send")
    return operation(instruction.target)._schema.is_mutable
