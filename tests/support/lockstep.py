"""All ranks of a plan in threads of one process, and their collectives in memory: the oracle for plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from aiodaft.tensor.code import Code, Routine
from aiodaft.tensor.local_functions import functions_of
from aiodaft.tensor.specs import coords, cut, joined

_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum
}  # fmt: skip


@dataclass
class Meeting:
    """The values that the members of one row have given, by number of the collective."""

    size: int
    given: dict[int, dict[int, Any]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    left: bool = False

    def put(self, number: int, rank: int, value: Any) -> None:
        with self.changed:
            self.given.setdefault(number, {})[rank] = value
            self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.left = True
            self.changed.notify_all()

    def values(self, number: int) -> list[Any]:
        with self.changed:
            if not self.changed.wait_for(lambda: self.left or len(self.given[number]) == self.size, 20):
                raise TimeoutError(f"collective {number}: {sorted(self.given[number])} of {self.size} ranks came")
            if len(self.given[number]) < self.size:
                raise _LeftError
            return [self.given[number][rank] for rank in range(self.size)]


class _LeftError(Exception):
    """Another rank has failed."""


@dataclass
class MemoryRow:
    """The members along an axis, which are threads."""

    rank: int
    size: int
    meeting: Meeting
    begun: int = 0

    def all_reduce(self, tensor: Tensor, op: str) -> Waited:
        return self._begin(("all_reduce", op), [tensor], lambda terms: reduce(_OPS[op], (one[0] for one in terms)))

    def all_gather(self, tensor: Tensor) -> Waited:
        return self._begin(("all_gather",), [tensor], lambda parts: [one[0] for one in parts])

    def reduce_scatter(self, parts: Sequence[Tensor], op: str) -> Waited:
        return self._begin(
            ("reduce_scatter", op), parts, lambda terms: reduce(_OPS[op], (one[self.rank] for one in terms))
        )

    def all_to_all(self, parts: Sequence[Tensor]) -> Waited:
        return self._begin(("all_to_all",), parts, lambda given: [one[self.rank] for one in given])

    def _begin(self, title: tuple[str, ...], tensors: Sequence[Tensor], finish: Callable[[Any], Any]) -> Waited:
        number, self.begun = self.begun, self.begun + 1
        copies = [one.clone(memory_format=torch.contiguous_format) for one in tensors]
        self.meeting.put(number, self.rank, (title, copies))
        return Waited(self, number, title, list(tensors), copies, finish)


@dataclass
class Waited:
    row: MemoryRow
    number: int
    title: tuple[str, ...]
    tensors: list[Tensor]
    copies: list[Tensor]
    finish: Callable[[Any], Any]

    def result(self) -> Any:
        given = self.row.meeting.values(self.number)
        titles = [title for title, _ in given]
        assert titles == [self.title] * len(given), f"collective {self.number}: the ranks disagree: {titles}"
        if self.title[0] in ("all_reduce", "reduce_scatter"):
            shapes = [[(tuple(one.shape), one.dtype) for one in tensors] for _, tensors in given]
            assert all(one == shapes[0] for one in shapes), f"collective {self.number}, {self.title}: {shapes}"
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), f"{self.title} was written to while under way"
        result = self.finish([tensors for _, tensors in given])
        # Nobody else has it.
        return [one.clone() for one in result] if isinstance(result, list) else result.clone()


def rows_of(axes: Mapping[str, int]) -> list[dict[str, MemoryRow]]:
    """The rows of each rank, by axis."""
    meetings: dict[Any, Meeting] = {}
    rows = []
    for rank in range(torch.tensor(list(axes.values())).prod().item() if axes else 1):
        at, mine = coords(axes, int(rank)), {}
        for index, (axis, size) in enumerate(axes.items()):
            key = axis, at[:index], at[index + 1 :]
            meeting = meetings.setdefault(key, Meeting(size))
            mine[axis] = MemoryRow(at[index], size, meeting)
        rows.append(mine)
    return rows


def run_ranks(plan: Any, inputs: Sequence[Sequence[Any]], functions: Mapping[str, Any] | None = None) -> list[Any]:
    """Run a plan at all ranks.

    Args:
        plan: It has axes, inputs (with a slot each), instructions, and outputs (with a slot each).
        inputs: By rank, the values of the inputs in their order.
        functions: Those of `local` instructions.

    Returns:
        By rank, the outputs in their order.

    Raises:
        Exception: That of the first rank that failed.
    """
    routine = Routine(
        "plan",
        tuple(one.slot for one in plan.inputs),
        tuple(plan.instructions),
        tuple(one.slot for one in plan.outputs),
        functions=functions_of(plan.instructions) if functions is None else functions,
    )
    outputs: list[Any] = [None] * len(inputs)
    errors: list[BaseException] = []
    rows = rows_of(plan.axes)
    assert len(rows) == len(inputs), f"{len(inputs)} lists of inputs for {len(rows)} ranks"

    def one(rank: int) -> None:
        try:
            with torch.no_grad():
                outputs[rank] = Code(routine, rank, rows[rank]).run(list(inputs[rank]))
        except _LeftError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            for row in rows[rank].values():
                row.meeting.leave()
        else:
            # Another rank may wait for it in vain.
            for row in rows[rank].values():
                if any(len(given) < row.size for number, given in row.meeting.given.items() if number >= row.begun):
                    errors.append(AssertionError(f"rank {rank} began only {row.begun} collectives"))
                    row.meeting.leave()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outputs


def run_whole(plan: Any, values: Mapping[str, Any], functions: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Run a plan with whole tensors and scalars by the names of its inputs; returns whole tensors by name.

    Replicas have to be equal.
    """
    specs, axes = plan.specs, plan.axes
    size = len(rows_of(axes))

    def part(one: Any, rank: int) -> Any:
        value = one.value if one.role == "constant" else values[one.name]
        return cut(value, specs[one.slot].placements, axes, rank).clone() if isinstance(value, Tensor) else value

    outputs = run_ranks(plan, [[part(one, rank) for one in plan.inputs] for rank in range(size)], functions)
    wholes = {}
    for index, one in enumerate(plan.outputs):
        spec = specs[one.slot]
        wholes[one.name] = joined(
            {rank: outputs[rank][index] for rank in range(size)}, spec.meta.shape, spec.placements, axes
        )
        for rank in range(size):
            here = cut(wholes[one.name], spec.placements, axes, rank)
            assert torch.equal(here.nan_to_num(), outputs[rank][index].nan_to_num()), f"{one.name} differs at {rank}"
    return wholes
