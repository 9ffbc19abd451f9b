"""A plan: the instructions of every rank, and their cost. Plain data, the same for all ranks, pickled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiodaft.tensor.instructions import CollectiveKind, Instruction
from aiodaft.tensor.operations import Arguments, Cause, Input, Output, Results
from aiodaft.tensor.specs import Spec

__all__ = ["Collective", "Plan"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a plan.

    Attributes:
        received: Bytes that a rank must receive, by rank: the lower bound. For n members and a local tensor of b bytes:
            all_reduce 2b(n-1)/n; all_gather the parts of the others; reduce_scatter (n-1) times its own part;
            all_to_all what others have of its part.
        cause: The operation that needs it, with module and line.
        written: Whether the strategy asks for it, by the placement of a parameter in use, of a module's output, of an
            optimizer's state or of a result; otherwise the rule of an operation does.
        slot: The tensor that it makes.
    """

    kind: CollectiveKind
    axis: str
    received: tuple[int, ...]
    cause: Cause
    written: bool
    slot: int


@dataclass(frozen=True)
class Plan:
    """The instructions of one step on a group with named axes.

    Attributes:
        axes: Names and sizes of the axes. Ranks are row-major: the last axis is the fastest.
        specs: Whole shape, dtype and placements of inputs, outputs and collectives' tensors, by number.
        flops: Floating-point operations of a step, by rank.
        peak: Bytes of tensors that a rank has at most at one time, by rank.
        arguments: As those of the program, and so are `results` and `aliases`.
        causes: The operation of the program for each instruction.
    """

    axes: Mapping[str, int]
    inputs: tuple[Input, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]
    specs: Mapping[int, Spec]
    arguments: Arguments
    results: Results
    collectives: tuple[Collective, ...]
    flops: tuple[int, ...] = ()
    peak: tuple[int, ...] = ()
    scalars: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()

    @property
    def bytes(self) -> dict[str, tuple[int, ...]]:
        """Bytes that each rank must receive in a step, by axis."""
        size = len(next(iter(self.collectives)).received) if self.collectives else 0
        total = {axis: [0] * size for axis in self.axes}
        for one in self.collectives:
            for rank, count in enumerate(one.received):
                total[one.axis][rank] += count
        return {axis: tuple(counts) for axis, counts in total.items()}
