"""The ways to do the parts of a program on one axis, each lowered by the planner.

A program is cut into runs: the operations of one module, until another begins, with their gradients. Equal runs have
their ways in common, and of equal layers two stand for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from aiodaft.tensor.costs import COLLECTIVES, work_of
from aiodaft.tensor.hardware import Hardware
from aiodaft.tensor.instructions import Slot, mapped
from aiodaft.tensor.lowering import Lowering
from aiodaft.tensor.operations import Gradient, Input, Mark, Operation, Trace
from aiodaft.tensor.passes import Traced, outs_of, phase_of, reads_of
from aiodaft.tensor.planner import Planner
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Meta, Spec
from aiodaft.tensor.strategy import Strategy
from aiodaft.tensor.views import is_view

REPLICA: Final = Replicate()

Message: TypeAlias = tuple[str, int]
"""The kind of a collective, and the bytes that a rank receives."""


@dataclass
class Run:
    """Operations of a module, with those of their gradients.

    Attributes:
        takes: The tensors that forward reads of others, each with the one that stands for it.
        gives: The tensors that others read.
        sources: The gradients that it makes, by the parameter.
        kind: Runs of one kind have equal operations.
        times: The number of runs that it stands for, of which it is one.
    """

    module: str
    forward: list[Traced] = field(default_factory=list)
    backward: list[Traced] = field(default_factory=list)
    takes: dict[int, int] = field(default_factory=dict)
    gives: list[int] = field(default_factory=list)
    parameters: dict[int, Input] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    kind: int = 0
    times: int = 1
    is_layer: bool = False


class Runs:
    """The runs of a program.

    Attributes:
        path: The path of the list with most equal modules, with a dot, and `layers`, their numbers in it.
        kept: The tensors that backward reads of forward, without views.
        states: The number of the optimizer's states, by parameter; `updates`, that of operations of the update of each.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kept: set[int] = set()
        every = self._cut()
        kinds: dict[Any, int] = {}
        forward = []
        for run in every:
            run.kind = kinds.setdefault(self._signature([*run.forward, *run.backward]), len(kinds))
            forward.append(kinds.setdefault(self._signature(run.forward), len(kinds)))
        self.path, layers = _layers(every, forward)
        self.layers = list(layers)
        self.runs = self._folded(every, list(layers.values()))
        inputs = [one for one in trace.inputs if one.role == "state" and trace.metas[one.slot].shape]
        self.states = Counter(one.parameter for one in inputs)
        phases = Counter(phase_of(one) for one in trace.operations if isinstance(one, Operation))
        self.updates = phases["update"] / max(1, sum(isinstance(one, Gradient) for one in trace.operations))

    def pattern(self, name: str) -> str:
        """The names of a parameter or module in all layers."""
        layer, dot, rest = name.removeprefix(self.path).partition(".")
        is_inside = self.layers and name.startswith(self.path) and layer.isdigit()
        return f"{self.path}*{dot}{rest}" if is_inside else name

    def _cut(self) -> list[Run]:
        trace, runs = self.trace, list[Run]()
        places: dict[tuple[str, ...], Run] = {}
        owners: dict[int, Run] = {}
        roots: dict[int, int] = {}
        for one in trace.operations:
            if phase_of(one) == "forward":
                if not runs or runs[-1].module != one.cause.module:
                    runs.append(Run(one.cause.module))
                runs[-1].forward.append(one)
                places.setdefault((one.cause.module, one.cause.line), runs[-1])
                places.setdefault((one.cause.module,), runs[-1])
                is_same = isinstance(one, Mark) or (isinstance(one, Operation) and is_view(one.target))
                for out in outs_of(one):
                    owners[out] = runs[-1]
                    source = next(iter(reads_of(one)), out) if is_same else out
                    roots[out] = roots.get(source, source)
        gradients = {one.source: one.parameter for one in trace.operations if isinstance(one, Gradient)}
        slots = {one.name: one.slot for one in trace.inputs if one.role == "parameter"}
        for one in trace.operations:
            if phase_of(one) == "backward":
                run = places.get((one.cause.module, one.cause.line)) or places.get((one.cause.module,), runs[-1])
                run = owners.get(one.forward or -1, run) if isinstance(one, Mark) else run
                run.backward.append(one)
                run.sources |= {slots[gradients[out]]: out for out in outs_of(one) if out in gradients}
                self.kept.update(roots[number] for number in reads_of(one) if number in owners)
        parameters = {one.slot: one for one in trace.inputs if one.role == "parameter"}
        for run in runs:
            for number in (number for one in run.forward for number in reads_of(one)):
                if number in parameters:
                    run.parameters[number] = parameters[number]
                elif number in trace.metas and owners.get(number) is not run:
                    run.takes[number] = number
        return runs

    def _signature(self, steps: Sequence[Traced]) -> tuple[Any, ...]:
        known: dict[int, int] = {}

        def name(one: Any) -> Any:
            return known.setdefault(one.number, len(known)) if isinstance(one, Slot) else one

        def described(one: Traced) -> tuple[Any, ...]:
            numbers = [*reads_of(one), *outs_of(one)]
            what = (one.target, repr(mapped(name, (one.args, dict(one.kwargs))))) if isinstance(one, Operation) else ()
            return type(one), *what, *((known.setdefault(n, len(known)), self.trace.metas.get(n)) for n in numbers)

        return tuple(map(described, steps))

    def _folded(self, runs: Sequence[Run], layers: Sequence[Sequence[Run]]) -> list[Run]:
        """Without the runs of layers behind the second one that are as those of the second, which stand for them."""
        same: dict[int, int] = {}
        gone: set[int] = set()
        for layer in layers:
            for run, like in zip(layer, layers[1], strict=True):
                run.is_layer = True
                if run is not like and layer is not layers[0] and run.kind == like.kind:
                    gone.add(id(run))
                    like.times += 1
                    for one, other in zip(run.forward, like.forward, strict=True):
                        same |= dict(zip(outs_of(one), outs_of(other), strict=True))
        kept = [run for run in runs if id(run) not in gone]
        self.kept = {same.get(number, number) for number in self.kept}
        self.results = [same.get(one.slot, one.slot) for one in self.trace.outputs if one.role == "result"]
        for run in kept:
            run.takes = {number: same.get(number, number) for number in run.takes}
        read = {*self.results, *(number for run in kept for number in run.takes.values())}
        for run in kept:
            run.gives = [out for one in run.forward for out in outs_of(one) if out in read]
        return kept


