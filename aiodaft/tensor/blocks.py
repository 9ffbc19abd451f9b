"""Blocks: the operations that go to the workers together, and the tensors that they make."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiodaft.ref import Ref
from aiodaft.tensor.code import Routine
from aiodaft.tensor.entries import Entry, Layout, Place, Scalar, said
from aiodaft.tensor.instructions import Instruction, Slot
from aiodaft.tensor.local_functions import functions_of
from aiodaft.tensor.specs import Placements

__all__ = ["Block", "Cell", "check_write", "join", "routine", "write"]


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
