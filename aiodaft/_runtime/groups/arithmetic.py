"""Cuts, reduces and joins values: tensors, arrays, and numbers, which have no parts."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Final, Generic, TypeAlias, TypeVar

from aiodaft._protocol.groups.collective import QUICK, Cut, Parts
from aiodaft._runtime.serialization.encoded import loaded_torch

Allocate: TypeAlias = Callable[[Any, Any], Any]
# Elements that torch computes in the calling thread: its GRAIN_SIZE.
SERIAL: Final = 1 << 15
# Ops that numpy computes as fast as torch, and to the same bits; of two NaNs, it may give the other one.
_SAME_OPS: Final = frozenset({"sum", "product"})
_SAME_DTYPES: Final = frozenset({"torch.float32", "torch.float64", "torch.int32", "torch.int64"})
# The name of a reducer below, a function of two values, or an `OfAll`.
Reducer: TypeAlias = str | Callable[..., Any]


T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class OfAll(Generic[T, R_co]):
    """An op of the values of all members together, such as a median: `all_reduce(gradients, OfAll(median))`.

    Attributes:
        function: Takes the list of the values, in the order of ranks, and must not change them. It runs in members'
            processes, on whole values; in `reduce_scatter` on parts.
    """

    function: Callable[[list[T]], R_co]

    def __call__(self, values: list[T]) -> R_co:
        return self.function(values)


@dataclass(frozen=True)
class Piece:
    """A part of a value, and the kind of the whole; see `kind_of`."""

    kind: str
    value: Any


_REDUCERS: Final[dict[str, tuple[Callable[[Any, Any], Any], str, str]]] = {
    "sum": (operator.add, "add", "add"),
    "product": (operator.mul, "mul", "multiply"),
    "min": (min, "minimum", "minimum"),
    "max": (max, "maximum", "maximum"),
}


def check_reducer(op: Reducer) -> Reducer:
    if not callable(op) and op not in _REDUCERS:
        raise ValueError(f"op is one of {', '.join(_REDUCERS)}, or a function of two values, not {op!r}")
    return op


def combine_into(total: Any, values: Sequence[Any], op: str) -> None:
    """Combine dense CPU tensors of one size from the left, into memory of none of them. It uses no threads of torch."""
    function = _function(op)
    if len(values) == 1:
        total.copy_(values[0])
        return
    parts: Iterable[Sequence[Any]] = [(total, *values)]
    if total.numel() > SERIAL:
        parts = zip(*(value.split(SERIAL) for value in (total, *values)), strict=True)
    _from_the_left(function, parts)


def combined(values: Sequence[Any], op: str, out: Any) -> Any:
    first, *others = values
    if not others:
        return first.clone() if out is None else out.copy_(first)
    function = _function(op)
    for other in others:
        first = out = function(first, other, out=out)
    return out


@cache
def _function(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(loaded_torch(), _REDUCERS[op][1])
    return function


def kind_of(value: Any) -> str:
    """All members have to share the type, and of tensors and arrays the dtype and the shape."""
    if isinstance(value, Piece):
        return value.kind
    if not _is_array(value):
        return type(value).__name__
    dtype, shape = str(value.dtype), tuple(value.shape)
    if not _is_tensor(value):
        return f"numpy {dtype} {shape}"
    return f"{dtype} {shape}" if _is_dense(value) else f"{dtype} {shape} {value.layout}"


def cut(value: Any, how: Cut, part: int, parts: Parts) -> Any:
    if how is Cut.WHOLE or isinstance(value, Piece):
        return value
    if how is Cut.ITEM:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list or tuple of {parts} items, not {type(value).__name__}")
        if len(value) != parts:
            raise ValueError(f"expected a list or tuple of {parts} items, not of {len(value)}")
        return value[part]
    if not _is_array(value):
        if how is Cut.ROWS:
            raise TypeError(f"expected a tensor or an array to be cut, not {type(value).__name__}")
        return Piece(kind_of(value), value)
    if how is Cut.ROWS and not value.shape:
        raise ValueError(f"{kind_of(value)} has no first dimension to be cut")
    rows = value if how is Cut.ROWS else value.reshape(-1)
    start, stop = _bounds(rows.shape[0], part, parts)
    return Piece(kind_of(value), rows[start:stop])


def alone(value: Any) -> Any:
    if isinstance(value, Piece):
        return Piece(value.kind, alone(value.value))
    if not _is_array(value):
        return value
    return value.clone() if _is_tensor(value) else value.copy()


def reduced(values: Sequence[Any], ranks: Sequence[int], op: Reducer, title: str, allocate: Allocate) -> Any:
    """Combine values from the left. Pieces give a piece.

    Raises:
        ValueError: The values are not of one kind.
    """
    first, kind = values[0], kind_of(values[0])
    for value, rank in zip(values[1:], ranks[1:], strict=True):
        if kind_of(value) != kind:
            raise ValueError(
                f"{title}: the members disagree: rank {ranks[0]} has {kind}, rank {rank} has {kind_of(value)}"
            )
    if isinstance(first, Piece):
        return Piece(kind, _combined([piece.value for piece in values], op, allocate))
    return _combined(values, op, allocate)


def joined(pattern: Any, parts: Sequence[Piece], allocate: Allocate) -> Any:
    if not _is_array(pattern):
        return parts[0].value
    pieces = [part.value for part in parts]
    whole = _like(pattern, allocate)
    flat, start = whole.reshape(-1), 0
    for piece in pieces:
        flat[start : start + len(piece)] = piece
        start += len(piece)
    return whole


def new_memory(shape: Any, dtype: Any) -> Any:
    torch: Any = loaded_torch()
    return torch.empty(shape, dtype=dtype)


def no_gradients() -> AbstractContextManager[object]:
    torch = loaded_torch()
    return nullcontext() if torch is None else torch.no_grad()


def nbytes_of(value: Any) -> int:
    if isinstance(value, Piece):
        return nbytes_of(value.value)
    if _is_tensor(value):
        # A sparse one has no `nbytes`.
        return int(value.numel() * value.element_size())
    return int(value.nbytes) if _is_array(value) else 0


def bytes_in(value: Any) -> int:
    return sum(map(nbytes_of, value)) if isinstance(value, list) else nbytes_of(value)


def written(out: Any, value: Any) -> Any:
    """Write a result, or each of a list, into memory of the member; returns that.

    Raises:
        ValueError: They are not of one kind.
    """
    if isinstance(value, list) and type(out) in {list, tuple} and len(out) == len(value):
        for one, result in zip(out, value, strict=True):
            written(one, result)
    elif value is not None:
        if not _is_array(out) or kind_of(out) != kind_of(value):
            kind = f"a list of {len(value)}" if isinstance(value, list) else kind_of(value)
            raise ValueError(f"out has to be of the kind of the result: it is {kind_of(out)}, the result is {kind}")
        with no_gradients():
            out[...] = value
    return out


def _combined(values: Sequence[Any], op: Reducer, allocate: Allocate) -> Any:
    if isinstance(op, OfAll):
        return op(list(values))
    if callable(op):
        return reduce(op, values)
    number, *_ = _REDUCERS[op]
    first = values[0]
    if not _has_reducers(first, op):
        raise TypeError(
            f"{op!r} is for numbers, dense tensors and arrays of numbers, not for {kind_of(first)}: "
            "give a function of two values"
        )
    if not _is_array(first):
        return reduce(number, values)
    total = _like(first, allocate)
    if len(values) == 1:
        total[...] = first
        return total
    _from_the_left(*_computing(op, [total, *values]))
    return total


def _from_the_left(function: Callable[..., Any], parts: Iterable[Sequence[Any]]) -> None:
    """The first of each part is the memory for the result."""
    for out, one, two, *others in parts:
        function(one, two, out=out)
        for other in others:
            function(out, other, out=out)


def _computing(op: str, values: Sequence[Any]) -> tuple[Callable[..., Any], Iterable[Sequence[Any]]]:
    """The function that reduces values of one shape, and the parts of them that it is called with.

    Quick work is done without the threads of torch, which spin for milliseconds at the end of each job where others
    need the cores. numpy has none; torch uses none for small parts, which take longer.
    """
    _, of_torch, of_numpy = _REDUCERS[op]
    first = values[0]
    if not _is_tensor(first):
        return getattr(_numpy(), of_numpy), [values]
    function = getattr(loaded_torch(), of_torch)
    if first.numel() <= SERIAL or len(values) * first.nbytes > 2 * QUICK:
        return function, [values]
    if first.device.type != "cpu" or not all(value.is_contiguous() for value in values):
        return function, [values]
    if op in _SAME_OPS and str(first.dtype) in _SAME_DTYPES and _numpy_sees_tensors():
        return _quiet(of_numpy), [[value.detach().numpy() for value in values]]
    return function, zip(*(value.view(-1).split(SERIAL) for value in values), strict=True)


def _like(value: Any, allocate: Allocate) -> Any:
    if not _is_tensor(value):
        return _numpy().empty(value.shape, value.dtype)
    if value.device.type != "cpu":
        return value.new_empty(value.shape)
    return allocate(value.shape, value.dtype)


def _bounds(length: int, part: int, parts: Parts) -> tuple[int, int]:
    if isinstance(parts, tuple):
        if sum(parts) != length:
            raise ValueError(f"the lengths {list(parts)} are not those of parts of {length} rows")
        return sum(parts[:part]), sum(parts[: part + 1])
    size, longer = divmod(length, parts)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def _is_tensor(value: Any) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return _is_tensor(value) or (type(value).__module__ == "numpy" and not isinstance(value, _numpy().generic))


def _has_reducers(value: Any, op: str) -> bool:
    """Whether an op has a meaning for a value, and for parts of it. For lists and texts, `+` makes longer ones."""
    if _is_tensor(value):
        return _is_dense(value)
    return op != "sum" or not (isinstance(value, Sequence) or (_is_array(value) and value.dtype.kind in "SU"))


def _is_dense(value: Any) -> bool:
    return str(value.layout) == "torch.strided"


@cache
def _numpy_sees_tensors() -> bool:
    torch: Any = loaded_torch()
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


@cache
def _quiet(name: str) -> Callable[..., Any]:
    quiet: Callable[..., Any] = _numpy().errstate(all="ignore")(getattr(_numpy(), name))
    return quiet


def _numpy() -> Any:
    return sys.modules["numpy"]
