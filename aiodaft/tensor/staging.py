"""The plan of a program in stages: each is lowered by itself, and values go over where another stage reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Final, TypeAlias

from aiodaft.pipeline import Schedule, gpipe, interleaved, one_f_one_b, simulate, zb_h1, zb_h2, zbv
from aiodaft.pipeline.schedule import rank_of_stages
from aiodaft.tensor.costs import flops_of, kinds_of
from aiodaft.tensor.instructions import Instruction, Slot, slots_of
from aiodaft.tensor.operations import Cause, Gradient, Input, Mark, Operation, Output, Trace
from aiodaft.tensor.passes import SegmentKind, Stages, Step, outs_of, split, with_buckets, without_dead
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.planner import Planner, check_names, joined_collectives, with_peak
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.segments import Collective, Pipeline, Segment
from aiodaft.tensor.specs import Placements
from aiodaft.tensor.stage_runs import PIPELINE_AXIS, rank_in_stage
from aiodaft.tensor.strategy import Strategy

ByRank: TypeAlias = tuple[int, ...]

_SCHEDULES: Final[Mapping[str, Callable[..., Schedule]]] = {
    one.__name__: one for one in (gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zbv)
}
_KINDS: Final[tuple[SegmentKind, ...]] = ("F", "B", "W", "U")


def plan_stages(trace: Trace, strategy: Strategy, axes: Mapping[str, int]) -> Plan:
    """The plan of the program of one micro-batch, in stages."""
    check_names(trace, strategy)
    stages = split(trace, strategy.stages)
    schedule = _schedule(strategy, stages.count, axes)
    inner = {axis: size for axis, size in axes.items() if axis != PIPELINE_AXIS} or {PIPELINE_AXIS: 1}
    rules, numbers = Rules(inner), count()
    planners: list[_StagePlanner] = []
    # The updates of the stages of one rank are one segment, since each may need values of the others.
    updates: dict[int, tuple[list[Instruction], list[Cause]]] = {}
    for stage, place in enumerate(rank_of_stages(schedule)):
        planners.append(_StagePlanner(trace, strategy, rules, numbers, stage, stages, planners))
        planners[-1].steps["U"] = updates.setdefault(place, ([], []))
    outputs = _lower(trace, stages, planners)
    return _Assembly(trace, strategy, axes, planners, schedule, outputs).plan()


def _schedule(strategy: Strategy, stages: int, axes: Mapping[str, int]) -> Schedule:
    ranks = axes.get(PIPELINE_AXIS, 1)
    if not isinstance(strategy.schedule, str):
        given = strategy.schedule
        tasks = simulate(given).starts
        found = len(given), 1 + max(one.stage for one in tasks), 1 + max(one.microbatch for one in tasks)
        if found != (ranks, stages, strategy.microbatches):
            raise ValueError(
                "schedule has {} ranks, {} stages and {} micro-batches; the strategy has {}, {} and {}".format(
                    *found, ranks, stages, strategy.microbatches
                )
            )
        if len(tasks) != len({one.kind for one in tasks}) * stages * strategy.microbatches:
            raise ValueError("schedule: micro-batches of a plan skip no stage")
        return given
    if strategy.schedule not in _SCHEDULES:
        raise ValueError(f"schedule is {strategy.schedule!r}: give one of {', '.join(_SCHEDULES)}")
    per_rank = {"zbv": 2, "interleaved": max(stages // ranks, 1)}.get(strategy.schedule, 1)
    if stages != ranks * per_rank:
        raise ValueError(
            f"{stages} stages on {ranks} ranks of the axis {PIPELINE_AXIS}: {strategy.schedule} takes "
            f"{ranks * per_rank} stages, so cut after {ranks * per_rank - 1} modules"
        )
    more = (per_rank,) if strategy.schedule == "interleaved" else ()
    return _SCHEDULES[strategy.schedule](ranks, strategy.microbatches, *more)


def _lower(trace: Trace, stages: Stages, planners: Sequence[_StagePlanner]) -> list[Output]:
    for planner in planners:
        planner.run("F", stages.steps.get((planner.stage, "F"), ()))
    for planner in reversed(planners):
        for kind in ("B", "W"):
            planner.run(kind, stages.steps.get((planner.stage, kind), ()))
    for planner in planners:
        planner.begin_update()
    for one in trace.operations:
        stage, kind = stages.where.get(outs_of(one)[0], (0, "F"))
        if kind == "U":
            planners[stage].run("U", [one])
    taken = {slot for planner in planners for slot in planner.taken}
    for unread in trace.inputs:
        if unread.role in ("parameter", "buffer", "state") and unread.slot not in taken:
            planners[stages.owners.get(unread.slot, 0)].keep(unread)
    return [given for one in trace.outputs for planner in planners if (given := planner.given(one)) is not None]


class _StagePlanner(Planner):
    def __init__(
        self,
        trace: Trace,
        strategy: Strategy,
        rules: Rules,
        numbers: Iterator[int],
        stage: int,
        stages: Stages,
        others: Sequence[_StagePlanner],
    ) -> None:
        super().__init__(trace, strategy, rules, numbers)
        self.stage = stage
        self.stages = stages
        self.others = others
        self.inputs = {one.slot: one for one in trace.inputs}
        self.taken: dict[int, int] = {}
        """The inputs of the plan that this stage takes, by those of the program."""
        self.steps: dict[SegmentKind, tuple[list[Instruction], list[Cause]]] = {
            "F": ([], []),
            "B": ([], []),
            "W": ([], []),
        }
        self.kind: SegmentKind = "F"
        self.sums: dict[int, int] = {}
        self.micro: dict[int, int] = {}
        self.begins: list[tuple[int, int, int]] = []
        self.arrivals: list[tuple[SegmentKind, Collective]] = []
        self.senders: dict[int, int] = {}
        """The stage that each tensor comes from that is received."""

    def run(self, kind: SegmentKind, steps: Sequence[Operation | Mark | Gradient]) -> None:
        self.kind = kind
        self.lowering.instructions, self.lowering.causes = self.steps[kind]
        for one in steps:
            self.step(one)

    def begin_update(self) -> None:
        mine = [one for one in self.gradients.values() if self.stages.owners[self.slots[one.parameter]] == self.stage]
        self.sums = {one.source: self.number_of(one.source, one.cause) for one in mine}
        self.micro, self.numbers = self.numbers, self.taken | self.sums
        for memo in (self.in_use, self.again, self.lowering.placed):
            memo.clear()

    def number_of(self, number: int, cause: Cause) -> int:
        if number not in self.numbers:
            self._fetch(number, cause)
        return super().number_of(number, cause)

    def gradient_is_there(self, one: Gradient) -> None:
        """It is placed in the update, when the sum over micro-batches is there."""

    def placements_of(self, number: int) -> Placements:
        here = self if number in self.numbers else self.others[self.stages.where[number][0]]
        return here.lowering.spec(here.numbers[number]).placements

    def keep(self, one: Input) -> None:
        self.taken[one.slot] = self.micro[one.slot] = self.placed_input(one)

    def given(self, one: Output) -> Output | None:
        source = self.sources.get((one.name, one.role))
        phase = getattr(self.stages.free.get(one.slot), "cause", Cause("", phase="forward")).phase
        stage, kind = self.stages.where.get(one.slot, (self.stages.count - 1, "U" if phase == "update" else "F"))
        if stage != self.stage if source is None or one.slot in self.stages.where else source not in self.taken:
            return None
        self.run(kind, ())
        updated = self.numbers
        self.numbers = updated if kind == "U" else self.micro
        made = replace(one, slot=self.output(one), stage=self.stage)
        self.numbers = updated
        return made

    def _fetch(self, number: int, cause: Cause) -> None:
        if (given := self.inputs.get(number)) is not None:
            owner = self.stages.owners.get(number, self.stage)
            if owner == self.stage or given.role != "parameter":
                self.taken[number] = self.placed_input(given)
            elif self.kind == "U":
                raise ValueError(
                    f"{cause.line or cause.operation}: the update of stage {self.stage} reads {given.name}, which "
                    f"stage {owner} has: cut the program so that one stage has both"
                )
            else:
                theirs = self.others[owner].number_as_stored(number)
                self.begins.append((theirs, owner, self.stage))
                self._arrives(number, theirs, owner)
        elif number in self.stages.free:
            self.step(self.stages.free[number])
            self.lowering.cause = cause
        elif self.kind == "U" and self.stages.where[number][1] != "U":
            raise ValueError(
                f"{cause.line or cause.operation}: the update reads a value of one micro-batch; only gradients are "
                "summed over micro-batches"
            )
        else:
            self._receive(number, self.stages.where[number][0])

    def number_as_stored(self, number: int) -> int:
        if number not in self.numbers:
            self._fetch(number, Cause(""))
        return self.numbers[number]

    def _receive(self, number: int, stage: int) -> None:
        other = self.others[stage]
        theirs = other.numbers[number]
        made = next(
            (made for made in other.steps.values() if any(theirs in one.outs for one in made[0])), other.steps["F"]
        )
        made[0].append(Instruction("send", PIPELINE_AXIS, (Slot(theirs), self.stage, theirs), {}, ()))
        made[1].append(self.lowering.cause)
        self.lowering.emit(Instruction("receive", PIPELINE_AXIS, (stage, theirs), {}, (theirs,)))
        self._arrives(number, theirs, stage)

    def _arrives(self, number: int, theirs: int, stage: int) -> None:
        spec = self.lowering.specs[theirs] = self.others[stage].lowering.specs[theirs]
        self.numbers[number] = theirs
        self.senders[theirs] = stage
        received = self.rules.local_bytes(spec)
        arrival = Collective("send", PIPELINE_AXIS, received, self.lowering.cause, True, theirs)
        self.arrivals.append((self.kind, arrival))


class _Assembly:
    def __init__(
        self,
        trace: Trace,
        strategy: Strategy,
        axes: Mapping[str, int],
        planners: Sequence[_StagePlanner],
        schedule: Schedule,
        outputs: Sequence[Output],
    ) -> None:
        self.trace = trace
        self.axes = dict(axes)
        self.microbatches = strategy.microbatches
        self.planners = planners
        self.rules = planners[0].rules
        self.schedule = schedule
        self.outputs = outputs
        self.places = rank_of_stages(schedule)
        self.specs = {number: spec for planner in planners for number, spec in planner.lowering.specs.items()}
        self.joined: dict[int, int] = {}
        self.updates: dict[int, set[int]] = {}
        """The tensors that the updates take, by the coordinate of their ranks."""
        self.collectives: list[Collective] = []
        self.kinds: tuple[int, ...] = ()
        self.flops = [(0,) * self.rules.size for _ in planners]

    def plan(self) -> Plan:
        segments = self._segments()
        self.kinds = kinds_of(self.specs.values(), self.rules)
        for one in segments:
            self._count(one)
        taken = [
            replace(p.inputs[slot], slot=number, stage=p.stage)
            for p in self.planners
            for slot, number in p.taken.items()
        ]
        made = Plan(
            axes=self.axes,
            inputs=tuple(taken),
            instructions=(),
            outputs=tuple(self.outputs),
            specs=self.specs,
            arguments=self.trace.arguments,
            results=self.trace.results,
            collectives=tuple(self.collectives),
            flops=self._by_rank(self.flops, sum),
            scalars=self.trace.scalars,
            aliases=self.trace.aliases,
            pipeline=Pipeline(
                axis=PIPELINE_AXIS if PIPELINE_AXIS in self.axes else "",
                microbatches=self.microbatches,
                schedule=self.schedule,
                segments=tuple(segments),
                gradients=tuple(number for planner in self.planners for number in planner.sums.values()),
                begins=tuple(one for planner in self.planners for one in planner.begins),
            ),
        )
        return with_peak(made, self.rules, self.kinds)

    def _segments(self) -> list[Segment]:
        """Without what nobody needs: a tensor is sent if it is received, and received if it is read."""
        received: set[tuple[int, int]] | None = None
        while True:
            self.updates.clear()
            made = [one for planner in self.planners for one in self._stage(planner, received)]
            now = {(i.args[1], self.places[one.stage]) for one in made for i in one.instructions if i.kind == "receive"}
            if now == received:
                return made
            received = now

    def _stage(self, planner: _StagePlanner, received: set[tuple[int, int]] | None) -> list[Segment]:
        wanted = {one.slot for one in self.outputs if one.stage == planner.stage}
        place = self.places[planner.stage]
        made: list[Segment] = []
        for kind in reversed(_KINDS):
            if kind == "U" and place in self.updates:
                wanted |= self.updates[place]
                continue
            if kind == "U":
                wanted |= {one.slot for one in self.outputs if self.places[one.stage] == place}
            made.append(self._segment(planner, kind, wanted, received))
            wanted |= set(made[-1].takes)
            if kind == "U":
                self.updates[place] = set(made[-1].takes)
        return made[::-1]

    def _segment(
        self, planner: _StagePlanner, kind: SegmentKind, wanted: set[int], received: set[tuple[int, int]] | None
    ) -> Segment:
        steps = [
            one
            for one in map(Step, *planner.steps[kind])
            if received is None or one.instruction.kind != "send" or self._goes(one.instruction) in received
        ]
        steps, joined = with_buckets(
            without_dead(steps, wanted), self.specs, self.rules.local_shapes, planner.replicated
        )
        self.joined |= joined
        self.specs |= planner.lowering.specs
        instructions = tuple(one.instruction for one in steps)
        outs = {out for one in instructions for out in one.outs if out is not None}
        takes = {slot for one in instructions for slot in slots_of((one.args, one.kwargs))} - outs
        causes = tuple(one.cause for one in steps)
        return Segment(planner.stage, kind, tuple(sorted(takes)), instructions, tuple(sorted(outs & wanted)), causes)

    def _goes(self, instruction: Instruction) -> tuple[int, int]:
        return instruction.args[0].number, self.places[instruction.args[1]]

    def _count(self, segment: Segment) -> None:
        times = 1 if segment.kind == "U" else self.microbatches
        alive = {out for one in segment.instructions for out in one.outs}
        alive |= {one for one, by in self.joined.items() if by in alive}
        for planner in self.planners:
            is_here = planner.stage == segment.stage
            if is_here or (segment.kind == "U" and self.places[planner.stage] == self.places[segment.stage]):
                place = self.places[planner.stage]
                come = [
                    one
                    for kind, one in planner.arrivals
                    if kind == segment.kind and self.places[planner.senders[one.slot]] != place
                ]
                begins = {number for number, *_ in planner.begins}
                collectives = [one for one in planner.lowering.collectives if one.slot in alive]
                self._add(planner, joined_collectives(collectives, self.joined, planner.lowering), times)
                self._add(planner, [one for one in come if one.slot in alive - begins], times)
                self._add(planner, [one for one in come if one.slot in begins], 1)
        flops = flops_of(segment.instructions, self.specs, self.rules, self.kinds)
        self.flops[segment.stage] = tuple(a + times * b for a, b in zip(self.flops[segment.stage], flops, strict=True))

    def _add(self, planner: _StagePlanner, collectives: Sequence[Collective], times: int) -> None:
        none = (0,) * self.rules.size
        for one in collectives:
            received = self._by_rank([one.received if p is planner else none for p in self.planners], sum)
            self.collectives.append(replace(one, received=received, times=times))

    def _by_rank(self, stages: Sequence[ByRank], combine: Callable[[list[int]], int]) -> ByRank:
        result = []
        for at in product(*map(range, self.axes.values())):
            coords = dict(zip(self.axes, at, strict=True))
            rank = rank_in_stage(coords, self.axes, PIPELINE_AXIS)
            mine = coords.get(PIPELINE_AXIS, 0)
            result.append(combine([by[rank] for stage, by in enumerate(stages) if self.places[stage] == mine]))
        return tuple(result)
