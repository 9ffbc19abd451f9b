"""Lowers the operations of a program, with the placements of a strategy."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from aiodaft.tensor.costs import by_rank, flops_of, kinds_of, peak_of
from aiodaft.tensor.instructions import Slot, mapped, slots_of
from aiodaft.tensor.lowering import Lowering, received_bytes
from aiodaft.tensor.operations import Cause, Gradient, Input, Mark, Operation, Output, Trace
from aiodaft.tensor.passes import Step, with_buckets, without_dead
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.segments import Collective
from aiodaft.tensor.specs import Meta, Placements, Spec, placed
from aiodaft.tensor.strategy import Strategy, check_patterns, first, matches


class Planner:
    """Lowers the operations of a program, one after the other."""

    def __init__(self, trace: Trace, strategy: Strategy, rules: Rules, count: Iterator[int] | None = None) -> None:
        self.trace = trace
        self.strategy = strategy
        self.rules = rules
        self.lowering = Lowering(rules, count)
        self.numbers: dict[int, int] = {}
        """The number in the plan of each tensor of the program."""
        self.parameters = {one.slot: one.name for one in trace.inputs if one.role == "parameter"}
        self.slots = {name: slot for slot, name in self.parameters.items()}
        self.in_use: dict[tuple[int, str], int] = {}
        """The tensors to compute with, by parameter and phase and module."""
        self.parts: dict[int, int] = {}
        """The part of a parameter that this rank updates."""
        self.derived: dict[int, Operation] = {}
        """The operations that make tensors of parameters in use alone; backward does them again, in each module."""
        self.inside: dict[int, Operation | Mark] = {}
        """Those inside of modules that are recomputed; backward does them again, once."""
        self.again: dict[tuple[int, str], int] = {}
        """The tensors that backward has made again."""
        self.sources: dict[tuple[str, str], int] = {(one.name, one.role): one.slot for one in trace.inputs}
        self.gradients = {one.source: one for one in trace.operations if isinstance(one, Gradient)}

    def made(self) -> Plan:
        check_names(self.trace, self.strategy)
        inputs = [replace(one, slot=self.placed_input(one)) for one in self.trace.inputs]
        for one in self.trace.operations:
            self.step(one)
        outputs = [replace(one, slot=self.output(one)) for one in self.trace.outputs]
        return self._plan(inputs, outputs)

    def replicated(self, meta: Meta) -> int:
        return self.lowering.new(Spec(self.lowering.replicas, meta))

    def step(self, one: Operation | Mark | Gradient) -> None:
        self.lowering.cause = one.cause
        match one:
            case Mark():
                self.numbers[one.out] = self._mark(one)
                around = self._recomputed(one.module) if one.cause.phase == "forward" else None
                if around and (one.side, one.module) != ("out", around):
                    self.inside[one.out] = one
            case Gradient():
                self.numbers[one.out] = self._gradient(one)
            case Operation():
                self._operation(one)

    def _plan(self, inputs: list[Input], outputs: list[Output]) -> Plan:
        lowering = self.lowering
        wanted = [one.slot for one in outputs]
        steps = without_dead([*map(Step, lowering.instructions, lowering.causes)], wanted)
        steps, joined = with_buckets(steps, lowering.specs, self.rules.local_shapes, self.replicated)
        instructions = [one.instruction for one in steps]
        alive = {out for one in instructions for out in one.outs}
        collectives = joined_collectives(
            (one for one in lowering.collectives if one.slot in alive | joined.keys()), joined, lowering
        )
        kinds = kinds_of(lowering.specs.values(), self.rules)
        made = Plan(
            axes=self.rules.axes,
            inputs=tuple(inputs),
            instructions=tuple(instructions),
            outputs=tuple(outputs),
            specs=lowering.specs,
            arguments=self.trace.arguments,
            results=self.trace.results,
            collectives=tuple(collectives),
            flops=flops_of(instructions, lowering.specs, self.rules, kinds),
            scalars=self.trace.scalars,
            aliases=self.trace.aliases,
            causes=tuple(one.cause for one in steps),
        )
        return with_peak(made, self.rules, kinds)

    # Inputs

    def placed_input(self, one: Input) -> int:
        meta = self.trace.metas.get(one.slot)
        spec = Spec(self._placements(one), meta) if meta is not None else None
        number = self.numbers[one.slot] = self.lowering.new(spec)
        return number

    def _placements(self, one: Input) -> Placements:
        strategy = self.strategy
        match one.role:
            case "parameter" | "buffer":
                return self._fitting(one, "params", first(strategy.params, one.name))
            case "argument":
                return self._fitting(one, "inputs", first(strategy.inputs, one.name))
            case "state" if one.parameter and self._is_like_parameter(one):
                return self._fitting(one, "optimizer", self._of_state(one.parameter))
        return self.lowering.replicas

    def _is_like_parameter(self, one: Input) -> bool:
        metas = self.trace.metas
        return metas[one.slot].shape == metas[self.slots[one.parameter]].shape

    def _of_state(self, parameter: str) -> Mapping[str, Any] | None:
        given = first(self.strategy.optimizer, parameter)
        return first(self.strategy.params, parameter) if given is None else given

    def _fitting(self, one: Input, field: str, given: Mapping[str, Any] | None) -> Placements:
        shape = self.trace.metas[one.slot].shape
        result = []
        asked = placed(given or {}, self.rules.axes)
        for placement in asked if shape else self.lowering.replicas:
            if isinstance(placement, Shard):
                dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
                if not 0 <= dim < len(shape):
                    raise ValueError(
                        f"{field}: {one.name} has the shape {tuple(shape)}, which has no dimension {placement.dim}"
                    )
                placement = Shard(dim)
            elif not isinstance(placement, Replicate) and field != "outputs":
                raise ValueError(f"{field}: {one.name} cannot be {placement}: give Shard(dim) or Replicate()")
            result.append(placement)
        return tuple(result)

    # Operations

    def _operation(self, one: Operation) -> None:
        for out, number in self._applied(one):
            self.numbers[out] = number
            if out in self.gradients:
                self.gradient_is_there(self.gradients[out])
        read = slots_of((one.args, one.kwargs))
        if read and one.cause.phase == "forward" and all(n in self.parameters or n in self.derived for n in read):
            self.derived |= {out: one for out in one.outs if out is not None}
        if one.cause.phase == "forward" and self._recomputed(one.cause.module):
            self.inside |= {out: one for out in one.outs if out is not None}

    def _applied(self, one: Operation) -> list[tuple[int, int]]:
        """The tensors that it makes, by their numbers in the program and in the plan."""
        results = self.lowering.apply(one.target, *self._looked_up(one))
        made = results if isinstance(results, list | tuple) else (results,)
        both = zip(one.outs, made, strict=False)
        return [(out, slot.number) for out, slot in both if out is not None and slot is not None]

    def _recomputed(self, module: str) -> str | None:
        parts = module.split(".") if module else []
        paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return next((path for path in paths if matches(self.strategy.recompute, path)), None)

    def _looked_up(self, one: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def look(value: Any) -> Any:
            return Slot(self.number_of(value.number, one.cause)) if isinstance(value, Slot) else value

        args, kwargs = mapped(look, (one.args, dict(one.kwargs)))
        return args, kwargs

    def number_of(self, number: int, cause: Cause) -> int:
        if number in self.parameters:
            return self._parameter(number, cause)
        if cause.phase == "backward":
            if number in self.inside:
                return self._again(number, self.inside[number], cause, "")
            if number in self.derived and self._is_gathered(number):
                return self._again(number, self.derived[number], cause, cause.module)
        return self.numbers[number]

    def _parameter(self, number: int, cause: Cause) -> int:
        if cause.phase == "update":
            return self.parts.get(number, self.numbers[number])
        given = first(self.strategy.use, self.parameters[number])
        if given is None:
            return self.numbers[number]
        key = (number, f"{cause.phase} {cause.module}")
        if key not in self.in_use:
            target = placed(given, self.rules.axes)
            self.lowering.placed.pop((self.numbers[number], target), None)
            with self._written():
                self.in_use[key] = self.lowering.redistribute(self.numbers[number], target)
        return self.in_use[key]

    def _is_gathered(self, number: int) -> bool:
        reads = slots_of((self.derived[number].args, self.derived[number].kwargs))
        return any(
            first(self.strategy.use, self.parameters[one]) is not None
            if one in self.parameters
            else self._is_gathered(one)
            for one in reads
        )

    def _again(self, number: int, one: Operation | Mark, cause: Cause, where: str) -> int:
        """A tensor of forward, made again for backward, so that nothing keeps it."""
        if (number, where) not in self.again:
            one = replace(one, cause=replace(one.cause, phase="backward", module=where or one.cause.module))
            if isinstance(one, Mark):
                self.again[number, where] = self._mark(one)
            else:
                self.again |= {(out, where): number for out, number in self._applied(one)}
            self.lowering.cause = cause
        return self.again[number, where]

    def _mark(self, one: Mark) -> int:
        number = self.number_of(one.source, one.cause)
        given = first(self.strategy.outputs, one.module) if one.side == "out" else None
        if given is not None:
            with self._written():
                return self.lowering.redistribute(number, self._fit_output(one, given))
        if one.side == "in" or (one.gradient and one.forward is None):
            return number
        # Sums over ranks are complete where a module ends; a gradient is placed as its value, so that the placements of
        # backward can be told from those of forward.
        here = self.placements_of(one.forward) if one.forward is not None else self.lowering.spec(number).placements
        return self.lowering.redistribute(number, tuple(Replicate() if p.is_partial() else p for p in here))

    def placements_of(self, number: int) -> Placements:
        return self.lowering.spec(self.numbers[number]).placements

    def _fit_output(self, one: Mark, given: Mapping[str, Any]) -> Placements:
        output = Input(one.source, one.module, "argument")
        return self._fitting(output, "outputs", given)

    def _reduced(self, one: Gradient) -> int:
        slot = self.slots[one.parameter]
        like = Input(slot, one.parameter, "state", one.parameter)
        self.lowering.cause = one.cause
        with self._written():
            return self.lowering.redistribute(self.number_of(one.source, one.cause), self._placements(like))

    def gradient_is_there(self, one: Gradient) -> None:
        """Place a gradient at once, so that it travels while backward goes on."""
        self._reduced(one)

    def _gradient(self, one: Gradient) -> int:
        number = self._reduced(one)
        slot = self.slots[one.parameter]
        with self._written():
            placements = self.lowering.spec(number).placements
            self.parts[slot] = self.lowering.redistribute(self.numbers[slot], placements)
        return number

    def output(self, one: Output) -> int:
        self.lowering.cause = Cause(f"the {one.role} {one.name}", phase="update")
        number = self.number_of(one.slot, self.lowering.cause)
        with self._written():
            if one.role == "result":
                return self.lowering.redistribute(number, self.lowering.replicas)
            source = self.sources[one.name, one.role]
            return self.lowering.redistribute(number, self.lowering.specs[self.numbers[source]].placements)

    @contextmanager
    def _written(self) -> Generator[None]:
        self.lowering.written = True
        try:
            yield
        finally:
            self.lowering.written = False


def check_names(trace: Trace, strategy: Strategy) -> None:
    inputs = trace.inputs
    names = [one.name for one in inputs if one.role in ("parameter", "buffer")]
    modules = list(dict.fromkeys(one.module for one in trace.operations if isinstance(one, Mark)))
    check_patterns("params", strategy.params, names)
    check_patterns("use", strategy.use, names)
    check_patterns("optimizer", strategy.optimizer, [one.name for one in inputs if one.role == "parameter"])
    check_patterns("inputs", strategy.inputs, [one.name for one in inputs if one.role == "argument"])
    check_patterns("outputs", strategy.outputs, modules)
    check_patterns("recompute", strategy.recompute, modules)


def joined_collectives(
    collectives: Iterable[Collective], joined: Mapping[int, int], lowering: Lowering
) -> list[Collective]:
    together: dict[int, list[Collective]] = {}
    for at, one in enumerate(collectives):  # a sum that goes on to other stages is sent each time
        slot = joined.get(one.slot) if one.kind == "all_reduce" else None
        together.setdefault(-1 - at if slot is None else slot, []).append(one)
    return [
        several[-1] if len(several) == 1 else _joined(several, slot, lowering) for slot, several in together.items()
    ]


def _joined(several: list[Collective], slot: int, lowering: Lowering) -> Collective:
    sizes = zip(*(lowering.rules.local_bytes(lowering.specs[one.slot]) for one in several), strict=True)
    members = lowering.axes[several[-1].axis]
    received = (received_bytes("all_reduce", members, sum(one), sum(one), sum(one)) for one in sizes)
    return replace(several[-1], received=tuple(received), slot=slot)


def with_peak(plan: Plan, rules: Rules, kinds: Sequence[int]) -> Plan:
    peak = [0] * plan.size
    for stage in plan.stages:
        routine = plan.routine(stage)
        taken = [one for one in plan.inputs if one.role not in ("argument", "scalar")]
        state = [one.slot for one in taken if one.slot in routine.inputs]
        here = by_rank(kinds, partial(peak_of, routine, state, plan.specs, rules))
        for rank, most in zip(plan.ranks_of(stage), here, strict=True):
            peak[rank] = most
    return replace(plan, peak=tuple(peak))
