"""Operations as they are done on placed tensors: each is lowered once, and then looked up."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from aiodaft.tensor.instructions import ByRank, Instruction, Slot, slots_of
from aiodaft.tensor.lowering import Lowering, name_of, quiet
from aiodaft.tensor.operations import Cause
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Placements, Spec, text
from aiodaft.tensor.views import is_view, written_arguments

__all__ = ["Entries", "Entry", "Given", "Layout", "Place", "Scalar", "here", "line_of", "said"]

# The name of an operation, and where it was recorded: a code object, and an instruction of it.
Place: TypeAlias = tuple[str, CodeType, int]

# Frames of these are no lines of the user.
_INSIDE: Final = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__))


def said(place: Place) -> str:
    name, code, instruction = place
    return f"{name} at {line_of(code, instruction)}"


def line_of(code: CodeType, instruction: int) -> str:
    lines = [line for first, end, line in code.co_lines() if first <= instruction < end and line is not None]
    return f"{Path(code.co_filename).name}:{lines[0] if lines else '?'}"


def here() -> tuple[CodeType, int]:
    frame = sys._getframe(2)
    while _is_inside(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


@cache
def _is_inside(file: str) -> bool:
    return file.startswith(_INSIDE)


_MOST_ENTRIES: Final = 20_000


class Layout:
    __slots__ = ("axes", "dtype", "shape", "spec", "stride")

    def __init__(self, axes: tuple[str, ...], spec: Spec) -> None:
        self.axes = axes
        self.spec = spec
        self.shape = torch.Size(spec.meta.shape)
        self.stride = spec.meta.stride
        self.dtype = spec.meta.dtype

    def __str__(self) -> str:
        where = ", ".join(f"{axis}={text(one)}" for axis, one in zip(self.axes, self.spec.placements, strict=True))
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}: {where}"


@dataclass(eq=False, slots=True)
class Entry:
    """The way in which an operation on tensors of certain layouts is done.

    Attributes:
        scalars: The number of its arguments that are numbers of each call.
        moves: The inputs that are redistributed first, and their targets.
        inputs: The numbers, in its instructions, of its tensors and then of the moved ones.
        result: Its result: the index of an out, an input that it writes to (`Given`), or None, in their structure.
        rebinds: Those that have other placements afterwards, each with the out that it becomes.
        view: The input that its outs are views of.
        torn: Whether such a view is a copy at the workers.
    """

    name: str
    scalars: int
    moves: tuple[tuple[int, Placements], ...]
    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outs: tuple[tuple[int, Layout], ...]
    result: Any
    writes: tuple[int, ...] = ()
    rebinds: tuple[tuple[int, int], ...] = ()
    view: int | None = None
    torn: bool = False


class Given(NamedTuple):
    position: int


class Scalar(float):
    """A number among the arguments of an operation that is being learned."""

    __slots__ = ("index",)
    index: int

    @classmethod
    def of(cls, value: float, index: int) -> Scalar:
        made = cls(value)
        made.index = index
        return made


class Entries:
    """The operations of one group that were learned."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.rules = Rules(axes)
        self.known: dict[tuple[Any, ...], Entry] = {}
        self._axes = tuple(axes)
        self._layouts: dict[Spec, Layout] = {}

    def layout(self, spec: Spec) -> Layout:
        known = self._layouts.get(spec)
        if known is None:
            known = self._layouts[spec] = Layout(self._axes, spec)
        return known

    def full(self, spec: Spec, name: str, *args: Any) -> Entry:
        layout = self.layout(spec)
        known = self.known.get((name, layout, *args))
        if known is None:
            shapes = ByRank(tuple(map(list, self.rules.local_shapes(spec))))
            made = Instruction("op", name, (shapes, *args), {"dtype": spec.meta.dtype}, (0,))
            scalars = len(_scalars_of(args))
            known = self.known[name, layout, *args] = Entry(name, scalars, (), (), (made,), ((0, layout),), 0)
        return known

    def drawn(self, spec: Spec, kind: str, parameters: tuple[float, ...]) -> Entry:
        """The operation that draws a random tensor; its numbers are seed, step and number of the draw."""
        layout = self.layout(spec)
        known = self.known.get((kind, layout, parameters))
        if known is None:
            ranks = range(self.rules.size)
            place = [Scalar.of(0, index) for index in range(3)]
            offset = ByRank(tuple(list(self.rules.offset(spec, rank)) for rank in ranks))
            parts = ByRank(tuple(map(list, self.rules.local_shapes(spec))))
            args = (kind, list(spec.meta.shape), spec.meta.dtype, list(parameters), *place, offset, parts)
            made = Instruction("op", "aiodaft.random.default", args, {}, (0,))
            known = self.known[kind, layout, parameters] = Entry(kind, 3, (), (), (made,), ((0, layout),), 0)
        return known

    def route(self, layout: Layout, target: Placements) -> Entry:
        """The way in which a tensor is redistributed. The result has memory of its own."""
        known = self.known.get(("redistribute", layout, target))
        if known is None:
            lowering = Lowering(self.rules)
            given = lowering.new(layout.spec)
            out = lowering.redistribute(given, target)
            if all(one.kind in ("alias", "chunk", "partition") for one in lowering.instructions):
                out = _copied(lowering, out, view=False)
            outs = ((out, self.layout(lowering.specs[out])),)
            known = self.known["redistribute", layout, target] = Entry(
                "redistribute", 0, (), (given,), tuple(lowering.instructions), outs, 0
            )
        return known

    def learn(
        self, key: tuple[Any, ...], func: OpOverload[..., Any], args: Any, kwargs: Any, layouts: Sequence[Layout]
    ) -> Entry | None:
        """Find how an operation is done, for this and all later calls with such arguments."""
        try:
            with quiet():
                entry = self._learned(func, args, kwargs, layouts)
        except Exception as error:
            given = "; ".join(f"({one})" for one in layouts)
            error.add_note(said((f"{func} of {given}", *here())))
            raise
        if entry is None:
            return None
        if len(self.known) >= _MOST_ENTRIES:
            self.known.clear()
        self.known[key] = entry
        return entry

    def _learned(self, func: OpOverload[..., Any], args: Any, kwargs: Any, layouts: Sequence[Layout]) -> Entry | None:
        writes = tuple(written_arguments(func, args, kwargs))
        specs = [one.spec for one in layouts]
        # A tensor that is written to is not the copy that other operations of the block have.
        lowering = Lowering(self.rules) if writes else _Scratch(self.rules, len(specs))
        lowering.cause = Cause(name_of(func), line=line_of(*here()))
        for spec in specs:
            lowering.new(spec)
        returned = lowering.apply(func, args, kwargs)
        view = slots_of(args)[0] if is_view(func) else None
        outs: dict[int, int] = {}

        def out(one: Any) -> Any:
            if not isinstance(one, Slot):
                return None
            if one.number in writes:
                return Given(one.number)
            return outs.setdefault(_own(lowering, one.number, outs, view=view is not None), len(outs))

        result = tree_map(out, returned, is_leaf=lambda one: isinstance(one, Slot))
        held = [(position, lowering.now(position)) for position in writes]
        rebinds = tuple(
            (position, outs.setdefault(number, len(outs))) for position, number in held if number != position
        )
        instructions = tuple(lowering.instructions)
        numbers = _scalars_of((args, kwargs))
        if {id(one) for one in _scalars_of(instructions)} != {id(one) for one in numbers}:
            return None
        moves = lowering.moves if isinstance(lowering, _Scratch) else {}
        is_same = len(instructions) == 1 and not moves and instructions[0].target in (name_of(func), None)
        return Entry(
            name_of(func),
            len(numbers),
            tuple(moves),
            (*range(len(layouts)), *moves.values()),
            instructions,
            tuple((number, self.layout(lowering.specs[number])) for number in outs),
            result,
            writes,
            rebinds,
            view,
            torn=view is not None and not is_same,
        )


