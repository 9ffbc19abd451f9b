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

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from typing import Any, Final, Generic, TypeVar

from aiodaft._protocol.connections.messages import ENCODED_VALUE, PLAIN_VALUE, GraphItem
from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.graphs.plan import SubPlan
from aiodaft._protocol.ids import CallId, PeerId

ValueT = TypeVar("ValueT")


class GraphState(IntEnum):
    """The members of these enums are integers: their hashes are fast."""

    PREPARING = auto()
    READY = auto()
    BROKEN = auto()


class GraphEvent(IntEnum):
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
        GraphEvent.FAILED: GraphState.BROKEN,
    },
    # Each run fails in its turn, with the error of the preparation.
    GraphState.BROKEN: {
        GraphEvent.MOVED: GraphState.PREPARING,
        GraphEvent.FAILED: GraphState.BROKEN,
    },
}


_READY: Final = GraphState.READY


class RunState(IntEnum):
    COPYING = auto()
    WAITING = auto()
    UNDER_WAY = auto()
    CANCELLED = auto()
    ABANDONED = auto()
    OVER = auto()


class RunEvent(IntEnum):
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
    # A helper thread or an accelerator copies inputs. The run keeps its place among the submitted calls.
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

BEGUN: Final = {RunState.WAITING: RUN[RunState.WAITING][RunEvent.SENT]}
_ENDED: Final = {state: RUN[state][RunEvent.ENDED] for state in (RunState.UNDER_WAY, RunState.CANCELLED)}

# A helper thread or an accelerator reads the inputs.
BEING_COPIED: Final = frozenset({RunState.COPYING, RunState.ABANDONED})
UNSENT: Final = frozenset({RunState.COPYING, RunState.WAITING})
_SENT: Final = frozenset({RunState.UNDER_WAY, RunState.CANCELLED})


class OwnedRun:
    """The state of a run at the owner of its graph.

    Attributes:
        deployment: Set when the run is sent.
        missing: The values that are not reported yet, with the processes that report them.
    """

    state = RunState.WAITING
    number = 0
    deployment: Any = None

    def __init__(self) -> None:
        self.missing: dict[int, PeerId] = {}

    def on(self, event: RunEvent) -> None:
        self.state = RUN[self.state][event]

    @property
    def is_reported(self) -> bool:
        return self.state in _SENT and not self.missing

    def report(self, item: GraphItem) -> bool:
        """False if the value was not missing. One with refs stays missing until it is settled."""
        if item[0] not in self.missing:
            return False
        if len(item) != ENCODED_VALUE or not item[3]:
            del self.missing[item[0]]
        return True

    def lose(self, process: PeerId) -> list[int]:
        lost = [value for value, reporter in self.missing.items() if reporter == process]
        for value in lost:
            del self.missing[value]
        return lost


RunT = TypeVar("RunT", bound=OwnedRun)


