"""A plan: the instructions of every rank, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiodaft.pipeline.schedule import rank_of_stages
from aiodaft.tensor.code import Routine
from aiodaft.tensor.hardware import Hardware
from aiodaft.tensor.local_functions import functions_of
from aiodaft.tensor.operations import Cause, Input, Output, described, drawn, ranks_text
from aiodaft.tensor.segments import Instructions, Pipeline
from aiodaft.tensor.simulation import Simulation, simulate
from aiodaft.tensor.stage_runs import StagedRoutine


@dataclass(frozen=True)
class Plan(Instructions):
    """The instructions of one step on a group with named axes, with what they cost."""

    def routine(self, stage: int = 0) -> Routine | StagedRoutine:
        """The program of the ranks that have a stage, with all of their inputs and outputs."""
        places = rank_of_stages(self.pipeline.schedule) if self.pipeline is not None else [0]
        inputs = [one for one in self.inputs if places[one.stage] == places[stage]]
        outputs = [one for one in self.outputs if places[one.stage] == places[stage]]
        return routine_of(self, "step", inputs, outputs, stage)

    def simulate(self, hardware: Hardware) -> Simulation:
        """The time of a step on some hardware: of each rank, each collective and each wait.

        Operations take the time of what they compute, or of the bytes that they read and write. A collective begins
        when all of its members have come to it, after those before it along its axis, and goes on while they compute.

        Raises:
            ValueError: The hardware has fewer devices than the plan has ranks.
            KeyError: It has no rate for a dtype of the plan.
        """
        return simulate(self, hardware)

    def describe(self) -> str:
        """The cost of a step, and each collective with the operation, module and line that needs it, as a text."""
        ranks = f"{self.size} ranks ({', '.join(f'{axis}={size}' for axis, size in self.axes.items())})"
        peak, flops = ranks_text(self.peak), max(self.flops, default=0)
        count = sum(one.times for one in self.collectives)
        head = f"{ranks}: {count} collectives, {flops:.3g} FLOPs and {peak} at most per rank"
        lines = [(one.cause, f"{one.kind} on {one.axis}", one.times, one.written) for one in self.collectives]
        return described(head, self.bytes, lines)

    def draw(self) -> str:
        """An SVG: each module with the placements of its parameters, and its collectives in each part of the step."""
        title = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        parameters = [(one, self.specs[one.slot]) for one in self.inputs if one.role == "parameter"]
        collectives = [(one.cause, f"{one.kind} {one.axis}", one.times) for one in self.collectives]
        return drawn(title, parameters, collectives, self.inner)

    def _repr_html_(self) -> str:
        return self.draw()


def routine_of(
    plan: Plan, name: str, inputs: Sequence[Input], outputs: Sequence[Output], stage: int = 0
) -> Routine | StagedRoutine:
    slots = {one.slot for one in inputs}
    replaced = {(one.name, one.role, one.stage) for one in outputs if one.slot not in slots}
    kept: dict[tuple[str, str, int], int] = {
        (one.name, one.role, one.stage): one.slot for one in inputs if one.role in ("parameter", "buffer", "state")
    }
    if plan.pipeline is not None:
        carried = {one.slot: kept[one.name, one.role, one.stage] for one in outputs if one.role == "buffer"}
        return _staged(plan.pipeline, name, inputs, outputs, carried, stage)
    donated = frozenset(slot for key, slot in kept.items() if key in replaced)
    return Routine(
        name,
        tuple(one.slot for one in inputs),
        plan.instructions,
        tuple(one.slot for one in outputs),
        donated,
        tuple(map(_said, plan.causes)),
        functions_of(plan.instructions),
    )


def _staged(
    pipeline: Pipeline,
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    carried: dict[int, int],
    stage: int,
) -> StagedRoutine:
    places = tuple(rank_of_stages(pipeline.schedule))
    place = places[stage]
    return StagedRoutine(
        name=name,
        inputs=tuple(one.slot for one in inputs),
        outputs=tuple(one.slot for one in outputs),
        axis=pipeline.axis,
        places=places,
        microbatches=pipeline.microbatches,
        tasks=pipeline.tasks(place),
        segments={
            (one.stage, one.kind): Routine(
                f"{name}/{one.kind}{one.stage}",
                one.takes,
                one.instructions,
                one.gives,
                causes=tuple(map(_said, one.causes)),
                functions=functions_of(one.instructions),
            )
            for one in pipeline.segments
            if places[one.stage] == place
        },
        gradients=frozenset(pipeline.gradients),
        begins=pipeline.begins,
        carried=carried,
        counting=next((one.slot for one in inputs if one.name == "random.step"), None),
    )


def _said(cause: Cause) -> str:
    where = ", ".join(one for one in (cause.module, cause.line) if one)
    return f"{cause.operation} in {where} ({cause.phase})" if where else ""