class _Scratch(Lowering):
    """Lowers one operation; how its inputs are redistributed is left out."""

    def __init__(self, rules: Rules, inputs: int) -> None:
        super().__init__(rules)
        self._inputs = inputs
        self.moves: dict[tuple[int, Placements], int] = {}

    def redistribute(self, number: int, target: Placements) -> int:
        if number >= self._inputs or self.specs[number].placements == target:
            return super().redistribute(number, target)
        known = self.moves.get((number, target))
        if known is None:
            known = self.moves[number, target] = self.new(self.specs[number].at(target))
        return known


def _copied(lowering: Lowering, number: int, *, view: bool) -> int:
    out = lowering.new(lowering.specs[number])
    alias, clone = Instruction("alias", None, (), {}, (out,)), Instruction("op", "aten.clone.default", (), {}, (out,))
    lowering.emit((alias if view else clone)._replace(args=(Slot(number),)))
    return out


def _own(lowering: Lowering, number: int, outs: Mapping[int, int], *, view: bool) -> int:
    made = {out for one in lowering.instructions for out in one.outs}
    return number if number in made and number not in outs else _copied(lowering, number, view=view)


def _scalars_of(value: object) -> list[Scalar]:
    match value:
        case Scalar():
            return [value]
        case Mapping():
            return [one for part in value.values() for one in _scalars_of(part)]
        case list() | tuple():
            return [one for part in value for one in _scalars_of(part)]
    return []
