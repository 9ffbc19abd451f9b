"""The search for a strategy: a solver proposes, and plans decide, so that no cost is one that a plan has not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import escape
from typing import Final, NamedTuple

from torch.distributed.tensor import Shard

from aiodaft.pipeline import Kind, Schedule, solved, zb_h1
from aiodaft.pipeline.solver import Row, minimum
from aiodaft.tensor.choices import WHOLE, Choices, Picked
from aiodaft.tensor.costs import COLLECTIVES, work_of
from aiodaft.tensor.hardware import Hardware
from aiodaft.tensor.operations import size_text, time_text
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.program import Program, check_axes, plan
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.simulation import Simulation
from aiodaft.tensor.specs import Spec
from aiodaft.tensor.stage_runs import PIPELINE_AXIS
from aiodaft.tensor.strategy import Strategy
from aiodaft.tensor.ways import REPLICA, Runs, Ways

OTHERS: Final = 10
_ROUNDS: Final = 3


@dataclass(frozen=True)
class Candidate:
    """A strategy that was planned, with its exact counts, and simulated."""

    strategy: Strategy
    axes: Mapping[str, int]
    plan: Plan = field(repr=False)
    simulation: Simulation = field(repr=False)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.simulation.seconds

    @property
    def peak(self) -> int:
        """Bytes that a rank has at most."""
        return max(self.plan.peak)

    @property
    def words(self) -> str:
        """What each axis is for, in a line."""
        strategy = self.strategy
        uses: list[str] = []
        for axis, size in self.axes.items():

            def cuts(field: str, axis: str = axis) -> list[int]:
                found = (one.get(axis) for one in getattr(strategy, field).values())
                return [one.dim for one in found if isinstance(one, Shard)]

            inputs, params = cuts("inputs"), cuts("params")
            kinds = {
                "pipeline": axis == PIPELINE_AXIS,
                "data": 0 in inputs,
                "sequence": any(inputs) or any(cuts("outputs")),
                "sharded": bool(params and strategy.use),
                "expert": any(len(one.meta.shape) > 2 for one in self._cut(axis)),
                "tensor": bool(params and "*" not in strategy.use),
                "optimizer": bool(cuts("optimizer")) and not (params and strategy.use),
            }
            uses.append(f"{axis}={size}: {' and '.join(name for name, one in kinds.items() if one) or 'replicas'}")
        if strategy.stages:
            name = strategy.schedule if isinstance(strategy.schedule, str) else "a solved schedule"
            uses.append(f"{strategy.microbatches} micro-batches by {name}")
        elif strategy.microbatches > 1:
            uses.append(f"{strategy.microbatches} micro-batches")
        return ", ".join([*uses, *(["recomputation"] if strategy.recompute else [])])

    def _cut(self, axis: str) -> Iterator[Spec]:
        """The parameters whose first dimension an axis cuts."""
        at = list(self.plan.inner).index(axis) if axis in self.plan.inner else -1
        for one in self.plan.inputs if at >= 0 else ():
            if one.role == "parameter" and self.plan.specs[one.slot].placements[at] == Shard(0):
                yield self.plan.specs[one.slot]

    @property
    def reason(self) -> str:
        """The parts of its time."""
        waits = {axis: max(by) for axis, by in self.simulation.waits.items()}
        parts = [f"waits for {axis} {time_text(most)}" for axis, most in waits.items() if most > 0.005 * self.seconds]
        return ", ".join([f"computes {time_text(max(self.simulation.busy))}", *parts])


@dataclass(frozen=True)
class Found:
    """The best strategy of a search, and the next ones.

    Attributes:
        complete: Whether the search came to its end, before its time was over or it was interrupted.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    complete: bool

    def describe(self) -> str:
        """A line for each: time, memory, what its axes are for, and the parts of the time."""
        lines = [
            f"{time_text(one.seconds):>9} {one.seconds / self.best.seconds:6.2f}x {size_text(one.peak):>9}  "
            f"{one.words} ({one.reason})"
            for one in (self.best, *self.others)
        ]
        return "\n".join([*lines, *([] if self.complete else ["interrupted: there may be better ones"])])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.describe())}</pre>"


