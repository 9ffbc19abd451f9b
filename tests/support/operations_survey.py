"""Functions with all placements of their inputs: done by all ranks in turn, compared with torch after each step."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks_in_turn import parts, run
from tensor_functions import FUNCTIONS, Function
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from aiodaft.tensor.instructions import Slot, operation, slots_of
from aiodaft.tensor.lowering import Lowering
from aiodaft.tensor.operations import Cause
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Meta, Placement, Placements, Spec
from aiodaft.tensor.views import written_arguments

__all__ = [
    "MESHES",
    "Captured",
    "Noting",
    "Trial",
    "Verification",
    "WrongValue",
    "captured",
    "combinations",
    "single_steps",
    "tried",
]


@dataclass(frozen=True)
class Step:
    """An operation below autograd.

    Attributes:
        before: The values of its arguments, by number.
        values: Those of all its tensors afterwards.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    before: Mapping[int, Tensor]
    values: Mapping[int, Tensor]


def is_tensor(one: object) -> bool:
    return isinstance(one, Tensor)


class Recorder(TorchDispatchMode):
    """Notes operations, forward and backward.

    Attributes:
        given: The tensors that no operation made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.steps: list[Step] = []
        self.given: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """The number of a tensor that is given."""
        number = self._slot(tensor).number
        self.given[number] = tensor.detach().clone()
        return number

    def _slot(self, tensor: Tensor) -> Slot:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return Slot(self._numbers[id(tensor)])

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for one in tree_leaves((args, kwargs)):
            if is_tensor(one) and id(one) not in self._numbers:
                self.add(one)
        before = {self._slot(one).number: one.detach().clone() for one in tree_leaves((args, kwargs)) if is_tensor(one)}
        result = target(*args, **kwargs)
        if "empty" in str(target):
            result.zero_()  # Nothing may depend on what was there.
        slots = tree_map(lambda one: self._slot(one) if is_tensor(one) else one, (args, kwargs, result))
        if not slots_of([slots[2]]) and not written_arguments(target, *slots[:2]):
            return result  # A check of values.
        values = {number: self.tensors[number].detach().clone() for number in slots_of(list(slots))}
        self.steps.append(Step(target, *slots, before, values))
        return result


@dataclass(frozen=True)
class Captured:
    """The steps of a function and of its gradient.

    Attributes:
        given: The whole tensors that no step makes, by number: inputs, constants, what the gradient begins with.
        free: Those whose placement is free: inputs, and what the gradient begins with.
    """

    steps: list[Step]
    given: Mapping[int, Tensor]
    metas: Mapping[int, Meta]
    free: tuple[int, ...]


def captured(function: Function) -> Captured:
    """The steps of a function on its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [make(generator) for make in function.inputs]
    recorder = Recorder()
    free = [recorder.add(one) for one in inputs]
    needs = [one.requires_grad_() for one in inputs if function.grad and one.is_floating_point()]
    with torch.set_grad_enabled(function.grad), recorder:
        results = function.call(*inputs)
    if function.grad:
        ends = [one for one in tree_leaves(results) if isinstance(one, Tensor) and one.requires_grad]
        starts = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in ends]
        free += [recorder.add(one) for one in starts]
        with recorder:
            torch.autograd.grad(ends, needs, starts, allow_unused=True)
    metas = {number: Meta.of(one) for number, one in enumerate(recorder.tensors)}
    return Captured(recorder.steps, recorder.given, metas, tuple(free))


def single_steps(functions: Iterable[Captured]) -> Iterator[Captured]:
    """Each different operation of the functions, alone, all of its arguments free."""
    seen = set()
    for function in functions:
        for step in function.steps:
            metas = {number: function.metas[number] for number in (*step.before, *step.values)}
            shown = tree_map(
                lambda one, m=metas: m[one.number] if isinstance(one, Slot) else one, (step.args, step.kwargs)
            )
            key = f"{step.target} {shown}"
            if step.before and key not in seen:
                seen.add(key)
                yield Captured([step], step.before, metas, tuple(step.before))


