"""The life of a graph's run, at the owner of the graph and at each participant. Pure.

A graph at its owner:              A run at the owner:                      A run at a participant:

    PREPARING <--+--+                  WAITING <--- COPYING ---+                EXPECTED ----+
     |     |     |  |                   |   |                  |                    |        |
     v     v     |  |                   v   |              ABANDONED                v        |
  READY  BROKEN -+  |           UNDER_WAY   |                  |                 RUNNING     |
     |              |            |      |   |                  |                    |        |
     +--------------+            v      |   |                  |                    v        |
                          CANCELLED ----+---+-> OVER <---------+                  OVER <-----+
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum, auto
from typing import Any, Final

from .plan import SubPlan


class GraphState(IntEnum):
    """Whether the runs of a graph may begin. The members of these enums are integers: their hashes are fast."""

    PREPARING = auto()
    READY = auto()
    BROKEN = auto()


class GraphEvent(IntEnum):
    """What happens to a graph at its owner."""

    MOVED = auto()
    INSTALLED = auto()
    FAILED = auto()


GRAPH: Final[Mapping[GraphState, Mapping[GraphEvent, GraphState]]] = {
    # The processes are being told their plans. Runs wait.
    GraphState.PREPARING: {
        GraphEvent.INSTALLED: GraphState.READY,
        GraphEvent.FAILED: GraphState.BROKEN,
        # Another actor is gone or replaced: the processes are told anew.
        GraphEvent.MOVED: GraphState.PREPARING,
    },
    # Runs begin, at most `max_in_flight` at a time.
    GraphState.READY: {
        GraphEvent.MOVED: GraphState.PREPARING,
        # The runtime is closed.
        GraphEvent.FAILED: GraphState.BROKEN,
    },
    # Each run fails in its turn, with the error of the preparation.
    GraphState.BROKEN: {
        GraphEvent.MOVED: GraphState.PREPARING,
        GraphEvent.FAILED: GraphState.BROKEN,
    },
}


class RunState(IntEnum):
    """Where a run is at the owner of the graph."""

    COPYING = auto()
    WAITING = auto()
    UNDER_WAY = auto()
    CANCELLED = auto()
    ABANDONED = auto()
    OVER = auto()


class RunEvent(IntEnum):
    """What happens to a run at the owner of the graph."""

    COPY = auto()
    COPIED = auto()
    SENT = auto()
    CANCELLED = auto()
    ENDED = auto()


RUN: Final[Mapping[RunState, Mapping[RunEvent, RunState]]] = {
    # The inputs are encoded. The run waits until the graph is ready, has room, and it is its turn.
    RunState.WAITING: {
        RunEvent.COPY: RunState.COPYING,
        RunEvent.SENT: RunState.UNDER_WAY,
        # Cancelled, or the graph is broken: no participant knows the run.
        RunEvent.ENDED: RunState.OVER,
    },
    # The helper thread copies large inputs. The run keeps its place among the submitted calls.
    RunState.COPYING: {
        RunEvent.COPIED: RunState.WAITING,
        # The inputs cannot be freed before the copy ends.
        RunEvent.ENDED: RunState.ABANDONED,
    },
    RunState.ABANDONED: {RunEvent.COPIED: RunState.OVER},
    # The participants report one result after the other; the last report ends the run.
    RunState.UNDER_WAY: {
        RunEvent.CANCELLED: RunState.CANCELLED,
        RunEvent.ENDED: RunState.OVER,
    },
    # The participants skip the steps that have not begun, and report them as cancelled.
    RunState.CANCELLED: {RunEvent.ENDED: RunState.OVER},
    RunState.OVER: {},
}

# The participants do not know the run.
UNSENT: Final = frozenset({RunState.COPYING, RunState.WAITING})


def may_begin(state: GraphState, under_way: int, max_in_flight: int) -> bool:
    """Whether one more run may begin (or fail, if the graph is broken)."""
    return state is not GraphState.PREPARING and under_way < max_in_flight


class ShareState(IntEnum):
    """Where a run is at a participant."""

    EXPECTED = auto()
    RUNNING = auto()
    OVER = auto()


class ShareEvent(IntEnum):
    """What happens to a run at a participant."""

    RUN_CAME = auto()
    DONE = auto()
    DROPPED = auto()


SHARE: Final[Mapping[ShareState, Mapping[ShareEvent, ShareState]]] = {
    # Values of other participants may come before the owner's message does.
    ShareState.EXPECTED: {
        ShareEvent.RUN_CAME: ShareState.RUNNING,
        # The graph is closed, or its owner is gone.
        ShareEvent.DROPPED: ShareState.OVER,
    },
    # The segments are in the mailboxes of their actors.
    ShareState.RUNNING: {
        # All segments have ended, all results are told, all values have come, even if no step uses them now.
        ShareEvent.DONE: ShareState.OVER,
        # The calls end by themselves.
        ShareEvent.DROPPED: ShareState.RUNNING,
    },
    ShareState.OVER: {},
}


class Needs:
    """What the segments of a plan wait for, the same for all runs.

    Attributes:
        segments: By value: the segments that wait for it.
        missing: For each segment, the number of values that it needs.
        missing_then: The same once all inputs of the graph have come.
        foreign: Values that come from other processes.
    """

    def __init__(self, plan: SubPlan[Any]) -> None:
        self.segments: dict[int, list[int]] = {}
        for index, segment in enumerate(plan.segments):
            for value in segment.needs:
                self.segments.setdefault(value, []).append(index)
        self.missing = [len(segment.needs) for segment in plan.segments]
        self.missing_then = [len(set(segment.needs).difference(plan.inputs)) for segment in plan.segments]
        self.foreign = len(plan.inputs) + sum(map(len, plan.receives.values()))


class Share:
    """What a participant does of one run.

    Attributes:
        state: Where the run is.
        missing: For each segment, the number of values that it still waits for.
        unfinished: Segments that have not ended, and results that are not told yet.
        to_come: Values of other processes that have not come.
    """

    __slots__ = ("_needs", "missing", "state", "to_come", "unfinished")

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self.state = ShareState.EXPECTED
        self.missing = needs.missing.copy()
        self.unfinished = len(needs.missing)
        self.to_come = needs.foreign

    def run_came(self, inputs: int) -> None:
        """RUN came, with this number of inputs that were not counted: all of the graph's, before any other value.

        Raises:
            KeyError: The run was dropped.
        """
        self.state = SHARE[self.state][ShareEvent.RUN_CAME]
        if inputs:
            self.missing = self._needs.missing_then.copy()
            self.to_come -= inputs

    def value_came(self, value: int) -> Iterable[int]:
        """A value is here: the segments that have everything now."""
        segments = self._needs.segments.get(value)
        if segments is None:
            return ()
        missing = self.missing
        ready: list[int] = []
        for segment in segments:
            missing[segment] -= 1
            if not missing[segment]:
                ready.append(segment)
        return ready

    def end(self) -> bool:
        """End a running run of which nothing is left to do or to come; False if there is something left."""
        if self.unfinished or self.to_come or self.state is not ShareState.RUNNING:
            return False
        self.state = SHARE[self.state][ShareEvent.DONE]
        return True

    def drop(self) -> None:
        """The graph is closed, or its owner is gone. Raises KeyError if the run is over."""
        self.state = SHARE[self.state][ShareEvent.DROPPED]
