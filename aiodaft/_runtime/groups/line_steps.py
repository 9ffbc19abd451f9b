"""The steps of exchanges on a line: a rank writes its parts, yields to have all ranks signal, and reads.

An exchange that is repeated has a form, which is made once: its terms, and tensors that are views of the shared memory.
Small parts are copied and combined through these views. Large parts go window by window.
"""

# ruff: noqa: B901 - a generator of steps returns its result

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Generator, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from aiodaft._runtime.groups.collectives import SERIAL, Allocate, combine_into, combined
from aiodaft._runtime.groups.line import TERMS, WINDOW, Line
from aiodaft._runtime.serialization.encoded import is_dense_tensor

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]
# Of one rank: the operation, the dtype, and the shapes of its parts.
Terms: TypeAlias = tuple[str, str, list[list[int]]]

# Of three members or more, each reduces a part of tensors larger than this.
_BY_PARTS: Final = 1 << 17
# Large results from this size are in memory that other processes can map.
_MAPPED: Final = 1 << 16
# Large parts in a window begin on a cache line.
_ALIGNED: Final = -64
_PREFIX: Final = 2
_NUMBER: Final = 8
_MAX_TOLD: Final = 200


class Disagreement(Exception):
    """All members find it at the same step: they can go on."""


class _Told(NamedTuple):
    """The parts that this rank reads: their dtypes and shapes, and, if they are small, views of them."""

    parts: list[tuple[Any, list[int]]]
    views: list[Tensor] | None
    longest: int


class _Form:
    """The message of a rank in an exchange.

    Args:
        given: The parts of this rank; or the tensor whose rows are its parts.
        lengths: The rows of each part; empty for parts.
    """

    def __init__(self, line: Line, title: str, given: Sequence[Tensor], lengths: Sequence[int]) -> None:
        from hashlib import blake2b  # noqa: PLC0415 - loads slowly

        self.dtype = given[0].dtype if given else None
        if any(one.is_quantized for one in given):
            raise TypeError(f"{title}: a plan is for dense tensors, not for quantized ones")
        self.name = title.partition(" ")[0]
        self.nbytes = sum(one.nbytes for one in given)
        self.shapes = [tuple(one.shape) for one in given]
        if lengths:
            self.shapes = [(rows, *self.shapes[0][1:]) for rows in lengths]
        text = json.dumps((title, str(self.dtype).removeprefix("torch."), self.shapes)).encode()
        if len(text) > TERMS - _PREFIX:
            raise ValueError(f"{title}: the shapes of {len(self.shapes)} parts take more than {TERMS} bytes")
        self.terms = len(text).to_bytes(_PREFIX, "little") + text
        # No other terms have it.
        self.number = int.from_bytes(blake2b(text, digest_size=_NUMBER).digest(), "little")
        self.told: dict[tuple[int, ...], _Told] = {}
        self.is_small = _are_small(self.shapes, self.dtype)
        # In each half, the places of what is given.
        self._places: list[list[Tensor]] = [[], []]
        if self.is_small:
            starts = list(accumulate((one.numel() for one in given), initial=0))
            for half in (line.half, line.half ^ 1):
                line.half = half
                self._places[half] = [
                    line.view(line.rank, start * one.dtype.itemsize, one.numel(), one.dtype).view(one.shape)
                    for one, start in zip(given, starts, strict=False)
                ]
            line.half ^= 1

    def write(self, half: int, given: Sequence[Tensor]) -> None:
        for place, one in zip(self._places[half], given, strict=True):
            place.copy_(one.detach() if one.requires_grad else one)


