"""Planned collectives: the members of a group do the same exchanges of tensors in the same order, again and again.

On one host nothing meets: each rank writes its part into its place in shared memory, signals the others, and reads
theirs (`Line`). An exchange is a generator of steps, which a thread or a task carries out. If members do not share
memory, its one step is a keyed collective.
"""

# ruff: noqa: B901 - a generator of steps returns its result

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

from aiodaft._protocol.groups.roster import even_shares
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.groups.collectives import Allocate, check_reducer, reduced
from aiodaft._runtime.groups.keyed import apart
from aiodaft._runtime.groups.line import Line, Planning
from aiodaft._runtime.groups.line_steps import Disagreement, LineSteps, Room, Steps, parts_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.encoded import is_dense_tensor
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft.exceptions import CallCancelled
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Op: TypeAlias = Literal["sum", "product", "min", "max"]
Meet: TypeAlias = Callable[[str, Any, str, int], Ref[Any]]
Wait: TypeAlias = Callable[[Any], Awaitable[Any]]


class Exchange(Generic[T]):
    """One collective of a `Planned`: it begins when it is started, awaited, or asked for its result."""

    __slots__ = ("_begun", "_error", "_meeting", "_plan", "_steps", "_value", "title")

    def __init__(self, plan: Planned, title: str, steps: Steps[T]) -> None:
        self._plan = plan
        self.title = title
        self._steps: Steps[T] | None = steps
        self._begun = False
        # Of a keyed collective, its ref.
        self._meeting: Any = None
        self._value: T | None = None
        self._error: BaseException | None = None

    def start(self) -> Exchange[T]:
        """Begin it, and return before the others have come: the first MiB of each part is written for them.

        A plan has one exchange under way: the next one that begins completes this one first. It is for threads, as
        `result` is.
        """
        self._plan._in_thread(self, start=True)
        return self

    def result(self) -> T:
        """Block this thread until the result is there. The thread may be any one that runs no event loop."""
        if self._steps is not None:
            self._plan._in_thread(self)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        if self._steps is not None:
            yield from self._plan._on_loop(self).__await__()
        return self._outcome()

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


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

    Attributes:
        counts: The number of collectives that this member has begun, by name.
        nbytes: The bytes of the tensors that it has given to them, by name. A broadcast counts at its root.

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
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self._process = process
        self._rank = rank
        self._size = size
        self._line = line
        self._meet = meet
        self._allocate: Allocate = process.part(Store).empty
        self._on_line = None if line is None else LineSteps(line, self._allocate, self.counts, self.nbytes)
        # Held by the thread or the task that does an exchange.
        self._turn = threading.Lock() if line is None else line.turn
        self._tasks = asyncio.Lock()
        # It has begun, and is not over.
        self._started: Exchange[Any] | None = None

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, out: Tensor | None = None) -> Exchange[Tensor]:
        """Combine the tensors of all members in the order of ranks; each member gets the result."""
        title = _title("all_reduce", op)
        return Exchange(self, title, self._reduce("all_reduce", title, [tensor], (), 0, op, out))

    def reduce_scatter(
        self,
        tensor: Tensor | Sequence[Tensor],
        op: Op = "sum",
        *,
        lengths: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Exchange[Tensor]:
        """Combine tensors; member i gets part i of the result.

        Args:
            tensor: It is cut along its first dimension; or its parts, one for each member.
            op: As for `all_reduce`.
            lengths: The rows of each member. Default: those of `torch.tensor_split`.
            out: See the class.

        Raises:
            ValueError: There are no such parts.
        """
        title, (given, cuts) = _title("reduce_scatter", op), self._cut("reduce_scatter", tensor, lengths)
        return Exchange(self, title, self._reduce("reduce_scatter", title, given, cuts, self._rank, op, out))

    def all_gather(self, tensor: Tensor, *, out: Sequence[Tensor] | None = None) -> Exchange[list[Tensor]]:
        """Give each member the list of the tensors of all. They may differ in dtype and shape."""
        return Exchange(self, "all_gather", self._list("all_gather", [tensor], (), 0, 1, out))

    def broadcast(self, tensor: Tensor | None = None, root: int = 0, *, out: Tensor | None = None) -> Exchange[Tensor]:
        """Give each member the tensor of the one with rank `root`; the tensors of the others are ignored.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= root < self._size:
            raise ValueError(f"root is the rank of one of {self._size} members, from 0, not {root}")
        return Exchange(self, "broadcast", self._broadcast(tensor, root, out))

    def all_to_all(
        self,
        tensor: Tensor | Sequence[Tensor],
        *,
        lengths: Sequence[int] | None = None,
        out: Sequence[Tensor] | None = None,
    ) -> Exchange[list[Tensor]]:
        """Exchange parts: each member has one for each member, and gets the list of those for it, by rank.

        Args:
            tensor: As for `reduce_scatter`; parts may have any shapes.
            lengths: As for `reduce_scatter`, of this member's tensor.
            out: See the class.

        Raises:
            ValueError: There are no such parts.
        """
        given, cuts = self._cut("all_to_all", tensor, lengths)
        steps = self._list("all_to_all", given, cuts, self._rank, self._size, out)
        return Exchange(self, "all_to_all", steps)

    def barrier(self, name: str = "barrier") -> Exchange[None]:
        """Wait until all members have begun it, with the same name."""
        return Exchange(self, name, self._barrier(name))

    def close(self) -> None:
        """Free the shared memory. Exchanges that the others begin in this plan end with CallCancelled. Idempotent.

        It is also freed when nothing refers to the plan, at the next epoch of the group, and with the member.
        """
        if self._line is not None:
            line, planning = self._line, self._process.part(Planning)
            self._process.call_soon(lambda: planning.drop(line, CallCancelled("the plan was closed"), "it was closed"))

    __del__ = close

    def end(self, error: BaseException) -> None:
        if self._line is not None:
            self._line.fail(error)

    def _in_thread(self, exchange: Exchange[Any], *, start: bool = False) -> None:
        if self._process.is_here or asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{exchange.title} would block the event loop of this thread: use `await`")
        line = self._line
        self._turn.acquire()
        try:
            wait = _result if line is None else line.wait_here
            if self._started not in (None, exchange):
                _done(self._carry_out(self._started, wait))
            _done(self._carry_out(exchange, wait, start=start))
        finally:
            self._release()

    async def _on_loop(self, exchange: Exchange[Any]) -> None:
        title, line = exchange.title, self._line
        if asyncio.get_running_loop() is not self._process.loop:
            raise RuntimeError(f"{title} is awaited on another event loop than the one its runtime was opened on")
        async with self._tasks:
            if not self._turn.acquire(blocking=False):
                raise RuntimeError(f"{title}: another thread uses the plan: give each thread a plan of its own")
            try:
                wait = _awaited if line is None else line.wait_on_loop
                if self._started not in (None, exchange):
                    await self._carry_out(self._started, wait)
                await self._carry_out(exchange, wait)
            finally:
                self._release()

    async def _carry_out(self, exchange: Exchange[Any] | None, wait: Wait, *, start: bool = False) -> None:
        """It never suspends if `wait` blocks."""
        line = self._line
        if exchange is None or (steps := exchange._steps) is None:
            return
        try:
            if line is not None:
                _enter(line, exchange)
            if not exchange._begun:
                exchange._begun = True
                exchange._meeting = next(steps)
                if line is not None:
                    line.signal()
            if start:
                self._started = exchange if line is not None else None
                return
            while True:
                given = None if line is not None and line.come_soon() else await wait(exchange._meeting)
                exchange._meeting = steps.send(given)
                if line is not None:
                    line.signal()
        except StopIteration as stop:
            exchange._value = stop.value
        except BaseException as error:
            exchange._error = _failed(line, exchange.title, error)
            # It has views of the memory.
            steps.close()
            exchange._steps = self._started = None
            if line is not None and line.error is not None:
                self.close()
            if not isinstance(error, Exception):
                raise
        exchange._steps = self._started = None

    def _release(self) -> None:
        if self._line is None:
            self._turn.release()
        else:
            self._line.release()

    def _reduce(
        self,
        name: str,
        title: str,
        given: Sequence[Tensor],
        lengths: tuple[int, ...],
        lane: int,
        op: str,
        out: Tensor | None,
    ) -> Steps[Tensor]:
        if self._on_line is not None:
            return (yield from self._on_line.reduce(title, given, lengths, lane, op, out))
        self._count(name, _bytes_of(given))
        if name == "all_reduce":
            value: Tensor = yield self._meet("all_reduce", given[0], op, 0)
        else:
            mine: list[Tensor] = yield self._meet("all_to_all", parts_of(given, lengths), "sum", 0)
            value = reduced(mine, range(self._size), op, title, self._allocate)
        return self._placed(title, value, out)

    def _list(
        self,
        name: str,
        given: Sequence[Tensor],
        lengths: tuple[int, ...],
        lane: int,
        lanes: int,
        out: Sequence[Tensor] | None,
    ) -> Steps[list[Tensor]]:
        outs: Sequence[Tensor | None] = [None] * self._size if out is None else out
        if len(outs) != self._size:
            raise ValueError(f"{name}: `out` has {len(outs)} tensors, and there are {self._size} results")
        if self._on_line is not None:
            return (yield from self._on_line.move(name, given, lengths, range(self._size), lane, lanes, outs))
        self._count(name, _bytes_of(given))
        value = given[0] if lanes == 1 else parts_of(given, lengths)
        found: Sequence[Tensor] = yield self._meet(name, value, "sum", 0)
        return [self._placed(name, one, to) for one, to in zip(found, outs, strict=True)]

    def _broadcast(self, tensor: Tensor | None, root: int, out: Tensor | None) -> Steps[Tensor]:
        is_root = self._rank == root
        given: Sequence[Any] = [tensor] if is_root else []
        if self._on_line is None:
            self._count("broadcast", _bytes_of(given))
            value: Tensor = yield self._meet("broadcast", tensor, "sum", root)
            return self._placed("broadcast", value, out)
        sources = () if is_root else (root,)
        moved = yield from self._on_line.move(f"broadcast from {root}", given, (), sources, 0, 1, [out][: len(sources)])
        return moved[0] if moved else self._placed("broadcast", given[0], out)

    def _barrier(self, name: str) -> Steps[None]:
        if self._on_line is None:
            self._count("barrier", 0)
            yield self._meet("barrier", None, "sum", 0)
        else:
            yield from self._on_line.move(name, (), (), (), 0, 1, ())

    def _placed(self, title: str, value: Tensor, out: Tensor | None) -> Tensor:
        return Room(self._allocate, title, value.dtype, value.shape, value.device, out).filled(value)

    def _count(self, name: str, nbytes: int) -> None:
        self.counts[name] += 1
        self.nbytes[name] += nbytes

    def _cut(
        self, name: str, tensor: Tensor | Sequence[Tensor], lengths: Sequence[int] | None
    ) -> tuple[Sequence[Tensor], tuple[int, ...]]:
        if is_dense_tensor(tensor):
            whole = cast("Tensor", tensor)
            if not whole.shape:
                raise ValueError(f"{name}: a tensor without dimensions cannot be cut")
            return [whole], _rows(name, whole.shape[0], self._size, None if lengths is None else tuple(lengths))
        parts = list(tensor)
        if len(parts) != self._size or not all(map(is_dense_tensor, parts)) or len({one.dtype for one in parts}) > 1:
            raise TypeError(f"{name}: expected a tensor, or {self._size} of one dtype, one for each member")
        if lengths is not None:
            raise TypeError(f"{name}: lengths are those of the parts of one tensor; it has parts already")
        return parts, ()


def _bytes_of(given: Sequence[Any]) -> int:
    return sum(one.nbytes for one in given if is_dense_tensor(one))


def _enter(line: Line, exchange: Exchange[Any]) -> None:
    call = line.call = current_call.get()
    if line.error is not None:
        raise copy_error(line.error)
    # One that was started goes on if all others are there, as in `Planning._withdraw`.
    if call is not None and call.apart is not None and not (exchange._begun and line.all_came()):
        raise apart(exchange.title, call.apart)


def _failed(line: Line | None, title: str, error: BaseException) -> BaseException:
    if isinstance(error, Disagreement):
        return ValueError(f"{title} of {error}")
    if line is not None:
        failed = isinstance(error, Exception)
        reason = f"{title}: {f'{type(error).__name__}: {error}' if failed else 'its wait was cancelled'}"
        line.leave(CallCancelled(f"the plan of {line.group} has ended: this member has left it: {reason}"), reason)
        add_note(error, f"raised for {title} of a plan of {line.group}")
    return error


def _done(work: Coroutine[Any, Any, None]) -> None:
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("a wait of a thread has suspended")


async def _result(ref: Ref[Any]) -> Any:  # noqa: RUF029 - it blocks
    return ref.result()


async def _awaited(ref: Ref[Any]) -> Any:
    return await ref


@lru_cache
def _title(name: str, op: str) -> str:
    if callable(check_reducer(op)):
        raise ValueError(f"{name}: a plan combines tensors by the name of an op; use the collectives of the group")
    return f"{name} {op}"


@lru_cache
def _rows(name: str, rows: int, size: int, lengths: tuple[int, ...] | None) -> tuple[int, ...]:
    if lengths is None:
        return tuple(part.stop - part.start for part in even_shares(rows, size))
    if len(lengths) != size or sum(lengths) != rows or min(lengths) < 0:
        raise ValueError(f"{name}: expected lengths of {size} parts of {rows} rows, not {list(lengths)}")
    return lengths
