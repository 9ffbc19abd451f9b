"""Planned collectives: the members of a group do the same exchanges of tensors in the same order, again and again.

On one host nothing meets: each rank writes its part into its place in shared memory, signals the others, and reads
theirs (`Line`). An exchange is a generator of steps: it writes, yields to have all ranks signal, and reads. A thread or
a task carries it out. If members do not share memory, its one step is a keyed collective.
"""

# ruff: noqa: B901 - a generator of steps returns its result

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.groups.arithmetic import Allocate, check_reducer, combine_into, reduced
from aiodaft._runtime.groups.keyed import apart
from aiodaft._runtime.groups.line import TERMS, WINDOW, Line
from aiodaft._runtime.groups.planning import Planning
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft._runtime.serialization.tensors import is_dense_tensor
from aiodaft.exceptions import CallCancelled
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]
Op: TypeAlias = Literal["sum", "product", "min", "max"]
# Takes part in a keyed collective: the operation, the value, the op, and the root.
Meet: TypeAlias = Callable[[str, Any, str, int], Ref[Any]]
# Of one rank: the operation, the dtype, and the shapes of its parts.
Terms: TypeAlias = tuple[str, str, list[list[int]]]

# Of three members or more, each reduces a part of tensors larger than this.
_BY_PARTS: Final = 1 << 17
# Results from this size are in memory that other processes can map.
_MAPPED: Final = 1 << 16
# Parts in a window begin on a cache line.
_ALIGNED: Final = -64
_PREFIX: Final = 2


class _Disagreement(Exception):
    """All members find it at the same step: they can go on."""


class Exchange(Generic[T]):
    """One collective of a `Planned`: it begins when it is awaited, or asked for its result, once."""

    __slots__ = ("_plan", "_steps", "_title")

    def __init__(self, plan: Planned, title: str, steps: Steps[T]) -> None:
        self._plan = plan
        self._title = title
        self._steps: Steps[T] | None = steps

    def result(self) -> T:
        """Block this thread until the result is there. The thread may be any one that runs no event loop."""
        return self._plan._in_thread(self._title, self._begun())

    def __await__(self) -> Generator[Any, None, T]:
        return self._plan._on_loop(self._title, self._begun()).__await__()

    def _begun(self) -> Steps[T]:
        steps, self._steps = self._steps, None
        if steps is None:
            raise RuntimeError(f"{self._title} of a plan was begun before: keep its result, or make another one")
        return steps


