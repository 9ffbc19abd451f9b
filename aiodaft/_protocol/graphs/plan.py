"""Plans: a captured dataflow, cut into one plan for each process that takes part. Pure.

The values of a dataflow have numbers: first its inputs, then the results of its steps. The plan of a process lists its
steps in their order, the values that it needs from other processes, the receivers of each of its results, and the
results that it reports to the owner of the graph: the outputs, and the results that no step uses.

The steps of one actor start in their order, each when its arguments are there. A row of steps, each of which needs the
result of the one before and no other value that is still to come, is one *segment*. Segments of which each needs the
last result of the one before, through other actors or not, are one *strand*: a single call of the actor, which waits
between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Generic, TypeVar

from aiodaft._protocol.calls.mailbox import Rules
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft.exceptions import CyclicGraph

ActorKey = tuple[PeerId, ActorId]
DataT = TypeVar("DataT")
KeyT = TypeVar("KeyT", bound=Hashable)

_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Step(Generic[DataT]):
    """One call of a dataflow; `line`: the user's line that makes it."""

    actor: ActorKey
    name: str
    label: str
    line: str
    rules: Rules
    needs: tuple[int, ...]
    data: DataT

    @property
    def lane(self) -> tuple[PeerId, str]:
        """The actor for people. Work of the runtime beside an actor has the actor's name, and so counts as its own."""
        return self.actor[0], self.name


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps of one actor that run one after the other, when the values in `needs` are there."""

    steps: tuple[int, ...]
    needs: tuple[int, ...]


class Report(Enum):
    NOTE = "the step is over: the owner does not need its value"
    VALUE = "the value, or the error"
    STORED = "the process stores the value"


@dataclass(frozen=True, slots=True)
class Result:
    """The destinations of the result of a step, in the process of the step.

    Attributes:
        used: Whether steps of this process use it.
        awaited: Whether segments of this process wait for it.
        output: Its position among the outputs of this process.
    """

    value: int
    sends: tuple[PeerId, ...]
    used: bool
    awaited: bool
    reported: bool
    output: int | None

    @property
    def leaves_segment(self) -> bool:
        return self.awaited or self.reported or bool(self.sends)

    def outlives(self, *, is_inline: bool) -> bool:
        """Whether steps of this process may read the value after the owner has freed it."""
        return self.output is not None and self.used and not is_inline

    def report(self, *, failed: bool, stays: bool) -> Report:
        if self.output is not None:
            return Report.STORED if stays else Report.VALUE
        return Report.VALUE if failed else Report.NOTE


@dataclass(frozen=True, slots=True)
class SubPlan(Generic[DataT]):
    """The plan of one process.

    Attributes:
        strands: Its segments as strands, each given by its segments' positions.
        inputs: Numbers of the graph's inputs that it needs.
        receives: Values that it needs from other processes, by process.
        uses: For each value, how often the steps of this process use it.
        labels: For each value that is used here, the step or input that makes it.
    """

    process: PeerId
    steps: tuple[Step[DataT], ...]
    results: tuple[Result, ...]
    segments: tuple[Segment, ...]
    strands: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    receives: Mapping[PeerId, tuple[int, ...]]
    outputs: tuple[int, ...]
    uses: Mapping[int, int]
    labels: Mapping[int, str]
    timed: bool = False

    @property
    def follows(self) -> bool:
        return all(set(segment.needs).difference(self.inputs) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Dataflow(Generic[DataT]):
    """A captured dataflow.

    Attributes:
        orders: Positions of an actor's steps in the order in which they start, for actors with an order of their own.
    """

    inputs: int
    steps: tuple[Step[DataT], ...]
    outputs: tuple[int, ...]
    orders: Mapping[ActorKey, Sequence[int]] = field(default_factory=dict[ActorKey, Sequence[int]])
    timed: bool = False

    def order_of(self, actor: ActorKey) -> Sequence[int]:
        """The steps of an actor, in the order in which they start.

        Raises:
            CyclicGraph: The actor's own order does not name each of its steps once.
        """
        made = [index for index, step in enumerate(self.steps) if step.actor == actor]
        order = self.orders.get(actor)
        if order is None:
            return made
        if sorted(order) != made:
            raise CyclicGraph(f"the order of an actor's steps names {list(order)}, and its steps are {made}")
        return order

    def label_of(self, value: int) -> str:
        if value < self.inputs:
            return f"input {value}"
        step = self.steps[value - self.inputs]
        return f"{step.label} of {step.name}"

    def with_actors(self, actors: Sequence[tuple[ActorKey, str]]) -> Dataflow[DataT]:
        steps = tuple(
            replace(step, actor=actor, name=name) for step, (actor, name) in zip(self.steps, actors, strict=True)
        )
        moved = {before.actor: step.actor for before, step in zip(self.steps, steps, strict=True)}
        orders = {moved.get(actor, actor): order for actor, order in self.orders.items()}
        return Dataflow(self.inputs, steps, self.outputs, orders, self.timed)


def make_plan(flow: Dataflow[DataT]) -> dict[PeerId, SubPlan[DataT]]:
    """Cut a dataflow into the plans of its processes. Plans that follow others come last.

    Raises:
        CyclicGraph: Steps would wait for each other in a cycle.
    """
    actors = _unique(step.actor for step in flow.steps)
    orders = {actor: flow.order_of(actor) for actor in actors}
    sequence = _sorted(flow, orders)
    needed_by: dict[int, list[int]] = {}
    for index in sequence:
        for value in set(flow.steps[index].needs):
            needed_by.setdefault(value, []).append(index)
    processes = _unique(actor[0] for actor in actors)
    behind = _behind(flow, sequence)
    plans = [_sub_plan(flow, process, sequence, needed_by, behind) for process in processes]
    return {plan.process: plan for plan in sorted(plans, key=lambda plan: plan.follows)}


def _sub_plan(
    flow: Dataflow[DataT],
    process: PeerId,
    sequence: Sequence[int],
    needed_by: Mapping[int, Sequence[int]],
    behind: Mapping[int, int],
) -> SubPlan[DataT]:
    mine = [index for index in sequence if flow.steps[index].actor[0] == process]
    own = {flow.inputs + index for index in mine}
    uses: dict[int, int] = {}
    for index in mine:
        for value in flow.steps[index].needs:
            uses[value] = uses.get(value, 0) + 1
    receives: dict[PeerId, list[int]] = {}
    for value in sorted(uses):
        if value >= flow.inputs and value not in own:
            receives.setdefault(flow.steps[value - flow.inputs].actor[0], []).append(value)
    outputs = tuple(value for value in _unique(flow.outputs) if value in own)
    segments = _segments(flow, mine)
    awaited = {value for segment in segments for value in segment.needs}

    def result(index: int) -> Result:
        value = flow.inputs + index
        users = _unique(flow.steps[user].actor[0] for user in needed_by.get(value, ()))
        return Result(
            value=value,
            sends=tuple(other for other in users if other != process),
            used=value in uses,
            awaited=value in awaited,
            reported=value in outputs or not users,
            output=outputs.index(value) if value in outputs else None,
        )

    return SubPlan(
        process=process,
        steps=tuple(flow.steps[index] for index in mine),
        results=tuple(map(result, mine)),
        segments=segments,
        strands=_strands(flow, mine, segments, behind),
        inputs=tuple(value for value in sorted(uses) if value < flow.inputs),
        receives={other: tuple(values) for other, values in receives.items()},
        outputs=outputs,
        uses=uses,
        labels={value: flow.label_of(value) for value in uses},
        timed=flow.timed,
    )


def _segments(flow: Dataflow[DataT], mine: Sequence[int]) -> tuple[Segment, ...]:
    segments: list[tuple[list[int], list[int]]] = []
    last: dict[ActorKey, int] = {}
    for position, index in enumerate(mine):
        step = flow.steps[index]
        segment = segments[last[step.actor]] if step.actor in last else None
        if segment is not None and _continues(flow, mine, segment, step):
            segment[0].append(position)
        else:
            last[step.actor] = len(segments)
            segments.append(([position], _unique(step.needs)))
    return tuple(Segment(tuple(steps), tuple(needs)) for steps, needs in segments)


def _continues(
    flow: Dataflow[DataT], mine: Sequence[int], segment: tuple[list[int], list[int]], step: Step[DataT]
) -> bool:
    """A step needs no value that the segment does not have."""
    steps, needs = segment
    before = flow.steps[mine[steps[-1]]].rules
    if step.rules.on_thread is not before.on_thread or not (_is_simple(step.rules) and _is_simple(before)):
        return False
    made = {flow.inputs + mine[position] for position in steps}
    return flow.inputs + mine[steps[-1]] in step.needs and made.union(needs).issuperset(step.needs)


def _behind(flow: Dataflow[DataT], sequence: Sequence[int]) -> dict[int, int]:
    behind: dict[int, int] = {}
    for index in sequence:
        bits = 0
        for before in (value - flow.inputs for value in flow.steps[index].needs if value >= flow.inputs):
            bits |= behind.get(before, 0) | 1 << before
        behind[index] = bits
    return behind


def _strands(
    flow: Dataflow[DataT], mine: Sequence[int], segments: Sequence[Segment], behind: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """A segment on an actor's thread does not wait there for others."""
    strands: list[list[int]] = []
    last: dict[ActorKey, list[int]] = {}
    for position, segment in enumerate(segments):
        index = mine[segment.steps[0]]
        step = flow.steps[index]
        strand = last.get(step.actor)
        if strand is not None:
            before = mine[segments[strand[-1]].steps[-1]]
            if _may_wait(flow.steps[before].rules) and _may_wait(step.rules) and behind[index] >> before & 1:
                strand.append(position)
                continue
        last[step.actor] = [position]
        strands.append(last[step.actor])
    return tuple(map(tuple, strands))