def choices(tensor: Tensor, axes: Mapping[str, int]) -> list[Placements]:
    """All placements of a tensor: replicas, parts of each dimension, terms of a sum, a mean or a maximum.

    Terms are there if they give the very same value.
    """

    def on_axis(size: int) -> list[Placement]:
        each: list[Placement] = [Replicate(), *map(Shard, range(tensor.dim()))]
        if tensor.is_floating_point() and tensor.isfinite().all():
            each += [Partial("sum"), Partial("max")]
            each += [Partial("avg")] * (size & (size - 1) == 0)
        return each

    # A sum of maxima is no placement.
    return [
        them
        for them in itertools.product(*map(on_axis, axes.values()))
        if len({one.reduce_op == "max" for one in them if isinstance(one, Partial)}) < 2
    ]


def combinations(one: Captured, axes: Mapping[str, int], at_most: int, seed: int) -> Iterator[dict[int, Placements]]:
    """Placements of all free tensors: all combinations, or as many, drawn by the seed; in two of three no terms."""
    each = {number: choices(one.given[number], axes) for number in one.free}
    if math.prod(map(len, each.values())) <= at_most:
        yield from (dict(zip(each, them, strict=True)) for them in itertools.product(*each.values()))
        return
    draw = random.Random(seed)
    plain = {n: [some for some in them if not any(p.is_partial() for p in some)] for n, them in each.items()}
    for index in range(at_most):
        yield {number: draw.choice(them) for number, them in (plain if index % 3 else each).items()}


class WrongValue(AssertionError):
    """An operation gave another value than on one device."""


@dataclass
class Trial:
    """A function with placements of its free tensors, step by step."""

    function: Captured
    lowering: Lowering
    numbers: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[Tensor]] = field(default_factory=dict)
    done: int = 0

    def begin(self, placements: Mapping[int, Placements]) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = tuple(self.lowering.axes.values())
        for number, whole in self.function.given.items():
            given = placements.get(number, self.lowering.replicas)
            self.numbers[number] = at = self.lowering.new(Spec(given, self.function.metas[number]))
            self.tables[at] = parts(whole, given, sizes, generator)

    def lower(self, step: Step) -> list[str]:
        """Returns the placements of the arguments."""
        self.lowering.cause = Cause(str(step.target), line="survey")
        args = tree_map(self._here, (step.args, dict(step.kwargs)))
        given = [str(self.lowering.spec(number).placements) for number in slots_of(list(args))]
        made = self.lowering.apply(step.target, *args)
        for out, slot in zip(tree_leaves(step.results), tree_leaves(made), strict=True):
            if isinstance(out, Slot):
                self.numbers[out.number] = slot.number
        return given

    def step(self, step: Step) -> None:
        given = self.lower(step)
        self._run()
        for number, want in step.values.items():
            held = self.lowering.redistribute(self.numbers[number], self.lowering.replicas)
            self._run()
            for got in self.tables[held]:
                if difference := different(got, want):
                    raise WrongValue(f"{step.target} of {', '.join(given)}: {difference}")

    def _here(self, value: Any) -> Any:
        return Slot(self.numbers[value.number]) if isinstance(value, Slot) else value

    def _run(self) -> None:
        run(self.lowering.instructions[self.done :], self.tables, self.lowering.axes)
        self.done = len(self.lowering.instructions)


def lowered(function: Captured, placements: Mapping[int, Placements], rules: Rules) -> Trial:
    """A function with these placements, not done."""
    trial = Trial(function, Lowering(rules))
    trial.begin(placements)
    for step in function.steps:
        trial.lower(step)
    return trial


