"""The part of a plan that a worker needs, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

from aiodaft.pipeline import Kind
from aiodaft.pipeline.schedule import rank_of_stages
from aiodaft.tensor.code import Routine
from aiodaft.tensor.local_functions import functions_of
from aiodaft.tensor.operations import Cause, Input, Output
from aiodaft.tensor.plan import Pipeline, Plan
from aiodaft.tensor.stage_runs import StagedRoutine

__all__ = ["routine_of"]


def routine_of(
    plan: Plan, name: str, inputs: Sequence[Input], outputs: Sequence[Output], stage: int = 0
) -> Routine | StagedRoutine:
    """The routine of the ranks of a stage, which take these inputs and give these outputs, among those of the plan."""
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
    is_split = any(task.kind is Kind.W for row in pipeline.schedule for task in row)
    tasks = [
        (task.stage, task.microbatch, kind)
        for task in pipeline.schedule[place]
        for kind in ((task.kind.name,) if is_split or task.kind is not Kind.B else ("B", "W"))
    ]
    return StagedRoutine(
        name=name,
        inputs=tuple(one.slot for one in inputs),
        outputs=tuple(one.slot for one in outputs),
        axis=pipeline.axis,
        places=places,
        microbatches=pipeline.microbatches,
        tasks=tuple(tasks),
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
