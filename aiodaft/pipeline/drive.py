"""Runs a schedule on actors: call by call, or captured by `aiodaft.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodaft.ref import Ref

from .schedule import Kind, Schedule, ScheduleError, Task, needs, paths_of, rank_of_stages, simulate

__all__ = ["PipelineRank", "drive"]


class PipelineRank(Protocol):
    """The methods that a schedule calls on an actor. They are all `def`, so that they run in order.

    A rank keeps the activations of a micro-batch from its `forward` to its `backward` (or to its `weights`, if the
    schedule has W tasks).
    """

    def start(self, batch: Any) -> Ref[None]:
        """Begin a run: with the batch on ranks with the first or the last stage, with None on others."""
        ...

    def forward(self, stage: int, microbatch: int, x: Any) -> Ref[Any]:
        """Compute the activations of a stage. `x` is None for the first stage, which takes its part of the batch.

        The `backward` of the last stage gets the result of its `forward`: None, if the actor keeps the loss.
        """
        ...

    def backward(self, stage: int, microbatch: int, gradient: Any) -> Ref[Any]:
        """Compute the gradient of the stage's input from that of its output (at the last stage: see `forward`)."""
        ...

    def weights(self, stage: int, microbatch: int) -> Ref[None]:
        """Compute the gradients of the stage's weights; only schedules with W tasks call it."""
        ...

    def finish(self, done: Any) -> Ref[Any]:
        """End a run, and return a result, such as the losses.

        `done` contains only None. If a forward or a backward fails, no rank finishes, so that none steps its optimizer.
        If a `weights` fails, its rank does not.
        """
        ...


def drive(schedule: Schedule, ranks: Sequence[PipelineRank], batch: Any) -> list[Ref[Any]]:
    """Run a schedule once. Returns the results of the ranks' `finish`.

    All calls are made at once, and each rank runs its own in the order of the schedule. Activations and gradients go
    from rank to rank as refs: they do not pass through the caller, and there are no sends and receives to put in order.
    If a forward or a backward fails, every returned ref fails with its error; if a `weights` fails, that of its rank.

    Args:
        schedule: For each rank its tasks.
        ranks: The actors.
        batch: A value or ref for the ranks with the first and the last stage.

    Raises:
        ScheduleError: The schedule cannot be run, or its number of ranks is not that of the actors.
    """
    if len(schedule) != len(ranks):
        raise ScheduleError(f"a schedule for {len(schedule)} ranks cannot run on {len(ranks)} actors")
    order = simulate(schedule).order()
    rank_of, paths = rank_of_stages(schedule), paths_of(schedule)
    ends = {rank_of[0], rank_of[-1]}
    began = [actor.start(batch if rank in ends else None) for rank, actor in enumerate(ranks)]
    results: dict[Task, Ref[Any]] = {}
    for task in order:
        stage, microbatch, kind = task
        actor = ranks[rank_of[stage]]
        needed = [results[other] for other in needs(task, paths[microbatch])]
        if kind is Kind.F:
            results[task] = actor.forward(stage, microbatch, needed[0] if needed else None)
        elif kind is Kind.B:
            # At the last stage, the result of its `forward`.
            results[task] = actor.backward(stage, microbatch, needed[-1])
        else:
            results[task] = actor.weights(stage, microbatch)
    # A task that fails makes the last task of its micro-batch fail, the backward of the first stage.
    ended = [ref for task, ref in results.items() if task.stage == 0 and task.kind is Kind.B]
    weights = [(rank_of[task.stage], ref) for task, ref in results.items() if task.kind is Kind.W]
    return [
        actor.finish([*began, *ended, *(ref for where, ref in weights if where == rank)])
        for rank, actor in enumerate(ranks)
    ]