@torch.no_grad()
def tried(
    function: Captured,
    placements: Mapping[int, Placements],
    rules: Rules,
    after_step: Callable[[], object] = bool,
) -> list[str]:
    """Does a function with these placements; returns the operations that were done whole.

    Raises:
        WrongValue: The results of an operation are not those of one device.
    """
    trial = Trial(function, Lowering(rules))
    trial.begin(placements)
    for step in function.steps:
        trial.step(step)
        after_step()
    return [one.operation for one in trial.lowering.whole]


def different(got: Tensor, want: Tensor) -> str:
    """The difference in words; empty if there is none but the order of additions."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    loose = 2e-2 if want.dtype == torch.bfloat16 else 5e-5
    if torch.allclose(got, want, rtol=loose, atol=loose, equal_nan=True):
        return ""
    return f"off by {(got.to(torch.complex128) - want.to(torch.complex128)).abs().max():.3g}"


class Noting(Rules):
    """All of torch's table but the kinds of placements that were found wrong; notes those that it was asked for."""

    def __init__(self, axes: Mapping[str, int], wrong: set[tuple[str, str]]) -> None:
        super().__init__(axes, table="torch")
        self.wrong = wrong
        self.asked: set[tuple[str, str]] = set()

    def allows(self, op: str, kind: str) -> bool:
        if (op, kind) in self.wrong:
            return False
        if kind != "r":
            self.asked.add((op, kind))
        return True


MESHES: dict[str, dict[str, int]] = {"2": {"a": 2}, "3": {"a": 3}, "2x2": {"a": 2, "b": 2}, "7": {"a": 7}}


class Verification:
    """The kinds of placements for which an operation was right, and those for which it was ever wrong."""

    def __init__(self) -> None:
        self.right: set[tuple[str, str]] = set()
        self.wrong: dict[tuple[str, str], str] = {}

    def add(self, name: str, function: Captured, axes: Mapping[str, int], at_most: int, seed: int) -> None:
        """Try a function; an operation that was wrong with some placements is done whole with these from then on."""
        for placements in combinations(function, axes, at_most, seed):
            while (reason := self._reason(function, placements, axes)) is not None:
                kinds, error = reason
                assert kinds, f"{name} with {placements}: {error}"
                self.wrong |= dict.fromkeys(kinds, f"{name} with {placements}: {error}")

    def _reason(
        self, function: Captured, placements: Mapping[int, Placements], axes: Mapping[str, int]
    ) -> tuple[set[tuple[str, str]], Exception] | None:
        rules = Noting(axes, set(self.wrong))

        def note() -> None:
            self.right |= rules.asked
            rules.asked.clear()

        try:
            tried(function, placements, rules, note)
        except Exception as error:  # noqa: BLE001 - local operations fail in many ways where the table is wrong.
            return set(rules.asked), error
        return None

    def lines(self) -> Iterator[str]:
        """`verified.txt`: each operation and the kinds of placements for which it is right."""
        kinds: dict[str, set[str]] = {}
        for name, kind in self.right - self.wrong.keys():
            if not any(op == name and _covers(kind, bad) for op, bad in self.wrong):
                # A function of single values does not see where parts end.
                parts = "e" if kind[0] != "r" and torch.Tag.pointwise in operation(name).tags else kind[0]
                kinds.setdefault(name.removeprefix("aten."), set()).add(parts + kind[1:])
        for name, those in sorted(kinds.items()):
            largest = [one for one in those if not any(_covers(other, one) for other in those - {one})]
            yield f"{name} {' '.join(sorted(largest))}"


def _covers(one: str, other: str) -> bool:
    """Whether what is right with some parts empty, or uneven, is right with equal ones."""
    return one[1:] == other[1:] and "rsue".index(one[0]) > "rsue".index(other[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    verification = Verification()
    for name, one in FUNCTIONS.items():
        for axes in MESHES.values():
            verification.add(name, captured(one), axes, int(sys.argv[1]), seed=0)
    for (op, kind), reason in sorted(verification.wrong.items()):
        print(f"{op} {kind}: {reason}", file=sys.stderr)
    print("\n".join(verification.lines()))
