"""Runs the stages of a pipeline that a rank has: its tasks in the order of the schedule, then the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from aiodaft.member import current_group
from aiodaft.ref import Ref
from aiodaft.tensor.code import Code, Routine, Row
from aiodaft.tensor.instructions import Instruction

PIPELINE_AXIS: Final = "pp"


class StagedRoutine(NamedTuple):
    """The stages of one rank. It stands for a `Routine`.

    Attributes:
        inputs: The numbers of the inputs; arguments, and scalars that differ by micro-batch, come as lists.
        tasks: Stage, micro-batch and kind (F, B or W), in their order.
        gradients: The numbers that are summed over micro-batches, and divided by their number.
        begins: Parameters that a stage sends to others before a step: number, from stage, to stage.
        carried: Outputs of forward that are the next value of an input, by number: buffers.
        counting: The number of the input that counts runs; each micro-batch is one.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axis: str
    places: tuple[int, ...]
    microbatches: int
    tasks: tuple[tuple[int, int, str], ...]
    segments: Mapping[tuple[int, str], Routine]
    gradients: frozenset[int]
    begins: tuple[tuple[int, int, int], ...]
    carried: Mapping[int, int]
    counting: int | None = None
    donated: frozenset[int] = frozenset()

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(one for routine in self.segments.values() for one in routine.instructions)


class Pipe:
    """The ranks along the axis of the pipeline, for what goes from stage to stage.

    Attributes:
        microbatch: The one that is being computed; -1 before the first, their number after the last.
    """

    def __init__(self, places: Sequence[int], axis: str) -> None:
        self._places = places
        self._axis = axis
        self._place = current_group().coords.get(axis, 0)
        self._row = current_group()
        self._here: dict[tuple[int, int], Tensor] = {}
        self._sent: list[Ref[None]] = []
        self.microbatch = -1
        self.begun = 0
        self.received = 0

    def begin(self) -> None:
        """Begin a step. Messages of one call of the group meet those of this call alone."""
        self._row = current_group().along(self._axis) if self._axis else current_group()
        self.microbatch = -1

    def send(self, tensor: Tensor, stage: int, number: int) -> None:
        """Send a tensor to a stage; it must not be written to before `end`."""
        if self.is_here(stage):
            self._here[number, self.microbatch] = tensor
        else:
            self._sent.append(self._row.isend(tensor, to=self._places[stage], tag=self._tag(number)))

    def receive(self, stage: int, number: int) -> Tensor:
        if self.is_here(stage):
            return self._here[number, self.microbatch]
        tensor: Tensor = self._row.irecv(source=self._places[stage], tag=self._tag(number)).result()
        self.begun += 1
        self.received += tensor.nbytes
        return tensor

    def end(self) -> None:
        sent, self._sent = self._sent, []
        self._here.clear()
        for one in sent:
            one.result()

    def is_here(self, stage: int) -> bool:
        return self._places[stage] == self._place

    def _tag(self, number: int) -> str:
        return f"{number}/{self.microbatch}"


