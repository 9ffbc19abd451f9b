"""Blocks: the operations that go to the workers together, and the tensors that they make."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from aiodaft.ref import Ref
from aiodaft.tensor.code import Routine
from aiodaft.tensor.instructions import ByRank, Instruction, Slot, slots_of
from aiodaft.tensor.local_functions import functions_of
from aiodaft.tensor.lowering import Lowering, name_of, quiet
from aiodaft.tensor.operations import Cause
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Placements, Spec, text
from aiodaft.tensor.views import is_view, written_arguments

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


class Cell:
    """A tensor in the workers. Handles that are the same tensor share it.

    Attributes:
        block: The block that made it, or wrote to it last.
        family: The tensors with the same memory, itself included; None if there are no others.

    Args:
        dropped: Takes its number when no handle has it any more.
    """

    __slots__ = ("__weakref__", "_dropped", "block", "family", "layout", "number")

    def __init__(self, layout: Layout, number: int, block: Block, dropped: deque[int]) -> None:
        self._dropped = dropped
        self.layout = layout
        self.number = number
        self.block = block
        self.family: Family | None = None

    def __del__(self) -> None:
        if self.family is not None:
            self.family.pop(self.number, None)
        self._dropped.append(self.number)


class Member(NamedTuple):
    """A tensor of a family.

    Attributes:
        place: The operation that made it a view; None of the first one.
        torn: Whether a redistribution came between, so that its memory is another one at the workers.
    """

    cell: weakref.ref[Cell]
    place: Place | None = None
    torn: bool = False


# Tensors that are one memory to the user, by number.
Family: TypeAlias = dict[int, Member]


@dataclass(eq=False, slots=True)
class Block:
    """Operations that go to the workers together, or a message of another kind that makes tensors.

    Attributes:
        key: Entries and the indices of their inputs: all that tells its program from others.
        made: The numbers of tensors that handles have, or had.
        writes: The older tensors that it writes to, with the blocks that made them.
        moved: The tensors that were redistributed, with the numbers of what they became.
        attempt: That in which it is sent; -1 if it is no program.
    """

    key: list[Any] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    sources: set[Block] = field(default_factory=set)
    writes: dict[Cell, Block] = field(default_factory=dict)
    moved: dict[tuple[int, Placements], int] = field(default_factory=dict)
    first_write: int = sys.maxsize
    refs: Sequence[Ref[Any]] = ()
    attempt: int = -1
    owners: tuple[int, ...] = ()
    error: BaseException | None = None

    def restore(self) -> None:
        for cell, before in self.writes.items():
            if cell.block is self:
                cell.block = before

    def forget(self) -> None:
        self.key, self.index, self.inputs, self.made, self.scalars, self.places = [], {}, [], [], [], []
        self.sources, self.writes, self.moved, self.refs = set(), {}, {}, ()


# Memory that several tensors have.


def check_write(cell: Cell, entry: Entry) -> None:
    family = cell.family or {}
    if len(family) < 2 or not (entry.rebinds or any(one.torn for one in family.values())):
        return
    views = [said(one.place) for number, one in family.items() if one.place and number != cell.number]
    raise RuntimeError(
        f"{entry.name} writes to a tensor ({cell.layout}) whose memory other handles have, too "
        f"({', '.join(views) or 'the tensor that it is a view of'}), and the workers "
        f"{'have to redistribute it first' if entry.rebinds else 'have redistributed it for the view'}: use the form "
        "that returns a new tensor"
    )


def join(source: Cell, views: Sequence[Cell], place: Place, *, torn: bool) -> None:
    family = source.family
    if family is None:
        family = source.family = {source.number: Member(weakref.ref(source))}
    torn = torn or family[source.number].torn
    for one in views:
        one.family = family
        family[one.number] = Member(weakref.ref(one), place, torn)


def write(block: Block, cell: Cell) -> None:
    members = [cell] if cell.family is None else [one for member in cell.family.values() if (one := member.cell())]
    for one in members:
        if one.block is not block:
            block.writes[one], one.block = one.block, block
            block.first_write = min(block.first_write, len(block.places) - 1)
        if block.moved:
            for key in [key for key in block.moved if key[0] == one.number]:
                del block.moved[key]


# Programs.


def routine(name: str, block: Block, kept: Sequence[int]) -> tuple[Routine, tuple[int, ...]]:
    count = len(block.index)
    scalars = range(count, count + len(block.scalars))
    numbers = itertools.count(scalars.stop)
    instructions: list[Instruction] = []
    owners: list[int] = []
    at = first = 0
    for owner in range(len(block.places)):
        entry: Entry = block.key[at]
        *given, out = block.key[at + 1 : at + 2 + len(entry.inputs)]
        at += 2 + len(entry.inputs)
        known = dict(zip(entry.inputs, given, strict=True))
        known |= {number: out + index for index, (number, _) in enumerate(entry.outs)}
        for kind, target, args, kwargs, outs in entry.instructions:
            fresh = {one: next(numbers) for one in outs if one is not None and one not in known}
            known |= fresh
            args, kwargs = _filled(args, known, scalars[first:]), _filled(kwargs, known, scalars[first:])
            made = tuple(None if one is None else known[one] for one in outs)
            instructions.append(Instruction(kind, target, args, kwargs, made))
            owners.append(owner)
        first += entry.scalars
    inputs = (*[block.index[number] for number in block.inputs], *scalars)
    outputs = tuple(block.index[number] for number in kept)
    return Routine(name, inputs, tuple(instructions), outputs, functions=functions_of(instructions)), tuple(owners)


def _filled(value: Any, numbers: Mapping[int, int], scalars: Sequence[int]) -> Any:
    match value:
        case Slot(number=number):
            return Slot(numbers[number])
        case Scalar():
            return Slot(scalars[value.index])
        case Mapping():
            return {name: _filled(one, numbers, scalars) for name, one in value.items()}
        case list():
            return [_filled(one, numbers, scalars) for one in value]
        case tuple():
            return tuple(_filled(one, numbers, scalars) for one in value)
    return value
