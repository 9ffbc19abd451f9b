"""Runs a schedule on actors: eagerly, or captured by `aiodaft.compile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiodaft.ref import Ref

from .schedule import Kind, Schedule, ScheduleError, Task, rank_of_stages, simulate

__all__ = ["PipelineRank", "drive"]


class PipelineRank(Protocol):
    """What a schedule asks of an actor: methods of these names, all of them `def`, so that they run in order.

    A rank keeps the activations of a micro-batch from its `forward` to its `backward` (or `weights`, if apart).
    """

    def start(self, batch: Any) -> Ref[None]:
        """A run begins: the batch for ranks with the first or the last stage, None for others."""
        ...

    def forward(self, stage: int, microbatch: int, x: Any) -> Ref[Any]:
        """Activations of a stage; `x` is None for the first one, which takes its micro-batch from the batch.

        What the last stage returns is what its `backward` gets: None, if the actor keeps the loss.
        """
        ...

    def backward(self, stage: int, microbatch: int, gradient: Any) -> Ref[Any]:
        """Gradient of the stage's input, of what comes from the stage behind (from its own `forward` at the last)."""
        ...

    def weights(self, stage: int, microbatch: int) -> Ref[None]:
        """Gradients of the stage's weights; called only by schedules that have them apart."""
        ...

    def finish(self, done: Any) -> Ref[Any]:
        """The run is over: say what came of it, such as the losses.

        `done` holds nothing but None: it is there so that no rank finishes (and steps its optimizer) unless all went
        well.
        """
        ...


def drive(schedule: Schedule, ranks: Sequence[PipelineRank], batch: Any) -> list[Ref[Any]]:
    """Run a schedule once: returns what each rank's `finish` gives.

    Every call is made at once and in an order in which no task comes before what it needs; each rank runs its own in
    the order of the schedule. Activations and gradients go from rank to rank as refs, so that nothing passes through
    the caller, and no order of sends and receives can be wrong.

    Args:
        schedule: For each rank its tasks.
        ranks: The actors.
        batch: A value or ref for the ranks with the first and the last stage.

    An error of any task is the error of every ref that is returned.

    Raises:
        ScheduleError: The schedule cannot be run, or has not as many ranks as there are actors.
    """
    if len(schedule) != len(ranks):
        raise ScheduleError(f"a schedule for {len(schedule)} ranks cannot run on {len(ranks)} actors")
    order = simulate(schedule).order()
    rank_of = rank_of_stages(schedule)
    ends = {rank_of[0], rank_of[-1]}
    began = [actor.start(batch if rank in ends else None) for rank, actor in enumerate(ranks)]
    results: dict[Task, Ref[Any]] = {}
    for task in order:
        stage, microbatch, kind = task
        actor = ranks[rank_of[stage]]
        if kind is Kind.F:
            x = results.get(Task(stage - 1, microbatch, Kind.F))
            results[task] = actor.forward(stage, microbatch, x)
        elif kind is Kind.B:
            behind = Task(stage + 1, microbatch, Kind.B)
            gradient = results[behind if behind in results else Task(stage, microbatch, Kind.F)]
            results[task] = actor.backward(stage, microbatch, gradient)
        else:
            results[task] = actor.weights(stage, microbatch)
    # Whatever fails makes the last task of its micro-batch fail, back at the first stage.
    ended = [ref for task, ref in results.items() if task.stage == 0 and task.kind is Kind.B]
    return [actor.finish([*began, *ended, *_weights_on(rank, rank_of, results)]) for rank, actor in enumerate(ranks)]


def _weights_on(rank: int, rank_of: Sequence[int], results: Mapping[Task, Ref[Any]]) -> list[Ref[Any]]:
    return [ref for task, ref in results.items() if task.kind is Kind.W and rank_of[task.stage] == rank]