class StageRuns:
    """Runs the segments of a rank. It stands for a `Code`."""

    def __init__(self, routine: StagedRoutine, rank: int, rows: Mapping[str, Row], watch: Any = None) -> None:
        self._routine = routine
        self.axis = routine.axis
        self.pipe = Pipe(routine.places, routine.axis)
        rows = {**rows, PIPELINE_AXIS: self.pipe}  # type: ignore[dict-item]  # sends and receives, and has no collectives
        group = current_group()
        place = rank_in_stage(group.coords, group.axes, routine.axis)
        self._codes = {key: Code(one, rank, rows, watch, place) for key, one in routine.segments.items()}
        self._ends = last_uses(routine)
        self._held: list[dict[int, Any]] = []

    def held(self) -> Iterable[Tensor]:
        return (one for here in self._held for one in here.values() if isinstance(one, Tensor))

    def run(self, values: list[Any], update: Callable[[], object] = bool) -> tuple[Any, ...]:
        routine, pipe = self._routine, self.pipe
        given = dict(zip(routine.inputs, values, strict=True))
        values.clear()
        if routine.counting is not None:
            first = given[routine.counting] * routine.microbatches
            given[routine.counting] = list(range(first, first + routine.microbatches))
        pipe.begin()
        for number, source, target in routine.begins:
            if pipe.is_here(source):
                pipe.send(given[number], target, number)
        for number, source, target in routine.begins:
            if pipe.is_here(target):
                given[number] = pipe.receive(source, number)
        micro: list[dict[int, Any]] = [{} for _ in range(routine.microbatches)]
        sums: dict[int, Tensor] = {}
        self._held = [sums, given, *micro]
        for stage, microbatch, kind in routine.tasks:
            pipe.microbatch = microbatch
            self._segment((stage, kind), given, micro[microbatch], sums)
        pipe.microbatch = routine.microbatches
        for number, total in sums.items():
            given[number] = total / routine.microbatches
        sums.clear()
        # Updates write to parameters that were sent.
        pipe.end()
        made = self._updates(given, update)
        pipe.end()
        self._held = []
        return tuple(self._output(number, made, micro, given) for number in routine.outputs)

    def _segment(
        self, key: tuple[int, str], given: dict[int, Any], here: dict[int, Any], sums: dict[int, Tensor]
    ) -> None:
        routine = self._routine.segments[key]
        at = self.pipe.microbatch
        values = [
            here[n] if n in here else given[n][at] if isinstance(given[n], list) else given[n] for n in routine.inputs
        ]
        for number in self._ends[key]:
            here.pop(number, None)
        for number, made in zip(routine.outputs, self._codes[key].run(values), strict=True):
            if number in self._routine.gradients:
                # The first is kept as it is, since others may have its memory.
                sums[number] = sums[number] + made if number in sums else made
                continue
            if number in self._routine.carried:
                given[self._routine.carried[number]] = made
            here[number] = made

    def _updates(self, given: dict[int, Any], update: Callable[[], object]) -> dict[int, Any]:
        made: dict[int, Any] = {}
        for key, code in self._codes.items():
            if key[1] == "U":
                routine = self._routine.segments[key]
                outputs = code.run([given[number] for number in routine.inputs], update)
                made.update(zip(routine.outputs, outputs, strict=True))
        return made

    def _output(self, number: int, made: Mapping[int, Any], micro: Sequence[Mapping[int, Any]], given: Any) -> Any:
        if number in made:
            return made[number]
        if number in self._routine.carried:
            return given[self._routine.carried[number]]
        if number in given:
            return given[number]
        parts = [one[number] for one in micro]
        if parts[0].dim():
            return torch.cat(parts)
        total = torch.stack(parts).sum()
        return total / len(parts) if total.is_floating_point() else total


def rank_in_stage(coords: Mapping[str, int], axes: Mapping[str, int], pipeline: str) -> int:
    """The rank among the members of one stage, which differ in the other axes."""
    rank = 0
    for axis, size in axes.items():
        rank = rank if axis == pipeline else rank * size + coords[axis]
    return rank


def last_uses(routine: StagedRoutine) -> dict[tuple[int, str], tuple[int, ...]]:
    kept = set(routine.outputs) - routine.carried.keys()
    order = {kind: at for at, kind in enumerate("FBW")}
    last: dict[int, tuple[int, str]] = {}
    for key in sorted((key for key in routine.segments if key[1] != "U"), key=lambda key: order[key[1]]):
        last |= dict.fromkeys(routine.segments[key].inputs, key)
    ends: dict[tuple[int, str], list[int]] = {key: [] for key in routine.segments}
    for number, key in last.items():
        if number not in kept:
            ends[key].append(number)
    return {key: tuple(numbers) for key, numbers in ends.items()}
