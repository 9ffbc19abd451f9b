"""Operations on handles: recorded in the controller, sent to the workers in blocks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.group import Group
from aiodaft.ref import Ref, Refs
from aiodaft.tensor.blocks import Block, Cell, Entries, Entry, Place, check_write, here, join, routine, said, write
from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.rules import strided
from aiodaft.tensor.specs import Meta, Placements, Spec, cut, holders, joined
from aiodaft.tensor.worker import Filled, Order, Program, Refused, Worker

_MOST_OPERATIONS: Final = 2_000
_MOST_PROGRAMS: Final = 512

_IMMEDIATE: ContextVar[bool] = ContextVar("immediate", default=False)


@contextmanager
def immediate() -> Generator[None]:
    """Send each operation on handles at once, in this task: an error then ends no other operation's result."""
    token = _IMMEDIATE.set(True)
    try:
        yield
    finally:
        _IMMEDIATE.reset(token)


class Recorder:
    """Records the operations on the handles of one group, for one controller.

    Attributes:
        dropped: The numbers of tensors that no handle has any more.
    """

    def __init__(self, group: Group[Any], axes: Mapping[str, int]) -> None:
        self.group = group
        self.axes = dict(axes)
        self.epoch = group.epoch
        self.replicas: Placements = tuple(Replicate() for _ in axes)
        self.dropped: deque[int] = deque()
        self.entries = Entries(axes)
        self.sent = 0
        self.session = f"handles-{uuid4().hex[:12]}"
        self._attempt = 0
        self._root: BaseException | None = None
        self._programs: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}
        self._count = 0
        self._block = Block()
        self._sent: deque[Block] = deque()

    # Recording.

    def record(self, entry: Entry, cells: Sequence[Cell], scalars: Sequence[float] = ()) -> list[Cell]:
        """Append an operation to the block."""
        block = self._block
        place = (entry.name, *here())
        for position in entry.writes:
            check_write(cells[position], entry)
        index = block.index
        at = []
        for cell in cells:
            known = index.get(cell.number)
            at.append(self._taken(block, cell) if known is None else known)
        for position, target in entry.moves:
            at.append(self._moved(block, cells[position], target, place))
        block.key += (entry, *at, len(index))
        block.scalars += scalars
        block.places.append(place)
        outs = []
        for _, layout in entry.outs:
            number = self._count
            self._count = number + 1
            index[number] = len(index)
            block.made.append(number)
            outs.append(Cell(layout, number, block, self.dropped))
        if entry.view is not None:
            join(cells[entry.view], outs, place, torn=entry.torn)
        for position in entry.writes:
            write(block, cells[position])
        for position, at_out in entry.rebinds:
            cell, new = cells[position], outs[at_out]
            cell.number, new.number = new.number, cell.number
            cell.layout, new.layout = new.layout, cell.layout
            # Its views are gone: see `check_write`.
            cell.family = None
        if len(block.places) >= _MOST_OPERATIONS or _IMMEDIATE.get():
            self.flush()
        return outs

    def _taken(self, block: Block, cell: Cell) -> int:
        if cell.block.error is not None:
            raise cell.block.error
        block.sources.add(cell.block)
        block.inputs.append(cell.number)
        at = block.index[cell.number] = len(block.index)
        return at

    def _moved(self, block: Block, cell: Cell, target: Placements, place: Place) -> int:
        known = block.moved.get((cell.number, target))
        if known is None:
            block.key += (self.entries.route(cell.layout, target), block.index[cell.number], len(block.index))
            block.places.append(place)
            known = block.moved[cell.number, target] = block.index[self._count] = len(block.index)
            self._count += 1
        return known

    # Sending.

    def flush(self) -> None:
        self._settle_done()
        gone = {self.dropped.popleft() for _ in range(len(self.dropped))}
        block = self._block
        if not block.places and not gone:
            return
        self._block = Block()
        block.error = next((one.error for one in block.sources if one.error is not None), None)
        block.error = block.error or self._changed()
        made = set(block.made)
        frees = [number for number in gone if number not in made]
        kept = [number for number in block.made if number not in gone]
        if block.error is not None:
            block.restore()
            self.dropped.extend(frees)
            return
        key = (*block.key, None, *[block.index[number] for number in kept])
        known, program = self._programs.get(key), None
        if known is None:
            name = f"block {len(self._programs)}"
            if len(self._programs) >= _MOST_PROGRAMS:
                name, _ = self._programs.pop(next(iter(self._programs)))
            made_of, owners = routine(name, block, kept)
            known, program = (name, owners), Program(made_of)
            self._programs[key] = known
        name, block.owners = known
        values = [*map(Slot, block.inputs), *block.scalars]
        block.attempt = self._attempt
        self._send(
            block, self.group.all(Worker.run, Order(self.session, self._attempt, name, values, kept, frees, program))
        )

    def put(self, whole: Tensor, placements: Placements) -> Cell:
        whole = whole.detach()
        strides = torch.empty(whole.shape, device="meta").stride()
        cell = self.reserve(Spec(placements, Meta(tuple(whole.shape), tuple(strides), whole.dtype)))
        parts = [cut(whole, placements, self.axes, rank) for rank in range(len(self.group))]
        tensors: list[dict[int, Tensor | Filled]] = [{cell.number: part.contiguous()} for part in parts]
        self._send(cell.block, self.group.each(Worker.put, tensors, self.session))
        return cell

    def reserve(self, spec: Spec) -> Cell:
        self._count += 1
        return Cell(self.entries.layout(spec), self._count - 1, Block(), self.dropped)

    def _send(self, block: Block, refs: Sequence[Ref[Any]] | Refs[Any]) -> None:
        block.refs = list(refs)
        self._sent.append(block)
        self.sent += 1

    # Results.

    def redistributed(self, cell: Cell, target: Placements) -> Cell:
        if cell.layout.spec.placements == target:
            return cell
        return self.record(self.entries.route(cell.layout, target), (cell,))[0]

    def _changed(self) -> RuntimeError | None:
        """The error of tensors of an earlier epoch of the group."""
        if self.group.epoch == self.epoch:
            return None
        return RuntimeError(
            "the workers have changed since these tensors were made: make them again, as `workers.put(value)`"
        )

    def refs(self, cell: Cell) -> Refs[Tensor]:
        self.flush()
        if (changed := self._changed()) is not None:
            raise changed
        return self.group.all(Worker.part, self.session, cell.number)

    def gathered(self, cell: Cell) -> Cell:
        return self.redistributed(cell, self.plain(cell.layout.spec.placements))

    def plain(self, placements: Placements) -> Placements:
        """The placements that are nearest, as replicas and contiguous parts."""
        plain = tuple(Replicate() if isinstance(one, Partial) else one for one in placements)
        return self.replicas if any(map(strided, plain)) else plain

    async def fetch(self, cell: Cell) -> Tensor:
        cell = self.gathered(cell)
        self.flush()
        await self.settle(cell.block)
        if (changed := self._changed()) is not None:
            raise changed
        spec = cell.layout.spec
        ranks = holders(spec.placements, self.axes)
        refs = [self.group[rank].part(self.session, cell.number) for rank in ranks]
        parts = {rank: await ref for rank, ref in zip(ranks, refs, strict=True)}
        return joined(parts, spec.meta.shape, spec.placements, self.axes)

    async def settle(self, block: Block) -> None:
        while block.refs:
            first = self._sent[0]
            for ref in first.refs:
                await ref.ready()
            self._settle_done()
        if block.error is not None:
            raise block.error

    def _settle_done(self) -> None:
        while self._sent and all(ref.done() for ref in self._sent[0].refs):
            block = self._sent.popleft()
            errors = [error for ref in block.refs if (error := ref.exception()) is not None]
            if errors:
                self._fail(block, errors)
            block.forget()

    def _fail(self, block: Block, errors: list[BaseException]) -> None:
        at = [-1 if isinstance(one, Refused) else getattr(one, "instruction", None) for one in errors]
        owners = [one if one is None or one < 0 else block.owners[one] for one in at]
        if len(errors) == len(block.refs) and all(one is not None and one < block.first_write for one in owners):
            block.restore()
        if block.attempt != self._attempt:
            # The workers refused it after an earlier one, or it put a tensor there.
            block.error = self._root if block.attempt >= 0 else errors[0]
            return
        self._attempt += 1
        # Workers that refused a block have not taken its program.
        self._programs.clear()
        self._root = block.error = min(errors, key=gravity)
        owner = owners[errors.index(block.error)]
        if owner is not None and owner >= 0:
            block.error.add_note(f"recorded as {said(block.places[owner])}")


async def values_of(refs: Iterable[Ref[Any]]) -> list[Any]:
    waits = asyncio.gather(*refs, return_exceptions=True)
    try:
        values = await asyncio.shield(waits)
    except asyncio.CancelledError:
        # As `Refs` does: tasks that are cancelled before they have begun to wait would leave the calls as they are.
        waits.cancel()
        await waits
        raise
    if errors := [one for one in values if isinstance(one, BaseException)]:
        raise min(errors, key=gravity)
    return values


def gravity(error: BaseException) -> int:
    """The error of an operation or a death comes before those that follow from it."""
    if isinstance(error, OutcomeUnknown):
        return 0
    if isinstance(error, Refused):
        return 2
    return 3 if isinstance(error, DaftError) else 1