class Planned:
    """Collectives of tensors that all members of a group do in one order, at the speed of their shared memory.

    `plan = await current_group().plan()` once, and then in each step `await plan.all_reduce(grads)`, or in threads
    `plan.all_reduce(grads).result()`. Members on one host send no message: use it for repeated exchanges. Members on
    several hosts meet as in the collectives of the group.

    All members begin the same collectives of a plan in the same order, one after the other; a thread or a task waits
    for its turn. Results equal those of the collectives of the group: they are reduced in the order of ranks, and all
    members get the same bits. Tensors are dense; those of a GPU go through the memory of the host. Until it has the
    result, a member must not write to its tensor; after that it may.

    Each method takes:
        out: The tensor for the result, of its dtype and shape; it may be the tensor itself. Default: a new tensor.

    Errors are raised by the wait for a collective, or for its result.

    Raises:
        ValueError: The members disagree on the operation, the dtype or the shape; it names two ranks, and all members
            raise it. The plan goes on. With a wrong `out` of one member, the plan ends.
        ActorDied: A member died or was stopped.
        CallCancelled: A member has left: its call failed, or its wait was cancelled; it names the rank.
        GroupChanged: The group has a new epoch.
        TypeError: The value is no dense tensor.
        RuntimeError: The thread runs an event loop, or for awaiting it another thread has its turn.

    After such an error, apart from the first one, the plan has ended for all members; open another one.

    Cancellation: the plan ends for all members.
    """

    def __init__(self, process: Process, rank: int, size: int, line: Line | None, meet: Meet) -> None:
        self._process = process
        self._rank = rank
        self._size = size
        self._line = line
        self._meet = meet
        self._allocate: Allocate = process.part(Store).empty
        # Tasks take turns.
        self._tasks = asyncio.Lock()

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, out: Tensor | None = None) -> Exchange[Tensor]:
        """Combine the tensors of all members in the order of ranks; each member gets the result."""
        title = _title("all_reduce", op)
        if self._line is None:
            return Exchange(self, title, self._reduced_there(title, [tensor], op, out))
        by_parts = self._size > 2 and is_dense_tensor(tensor) and tensor.nbytes > _BY_PARTS
        steps = self._by_parts(title, tensor, op, out) if by_parts else self._reduce(title, [tensor], 0, op, out)
        return Exchange(self, title, steps)

    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: Op = "sum", *, out: Tensor | None = None
    ) -> Exchange[Tensor]:
        """Combine tensors; member i gets part i of the result.

        Args:
            tensor: It is cut along its first dimension as by `torch.tensor_split`; or its parts, one for each member.
            op: As for `all_reduce`.
            out: See the class.
        """
        title, parts = _title("reduce_scatter", op), self._parts("reduce_scatter", tensor)
        if self._line is None:
            return Exchange(self, title, self._reduced_there(title, parts, op, out))
        return Exchange(self, title, self._reduce(title, parts, self._rank, op, out))

    def all_gather(self, tensor: Tensor, *, out: Sequence[Tensor] | None = None) -> Exchange[list[Tensor]]:
        """Give each member the list of the tensors of all. They may differ in dtype and shape."""
        steps = self._list("all_gather", tensor, [tensor], 0, out)
        return Exchange(self, "all_gather", steps)

    def broadcast(self, tensor: Tensor | None = None, root: int = 0, *, out: Tensor | None = None) -> Exchange[Tensor]:
        """Give each member the tensor of the one with rank `root`; the tensors of the others are ignored.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= root < self._size:
            raise ValueError(f"root is the rank of one of {self._size} members, from 0, not {root}")
        return Exchange(self, "broadcast", self._broadcast(tensor, root, out))

    def all_to_all(
        self, tensor: Tensor | Sequence[Tensor], *, out: Sequence[Tensor] | None = None
    ) -> Exchange[list[Tensor]]:
        """Exchange parts: each member has one for each member, and gets the list of those for it, by rank.

        Args:
            tensor: As for `reduce_scatter`; parts may have any shapes.
            out: See the class.
        """
        parts = self._parts("all_to_all", tensor)
        return Exchange(self, "all_to_all", self._list("all_to_all", parts, parts, self._rank, out))

    def barrier(self) -> Exchange[None]:
        """Wait until all members have begun it."""
        return Exchange(self, "barrier", self._barrier())

    def close(self) -> None:
        """Free the shared memory. Exchanges that the others begin in this plan end with CallCancelled. Idempotent.

        It is also freed when nothing refers to the plan, at the next epoch of the group, and with the member.
        """
        if self._line is not None:
            line, planning = self._line, self._process.part(Planning)
            self._process.call_soon(lambda: planning.drop(line, CallCancelled("the plan was closed"), "it was closed"))

    __del__ = close

    # The steps of an exchange.

    def _in_thread(self, title: str, steps: Steps[T]) -> T:
        line = self._line
        if self._process.is_here or asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{title} would block the event loop of this thread: use `await`")
        if line is None:
            return _last(steps, next(steps).result())
        line.turn.acquire()
        try:
            _begin(line, title)
            while True:
                next(steps)
                line.signal()
                line.wait()
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as error:  # noqa: BLE001 - each ends the plan, also a cancellation
            raise _failed(line, title, error) from None
        finally:
            line.release()

    async def _on_loop(self, title: str, steps: Steps[T]) -> T:
        line = self._line
        if asyncio.get_running_loop() is not self._process.loop:
            raise RuntimeError(f"{title} is awaited on another event loop than the one its runtime was opened on")
        if line is None:
            return _last(steps, await next(steps))
        async with self._tasks:
            if not line.turn.acquire(blocking=False):
                raise RuntimeError(f"{title}: another thread uses the plan: give each thread a plan of its own")
            try:
                _begin(line, title)
                while True:
                    next(steps)
                    line.signal()
                    await line.wait_on_loop()
            except StopIteration as stop:
                result: T = stop.value
                return result
            except BaseException as error:  # noqa: BLE001 - each ends the plan, also a cancellation
                raise _failed(line, title, error) from None
            finally:
                line.release()

    # The steps on a line.

    def _reduce(self, title: str, parts: Sequence[Tensor], lane: int, op: str, out: Tensor | None) -> Steps[Tensor]:
        """Combine one part, each rank another one."""
        line, flats = self._at(), [_flat(title, part) for part in parts]
        dtype, length = parts[lane].dtype, parts[lane].numel()
        target = self._room(title, parts[lane], out)
        terms = _terms(title, dtype, tuple(part.shape for part in parts))
        width = WINDOW // len(parts) & _ALIGNED
        each = width // dtype.itemsize
        for start in range(0, max(1, *(flat.numel() for flat in flats)), each):
            for index, flat in enumerate(flats):
                _put(line, index * width, flat, start * dtype.itemsize, width)
            yield from self._meet_at(line, start, terms)
            some = min(each, length - start)
            if some > 0:
                combine_into(target.flat[start : start + some], line.views(lane * width, some, dtype), op)
            line.half ^= 1
        return target.filled()

    def _by_parts(self, title: str, tensor: Tensor, op: str, out: Tensor | None) -> Steps[Tensor]:
        """Combine a part of each window, and take the other parts from the members that have combined them."""
        line, flat = self._at(), _flat(title, tensor)
        dtype, item, length = tensor.dtype, tensor.dtype.itemsize, tensor.numel()
        target = self._room(title, tensor, out)
        terms, each = _terms(title, dtype, (tensor.shape,)), WINDOW // item
        into = target.flat.data_ptr()
        for start in range(0, length, each):
            some = min(each, length - start)
            _put(line, 0, flat, start * item, WINDOW)
            yield from self._meet_at(line, start, terms)
            cuts = [some * rank // self._size for rank in range(self._size + 1)]
            first, last = cuts[self._rank : self._rank + 2]
            # The last elements of a tensor can be fewer than the members.
            if last > first:
                views = line.views(first * item, last - first, dtype)
                combine_into(target.flat[start + first : start + last], views, op)
                _put(line, first * item, target.flat, (start + first) * item, (last - first) * item)
            yield
            for rank in range(self._size):
                if rank != self._rank:
                    nbytes = (cuts[rank + 1] - cuts[rank]) * item
                    line.get(rank, cuts[rank] * item, into + (start + cuts[rank]) * item, nbytes)
            line.half ^= 1
        return target.filled()

    def _list(
        self, title: str, value: Any, parts: Sequence[Tensor], lane: int, out: Sequence[Tensor] | None
    ) -> Steps[list[Tensor]]:
        """Move one part of each rank."""
        if self._line is None:
            given: Sequence[Tensor] = yield self._meet(title, value, "sum", 0)
            outs = _outs(title, out, len(given))
            return [self._room(title, one, to).filled(one) for one, to in zip(given, outs, strict=True)]
        outs = _outs(title, out, self._size)
        return (yield from self._move(title, parts, range(self._size), lane, len(parts), outs))

    def _broadcast(self, tensor: Tensor | None, root: int, out: Tensor | None) -> Steps[Tensor]:
        is_root = self._rank == root
        if self._line is None:
            given: Tensor = yield self._meet("broadcast", tensor, "sum", root)
            return self._room("broadcast", given, out).filled(given)
        sources = () if is_root and (out is None or out is tensor) else (root,)
        parts: Sequence[Any] = [tensor] if is_root else []
        moved = yield from self._move(f"broadcast from {root}", parts, sources, 0, 1, [out])
        return moved[0] if moved else parts[0]

    def _barrier(self) -> Steps[None]:
        if self._line is None:
            yield self._meet("barrier", None, "sum", 0)
        else:
            yield from self._move("barrier", (), (), 0, 1, ())

    def _move(
        self,
        title: str,
        parts: Sequence[Tensor],
        sources: Sequence[int],
        lane: int,
        lanes: int,
        outs: Sequence[Tensor | None],
    ) -> Steps[list[Tensor]]:
        """Take the same part of some ranks; each has its parts in lanes."""
        line, flats, width = self._at(), [_flat(title, part) for part in parts], WINDOW // lanes & _ALIGNED
        terms = _terms(title, parts[0].dtype if parts else None, tuple(part.shape for part in parts))
        longest, targets = 1, list[_Room]()
        for start in count(0, width):
            if start >= longest:
                break
            for index, flat in enumerate(flats):
                _put(line, index * width, flat, start, width)
            told = yield from self._meet_at(line, start, terms, alike=False)
            if told:
                longest = max(_longest(one) for one in told)
                device = parts[0].device if parts else "cpu"
                targets = [
                    _Room(self._allocate, title, _dtype(told[source]), told[source][2][lane], device, to)
                    for source, to in zip(sources, outs, strict=False)
                ]
            for source, target in zip(sources, targets, strict=True):
                nbytes = min(width, target.flat.nbytes - start)
                if nbytes > 0:
                    line.get(source, lane * width, target.flat.data_ptr() + start, nbytes)
            line.half ^= 1
        return [target.filled() for target in targets]

    def _reduced_there(self, title: str, parts: Sequence[Tensor], op: str, out: Tensor | None) -> Steps[Tensor]:
        if len(parts) == 1:
            given: Tensor = yield self._meet("all_reduce", parts[0], op, 0)
        else:
            mine: list[Tensor] = yield self._meet("all_to_all", parts, "sum", 0)
            given = reduced(mine, range(self._size), op, title, self._allocate)
        return self._room(title, given, out).filled(given)

    def _meet_at(self, line: Line, start: int, terms: bytes, *, alike: bool = True) -> Steps[Sequence[Terms]]:
        """Wait for all; at the first step, compare the terms of the exchange, and return those of each rank."""
        if start == 0:
            line.put_terms(terms)
        yield
        if start or all(other == terms for other in line.terms(len(terms))):
            return () if start else [_read(terms)] * self._size
        told = list(map(_read, line.terms()))
        mine = told[self._rank]
        for rank, other in enumerate(told):
            if other[: 3 if alike else 1] != mine[: 3 if alike else 1]:
                line.half ^= 1
                texts = (f"rank {at} has {' '.join(map(str, told[at]))}" for at in sorted((self._rank, rank)))
                raise _Disagreement(f"a plan of {line.group}: the members disagree: {', '.join(texts)}")
        return told

    def _at(self) -> Line:
        assert self._line is not None
        return self._line

    def _room(self, title: str, like: Tensor, out: Tensor | None) -> _Room:
        return _Room(self._allocate, title, like.dtype, like.shape, like.device, out)

    def _parts(self, title: str, tensor: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if is_dense_tensor(tensor):
            if not cast("Tensor", tensor).shape:
                raise ValueError(f"{title}: a tensor without dimensions cannot be cut")
            return cast("Tensor", tensor).tensor_split(self._size)
        parts = list(tensor)
        if len(parts) != self._size or not all(map(is_dense_tensor, parts)) or len({one.dtype for one in parts}) > 1:
            raise TypeError(f"{title}: expected a tensor, or {self._size} of one dtype, one for each member")
        return parts


class _Room:
    """The memory for a result: `flat` is memory of the host, which is filled before `filled` is called."""

    def __init__(
        self, allocate: Allocate, title: str, dtype: Any, shape: Sequence[int], device: Any, out: Tensor | None
    ) -> None:
        import torch  # noqa: PLC0415 - optional package

        self._shape, self._out, self._device = torch.Size(shape), out, device
        if out is not None:
            if not is_dense_tensor(out) or out.dtype != dtype or out.shape != self._shape:
                found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
                raise ValueError(f"{title}: the result is {dtype} {tuple(shape)}, and `out` is {found}")
            if out.is_cpu and out.is_contiguous() and not (out.is_conj() or out.is_neg()):
                self.flat = out.detach().view(-1)
                self._in_place = True
                return
        self._in_place = False
        size = self._shape.numel()
        small = size * dtype.itemsize < _MAPPED
        self.flat = torch.empty(size, dtype=dtype) if small else allocate(torch.Size([size]), dtype)

    def filled(self, given: Tensor | None = None) -> Tensor:
        """The result; `given` is copied there first."""
        if self._out is None:
            return self.flat.view(self._shape).to(self._device) if given is None else given
        if given is not None or not self._in_place:
            self._out.detach().copy_(self.flat.view(self._shape) if given is None else given)
        return self._out


def _begin(line: Line, title: str) -> None:
    call = line.call = current_call.get()
    if call is not None and call.apart is not None:
        raise apart(title, call.apart)
    if line.error is not None:
        raise copy_error(line.error)


def _failed(line: Line, title: str, error: BaseException) -> BaseException:
    """The error of an exchange, which ends the line if not all members have it at this step."""
    if isinstance(error, _Disagreement):
        return ValueError(f"{title} of {error}")
    failed = isinstance(error, Exception)
    reason = f"{title}: {f'{type(error).__name__}: {error}' if failed else 'its wait was cancelled'}"
    line.leave(CallCancelled(f"the plan of {line.group} has ended: this member has left it: {reason}"), reason)
    add_note(error, f"raised for {title} of a plan of {line.group}")
    return error


def _last(steps: Steps[T], given: Any) -> T:
    try:
        steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a keyed collective is one step")


def _put(line: Line, at: int, flat: Tensor, start: int, most: int) -> None:
    """Copy bytes of a tensor from `start` into the window of this rank."""
    nbytes = min(most, flat.nbytes - start)
    if nbytes > 0:
        line.put(at, flat.data_ptr() + start, nbytes)


def _flat(title: str, tensor: Tensor) -> Tensor:
    """The elements as one row in memory of the host."""
    if not is_dense_tensor(tensor) or tensor.is_quantized:
        raise TypeError(f"{title}: a plan is for dense tensors, not for {type(tensor).__name__}")
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return (flat if flat.is_cpu else flat.cpu()).reshape(-1)


def _title(name: str, op: str) -> str:
    if callable(check_reducer(op)):
        raise ValueError(f"{name}: a plan combines tensors by the name of an op; use the collectives of the group")
    return f"{name} {op}"


def _outs(title: str, out: Sequence[Tensor] | None, count: int) -> Sequence[Tensor | None]:
    if out is not None and len(out) != count:
        raise ValueError(f"{title}: `out` has {len(out)} tensors, and there are {count} results")
    return [None] * count if out is None else out


@lru_cache
def _terms(title: str, dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    text = json.dumps((title, str(dtype).removeprefix("torch."), shapes)).encode()
    if len(text) > TERMS - _PREFIX:
        raise ValueError(f"{title}: the shapes of {len(shapes)} parts take more than {TERMS} bytes")
    return len(text).to_bytes(_PREFIX, "little") + text


@lru_cache
def _read(terms: bytes) -> Terms:
    text = terms[_PREFIX : _PREFIX + int.from_bytes(terms[:_PREFIX], "little")]
    told: Terms = tuple(json.loads(text))
    return told


def _dtype(terms: Terms) -> Any:
    import torch  # noqa: PLC0415 - optional package

    return getattr(torch, terms[1])


def _longest(terms: Terms) -> int:
    """The bytes of the longest part."""
    _, _, shapes = terms
    return max((math.prod(shape) for shape in shapes), default=0) * (_dtype(terms).itemsize if shapes else 0)