def search(
    program: Program,
    axes: Mapping[str, int] | int,
    hardware: Hardware,
    *,
    memory: float | None = None,
    seconds: float = 30.0,
) -> Found:
    """The fastest strategies for a program: data, tensor, sequence and expert parallelism, sharded states, pipelines
    with micro-batches and schedules, and recomputation.

    An integer program proposes strategies; each is planned and simulated, and these numbers decide. It runs in this
    thread: `await asyncio.to_thread(search, ...)`. Ctrl-C ends it with the best found so far.

    Args:
        axes: Names and sizes, of which `pp` is for a pipeline, or the number of devices, to try several.
        memory: Bytes that a device may have, those of `hardware` by default.
        seconds: The time after which it begins nothing new.

    Raises:
        ValueError: Nothing was found that holds in the memory: by how much, and on how many devices something would.
        ImportError: SciPy is not installed: it comes with the extra `plan`.
    """
    return _Search(program, hardware, memory, seconds).run(axes)


class _Layout(NamedTuple):
    axes: Mapping[str, int]
    inner: Mapping[str, int]
    stages: int


class _Proposal(NamedTuple):
    seconds: float
    held: float
    strategy: Strategy
    layout: _Layout
    picked: Mapping[str, Picked]
    recompute: bool


class _Search:
    def __init__(self, program: Program, hardware: Hardware, memory: float | None, seconds: float) -> None:
        self.program = program
        self.hardware = hardware
        self.memory = hardware.memory if memory is None else memory
        if not self.memory > 0:
            raise ValueError(f"memory is {memory!r}: give a positive number of bytes")
        self.deadline = time.monotonic() + seconds
        self.runs = Runs(program)
        self.tables: dict[int, Ways] = {}
        self.micro: Callable[[int], Program] = lru_cache(program.micro)
        self.tried: dict[str, Candidate | None] = {}
        self.origins: dict[int, tuple[_Layout, Mapping[str, Picked], bool, float]] = {}
        """Of a candidate: what it was made of, and the time of its plan."""
        minimum([0.0], [Row({0: 1.0}, 0.0)], [1.0], [False], 1.0)  # SciPy is missed at once.

    def run(self, axes: Mapping[str, int] | int) -> Found:
        complete = True
        try:
            self._search(self._layouts(axes))
        except (KeyboardInterrupt, TimeoutError):
            complete = False
            if not any(self.tried.values()):
                raise
        every = sorted((one for one in self.tried.values() if one is not None), key=lambda one: one.seconds)
        fitting = [one for one in every if self._over(one) <= 0]
        if not fitting:
            raise ValueError(self._refusal(every) + " (the search was interrupted)" * (not complete))
        return Found(fitting[0], tuple(fitting[1 : 1 + OTHERS]), complete)

    def _search(self, layouts: Sequence[_Layout]) -> None:
        later: list[_Proposal] = []
        scarce: list[tuple[float, _Layout, list[_Proposal]]] = []
        for layout in layouts:
            proposals = self._proposals(layout, math.inf, recompute=False)
            made = [made for one in proposals[:2] if (made := self._best_of(one)) is not None]
            later += proposals[2:]
            if made and min(map(self._over, made)) > 0:
                scarce.append((made[0].seconds, layout, proposals))
        for _, layout, proposals in sorted(scarce, key=lambda one: one[0]):
            later += self._squeezed(layout, proposals)
        for one in sorted(later, key=lambda one: one.seconds):
            self._best_of(one)
        self._climb()

    def _squeezed(self, layout: _Layout, proposals: list[_Proposal]) -> list[_Proposal]:
        """Tries what the solver finds with less memory, and returns what it proposes besides."""
        scale = 1.0
        for _ in range(_ROUNDS):
            tried = [(one, made) for one in proposals[:2] if (made := self._best_of(one)) is not None]
            if not tried or any(self._over(made) <= 0 for _, made in tried):
                return proposals[2:]
            scale = min([scale * 0.95, *(one.held / self._used(made) for one, made in tried if one.held)])
            before = proposals
            kept, again = (self._proposals(layout, scale * self.memory, recompute=one) for one in (False, True))
            proposals = [*kept[:1], *again[:1], *kept[1:], *again[1:]]
            if [one.strategy for one in proposals] == [one.strategy for one in before]:
                break
        self._accumulated(proposals)
        return proposals[2:]

    def _accumulated(self, proposals: Sequence[_Proposal]) -> None:
        """Less memory by micro-batches, if none of the rest holds."""
        for one in sorted(proposals, key=lambda one: one.held)[:1]:
            for microbatches in self._microbatches(1) if one.layout.stages == 1 else ():
                self._planned(replace(one.strategy, microbatches=microbatches), one.layout, one.picked, one.recompute)

    def _layouts(self, axes: Mapping[str, int] | int) -> list[_Layout]:
        if isinstance(axes, Mapping):
            check_axes(axes)
        given = [dict(axes)] if isinstance(axes, Mapping) else list(_factored(axes))
        made = []
        for one in given:
            stages = one.get(PIPELINE_AXIS, 1)
            if stages <= max(1, len(self.runs.layers)):
                inner = {axis: size for axis, size in one.items() if axis != PIPELINE_AXIS} or {PIPELINE_AXIS: 1}
                made.append(_Layout(one, inner, stages))
        if not made:
            raise ValueError(
                f"the program has {len(self.runs.layers)} equal modules in a list, which cannot be cut into "
                f"{min(one.get(PIPELINE_AXIS, 1) for one in given)} stages"
            )
        return made

    # Proposals

    def _proposals(self, layout: _Layout, budget: float, *, recompute: bool) -> list[_Proposal]:
        """From each of several beginnings, what the solver makes of one axis after the other."""
        choices = Choices(self.runs, self.hardware, layout.axes, layout.inner, self.tables)
        found: list[_Proposal] = []
        whole = dict(choices.now)
        for begin in self._beginnings(choices, ("whole", "update", "store") if budget == math.inf else ("store",)):
            choices.now = {**whole, **begin}
            last = next(iter(choices.now.values()), None)
            for axis in (*(one for one in choices.axes if one not in begin), *begin):
                if axis in begin:
                    found.append(self._proposal(choices, layout, last, recompute=recompute))
                shares = (1 / layout.stages, 1.0 if layout.stages == 1 else 0.5)
                last = choices.pick(axis, budget, shares, recompute=recompute, seconds=self._left())
            found.append(self._proposal(choices, layout, last, recompute=recompute))
        unique = {one.strategy.to_json(): one for one in sorted(found, key=lambda one: -one.seconds)}
        return sorted(unique.values(), key=lambda one: one.seconds)

    def _proposal(self, choices: Choices, layout: _Layout, last: Picked | None, *, recompute: bool) -> _Proposal:
        seconds, held = (last.seconds, last.held) if last is not None else (0.0, 0.0)
        return _Proposal(seconds, held, choices.strategy(recompute=recompute), layout, dict(choices.now), recompute)

    def _beginnings(self, choices: Choices, kinds: Sequence[str]) -> Iterator[dict[str, Picked]]:
        """Nothing; and the first axis for data, with and without sharded states."""
        yield {}
        for axis in list(choices.axes)[:1]:
            size = choices.axes[axis]
            for kind in kinds if self.runs.updates else ("whole",):
                options = {
                    name: next((one for one in choices.options(name, axis) if one.kind == kind), WHOLE)
                    for name in choices.parameters
                }
                inputs = {
                    name: Shard(0) if Shard(0) in choices.inputs(name, axis) else REPLICA for name in choices.arguments
                }
                shares = [(1 / size, 1 / size)] * len(self.runs.runs)
                now = replace(choices.now[axis], options=options, inputs=inputs, shares=shares, seconds=math.inf)
                yield {axis: now}

    # Plans

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0 and any(self.tried.values()):
            raise TimeoutError
        return max(left, 5.0)

    def _best_of(self, proposal: _Proposal) -> Candidate | None:
        """The best plan of a proposal: of a pipeline, with any of the micro-batches and schedules."""
        found = [
            self._planned(one, proposal.layout, proposal.picked, proposal.recompute) for one in self._staged(proposal)
        ]
        made = [one for one in found if one is not None]
        return min(made, key=lambda one: (max(self._over(one), 0.0), one.seconds), default=None)

    def _planned(
        self, strategy: Strategy, layout: _Layout, picked: Mapping[str, Picked], recompute: bool
    ) -> Candidate | None:
        key = f"{dict(layout.axes)} {strategy.to_json()}"
        if key not in self.tried:
            self._left()
            began = time.monotonic()
            try:
                made = plan(self.program, self.micro, strategy, layout.axes)
            except (NotImplementedError, ValueError):
                self.tried[key] = None
            else:
                found = self.tried[key] = Candidate(strategy, layout.axes, made, made.simulate(self.hardware))
                self.origins[id(found)] = (layout, picked, recompute, time.monotonic() - began)
        return self.tried[key]

    def _staged(self, proposal: _Proposal) -> Iterator[Strategy]:
        strategy, layout = proposal.strategy, proposal.layout
        if layout.stages == 1:
            yield strategy
            return
        layers = self.runs.layers
        cuts = self._cuts(layout, len(layers))
        for microbatches in self._microbatches(layout.stages):
            stages = tuple(f"{self.runs.path}{layers[cut - 1]}" for cut in cuts)
            staged = replace(strategy, stages=stages, microbatches=microbatches)
            yield staged
            yield replace(staged, schedule="zb_h1")
            if (made := self._planned(staged, layout, proposal.picked, proposal.recompute)) is not None:
                schedule = self._schedule(made, layout)
                if [list(row) for row in schedule] != zb_h1(layout.stages, microbatches):
                    yield replace(staged, schedule=schedule)

    def _cuts(self, layout: _Layout, count: int) -> list[int]:
        """The layers after which stages end: as many as its weakest rank is fast."""
        inner = math.prod(layout.inner.values())
        speeds = [
            min(self.hardware.factor("compute", rank) for rank in self._ranks(layout, stage, inner))
            for stage in range(layout.stages)
        ]
        layers = [1] * layout.stages
        for _ in range(count - layout.stages):
            least = min(range(layout.stages), key=lambda stage: (layers[stage] + 1) / speeds[stage])
            layers[least] += 1
        return [sum(layers[: stage + 1]) for stage in range(layout.stages - 1)]

    def _ranks(self, layout: _Layout, stage: int, inner: int) -> Iterator[int]:
        after = list(layout.axes)[list(layout.axes).index(PIPELINE_AXIS) + 1 :]
        stride = math.prod(layout.axes[axis] for axis in after)
        return (rank for rank in range(inner * layout.stages) if rank // stride % layout.stages == stage)

    def _microbatches(self, stages: int) -> list[int]:
        shapes = [meta.shape for _, meta, _ in self.program.arguments.leaves if meta is not None]
        rows = math.gcd(*(shape[0] if shape else 1 for shape in shapes))
        fitting = [count for count in (4 * stages, 2 * stages, stages, 2) if rows % count == 0]
        return fitting[:2] or [1]

    def _schedule(self, made: Candidate, layout: _Layout) -> Schedule:
        """The schedule for the times of this plan, in the memory of 1F1B."""
        pipeline, rules = made.plan.pipeline, Rules(made.plan.inner)
        assert pipeline is not None
        costs = {kind: [0.0] * layout.stages for kind in Kind}
        for segment in pipeline.segments:
            if segment.kind != "U":
                rank = made.plan.ranks_of(segment.stage)[0]
                costs[Kind[segment.kind]][segment.stage] = sum(
                    self.hardware.work(*work_of(one, made.plan.specs, rules, 0), one.target or one.kind, rank)
                    for one in segment.instructions
                    if one.kind not in COLLECTIVES
                )
        stages = range(layout.stages)
        return solved(stages, pipeline.microbatches, costs, held=layout.stages, seconds=min(2.0, self._left()))

    def _climb(self) -> None:
        """Change one thing of the best at a time, while that makes it better and its plans take no long time."""
        while (best := self._best()) is not None:
            layout, picked, recompute, took = self.origins[id(best)]
            choices = Choices(self.runs, self.hardware, layout.axes, layout.inner, self.tables)
            changes = list(_changes(choices, picked))
            for at, choices.now in enumerate(changes):
                if took * (len(changes) - at) > self._left() and len(self.tried) > OTHERS:
                    return
                made = choices.strategy(recompute=recompute)
                staged = replace(
                    best.strategy, **{name: getattr(made, name) for name in ("params", "inputs", "optimizer", "use")}
                )
                self._planned(staged, layout, choices.now, recompute)
            if self._best() is best:
                return

    def _best(self) -> Candidate | None:
        fitting = (one for one in self.tried.values() if one is not None and self._over(one) <= 0)
        return min(fitting, key=lambda one: one.seconds, default=None)

    # Memory

    def _used(self, one: Candidate) -> float:
        """The peak in terms of a device with the usual memory."""
        return max(nbytes / self.hardware.factor("memory", rank) for rank, nbytes in enumerate(one.plan.peak))

    def _over(self, one: Candidate) -> float:
        return self._used(one) - self.memory

    def _refusal(self, every: Sequence[Candidate]) -> str:
        best = min(every, key=self._used)
        text = (
            f"no strategy was found that holds in {size_text(self.memory)}: the least takes "
            f"{size_text(self._used(best))}, {size_text(self._over(best))} too much ({best.words}). "
            "Parts of unequal lengths were not tried"
        )
        axis = max((one for one in best.axes if one != PIPELINE_AXIS), key=best.axes.__getitem__, default="")
        for factor in (2, 4, 8, 16) if axis else ():
            axes = {**best.axes, axis: factor * best.axes[axis]}
            try:
                peak = max(plan(self.program, self.micro, best.strategy, axes).peak)
            except ValueError:
                continue
            if peak <= self.memory:
                return f"{text}. On {math.prod(axes.values())} devices ({axis}={axes[axis]}) it takes {size_text(peak)}"
        return text


def _changes(choices: Choices, picked: Mapping[str, Picked]) -> Iterator[dict[str, Picked]]:
    """The strategies that differ in what one axis does with one parameter or argument."""
    for axis, now in picked.items():
        choices.now = dict(picked)
        for name in choices.parameters:
            for option in choices.options(name, axis):
                if option != now.options[name]:
                    yield {**picked, axis: replace(now, options={**now.options, name: option})}
        for name in choices.arguments:
            for placement in choices.inputs(name, axis):
                if placement != now.inputs[name]:
                    yield {**picked, axis: replace(now, inputs={**now.inputs, name: placement})}


def _factored(devices: int) -> Iterator[dict[str, int]]:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ValueError(f"{devices!r} devices: give at least one, or axes such as {{'dp': 2, 'tp': 4}}")
    divisors = [one for one in range(1, devices + 1) if devices % one == 0]
    for stages in divisors:
        rest = devices // stages
        for tensor in (one for one in divisors if rest % one == 0):
            sizes = {PIPELINE_AXIS: stages, "dp": rest // tensor, "tp": tensor}
            axes = {axis: size for axis, size in sizes.items() if size > 1}
            if tensor == 1 or rest > tensor:
                yield axes or {"dp": 1}
