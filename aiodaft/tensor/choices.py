"""The placements of a program's tensors on one axis, chosen by an integer program.

The solver takes one way for each run, so that the placements between them agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, Final, Literal, NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from aiodaft.pipeline.solver import Row, minimum
from aiodaft.tensor.hardware import Hardware
from aiodaft.tensor.operations import Input
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Meta, Spec
from aiodaft.tensor.strategy import Patterns, Strategy, first
from aiodaft.tensor.ways import REPLICA, Message, Run, Runs, Way, Ways

_MOST: Final = 128
"""Combinations of placements of what a run takes; those in which fewer differ come first."""


class Option(NamedTuple):
    """What an axis does with a parameter: nothing, or it cuts its update (ZeRO-1), also where it is kept (ZeRO-3), or
    the computation with it too."""

    kind: Literal["whole", "update", "store", "cut"]
    dim: int = 0

    def kept(self) -> Placement:
        return Shard(self.dim) if self.kind in ("store", "cut") else REPLICA

    def used(self) -> Placement:
        return Shard(self.dim) if self.kind == "cut" else REPLICA

    def updated(self) -> Placement:
        return REPLICA if self.kind == "whole" else Shard(self.dim)


WHOLE: Final = Option("whole")


@dataclass(frozen=True)
class Picked:
    """What one axis does: with parameters, by the pattern of their names, with arguments, and where modules end.

    Attributes:
        asked: The modules of which the strategy says the placements.
        shares: The time and the bytes of each run, as parts of those of the whole one.
        seconds: As the solver sees them, and `held` the bytes.
    """

    options: Mapping[str, Option]
    inputs: Mapping[str, Placement]
    shares: Sequence[tuple[float, float]]
    ends: Mapping[str, Placement] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    seconds: float = math.inf
    held: float = 0.0


class Choices:
    """The choice of a strategy on a group with named axes, an axis at a time.

    Args:
        axes: Those of all ranks; `inner` are those of a stage.
        tables: The ways on an axis, by its size; others are added.

    Attributes:
        now: The choice of each axis.
    """

    def __init__(
        self,
        runs: Runs,
        hardware: Hardware,
        axes: Mapping[str, int],
        inner: Mapping[str, int],
        tables: dict[int, Ways],
    ) -> None:
        self.runs = runs
        self.metas = runs.trace.metas
        self.hardware = hardware
        self.axes = {axis: size for axis, size in inner.items() if size > 1}
        self.tables = tables
        for size in self.axes.values():
            if size not in tables:
                tables[size] = Ways(runs, hardware, size)
        self.rules = Rules(dict(inner))
        inputs = runs.trace.inputs
        same: dict[str, list[Input]] = defaultdict(list)
        for one in sorted(inputs, key=lambda one: -self.metas[one.slot].nbytes if one.role == "parameter" else 0):
            if one.role == "parameter":
                same[runs.pattern(one.name)].append(one)
        self.parameters: Mapping[str, Sequence[Input]] = same
        self.arguments = {one.name: one for one in inputs if one.role == "argument" and one.slot in self.metas}
        whole = Picked(
            dict.fromkeys(same, WHOLE), dict.fromkeys(self.arguments, REPLICA), [(1.0, 1.0)] * len(runs.runs)
        )
        self.now = dict.fromkeys(self.axes, whole)
        ranks = range(math.prod(axes.values()))
        self.slowest = min(hardware.factor("compute", rank) * hardware.factor("bandwidth", rank) for rank in ranks)
        self._members: dict[str, list[range]] = {}
        stride = len(ranks)
        for axis, size in axes.items():
            stride //= size
            firsts = (rank for rank in ranks if rank // stride % size == 0)
            self._members[axis] = [range(one, one + size * stride, stride) for one in firsts]

    def pick(self, axis: str, budget: float, shares: tuple[float, float], *, recompute: bool, seconds: float) -> Picked:
        """Choose what an axis does, while the others do what they do now: the fastest that holds, or else the least.

        Args:
            budget: Bytes of parameters, gradients, states and activations at a rank.
            shares: The part of the parameters, and of the activations, that a rank has at a time.
            recompute: Whether layers keep nothing for backward.
        """
        model = _Model(self, axis, budget, shares, recompute=recompute)
        found = model.solved(seconds) or (model.least(seconds) if budget < math.inf else None)
        self.now[axis] = found or self.now[axis]
        return self.now[axis]

    def strategy(self, *, recompute: bool) -> Strategy:
        def by_axis(placements: Iterable[Placement]) -> dict[str, Placement]:
            return {axis: one for axis, one in zip(self.axes, placements, strict=True) if one != REPLICA}

        now = self.now.values()
        params, optimizer, use = (
            {name: by_axis(of(one.options[name]) for one in now) for name in self.parameters}
            for of in (Option.kept, Option.updated, Option.used)
        )
        stored = {name: use[name] for name in params if params[name] != use[name]}
        asked = sorted({name for one in now for name in one.asked})
        return Strategy(
            params=_patterns(params),
            inputs=_patterns({name: by_axis(one.inputs[name] for one in now) for name in self.arguments}),
            outputs={name: by_axis(one.ends.get(name, REPLICA) for one in now) for name in asked},
            optimizer=_patterns(optimizer, params),
            use={"*": {}} if len(stored) == len(params) and not any(stored.values()) else stored,
            recompute=(f"{self.runs.path}*",) if recompute else (),
        )

    def options(self, name: str, axis: str) -> list[Option]:
        meta = self.metas[self.parameters[name][0].slot]
        dims = self._dims(meta, axis, lambda one: one.options[name].updated())
        updates = [
            one for dim in dims[:1] for one in (Option("update", dim), Option("store", dim)) if self.runs.updates
        ]
        return [WHOLE, *(Option("cut", dim) for dim in dims), *updates]

    def inputs(self, name: str, axis: str) -> list[Placement]:
        meta = self.metas[self.arguments[name].slot]
        return [REPLICA, *(Shard(dim) for dim in self._dims(meta, axis, lambda one: one.inputs[name]))]

    def _dims(self, meta: Meta, axis: str, of: Callable[[Picked], Placement]) -> list[int]:
        """The dimensions that an axis can cut evenly besides what others cut."""
        cuts = [(of(one), self.axes[at]) for at, one in self.now.items() if at != axis]
        parts = [
            self.axes[axis] * math.prod(n for one, n in cuts if one.is_shard(dim)) for dim in range(len(meta.shape))
        ]
        return [dim for dim, length in enumerate(meta.shape) if length and length % parts[dim] == 0]

    def time(self, axis: str, messages: Iterable[Message], share: float) -> float:
        return sum(
            max(self.hardware.seconds(kind, received * share, one) for one in self._members[axis])
            for kind, received in messages
        )

    def held(self, name: str, axis: str, option: Option) -> float:
        """Bytes of the parameters of a name, their gradients and states."""
        one, count = self.parameters[name][0], len(self.parameters[name])
        options = [
            option if at == axis else self.now[at].options[name] if at in self.now else WHOLE for at in self.rules.axes
        ]
        kept, updated = (
            max(self.rules.local_bytes(Spec(tuple(map(of, options)), self.metas[one.slot])))
            for of in (Option.kept, Option.updated)
        )
        states = 1 + self.runs.states[one.name] if self.runs.updates else 0
        return count * (kept + states * updated)

    def upkeep(self, name: str, axis: str, option: Option, gradient: Placement | None) -> float:
        """The time of a parameter beside its computation: gathered for use, its gradient reduced, and updated."""
        table, meta = self.tables[self.axes[axis]], self.metas[self.parameters[name][0].slot]
        others = [(self.axes[at], one.options[name]) for at, one in self.now.items() if at != axis]
        used, updated = (
            math.prod(1 / size for size, one in others if of(one) != REPLICA) for of in (Option.used, Option.updated)
        )
        seconds = 2 * self.time(axis, table.route(meta, option.kept(), option.used()), used)
        if gradient is None:
            return seconds
        part = updated / (1 if option == WHOLE else table.size)
        update = self.runs.updates * self.hardware.work(0, 3 * part * meta.nbytes, "", "") / self.slowest
        reduced = (*table.route(meta, gradient, option.updated()), *table.route(meta, option.updated(), option.kept()))
        return seconds + update + self.time(axis, reduced, updated)


def _patterns(given: Patterns, others: Patterns | None = None) -> Patterns:
    """The least of these patterns that say the same; `others` say it of what none of them fits."""
    default = others or {name: {} for name in given}
    found: Patterns = {
        name: given[name] for name in sorted(given, key=len, reverse=True) if given[name] != default[name]
    }
    values = list(given.values())
    if found and all(one == values[0] for one in values):
        return {"*": values[0]}
    fits = {name: first(found, name) for name in given}
    is_same = all((default[name] if one is None else one) == given[name] for name, one in fits.items())
    return found if is_same else dict(given)


class _Model:
    """The integer program: a variable for each way of each run, option of a parameter and placement of an argument."""

    def __init__(
        self, choices: Choices, axis: str, budget: float, shares: tuple[float, float], *, recompute: bool
    ) -> None:
        self.choices = choices
        self.axis = axis
        self.table = choices.tables[choices.axes[axis]]
        self.recompute = recompute
        self.kept = shares[1]
        self.costs: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[Row] = []
        self.memory: dict[int, float] = {}
        self.ways: list[dict[int, Way]] = []
        self.moves: dict[tuple[int, Placement, Placement], int] = {}
        self.ends: dict[str, dict[Placement | None, list[int]]] = {}
        self.inputs = {name: self._one_of(choices.inputs(name, axis)) for name in choices.arguments}
        self.options = {name: self._one_of(choices.options(name, axis)) for name in choices.parameters}
        self.placed: dict[int, dict[Placement, int]] = {
            one.slot: self.inputs[name] for name, one in choices.arguments.items()
        }
        others = [one.shares for at, one in choices.now.items() if at != axis]
        for at, run in enumerate(choices.runs.runs):
            self._run(run, (math.prod(one[at][0] for one in others), math.prod(one[at][1] for one in others)))
        for number in choices.runs.results:
            for placement, variable in self.placed.get(number, {}).items():
                self.costs[variable] += self._route(number, placement, REPLICA, 1.0)
        for name, found in self.options.items():
            for option, variable in found.items():
                self.memory[variable] = choices.held(name, axis, option) * shares[0]
        if budget < math.inf:
            self.rows.append(Row({at: one / budget for at, one in self.memory.items() if one}, -math.inf, 1.0))

    def _one_of(self, values: Iterable[Any]) -> dict[Any, int]:
        found = {one: self._new(0.0) for one in values}
        self._sum(found.values(), 1.0)
        return found

    def _new(self, cost: float, *, whole: bool = True) -> int:
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def _sum(self, variables: Iterable[int], value: float, *less: int) -> None:
        self.rows.append(Row(dict.fromkeys(variables, 1.0) | dict.fromkeys(less, -1.0), value, value))

    def _run(self, run: Run, share: tuple[float, float]) -> None:
        taken, choices = list(run.takes.values()), self.choices
        for number in taken:
            if number not in self.placed:
                self.placed[number] = self._one_of([REPLICA])
        names = [choices.runs.pattern(one.name) for one in run.parameters.values()]
        computed = [list(dict.fromkeys(one.used() for one in self.options[name])) for name in names]
        mixes = sorted(product(*(self.placed[one] for one in taken)), key=lambda one: len(set(one)))
        both = product(islice(mixes, _MOST), product(*computed))
        found = [way for takes, parameters in both for way in self.table.of(run, takes, parameters)]
        stays = self.recompute and run.is_layer
        ways = {}
        for way in found:
            work, count = (a + b * stays for a, b in zip(way.work, way.forward, strict=True))
            seconds = work * share[0] / choices.slowest + count * choices.hardware.overhead
            variable = self._new(run.times * (seconds + choices.time(self.axis, way.messages, share[1])))
            ways[variable] = way
            self.memory[variable] = 0.0 if stays else way.kept * share[1] * run.times * self.kept
        self.ways.append(ways)
        self._sum(ways, 1.0)
        for at, number in enumerate(run.gives):
            self.placed[number] = self._one_of(dict.fromkeys(way.gives[at] for way in found))
            self._agree(self.placed[number], {variable: way.gives[at] for variable, way in ways.items()})
        for at, number in enumerate(taken):
            self._agree(self.placed[number], {variable: way.takes[at] for variable, way in ways.items()})
        self._moves(run, taken, ways, share[1])
        for at, name in enumerate(names):
            self._upkeep(name, run.times, ways, at)
        self._ends(ways)

    def _agree(self, values: Mapping[Any, int], ways: Mapping[int, Any]) -> None:
        for value, variable in values.items():
            self._sum([one for one, has in ways.items() if has == value], 0.0, variable)

    def _moves(self, run: Run, taken: Sequence[int], ways: Mapping[int, Way], share: float) -> None:
        """A redistribution is done once for all that need it."""
        need: dict[int, list[int]] = defaultdict(list)
        for variable, way in ways.items():
            for at, target in way.moves:
                key = (taken[at], way.takes[at], target)
                if key not in self.moves:
                    self.moves[key] = self._new(self._route(*key, share) * run.times, whole=False)
                need[self.moves[key]].append(variable)
        for move, those in need.items():
            self.rows.append(Row({move: 1.0, **dict.fromkeys(those, -1.0)}, 0.0))

    def _route(self, number: int, source: Placement, target: Placement, share: float) -> float:
        return self.choices.time(self.axis, self.table.route(self.choices.metas[number], source, target), share)

    def _upkeep(self, name: str, times: int, ways: Mapping[int, Way], at: int) -> None:
        groups: dict[tuple[Placement, Placement | None], list[int]] = defaultdict(list)
        for variable, way in ways.items():
            groups[way.parameters[at], way.gradients[at]].append(variable)
        chosen: dict[int, Option] = {}
        for (used, gradient), those in groups.items():
            parts = {
                self._new(self.choices.upkeep(name, self.axis, option, gradient) * times, whole=False): option
                for option in self.options[name]
                if option.used() == used
            }
            self._sum(parts, 0.0, *those)
            chosen |= parts
        self._agree(self.options[name], chosen)

    def _ends(self, ways: Mapping[int, Way]) -> None:
        """The strategy asks for the same where equal modules end."""
        for name in dict.fromkeys(name for way in ways.values() for name in way.ends):
            groups: dict[Placement | None, list[int]] = defaultdict(list)
            for variable, way in ways.items():
                groups[way.asked.get(name)].append(variable)
            others = self.ends.setdefault(name, groups)
            for asked in {*groups, *others} if others is not groups else ():
                self._sum(groups.get(asked, ()), 0.0, *others.get(asked, ()))

    def least(self, seconds: float) -> Picked | None:
        """Of the least memory, whatever the time."""
        self.rows.pop()
        return self.solved(seconds, [self.memory.get(at, 0.0) + cost for at, cost in enumerate(self.costs)])

    def solved(self, seconds: float, costs: Sequence[float] = ()) -> Picked | None:
        costs = costs or self.costs
        scale = 1000 / max(*costs, 1e-30)
        rows = [row for row in self.rows if row.factors]
        found = minimum([one * scale for one in costs], rows, [1.0] * len(costs), self.whole, seconds)
        if found is None:
            return None
        chosen = [max(of, key=found.__getitem__) for of in self.ways]
        ways = [of[one] for of, one in zip(self.ways, chosen, strict=True)]
        wholes = [next(iter(of.values())) for of in self.ways]
        return Picked(
            options={name: _most(of, found) for name, of in self.options.items()},
            inputs={name: _most(of, found) for name, of in self.inputs.items()},
            shares=[
                (way.work[0] / (whole.work[0] or 1.0) or 1.0, way.nbytes / (whole.nbytes or 1) or 1.0)
                for way, whole in zip(ways, wholes, strict=True)
            ],
            ends={name: placement for way in ways for name, placement in way.ends.items()},
            asked=frozenset(name for way in ways for name in way.asked),
            seconds=sum(cost * value for cost, value in zip(self.costs, found, strict=True)),
            held=sum(found[at] * one for at, one in self.memory.items()),
        )


def _most(values: Mapping[Any, int], found: Sequence[float]) -> Any:
    return max(values, key=lambda one: found[values[one]])
