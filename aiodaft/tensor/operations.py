"""Operations on whole tensors, as one device does them: the words of a program, which knows no strategy and no axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from aiodaft.tensor.specs import Meta, Placements, Spec, bounds, text, unplaced

Phase: TypeAlias = Literal["forward", "backward", "update"]

Role: TypeAlias = Literal["parameter", "buffer", "state", "scalar", "argument", "constant"]
"""The owner of an input: the model (parameters and buffers), the optimizer (state, and scalars such as its learning
rate), the caller of the step (arguments), or the program itself (constants)."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The place in the user's code that an operation comes from.

    Attributes:
        module: The path of the module, such as `blocks.0.attn`; empty outside of modules.
        line: The line of the user's code, such as `gpt.py:24`; a line of backward is that of its forward operation.
    """

    operation: str
    module: str = ""
    line: str = ""
    phase: Phase = "forward"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch on whole tensors; `Slot`s stand for tensors, also in lists.

    A slot without a meta is a number of Python, such as a learning rate or `beta ** step`: `aten.mul.float` and the
    like make them of others, and operations on tensors take them as scalars. An operation that writes to a tensor
    (`aten.add_.Tensor`) gives it a new number, in the same memory: no operation reads the old one afterwards.

    Attributes:
        outs: The numbers of the tensors that it makes, in their order; None for a result that is no tensor or that
            nobody uses.
    """

    target: torch._ops.OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int | None, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Mark:
    """The output (or an input) of a module, or the gradient of one: the place where a strategy speaks."""

    module: str
    side: Literal["in", "out"]
    gradient: bool
    source: int
    out: int
    cause: Cause
    forward: int | None = None
    """Of a gradient, the number beyond its mark of the tensor that it is the gradient of."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The complete gradient of a parameter where the update begins, placed as the optimizer's state."""

    parameter: str
    source: int
    out: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program takes.

    Attributes:
        name: Its name: of a parameter or buffer its path in the model, of a state `exp_avg/PARAMETER`, of an argument
            the name in the signature of the function (`batch.x` for a part of it).
        value: The tensor of a constant, or the first value of a state or of a buffer that no checkpoint has.
        fill: The first value of each element of a state that has no `value`.
    """

    slot: int
    name: str
    role: Role
    parameter: str = ""
    value: torch.Tensor | None = None
    fill: float | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    slot: int
    name: str
    role: Literal["result"] | Role
    stage: int = 0


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of the step, without models and optimizers.

    Attributes:
        leaves: For each leaf the name of its input and its meta, or the value that it must equal.
    """

    tree: TreeSpec
    leaves: tuple[tuple[str, Meta | None, Any], ...]

    def bind(self, *args: Any) -> dict[str, torch.Tensor]:
        """The tensors of these arguments, by the name of their input."""
        leaves, tree = tree_flatten(args)
        if tree != self.tree:
            names = ", ".join(dict.fromkeys(name.partition(".")[0] for name, *_ in self.leaves)) or "none"
            raise TypeError(
                f"the step takes the arguments {names}, with parts as captured ({self.tree}); these are {len(args)} "
                f"({tree})"
            )
        tensors: dict[str, torch.Tensor] = {}
        for given, (name, meta, value) in zip(leaves, self.leaves, strict=True):
            if meta is None:
                if given is not value and given != value:
                    raise TypeError(f"{name} is {given!r}, and the step was captured with {value!r}: capture it again")
            elif not isinstance(given, torch.Tensor) or (tuple(given.shape), given.dtype) != (meta.shape, meta.dtype):
                found = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, torch.Tensor) else repr(given)
                raise ValueError(
                    f"{name} is {found}, and the step was captured with {meta.shape} {meta.dtype}: capture it again"
                )
            else:
                tensors[name] = given
        return tensors


@dataclass(frozen=True)
class Results:
    """The structure of the results of the function.

    Attributes:
        others: The leaves that are no tensors, by their place. The others are the outputs with the role `result`.
    """

    tree: TreeSpec
    others: Mapping[int, Any] = field(default_factory=dict)

    def build(self, tensors: Iterable[Any]) -> Any:
        rest = iter(tensors)
        places = range(self.tree.num_leaves)
        return tree_unflatten([self.others[at] if at in self.others else next(rest) for at in places], self.tree)


@dataclass(frozen=True)
class Trace:
    """The operations of one step.

    Attributes:
        metas: Shape, stride and dtype of each tensor, by its number.
        scalars: The values of scalars now, by name: read before each step, so that a scheduler changes them.
        aliases: Further names that a parameter or buffer has in the model, each with the name of its input.
    """

    inputs: tuple[Input, ...]
    operations: tuple[Operation | Mark | Gradient, ...]
    outputs: tuple[Output, ...]
    metas: Mapping[int, Meta]
    arguments: Arguments
    results: Results
    scalars: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "update")
