"""The instructions of one rank, as a function of Python: operations are found once, tensors end with their last use.

Collectives begin at their instruction and are waited for at the first use of what they give.
"""

from __future__ import annotations

import linecache
import logging
import math
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from aiodaft.tensor.instructions import ByRank, Instruction, Slot, operation, slots_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Is called with the local variables after each statement.
Watch: TypeAlias = Callable[[Mapping[str, Any]], object]


class Pending(Protocol[T_co]):
    def result(self) -> T_co: ...


class Row(Protocol):
    """The members along one axis. Each of them begins the same collectives in the same order.

    Results are new tensors. A tensor that was given must not be written to until the result is there. Parts may have
    any shapes, all terms of a sum have one; sums are in the order of ranks.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: Tensor, op: str) -> Pending[Tensor]: ...
    def all_gather(self, tensor: Tensor) -> Pending[Sequence[Tensor]]: ...
    def reduce_scatter(self, parts: Sequence[Tensor], op: str) -> Pending[Tensor]: ...
    def all_to_all(self, parts: Sequence[Tensor]) -> Pending[Sequence[Tensor]]: ...


class Routine(NamedTuple):
    """A program of instructions, the same for all ranks.

    Attributes:
        donated: The inputs that nobody needs once the run has begun to change its state.
        causes: The place in the user's code for each instruction, or nothing.
    """

    name: str
    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int] = frozenset()
    causes: tuple[str, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = {}


class Code:
    """The function of a routine for one rank.

    Attributes:
        source: Its text.
    """

    def __init__(
        self,
        routine: Routine,
        rank: int,
        rows: Mapping[str, Row],
        watch: Watch | None = None,
        place: int | None = None,
    ) -> None:
        self._routine = routine
        self._rank = rank
        # Among the ranks of its stage.
        self._place = rank if place is None else place
        self._rows = rows
        self._watched = watch is not None
        self._names: dict[str, Any] = {"watch": watch}
        self._numbers = count()
        # The statements, with the instruction of each.
        self._lines: list[tuple[str, int]] = []
        self._write()
        head = "def program(values, update):"
        self.source = "\n".join([head, *(f"    {line}" for line, _ in self._lines), ""])
        self._file = f"<{routine.name} of rank {rank}>"
        exec(compile(self.source, self._file, "exec"), self._names)
        self._program = self._names.pop("program")
        linecache.cache[self._file] = len(self.source), None, self.source.splitlines(keepends=True), self._file
        weakref.finalize(self, linecache.cache.pop, self._file, None)

    def run(self, values: list[Any], update: Callable[[], object] = bool) -> tuple[Any, ...]:
        try:
            outputs: tuple[Any, ...] = self._program(values, update)
        except Exception as error:
            self._explain(error)
            raise
        return outputs

    def held(self) -> Iterable[Tensor]:
        return ()

    def _explain(self, error: Exception) -> None:
        if hasattr(error, "instruction"):
            # By a part of this routine.
            return
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._file:
            trace = trace.tb_next
        at = self._lines[trace.tb_lineno - 2][1] if trace is not None else -1
        if at >= 0:
            with suppress(AttributeError):
                error.instruction = at  # type: ignore[attr-defined]  # for the controller
            causes, (kind, target, *_) = self._routine.causes, self._routine.instructions[at]
            cause = f", of {causes[at]}" if causes and causes[at] else ""
            title = target if kind in _NAMED else f"{kind} along {target}" if target else kind
            error.add_note(f"raised by {title} (instruction {at}) of {self._routine.name} at rank {self._rank}{cause}")

    # The text.

    def _write(self) -> None:
        _, inputs, instructions, outputs, donated, *_ = self._routine
        last = {number: at for at, one in enumerate(instructions) for number in _numbers_of(one)}
        last.update(dict.fromkeys(outputs, len(instructions)))
        pending: dict[int, int] = {}
        if inputs:
            self._add(f"{', '.join(f'v{n}' if n in last else '_' for n in inputs)}, = values")
        self._add("_ = values.clear()")
        updating = False
        for at, one in enumerate(instructions):
            numbers = set(_numbers_of(one))
            dead = sorted(n for n in numbers if last[n] == at)
            writes = one.kind == "op" and overload_of(one.target)._schema.is_mutable
            # What is written to may be under way.
            self._wait(pending, [*pending] if writes else slots_of((one.args, one.kwargs)))
            if not updating and (writes or not donated.isdisjoint(dead)):
                updating = True
                self._add("update()", at)
            self._add(self._statement(one), at)
            if one.kind in _COLLECTIVES:
                pending[_only(one)] = at
            names = [f"v{n}" for n in dead if n not in pending]
            if None in one.outs and set(one.outs) != {None}:
                names.append("_")
            if names:
                self._add(f"del {', '.join(names)}", at)
        self._wait(pending, [*pending])
        self._add(f"return ({''.join(f'v{n}, ' for n in outputs)})")

    def _add(self, line: str, at: int = -1) -> None:
        self._lines.append((line, at))
        if self._watched and at >= 0:
            self._lines.append(("watch(locals())", -1))

    def _wait(self, pending: dict[int, int], numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in pending:
                self._add(f"v{number} = v{number}.result()", pending.pop(number))

    def _statement(self, one: Instruction) -> str:
        kind, target, args, kwargs, outs = one
        if kind == "alias":
            return f"v{_only(one)} = {self._text(args[0])}"
        given = [self._text(value) for value in args]
        given += [f"{name}={self._text(value)}" for name, value in kwargs.items()]
        if kind == "op":
            overload = overload_of(target)
            function, is_list = _quickest(overload), _gives_several(overload)
        elif kind == "local":
            function, is_list = self._routine.functions[str(target)], True
        elif kind in _FUNCTIONS:
            function, is_list = _FUNCTIONS[kind], kind == "split"
        else:
            along = {**_COLLECTIVES, **_ALONG, **_BETWEEN_STAGES}[kind]
            function, is_list = partial(along, self._rows[str(target)]), False
        names = ", ".join("_" if n is None else f"v{n}" for n in outs)
        if set(outs) <= {None}:
            names = ""
        else:
            names += ", = " if is_list else " = "
        return f"{names}{self._constant(function, target or kind)}({', '.join(given)})"

    def _text(self, value: Any) -> str:
        match value:
            case Slot(number=number):
                return f"v{number}"
            case ByRank(values=values):
                return self._text(values[self._place])
            case list():
                return f"[{', '.join(map(self._text, value))}]"
            case tuple() if type(value) is tuple:
                return f"({''.join(f'{self._text(one)}, ' for one in value)})"
            case bool() | int() | str() | None:
                return repr(value)
            case float() if math.isfinite(value):
                return repr(value)
        return self._constant(value, "constant")

    def _constant(self, value: Any, title: str) -> str:
        name = f"{''.join(c if c.isalnum() else '_' for c in title)}_{next(self._numbers)}"
        self._names[name] = value
        return name


def chunks(tensor: Tensor, n: int, dim: int) -> list[Tensor]:
    length = tensor.shape[dim]
    each = -(-length // n)
    starts = [min(length, each * rank) for rank in range(n + 1)]
    return [tensor.narrow(dim, first, end - first) for first, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class _Then(Generic[T]):
    pending: Pending[Any]
    change: Callable[[Any], T]

    def result(self) -> T:
        return self.change(self.pending.result())


# Collectives. Their first argument is the row.


def _all_reduce(row: Row, x: Tensor, op: str) -> Pending[Tensor]:
    if op == "avg":
        return _Then(row.all_reduce(x, "sum"), lambda total: total.div_(row.size))
    if not op.startswith("norm:"):
        return row.all_reduce(x, op)
    power = float(op.removeprefix("norm:"))
    if math.isinf(power):
        return row.all_reduce(x, "max" if power > 0 else "min")
    if power == 0:
        return row.all_reduce(x, "sum")
    return _Then(row.all_reduce(x.pow(power), "sum"), lambda total: total.pow_(1 / power))


def _reduce_scatter(row: Row, x: Tensor, dim: int, op: str) -> Pending[Tensor]:
    parts = chunks(x, row.size, dim)
    if op == "avg":
        return _Then(row.reduce_scatter(parts, "sum"), lambda total: total.div_(row.size))
    return row.reduce_scatter(parts, op)


def _all_gather(row: Row, x: Tensor, dim: int, factor: int = 1) -> Pending[Tensor]:
    if factor == 1:
        return _Then(row.all_gather(x), lambda parts: torch.cat(tuple(parts), dim))
    return _Then(row.all_gather(x), lambda parts: _joined_strided(parts, dim, factor))


def _joined_strided(parts: Sequence[Tensor], dim: int, factor: int) -> Tensor:
    return torch.cat([_strided(part, dim, factor) for part in parts], dim + 1).flatten(dim, dim + 1)


def _strided(x: Tensor, dim: int, factor: int) -> Tensor:
    return x.reshape(*x.shape[:dim], factor, x.shape[dim] // factor, *x.shape[dim + 1 :])


def _all_to_all(row: Row, x: Tensor, whole: int, cut: int) -> Pending[Tensor]:
    return _Then(row.all_to_all(chunks(x, row.size, cut)), lambda parts: torch.cat(tuple(parts), whole))


# Parts of replicated tensors, without a message.


def _chunk(row: Row, x: Tensor, dim: int, factor: int = 1) -> Tensor:
    if factor == 1:
        return chunks(x, row.size, dim)[row.rank].contiguous()
    return chunks(_strided(x, dim, factor), row.size, dim + 1)[row.rank].flatten(dim, dim + 1).contiguous()


def _partition(row: Row, x: Tensor, op: str) -> Tensor:
    if row.rank == 0 or op in ("avg", "min", "max"):
        return x
    return torch.ones_like(x) if op == "product" else torch.zeros_like(x)


def _embedding(row: Row, weight: Tensor, index: Tensor, rows: int) -> Tensor:
    first = min(row.rank * -(-rows // row.size), rows)
    # Each rank checks all rows, as one device does.
    if index.is_cpu and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise IndexError(
            f"embedding: the index has {int(index.min())} to {int(index.max())}, the rows are 0 to {rows - 1}"
        )
    if not weight.shape[0]:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    here = index - first
    outside = (here < 0) | (here >= weight.shape[0])
    return F.embedding(here.masked_fill(outside, 0), weight).masked_fill_(outside.unsqueeze(-1), 0)


# Several tensors in one.


def _join(tensors: Sequence[Tensor]) -> Tensor:
    # Without a copy of those whose elements are in another order, such as gradients of weights.
    flat = tensors[0].new_empty(sum(one.numel() for one in tensors))
    for part, one in zip(_split(flat, [one.shape for one in tensors]), tensors, strict=True):
        part.copy_(one)
    return flat


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    parts: Sequence[Tensor] = torch.split(flat, [math.prod(shape) for shape in shapes])
    return (part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))


_COLLECTIVES: Final[Mapping[str, Callable[..., Pending[Tensor]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
_ALONG: Final[Mapping[str, Callable[..., Tensor]]] = {
    "chunk": _chunk,
    "partition": _partition,
    "embedding": _embedding,
}
_BETWEEN_STAGES: Final[Mapping[str, Callable[..., Any]]] = {
    "send": lambda pipe, *args: pipe.send(*args),
    "receive": lambda pipe, *args: pipe.receive(*args),
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"join": _join, "split": _split}
# A part can have other strides than the whole.
_OF_PARTS: Final[Mapping[str, str]] = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}
# Their functions parse arguments half a microsecond faster, and call the same overload: test_code.py.
_OF_TORCH: Final = frozenset({
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "exp.default", "sqrt.default",
    "tanh.default", "mm.default", "bmm.default", "addmm.default", "t.default", "transpose.int", "unsqueeze.default",
    "reshape.default", "sum.dim_IntList", "mean.dim", "native_layer_norm.default", "_softmax.default", "add_.Tensor",
    "sub_.Tensor", "mul_.Tensor", "addcmul_.default", "addcdiv_.default", "lerp_.Scalar",
})  # fmt: skip
_NAMED: Final = frozenset({"op", "local", "random"})


def overload_of(name: str | None) -> Any:
    return operation(_OF_PARTS.get(str(name), str(name)))


def _quickest(overload: Any) -> Callable[..., Any]:
    """The function of torch that calls this overload, or the overload itself, without a Python function around it."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    if f"{packet}.{name}" in _OF_TORCH:
        return cast("Callable[..., Any]", getattr(Tensor if packet.endswith("_") else torch, packet))
    return cast("Callable[..., Any]", getattr(overload, "_op", overload))


def _gives_several(overload: Any) -> bool:
    returns = overload._schema.returns
    return len(returns) != 1 or str(returns[0].type).startswith("List")


def _numbers_of(one: Instruction) -> list[int]:
    return [*slots_of((one.args, one.kwargs)), *(n for n in one.outs if n is not None)]


def _only(one: Instruction) -> int:
    (number,) = one.outs
    assert number is not None
    return number


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