def _may_wait(rules: Rules) -> bool:
    return _is_simple(rules) and not rules.on_thread


def _is_simple(rules: Rules) -> bool:
    return rules.ordered and rules.concurrency is None


def _sorted(flow: Dataflow[DataT], orders: Mapping[ActorKey, Sequence[int]]) -> list[int]:
    before: list[set[int]] = [
        {value - flow.inputs for value in step.needs if value >= flow.inputs} for step in flow.steps
    ]
    for order in orders.values():
        for earlier, later in itertools.pairwise(order):
            before[later].add(earlier)
    after: dict[int, list[int]] = {}
    for index, needed in enumerate(before):
        for other in needed:
            after.setdefault(other, []).append(index)
    missing = [len(needed) for needed in before]
    ready = [index for index, count in enumerate(missing) if not count]
    done: list[int] = []
    while ready:
        index = ready.pop()
        done.append(index)
        for later in after.get(index, ()):
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if len(done) < len(flow.steps):
        raise _cycle(flow, before, set(range(len(flow.steps))).difference(done))
    # Program order is such an order, if no actor has its own.
    return done if flow.orders else sorted(done)


def _cycle(flow: Dataflow[DataT], before: Sequence[set[int]], stuck: set[int]) -> CyclicGraph:
    path = [min(stuck)]
    while True:
        earlier = min(before[path[-1]] & stuck)
        if earlier in path:
            break
        path.append(earlier)
    cycle = path[path.index(earlier) :]
    lines = [f"  {flow.steps[index].label} ({flow.steps[index].line})" for index in cycle]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  ... and {len(cycle) - _SHOWN} more"]
    text = "\n".join(lines)
    return CyclicGraph(f"these steps wait for each other in a cycle, each for the next:\n{text}")


def _unique(items: Iterable[KeyT]) -> list[KeyT]:
    return list(dict.fromkeys(items))