_ROW, _LEFT, _CELL = 18, 190, 300


def place_of(cause: Cause) -> str:
    where = ", ".join(one for one in (cause.module, cause.line, cause.phase) if one)
    return f"{cause.operation} ({where})"


def placed_text(spec: Spec, axes: Mapping[str, int]) -> str:
    given = unplaced(spec.placements, axes)
    return ", ".join(f"{axis}={text(one)}" for axis, one in given.items()) or "replicas"


def size_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def ranks_text(values: Sequence[int]) -> str:
    least, most = min(values, default=0), max(values, default=0)
    return size_text(most) if least == most else f"{size_text(least)} to {size_text(most)}"


def described(head: str, bytes_: Mapping[str, tuple[int, ...]], lines: Sequence[tuple[Cause, str, int, bool]]) -> str:
    totals = [f"{axis}: {ranks_text(counts)} received by a rank" for axis, counts in bytes_.items()]
    counted: dict[tuple[str, str, bool], int] = {}
    for cause, title, times, written in lines:
        key = place_of(cause), title, written
        counted[key] = counted.get(key, 0) + times
    listed = [
        f"  {times} x {title}: {place}{'' if written else ' (implicit)'}"
        for (place, title, written), times in counted.items()
    ]
    return "\n".join([head, *totals, *listed])


def drawn(
    title: str,
    parameters: Sequence[tuple[Input, Spec]],
    collectives: Sequence[tuple[Cause, str, int]],
    axes: Mapping[str, int],
) -> str:
    modules: dict[str, None] = {}
    placements: dict[str, list[str]] = {}
    for one, spec in parameters:
        module, _, name = one.name.rpartition(".")
        modules[module] = None
        placements.setdefault(module, []).append(f"{name} {placed_text(spec, axes)}")
    cells: dict[tuple[str, str], dict[str, int]] = {}
    for cause, kind, times in collectives:
        modules[cause.module] = None
        here = cells.setdefault((cause.module, cause.phase), {})
        here[kind] = here.get(kind, 0) + times
    rows = "".join(_row(at, module, placements.get(module, ()), cells) for at, module in enumerate(modules, 2))
    heads = "".join(_text(_LEFT + _CELL * at, 1, head, bold=True) for at, head in enumerate(("parameters", *_PHASES)))
    width, height = _LEFT + 4 * _CELL, _ROW * (len(modules) + 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        f' font-size="11" fill="currentColor">{_text(4, 0, title, bold=True)}{heads}{rows}</svg>'
    )


def _row(at: int, module: str, placements: Sequence[str], cells: Mapping[tuple[str, str], Mapping[str, int]]) -> str:
    found = [
        ", ".join(f"{times} x {kind}" for kind, times in cells.get((module, phase), {}).items()) for phase in _PHASES
    ]
    texts: Iterator[tuple[int, str]] = enumerate(("; ".join(placements), *found))
    return _text(4, at, module or "(the function)") + "".join(_text(_LEFT + _CELL * n, at, one) for n, one in texts)


def _text(x: int, row: int, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{_ROW * (row + 1)}"{weight}>{escape(words)}</text>' if words else ""


_WIDTH, _HEIGHT = 240, 120


def picture(shape: Sequence[int], placements: Placements, axes: Mapping[str, int]) -> str:
    """An SVG of a tensor with the ranks in their parts; of more than two dimensions, the sharded ones come first."""
    ranks = range(math.prod(axes.values()))
    dims = sorted(range(len(shape)), key=lambda dim: not any(one.is_shard(dim) for one in placements))
    rows, columns = [*sorted(dims[:2]), None, None][:2]
    by_part: dict[tuple[tuple[int, int], ...], list[int]] = {}
    try:
        for rank in ranks:
            by_part.setdefault(tuple(bounds(shape, placements, axes, rank)), []).append(rank)
    except ValueError:
        return f"<p>{', '.join(map(text, placements))}</p>"
    boxes = []
    for part, held in by_part.items():
        y, down = _scaled(part, rows, shape, _HEIGHT)
        x, right = _scaled(part, columns, shape, _WIDTH)
        boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{right:.1f}" height="{down:.1f}" fill="none"'
            f' stroke="currentColor"/><text x="{x + right / 2:.1f}" y="{y + down / 2:.1f}" fill="currentColor"'
            f' font-size="11" text-anchor="middle" dominant-baseline="middle">{", ".join(map(str, held))}</text>'
        )
    width, height = _WIDTH + 2, _HEIGHT + 2
    return f'<svg width="{width}" height="{height}" viewBox="-1 -1 {width} {height}">{"".join(boxes)}</svg>'


def _scaled(part: Sequence[tuple[int, int]], dim: int | None, shape: Sequence[int], size: int) -> tuple[float, float]:
    if dim is None or not shape[dim]:
        return 0.0, float(size)
    start, length = part[dim]
    return start * size / shape[dim], length * size / shape[dim]
