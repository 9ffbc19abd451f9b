"""The parts of a plan: plain data, the same for all ranks, pickled once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from aiodaft.pipeline import Kind, Schedule
from aiodaft.pipeline.schedule import rank_of_stages
from aiodaft.tensor.instructions import CollectiveKind, Instruction
from aiodaft.tensor.operations import Arguments, Cause, Input, Output, Results
from aiodaft.tensor.passes import SegmentKind
from aiodaft.tensor.specs import Spec


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a plan.

    Attributes:
        received: Bytes that a rank must receive, by rank: the lower bound. For n members and a local tensor of b bytes:
            all_reduce 2b(n-1)/n; all_gather the parts of the others; reduce_scatter (n-1) times its own part;
            all_to_all what others have of its part. Of `send`, from stage to stage of a pipeline, the tensor.
        cause: The operation that needs it, with module and line.
        written: Whether the strategy asks for it, by the placement of a parameter in use, of a module's output, of an
            optimizer's state or of a result; otherwise the rule of an operation does.
        slot: The tensor that it makes.
        times: How often it happens in a step.
    """

    kind: CollectiveKind | Literal["send"]
    axis: str
    received: tuple[int, ...]
    cause: Cause
    written: bool
    slot: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage of a pipeline: forward (F), the gradient of its input (B), those of its parameters (W), or the
    update (U), which runs once a step.

    Attributes:
        takes: The tensors that it reads: inputs of the plan, and what earlier segments of the stage gave.
        gives: The tensors that later segments need, the gradients to accumulate, and outputs of the plan.
    """

    stage: int
    kind: SegmentKind
    takes: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    gives: tuple[int, ...]
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The segments of a program in stages, and the order in which ranks run them.

    Attributes:
        axis: The axis along which stages stand; empty if there is one stage.
        schedule: By coordinate in that axis, the tasks in their order; the update follows.
        gradients: The tensors whose sum over micro-batches, divided by their number, the updates take.
        begins: Parameters that a stage sends to others before a step: number, from stage, to stage.
    """

    axis: str
    microbatches: int
    schedule: Schedule
    segments: tuple[Segment, ...]
    gradients: tuple[int, ...]
    begins: tuple[tuple[int, int, int], ...] = ()

    def tasks(self, place: int) -> tuple[tuple[int, int, str], ...]:
        """Stage, micro-batch and kind of segment of each task of a coordinate, in order; the update follows."""
        is_split = any(task.kind is Kind.W for row in self.schedule for task in row)
        return tuple(
            (task.stage, task.microbatch, kind)
            for task in self.schedule[place]
            for kind in ((task.kind.name,) if is_split or task.kind is not Kind.B else ("B", "W"))
        )


@dataclass(frozen=True)
class Instructions:
    """The instructions of one step on a group with named axes.

    Attributes:
        axes: Names and sizes of the axes. Ranks are row-major: the last axis is the fastest.
        specs: Whole shape, dtype and placements of inputs, outputs and collectives' tensors, by number.
        flops: Floating-point operations of a step, by rank.
        peak: Bytes of tensors that a rank has at most at one time, by rank.
        arguments: As those of the program, and so are `results` and `aliases`.
        causes: The operation of the program for each instruction.
        pipeline: The segments of a program in stages or with micro-batches, which has no instructions besides.
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
    pipeline: Pipeline | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    @property
    def inner(self) -> Mapping[str, int]:
        """The axes of the ranks of one stage: placements are for these."""
        if self.pipeline is None:
            return self.axes
        axis = self.pipeline.axis
        return {name: size for name, size in self.axes.items() if name != axis} or {axis: 1}

    @property
    def stages(self) -> range:
        """The numbers of the stages."""
        return range(1 if self.pipeline is None else len(rank_of_stages(self.pipeline.schedule)))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that have a stage, in the order of `inner`."""
        where = [(list(self.axes).index(axis), place) for axis, place in self.place_of(stage).items()]
        every = product(*map(range, self.axes.values()))
        return tuple(rank for rank, at in enumerate(every) if all(at[index] == place for index, place in where))

    def place_of(self, stage: int) -> dict[str, int]:
        """The coordinate of the ranks of a stage on the axis of the pipeline."""
        if self.pipeline is None or not self.pipeline.axis:
            return {}
        return {self.pipeline.axis: rank_of_stages(self.pipeline.schedule)[stage]}

    @property
    def bytes(self) -> dict[str, tuple[int, ...]]:
        """Bytes that each rank must receive in a step, by axis."""
        total = {axis: [0] * self.size for axis in self.axes}
        for one in self.collectives:
            for rank, count in enumerate(one.received):
                total[one.axis][rank] += count * one.times
        return {axis: tuple(counts) for axis, counts in total.items()}