class GraphRuns(Generic[RunT]):
    """A graph at its owner: its runs, and which may begin.

    Attributes:
        broken: The error of each run, if the graph is BROKEN.
        all: The runs that are not over.
        waiting: The runs that are not sent, in their order.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.state = GraphState.PREPARING
        self.broken: BaseException | None = None
        self.closed = False
        self.all: dict[int, RunT] = {}
        self.waiting: deque[RunT] = deque()
        self._max_in_flight = max_in_flight
        self._last = 0

    def on(self, event: GraphEvent, broken: BaseException | None = None) -> None:
        self.state, self.broken = GRAPH[self.state][event], broken

    def enter(self, run: RunT, *, must_wait: bool) -> bool:
        runs = self.all
        at_once = self.state is _READY and not (must_wait or self.waiting) and len(runs) < self._max_in_flight
        self._last = run.number = number = self._last + 1
        runs[number] = run
        if not at_once:
            self.waiting.append(run)
        return at_once

    def may_begin(self) -> bool:
        under_way = len(self.all) - len(self.waiting)
        return self.state is not GraphState.PREPARING and under_way < self._max_in_flight

    def turn_came(self) -> BaseException | None:
        """The first waiting run is to be sent; or it is over with this error."""
        run = self.waiting.popleft()
        if self.broken is not None:
            run.on(RunEvent.ENDED)
        return self.broken

    def withdraw(self, run: RunT) -> None:
        self.waiting.remove(run)
        run.on(RunEvent.ENDED)

    def over(self, run: RunT) -> bool:
        if self.all.pop(run.number, None) is None:
            return False
        if run.state in _SENT:
            run.state = _ENDED[run.state]
        return True

    def lose(self, process: PeerId) -> list[tuple[RunT, list[int]]]:
        return [(run, lost) for run in self.all.values() if (lost := run.lose(process))]

    def sent_with(self, deployment: object) -> list[RunT]:
        return [run for run in self.all.values() if run.deployment is deployment]


class ShareState(IntEnum):
    EXPECTED = auto()
    RUNNING = auto()
    OVER = auto()


class ShareEvent(IntEnum):
    RUN_CAME = auto()
    DONE = auto()
    DROPPED = auto()


SHARE: Final[Mapping[ShareState, Mapping[ShareEvent, ShareState]]] = {
    # Values of other participants may come before the owner's message does.
    ShareState.EXPECTED: {
        ShareEvent.RUN_CAME: ShareState.RUNNING,
        ShareEvent.DROPPED: ShareState.OVER,
    },
    ShareState.RUNNING: {
        # All strands have ended, all results are told, all values have come, even if no step uses them now.
        ShareEvent.DONE: ShareState.OVER,
        # The calls end by themselves.
        ShareEvent.DROPPED: ShareState.RUNNING,
    },
    ShareState.OVER: {},
}


_CAME: Final = {ShareState.EXPECTED: SHARE[ShareState.EXPECTED][ShareEvent.RUN_CAME]}
_DONE: Final = {ShareState.RUNNING: SHARE[ShareState.RUNNING][ShareEvent.DONE]}

# A strand has a negative number made of the graph, the run and one of its values.
_VALUE_BITS: Final = 32
_RUN_BITS: Final = 64


class Needs:
    """The values that the segments of a plan wait for and make, the same for all runs.

    Attributes:
        missing: For each segment, the number of values that it needs.
        missing_then: The same once all inputs of the graph have come.
        foreign: Values that come from other processes.
    """

    def __init__(self, plan: SubPlan[Any], owner: PeerId, graph: int) -> None:
        self.plan = plan
        self._owner = owner
        self._graph = graph
        self.segments: dict[int, list[int]] = {}
        self.strands = {segment: index for index, strand in enumerate(plan.strands) for segment in strand}
        self._made_by: dict[int, int] = {}
        for index, segment in enumerate(plan.segments):
            for value in segment.needs:
                self.segments.setdefault(value, []).append(index)
            for position in segment.steps:
                self._made_by[plan.results[position].value] = self.strands[index]
        self.missing = [len(segment.needs) for segment in plan.segments]
        self.missing_then = [len(set(segment.needs).difference(plan.inputs)) for segment in plan.segments]
        self.foreign = len(plan.inputs) + sum(map(len, plan.receives.values()))

    def maker_of(self, run: int, value: int) -> CallAt:
        plan = self.plan
        process = next((process for process, values in plan.receives.items() if value in values), plan.process)
        number = -1 - ((self._graph << _RUN_BITS | run) << _VALUE_BITS | value)
        return CallAt(process, self._owner, CallId(number), within=(self._graph, run))

    def strand_with(self, number: CallId, run: int, outputs: Sequence[CallId]) -> int | None:
        """The strand that has a number in a run, or makes the output with this number."""
        if number in outputs:
            return self._made_by[self.plan.outputs[outputs.index(number)]]
        value = -1 - number & (1 << _VALUE_BITS) - 1
        return self._made_by.get(value) if self.maker_of(run, value).number == number else None


class Share(Generic[ValueT]):
    """The share of a participant in one run.

    Attributes:
        values: Inputs, and results of this and other processes.
        missing: For each segment, the number of values that it still waits for.
        unfinished: Strands that have not ended, and results that are not told yet.
        to_come: Values of other processes.
    """

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.state = ShareState.EXPECTED
        self.values: dict[int, ValueT] = {}
        self.missing = needs.missing.copy()
        self.unfinished = len(needs.plan.strands)
        self.to_come = needs.foreign

    def run_came(self, items: tuple[GraphItem, ...]) -> tuple[GraphItem, ...]:
        """RUN came, with the inputs. Returns those to `take` one by one: none if all are plain, the usual case.

        Raises:
            KeyError: The run was dropped.
        """
        self.state = _CAME[self.state]
        if self.values:
            # Some came from other participants; no value is counted twice.
            return items
        for item in items:
            if len(item) != PLAIN_VALUE:
                return items
        if items:
            self.values.update(items)
            self.missing = self.needs.missing_then.copy()
            self.to_come -= len(items)
        return ()

    def take(self, value: int, content: ValueT) -> Sequence[int]:
        if value in self.values:
            return ()
        self.to_come -= 1
        return self.put(value, content)

    def put(self, value: int, content: ValueT) -> Sequence[int]:
        self.values[value] = content
        missing = self.missing
        ready: list[int] = []
        for segment in self.needs.segments.get(value, ()):
            missing[segment] -= 1
            if not missing[segment]:
                ready.append(segment)
        return ready

    def expected_from(self, process: PeerId) -> list[int]:
        return [value for value in self.needs.plan.receives.get(process, ()) if value not in self.values]

    def awaits(self, values: Sequence[int]) -> list[int]:
        """None if an input of the graph is missing."""
        missing = [value for value in values if value not in self.values]
        return [] if set(missing).intersection(self.needs.plan.inputs) else missing

    def end(self) -> bool:
        if self.unfinished or self.to_come or self.state not in _DONE:
            return False
        self.state = _DONE[self.state]
        return True

    def drop(self) -> None:
        self.state = SHARE[self.state][ShareEvent.DROPPED]
