"""Local operations between collectives, given to torch.compile."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from aiodaft.tensor.code import Code, Routine, overload_of
from aiodaft.tensor.instructions import ByRank, Instruction, Slot, slots_of

__all__ = ["Compiled", "with_compiled"]

logger = logging.getLogger("aiodaft.tensor")

# Below this number of operations, the guards of a compiled function cost more than it saves.
_FEWEST: Final = 4
# Kinds that may give views.
_VIEWS: Final = frozenset({"alias", "chunk", "partition", "split", "local"})


class Compiled:
    """A function of tensors, compiled when it is called first.

    Attributes:
        compiled: The compiled function, if there is one.
        reason: The reason why it is run as it is written; empty as long as it is compiled.
    """

    def __init__(self, routine: Routine, rank: int) -> None:
        self.reason = ""
        self._name = routine.name
        self._plain = Code(routine, rank, {})
        self.compiled: Callable[..., Any] | None = torch.compile(_graph_of(routine, rank), dynamic=False)

    def __call__(self, *tensors: Tensor) -> Any:
        reason = ""
        if self.compiled is not None:
            try:
                return self.compiled(*tensors)
            except Exception as error:  # noqa: BLE001 - the compiler's, or that of an operation, which is raised below
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        outputs = self._plain.run(list(tensors))
        if self.compiled is not None:
            self.compiled, self.reason = None, reason
            logger.warning("%s is not compiled: %s", self._name, reason)
        return outputs


def with_compiled(routine: Routine, rank: int, numbers: Sequence[int]) -> tuple[Routine, list[Compiled]]:
    """The routine with runs of operations as compiled functions."""
    wanted = {number: len(routine.instructions) for number in routine.outputs}
    for at, one in enumerate(routine.instructions):
        for number in slots_of((one.args, one.kwargs)):
            wanted[number] = max(at, wanted.get(number, 0))
    known, written = set(numbers), _written(routine, wanted)
    runs: list[list[int]] = [[]]
    for at, one in enumerate(routine.instructions):
        if _is_pure(one, known) and written.isdisjoint(one.outs):
            runs[-1].append(at)
        else:
            runs.append([])
        if one.kind == "op" and not _gives_tensors(one):
            known.update(number for number in one.outs if number is not None)
    # The others are processes, which would outlive the worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    segments: list[Compiled] = []
    instructions = dict(enumerate(routine.instructions))
    for run in runs:
        if len(run) >= _FEWEST:
            part = _part(routine, run[0], run[-1] + 1, wanted, f"segment {len(segments)} of {routine.name}")
            segments.append(Compiled(part, rank))
            for at in run:
                del instructions[at]
            slots = tuple(map(Slot, part.inputs))
            instructions[run[0]] = Instruction("local", part.name, slots, {}, part.outputs)
    order = sorted(instructions)
    changed = routine._replace(
        instructions=tuple(instructions[at] for at in order),
        causes=tuple(routine.causes[at] for at in order) if routine.causes else (),
        functions={**routine.functions, **{one._name: one for one in segments}},
    )
    return changed, segments


def _is_pure(one: Instruction, numbers: set[int]) -> bool:
    if one.kind != "op" or not numbers.isdisjoint(slots_of((one.args, one.kwargs))):
        return False
    return not overload_of(one.target)._schema.is_mutable and _gives_tensors(one)


def _written(routine: Routine, wanted: dict[int, int]) -> set[int]:
    """Tensors that change with another one, and are used after that: a compiler may give them memory of their own."""
    roots: dict[int, int] = {}
    writes: list[tuple[int, int]] = []

    def root(number: int) -> int:
        while number in roots:
            number = roots[number]
        return number

    for at, one in enumerate(routine.instructions):
        sources, written = _aliased(one)
        for number in one.outs:
            for source in sources:
                if number is not None and root(number) != root(source):
                    roots[root(number)] = root(source)
        writes += [(at, number) for number in written]
    first = {root(number): at for at, number in reversed(writes)}
    shared = {*roots, *roots.values()}
    return {one for one, last in wanted.items() if one in shared and last >= first.get(root(one), last + 1)}


def _aliased(one: Instruction) -> tuple[list[int], list[int]]:
    if one.kind in _VIEWS:
        return slots_of(one.args), []
    if one.kind != "op":
        return [], []
    given = [*zip(overload_of(one.target)._schema.arguments, one.args, strict=False)]
    aliased = [(info.alias_info, slots_of(value)) for info, value in given if info.alias_info is not None]
    written = [number for info, numbers in aliased if info.is_write for number in numbers]
    return [number for _, numbers in aliased for number in numbers], written


def _gives_tensors(one: Instruction) -> bool:
    return all("Tensor" in str(returned.type) for returned in overload_of(one.target)._schema.returns)


def _part(routine: Routine, first: int, end: int, wanted: dict[int, int], name: str) -> Routine:
    instructions = routine.instructions[first:end]
    made = [number for one in instructions for number in one.outs if number is not None]
    taken = dict.fromkeys(number for one in instructions for number in slots_of((one.args, one.kwargs)))
    inputs = tuple(number for number in taken if number not in set(made))
    outputs = tuple(number for number in made if wanted.get(number, 0) >= end)
    return Routine(name, inputs, instructions, outputs, causes=routine.causes[first:end])


def _graph_of(routine: Routine, rank: int) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {number: graph.placeholder(f"v{number}") for number in routine.inputs}
    for one in routine.instructions:
        here = tree_map_only(ByRank, lambda value: value.values[rank], (one.args, dict(one.kwargs)))
        args, kwargs = tree_map_only(Slot, lambda slot: nodes[slot.number], here)
        overload = overload_of(one.target)
        node = graph.call_function(overload, args, kwargs)
        returns = overload._schema.returns
        if len(returns) == 1 and not str(returns[0].type).startswith("List"):
            results = [node]
        else:
            results = [graph.call_function(operator.getitem, (node, at)) for at in range(len(one.outs))]
        nodes.update((number, result) for number, result in zip(one.outs, results, strict=True) if number is not None)
    graph.output(tuple(nodes[number] for number in routine.outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)
