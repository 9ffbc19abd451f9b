"""How an operation is done in parts, and what a rank has of a tensor.

Torch's table of placements has wrong entries: `verified.txt` lists the kinds of placements with which tests found an
operation equal to that of one device. With others it is done whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from aiodaft.tensor.instructions import leaves, mapped
from aiodaft.tensor.specs import Meta, Placements, Spec, bounds, coords

if TYPE_CHECKING:
    from aiodaft.tensor.table import Table

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

logger = logging.getLogger("aiodaft.tensor")

aten = torch.ops.aten


class Move(NamedTuple):
    axis: int
    source: Placement
    target: Placement


@dataclass(frozen=True, slots=True)
class Placing:
    """A way to do an operation in parts.

    Attributes:
        inputs: The placements that its tensors need, in the order in which they stand in the arguments.
        args: Its arguments, with `Spec`s for tensors and `ByRank` for what depends on the rank.
        outputs: Its results: a `Spec`, None, or several of them.
    """

    target: OpOverload[..., Any]
    inputs: tuple[Placements, ...]
    args: tuple[Any, ...]
    outputs: Any


RESHAPES: Final[Mapping[OpOverload[..., Any], OpOverload[..., Any]]] = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default
)
"""Views of a shape, and the operation that does the same for any strides."""


def _dense(spec: Spec) -> Spec:
    strides = [math.prod(spec.meta.shape[dim + 1 :]) for dim in range(len(spec.meta.shape))]
    return Spec(spec.placements, Meta(spec.meta.shape, tuple(strides), spec.meta.dtype))


class Rules:
    """The placements of operations on a group with named axes.

    Args:
        axes: Names and sizes of the axes; ranks are row-major.
        table: `verified`: entries of torch's table that tests have verified; `torch`: all of them; `none`: none.
    """

    def __init__(self, axes: Mapping[str, int], table: Literal["verified", "torch", "none"] = "verified") -> None:
        self.axes = dict(axes)
        self.size = math.prod(axes.values())
        self._only_verified = table == "verified"
        self._coords = [coords(self.axes, rank) for rank in range(self.size)]
        self._shapes: dict[Spec, tuple[tuple[int, ...], ...]] = {}
        self._table = None if table == "none" else _table(self.axes, self.local_shapes)

    def place(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placing | None:
        if self._table is None or _specs(dict(kwargs)):
            return None
        if op in RESHAPES:
            # Workers reshape. The strides that the table foretells may be others than those of one device.
            args = (_dense(args[0]), *args[1:])
        placing = self._placing(self._table, op, args, kwargs)
        if placing is None and any(p.is_partial() for one in _specs(args) for p in one.placements):
            return self._placing(self._table, op, mapped(_reduced, args), kwargs)
        return placing

    def allows(self, op: str, kind: str) -> bool:
        if kind == "r" or not self._only_verified or op in _OF_USERS:
            return True
        kinds = verified().get(op, frozenset())
        level, terms = _LEVELS.index(kind[0]), kind[1:]

        def has(terms: str) -> bool:
            return any(one[1:] == terms and _LEVELS.index(one[0]) >= level for one in kinds)

        # Axes do not depend on each other: what is right with parts, and with terms, is right with both.
        return has(terms) or (f"r{terms}" in kinds and has(""))

    def kind(self, placing: Placing, given: Sequence[Spec]) -> str:
        """The placements of an operation in short.

        The first letter says the parts: r replicas, s equal shards, u uneven ones, e some of them empty. The others say
        which terms there are: p of a sum, a of a mean, m of a maximum or minimum, q of a product, n of a norm; and x
        for strided parts.
        """
        tensors = [spec.at(placements) for spec, placements in zip(given, placing.inputs, strict=True)]
        tensors += _specs(placing.outputs)
        level = max(map(self._level, tensors), key=_LEVELS.index, default="r")
        return level + "".join(sorted({_flag(placement) for one in tensors for placement in one.placements}))

    def route(self, source: Spec, target: Placements) -> Iterator[Move]:
        """The steps of a redistribution, in their order.

        A dimension that several axes cut is cut by them in their order: the last axis is joined first and cut last.
        Terms of a sum are made of replicas.
        """
        now = list(source.placements)

        def cut_before(placements: Sequence[Placement], axis: int, dim: int) -> list[int]:
            return [at for at in range(axis) if _dim(placements[at]) == dim]

        for axis in reversed(range(len(now))):
            to, dim = target[axis], _dim(target[axis])
            if dim is not None and cut_before(now, axis, dim) != cut_before(target, axis, dim):
                to = Replicate()
            yield from _moves(axis, now[axis], to)
            now[axis] = to
        for axis, to in enumerate(target):
            yield from _moves(axis, now[axis], to)

    def local_shapes(self, spec: Spec) -> tuple[tuple[int, ...], ...]:
        known = self._shapes.get(spec)
        if known is None:
            # Parts get smaller along each axis.
            first, last = self._local_shape(spec, self._coords[0]), self._local_shape(spec, self._coords[-1])
            is_even = first == last
            known = (first,) * self.size if is_even else tuple(self._local_shape(spec, at) for at in self._coords)
            self._shapes[spec] = known
        return known

    def offset(self, spec: Spec, rank: int) -> tuple[int, ...]:
        return tuple(start for start, _ in bounds(spec.meta.shape, spec.placements, self.axes, rank))

    def local_bytes(self, spec: Spec) -> tuple[int, ...]:
        shapes = self.local_shapes(spec)
        sizes = {shape: math.prod(shape) * spec.meta.dtype.itemsize for shape in set(shapes)}
        return tuple(map(sizes.__getitem__, shapes))

    def nbytes(self, spec: Spec, rank: int) -> int:
        return math.prod(self.local_shapes(spec)[rank]) * spec.meta.dtype.itemsize

    def _local_shape(self, spec: Spec, place: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(spec.meta.shape)
        for size, at, placement in zip(self.axes.values(), place, spec.placements, strict=True):
            if (dim := _dim(placement)) is not None:
                _, factor = strided(placement) or (dim, 1)
                length = shape[dim] // factor
                each = -(-length // size)
                shape[dim] = factor * (min(length, each * (at + 1)) - min(length, each * at))
        return tuple(shape)

    def _level(self, spec: Spec) -> str:
        if all(_dim(one) is None for one in spec.placements):
            return "r"
        shapes = self.local_shapes(spec)
        if shapes[0] == shapes[-1]:
            return "s"
        return "e" if 0 not in spec.meta.shape and any(0 in shape for shape in shapes) else "u"

    def _placing(
        self, table: Table, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Placing | None:
        answer = table.ask(op, args, kwargs)
        if answer is None:
            return None
        placing, given = Placing(*answer), _specs(args)
        if self._is_wrong(placing, given) or not self.allows(str(op), self.kind(placing, given)):
            return None
        return placing

    def _is_wrong(self, placing: Placing, given: list[Spec]) -> bool:
        """Whether torch's table is known to be wrong about it.

        Of uneven parts it takes the mean of means; it keeps masks in a buffer of its process group; a maximum of sums
        is not the sum of maxima; filled or rounded terms do not make the filled or rounded sum; and views of unevenly
        nested parts differ.
        """
        outs = _specs(placing.outputs)
        for placements in (*placing.inputs, *(one.placements for one in outs)):
            linear = {one.reduce_op in ("sum", "avg") for one in placements if isinstance(one, Partial)}
            if len(linear) > 1 or any(_flag(one) == "?" for one in placements):
                return True
        terms = any(one.is_partial() for placements in placing.inputs for one in placements)
        if terms and placing.target in _FILLS:
            return True
        if (
            terms
            and placing.target is aten._to_copy.default
            and outs[0].meta.dtype.itemsize < given[0].meta.dtype.itemsize
        ):
            return True
        if placing.target in _VIEWS and not self._is_same_size(given[0].at(placing.inputs[0]), outs[0]):
            return True
        means = {axis for one in outs for axis, p in enumerate(one.placements) if _flag(p) == "a"}
        return any(
            self._is_uneven(spec, placements, axis)
            for spec, placements in zip(given, placing.inputs, strict=True)
            for axis in means
        )

    def _is_same_size(self, one: Spec, other: Spec) -> bool:
        return self.local_bytes(one) == self.local_bytes(other)

    def _is_uneven(self, spec: Spec, placements: Placements, axis: int) -> bool:
        dim = _dim(placements[axis])
        return dim is not None and spec.meta.shape[dim] % tuple(self.axes.values())[axis] != 0


def _table(axes: Mapping[str, int], shapes: Callable[[Spec], tuple[tuple[int, ...], ...]]) -> Table | None:
    try:
        found: Table = import_module("aiodaft.tensor.table").Table(axes, shapes)
    except (ImportError, AttributeError, NotImplementedError) as error:
        # The table is private to torch.
        logger.warning("operations are done whole, since torch %s has another table: %s", torch.__version__, error)
        return None
    return found


def _moves(axis: int, source: Placement, target: Placement) -> Iterator[Move]:
    if source == target:
        return
    if target.is_partial() and not source.is_replicate():
        yield Move(axis, source, Replicate())
        source = Replicate()
    yield Move(axis, source, target)


_LEVELS: Final = "rsue"
_FILLS: Final = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.fill.Scalar, aten.fill.Tensor})
_VIEWS: Final = frozenset({aten.view.default, aten._unsafe_view.default})
_TERMS: Final = {"sum": "p", "avg": "a", "max": "m", "min": "m", "product": "q"}


_OF_USERS: Final[set[str]] = set()


def rule(*operations: OpOverload[..., Any]) -> Callable[[FunctionT], FunctionT]:
    """Say how an operation can be done in parts: `@tensor.rule(torch.ops.mine.scale.default)`.

    The function takes the arguments of the operation, with `shape` and `ndim` of tensors. It returns alternatives for
    one axis: pairs of the placements of the results and of those of the arguments, None for an argument that is no
    tensor. Replicas are always possible, and all results are right for each alternative: nothing verifies that. The
    module that makes the operation has to be imported at the workers, such as by a class that extends `Worker`.
    """

    def register(function: FunctionT) -> FunctionT:
        def alternatives(*args: Any, **kwargs: Any) -> list[Any]:
            given = list(function(*args, **kwargs))
            whole = [[one and Replicate() for one in side] for side in given[0]]
            return [tuple(whole), *given]

        register_sharding([*operations])(alternatives)
        _OF_USERS.update(map(str, operations))
        return function

    return register


@cache
def verified() -> Mapping[str, frozenset[str]]:
    lines = resources.files("aiodaft.tensor").joinpath("verified.txt").read_text().splitlines()
    return {f"aten.{name}": frozenset(kinds) for name, *kinds in map(str.split, lines)}


def norm_of(placement: Placement) -> float | None:
    """The P of a partial P-norm; torch lets these pass through sums, which is wrong, so they are reduced at once."""
    return float(cast(Any, placement).norm_type) if type(placement).__name__ == "_NormPartial" else None


def strided(placement: Placement) -> tuple[int, int] | None:
    one = cast(Any, placement)
    return (one.dim, int(one.split_factor)) if type(placement).__name__ == "_StridedShard" else None


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else (strided(placement) or (None,))[0]


def _flag(placement: Placement) -> str:
    if norm_of(placement) is not None:
        return "n"
    if strided(placement) is not None:
        return "x"
    if type(placement) is Partial:
        return _TERMS.get(placement.reduce_op, "?")
    return "" if type(placement) in (Shard, Replicate) else "?"


def _reduced(one: Any) -> Any:
    if not isinstance(one, Spec):
        return one
    return one.at(tuple(Replicate() if placement.is_partial() else placement for placement in one.placements))


def _specs(values: Any) -> list[Spec]:
    return [one for one in leaves(values) if isinstance(one, Spec)]