def _layers(runs: Sequence[Run], kinds: Sequence[int]) -> tuple[str, Mapping[int, Sequence[Run]]]:
    found: dict[str, dict[int, list[tuple[int, Run]]]] = {}
    for run, kind in zip(runs, kinds, strict=True):
        parts = run.module.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                path = "".join(f"{one}." for one in parts[:at])
                found.setdefault(path, {}).setdefault(int(part), []).append((kind, run))
    for path, layers in sorted(found.items(), key=lambda one: -len(one[1])):
        if len(layers) > 1 and len({tuple(kind for kind, _ in of) for of in layers.values()}) == 1:
            return path, {layer: [run for _, run in of] for layer, of in layers.items()}
    return "", {}


class Way(NamedTuple):
    """One way to do a run on one axis.

    Attributes:
        takes: The placements of what it takes, and likewise `gives` and `parameters`, with which it computes.
        asked: The placements that the strategy asks for where modules end; `ends` are those that they have.
        gradients: Those of the gradients of its parameters; None for one that has none.
        moves: The redistributions of what it takes, which runs share: which of `takes`, to what.
        work: Seconds of its operations without the overhead of each, and their number; `forward`, of forward alone.
        messages: Its collectives, without those of `moves`.
        nbytes: Of what forward makes; and `kept`, what backward needs of it.
    """

    takes: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    asked: Mapping[str, Placement]
    ends: Mapping[str, Placement]
    gives: tuple[Placement, ...]
    gradients: tuple[Placement | None, ...]
    moves: tuple[tuple[int, Placement], ...]
    work: tuple[float, int]
    forward: tuple[float, int]
    messages: tuple[Message, ...]
    nbytes: int
    kept: int


