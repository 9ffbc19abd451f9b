"""Rows of graphs, as a search for deadlocks sees them: how other processes call them, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from aiodaft._protocol.deadlock import CallAt
from aiodaft._protocol.ids import CallId, PeerId

if TYPE_CHECKING:
    from aiodaft._runtime.graphs.participant import Part, Run
    from aiodaft._runtime.graphs.registry import Graphs
    from aiodaft._runtime.graphs.segment_call import RowCall

# A row has no number at the graph's owner. It is called by a value that it makes: the graph, the run and the value in
# one number, below those of calls.
_VALUE_BITS: Final = 32
_RUN_BITS: Final = 64


def _number(graph: int, run: int, value: int) -> CallId:
    return CallId(-1 - ((graph << _RUN_BITS | run) << _VALUE_BITS | value))


def row_number(call: RowCall) -> CallId:
    """The number of a row, among the calls of the graph's owner."""
    return _number(call.run.part.number, call.run.number, call.row.jobs[0].index)


def find_row(graphs: Graphs, at: CallAt) -> RowCall | None:
    """The row that has this number; or one that makes a result which has it."""
    for run, value in _values_at(graphs, at):
        for call in run.calls:
            if any(job.index == value for job in call.row.jobs):
                return call
    return None


def _values_at(graphs: Graphs, at: CallAt) -> Iterator[tuple[Run, int]]:
    for part in graphs.parts_of(at.owner):
        for run in part.runs.values():
            if at.number in run.numbers:
                yield run, part.plan.outputs[run.numbers.index(at.number)]
            elif at.number < 0:
                yield from (
                    (run, value) for value in part.plan.values if _number(part.number, run.number, value) == at.number
                )


def needed_by(call: RowCall) -> list[CallAt]:
    """The rows that make what a row still has to wait for; nothing if it waits for anything else."""
    run, part = call.run, call.run.part
    segment = part.plan.segments[part.rows.index(call.row)]
    missing = [value for value in segment.needs if value not in run.values]
    if any(value in part.plan.inputs for value in missing):
        return []
    return [CallAt(_maker(part, value), part.owner, _number(part.number, run.number, value)) for value in missing]


def _maker(part: Part, value: int) -> PeerId:
    received = (process for process, values in part.plan.receives.items() if value in values)
    return next(received, part.plan.process)