class LineSteps:
    """The exchanges of one rank on a line.

    Args:
        allocate: Makes memory for large results.
        counts: The exchanges that have begun, by name.
        nbytes: The bytes that this rank gives to them, by name.
    """

    def __init__(self, line: Line, allocate: Allocate, counts: Counter[str], nbytes: Counter[str]) -> None:
        self._line = line
        self._allocate = allocate
        self._counts = counts
        self._nbytes = nbytes

    def reduce(
        self, title: str, given: Sequence[Tensor], lengths: tuple[int, ...], lane: int, op: str, out: Tensor | None
    ) -> Steps[Tensor]:
        """Combine one part, each rank another one or all the same.

        Args:
            given, lengths: As for `_Form`.
            lane: The part that this rank combines.
            op: The name of the reducer.
            out: The tensor for the result, if there is one.
        """
        line, form = self._line, self._form(title, given, lengths)
        direct = out is not None and _is_writable(title, form.dtype, form.shapes[lane], out)
        if not form.is_small:
            by_parts = line.size > 2 and len(form.shapes) == 1 and given[0].nbytes > _BY_PARTS
            steps = self._by_parts(form, title, given[0], op, out) if by_parts else None
            return (yield from steps or self._by_windows(form, title, parts_of(given, lengths), lane, op, out))
        form.write(line.half, given)
        line.tell(form.number, form.terms)
        yield
        views = self._meet(form, range(line.size), lane, alike=True).views
        assert views is not None
        line.half ^= 1
        total: Tensor = combined(views, op, out.detach() if direct and out is not None else None)
        if out is None:
            return total if given[0].is_cpu else total.to(given[0].device)
        if not direct:
            out.detach().copy_(total)
        return out

    def move(
        self,
        title: str,
        given: Sequence[Tensor],
        lengths: tuple[int, ...],
        sources: Sequence[int],
        lane: int,
        lanes: int,
        outs: Sequence[Tensor | None],
    ) -> Steps[list[Tensor]]:
        """Take the same part of some ranks; each has so many lanes with parts in its window."""
        line, form, width = self._line, self._form(title, given, lengths), WINDOW // lanes & _ALIGNED
        flats: list[Tensor] = []
        if form.is_small:
            form.write(line.half, given)
        else:
            flats = list(map(_flat, parts_of(given, lengths)))
        line.tell(form.number, form.terms)
        longest, targets = 0, list[Room]()
        device = given[0].device if given and not given[0].is_cpu else None
        for start in count(0, width):
            for index, flat in enumerate(flats):
                _put(line, index * width, flat, start, width)
            yield
            if start == 0:
                told = self._meet(form, sources, lane, alike=False)
                longest = told.longest
                if told.views is not None:
                    line.half ^= 1
                    return [_copied(title, view, out, device) for view, out in zip(told.views, outs, strict=True)]
                targets = [
                    Room(self._allocate, title, *part, device, out) for part, out in zip(told.parts, outs, strict=True)
                ]
            for source, target in zip(sources, targets, strict=True):
                nbytes = min(width, target.flat.nbytes - start)
                if nbytes > 0:
                    line.get(source, lane * width, target.flat.data_ptr() + start, nbytes)
            line.half ^= 1
            if start + width >= longest:
                break
        return [target.filled() for target in targets]

    def _by_windows(
        self, form: _Form, title: str, parts: Sequence[Tensor], lane: int, op: str, out: Tensor | None
    ) -> Steps[Tensor]:
        line, flats = self._line, list(map(_flat, parts))
        dtype, length = parts[lane].dtype, parts[lane].numel()
        target = Room(self._allocate, title, dtype, parts[lane].shape, parts[lane].device, out)
        line.tell(form.number, form.terms)
        width = WINDOW // len(parts) & _ALIGNED
        each = width // dtype.itemsize
        for start in range(0, max(flat.numel() for flat in flats), each):
            for index, flat in enumerate(flats):
                _put(line, index * width, flat, start * dtype.itemsize, width)
            yield
            if start == 0:
                self._meet(form, (), lane, alike=True)
            some = min(each, length - start)
            if some > 0:
                combine_into(target.flat[start : start + some], line.views(lane * width, some, dtype), op)
            line.half ^= 1
        return target.filled()

    def _by_parts(self, form: _Form, title: str, tensor: Tensor, op: str, out: Tensor | None) -> Steps[Tensor]:
        """Combine a part of each window, and take the other parts from the members that have combined them."""
        line, flat, size = self._line, _flat(tensor), self._line.size
        dtype, item, length = tensor.dtype, tensor.dtype.itemsize, tensor.numel()
        target, each = Room(self._allocate, title, dtype, tensor.shape, tensor.device, out), WINDOW // item
        line.tell(form.number, form.terms)
        into = target.flat.data_ptr()
        for start in range(0, length, each):
            some = min(each, length - start)
            _put(line, 0, flat, start * item, WINDOW)
            yield
            if start == 0:
                self._meet(form, (), 0, alike=True)
            cuts = [some * rank // size for rank in range(size + 1)]
            first, last = cuts[line.rank : line.rank + 2]
            # The last elements of a tensor can be fewer than the members.
            if last > first:
                views = line.views(first * item, last - first, dtype)
                combine_into(target.flat[start + first : start + last], views, op)
                _put(line, first * item, target.flat, (start + first) * item, (last - first) * item)
            yield
            for rank in range(size):
                if rank != line.rank:
                    nbytes = (cuts[rank + 1] - cuts[rank]) * item
                    line.get(rank, cuts[rank] * item, into + (start + cuts[rank]) * item, nbytes)
            line.half ^= 1
        return target.filled()

    def _form(self, title: str, given: Sequence[Tensor], lengths: tuple[int, ...]) -> _Form:
        for one in given:
            if not is_dense_tensor(one):
                raise TypeError(f"{title}: a plan is for dense tensors, not for {type(one).__name__}")
        key = (title, lengths, given[0].dtype, *[one.shape for one in given]) if given else title
        form = self._line.keep(key, lambda: _Form(self._line, title, given, lengths))
        self._counts[form.name] += 1
        self._nbytes[form.name] += form.nbytes
        return form

    def _meet(self, form: _Form, sources: Sequence[int], lane: int, *, alike: bool) -> _Told:
        key = (self._line.half, *self._line.numbers())
        told = form.told.get(key)
        if told is None:
            if len(form.told) == _MAX_TOLD:
                form.told.clear()
            told = form.told[key] = self._read(sources, lane, 3 if alike else 1)
        return told

    def _read(self, sources: Sequence[int], lane: int, alike: int) -> _Told:
        line = self._line
        told = list(map(_terms, line.terms()))
        mine = told[line.rank]
        for rank, other in enumerate(told):
            if other[:alike] != mine[:alike]:
                line.half ^= 1
                texts = (f"rank {at} has {_text(told[at])}" for at in sorted((line.rank, rank)))
                raise Disagreement(f"a plan of {line.group}: the members disagree: {', '.join(texts)}")
        parts = [(_dtype(told[source]), told[source][2][lane]) for source in sources]
        views = None
        if all(_are_small(one[2], _dtype(one)) for one in told if one[2]):
            views = []
            for source, (dtype, shape) in zip(sources, parts, strict=True):
                start = sum(map(math.prod, told[source][2][:lane])) * dtype.itemsize
                views.append(line.view(source, start, math.prod(shape), dtype).view(shape))
        return _Told(parts, views, max(map(_longest, told)))


class Room:
    """The memory for a result: `flat` is memory of the host, which is filled before `filled` is called."""

    def __init__(
        self, allocate: Allocate, title: str, dtype: Any, shape: Sequence[int], device: Any, out: Tensor | None
    ) -> None:
        import torch  # noqa: PLC0415 - optional package

        self._shape, self._out, self._device = torch.Size(shape), out, device
        self._in_place = out is not None and _is_writable(title, dtype, shape, out) and out.is_contiguous()
        if out is not None and self._in_place:
            self.flat = out.detach().view(-1)
            return
        size = self._shape.numel()
        small = size * dtype.itemsize < _MAPPED
        self.flat = torch.empty(size, dtype=dtype) if small else allocate(torch.Size([size]), dtype)

    def filled(self, given: Tensor | None = None) -> Tensor:
        if self._out is None:
            return self.flat.view(self._shape).to(self._device or "cpu") if given is None else given
        if given is not None or not self._in_place:
            self._out.detach().copy_(self.flat.view(self._shape) if given is None else given)
        return self._out


def _is_writable(title: str, dtype: Any, shape: Sequence[int], out: Any) -> bool:
    """Whether a result can be computed in place in a given tensor.

    Raises:
        ValueError: It is of another dtype or shape.
    """
    if not is_dense_tensor(out) or out.dtype != dtype or tuple(out.shape) != tuple(shape):
        found = f"{out.dtype} {tuple(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise ValueError(f"{title}: the result is {dtype} {tuple(shape)}, and `out` is {found}")
    return bool(out.is_cpu) and not (out.is_conj() or out.is_neg())


def _copied(title: str, view: Tensor, out: Tensor | None, device: Any) -> Tensor:
    if out is None:
        return view.clone() if device is None else view.to(device)
    _is_writable(title, view.dtype, view.shape, out)
    out.detach().copy_(view)
    return out


def _put(line: Line, at: int, flat: Tensor, start: int, most: int) -> None:
    nbytes = min(most, flat.nbytes - start)
    if nbytes > 0:
        line.put(at, flat.data_ptr() + start, nbytes)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return (flat if flat.is_cpu else flat.cpu()).reshape(-1)


def parts_of(given: Sequence[Tensor], lengths: tuple[int, ...]) -> Sequence[Tensor]:
    return given[0].split(lengths) if lengths else given  # type: ignore[no-untyped-call]  # without types


def _are_small(shapes: Sequence[Sequence[int]], dtype: Any) -> bool:
    """Whether parts fit into a window one after the other, and torch computes them in the calling thread."""
    size = sum(map(math.prod, shapes))
    return size <= SERIAL and (not size or size * int(dtype.itemsize) <= (WINDOW // len(shapes) & _ALIGNED))


def _terms(terms: bytes) -> Terms:
    told: Terms = tuple(json.loads(terms[_PREFIX : _PREFIX + int.from_bytes(terms[:_PREFIX], "little")]))
    return told


def _text(terms: Terms) -> str:
    title, dtype, shapes = terms
    return f"{title} {dtype} {shapes}" if shapes else title


def _dtype(terms: Terms) -> Any:
    import torch  # noqa: PLC0415 - optional package

    return getattr(torch, terms[1])


def _longest(terms: Terms) -> int:
    _, _, shapes = terms
    return max(map(math.prod, shapes), default=0) * (_dtype(terms).itemsize if shapes else 0)