class Ways:
    """The ways to do runs on one axis of a size. Other axes divide the time, and change little else."""

    def __init__(self, runs: Runs, hardware: Hardware, size: int) -> None:
        self.runs = runs
        self.hardware = hardware
        self.size = size
        self.rules = Rules({"axis": size})
        self._metas = runs.trace.metas
        self._known: dict[Any, tuple[Way, ...]] = {}
        self._routes: dict[tuple[Meta, Placement, Placement], tuple[Message, ...]] = {}

    def of(self, run: Run, takes: tuple[Placement, ...], parameters: tuple[Placement, ...]) -> tuple[Way, ...]:
        """The ways with these placements; where a sum is pending at the end of a module, it may be cut instead."""
        key = (run.kind, takes, parameters)
        if key not in self._known:
            try:
                way, sums = self._lowered(run, takes, parameters, {})
            except NotImplementedError:  # a placement that cannot be reached from another
                self._known[key] = ()
                return ()
            cuts = [
                (name, dim) for name, meta in sums.items() for dim, n in enumerate(meta.shape) if n % self.size == 0
            ]
            asked = [self._lowered(run, takes, parameters, {name: Shard(dim)})[0] for name, dim in cuts]
            self._known[key] = (way, *asked)
        return self._known[key]

    def route(self, meta: Meta, source: Placement, target: Placement) -> tuple[Message, ...]:
        key = (meta, source, target)
        if key not in self._routes:
            lowering = Lowering(self.rules)
            lowering.redistribute(lowering.new(Spec((source,), meta)), (target,))
            self._routes[key] = _messages(lowering)
        return self._routes[key]

    def _lowered(
        self, run: Run, takes: tuple[Placement, ...], parameters: tuple[Placement, ...], asked: Mapping[str, Placement]
    ) -> tuple[Way, dict[str, Meta]]:
        trace = replace(
            self.runs.trace, inputs=tuple(run.parameters.values()), operations=(*run.forward, *run.backward)
        )
        planner = Planner(trace, Strategy(outputs={name: {"axis": one} for name, one in asked.items()}), self.rules)
        lowering, numbers, metas = planner.lowering, planner.numbers, self._metas
        for number, placement in zip((*run.takes, *run.parameters), (*takes, *parameters), strict=True):
            numbers[number] = lowering.new(Spec((placement,), metas[number]))
        taken = [numbers[number] for number in run.takes]
        sums, ends = {}, {}
        self._add_others(planner, run.forward)
        for one in run.forward:
            planner.step(one)
            if isinstance(one, Mark) and one.side == "out":
                name = self.runs.pattern(one.module)
                (ends[name],) = lowering.spec(numbers[one.out]).placements
                if lowering.spec(numbers[one.source]).placements[0].is_partial() and not name.endswith("*"):
                    sums[name] = metas[one.source]
        forward = self._work(lowering)
        self._add_others(planner, run.backward)
        for one in run.backward:
            planner.step(one)
        made = {n: lowering.spec(numbers[n]) for one in run.forward for n in outs_of(one) if n in metas}
        moves = [(at, to) for at, number in enumerate(taken) for key, (to,) in lowering.placed if key == number]
        messages = Counter(_messages(lowering))
        messages.subtract(one for at, to in moves for one in self.route(metas[[*run.takes][at]], takes[at], to))
        sources = [numbers.get(run.sources.get(slot, -1)) for slot in run.parameters]
        sizes = {number: max(self.rules.local_bytes(spec)) for number, spec in made.items()}
        way = Way(
            takes,
            parameters,
            asked,
            ends,
            tuple(made[number].placements[0] for number in run.gives),
            tuple(None if source is None else lowering.spec(source).placements[0] for source in sources),
            tuple(moves),
            self._work(lowering),
            forward,
            tuple(messages.elements()),
            sum(sizes.values()),
            sum(size for number, size in sizes.items() if number in self.runs.kept),
        )
        return way, sums

    def _add_others(self, planner: Planner, steps: Sequence[Traced]) -> None:
        """What other runs make: numbers, and gradients, which are placed as the tensor of their shape."""
        metas, lowering, numbers = self._metas, planner.lowering, planner.numbers
        made = {out for one in steps for out in outs_of(one)}
        tensors = numbers.keys() & metas.keys() - planner.parameters.keys()
        known = {metas[number].shape: lowering.spec(numbers[number]).placements for number in sorted(tensors)}
        for number in {number for one in steps for number in reads_of(one)} - made - numbers.keys():
            meta = metas.get(number)
            like = known.get(meta.shape, lowering.replicas) if meta else ()
            like = lowering.replicas if any(one.is_partial() for one in like) else like
            numbers[number] = lowering.new(Spec(like, meta) if meta else None)

    def _work(self, lowering: Lowering) -> tuple[float, int]:
        times = [
            self.hardware.work(*work_of(one, lowering.specs, self.rules, 0), one.target or one.kind)
            for one in lowering.instructions
            if one.kind not in COLLECTIVES
        ]
        return sum(max(one - self.hardware.overhead, 0.0) for one in times), sum(one > 0 for one in times)


def _messages(lowering: Lowering) -> tuple[Message, ...]:
    return tuple((one.kind, max(one.received)) for one in lowering.collectives)
