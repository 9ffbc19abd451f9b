"""Refs: awaitable distributed futures. A ref names a value that an actor makes or has made.

Passing a ref to another actor moves the value from actor to actor; awaiting it brings the value here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypeVar, cast

from aiodaft._protocol.numbers import amount, is_count, is_number
from aiodaft.causes import message_of
from aiodaft.exceptions import CallCancelled
from aiodaft.html import facts, page, table

__all__ = ["Ref", "Refs", "Stream", "lazy"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# Comparing a ref with one of these, a tensor or an array is an error.
_VALUES: Final = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class RefFacts(NamedTuple):
    """The facts about a ref that this process knows, without asking another one.

    Attributes:
        call: The call that makes the value, such as "Model.execute of Model-1".
        kind: Its type, of a tensor the dtype and the shape; "" if that is not known.
        nbytes: Its size; None if that is not known.
        where: The places that have it; "" if there is none.
    """

    call: str
    kind: str
    nbytes: int | None
    where: str


class RefBackend(Protocol):
    """The part of the runtime that a `Ref` uses."""

    error: BaseException | None
    seen: bool
    stored_bytes: int

    @property
    def label(self) -> str: ...
    @property
    def settled(self) -> bool: ...
    def wait(self, ref: Ref[Any]) -> Generator[Any, None, Any]: ...
    def result(self, ref: Ref[Any], timeout: float | None) -> Any: ...
    def wait_settled(self) -> Generator[Any, None, None]: ...
    def wait_released(self) -> Generator[Any, None, None]: ...
    async def copy_into(self, target: Any) -> None: ...
    def watch(self, callback: Callable[[Any], object], *, interested: bool = False) -> None: ...
    def unwatch(self, callback: Callable[[Any], object]) -> int: ...
    def cancel(self, why: str) -> bool: ...
    def check_loop(self) -> None: ...
    def mark_seen(self) -> None: ...
    def handle_dropped(self) -> None: ...
    def free_now(self) -> None: ...
    def gathered(self, parts: tuple[Ref[Any], ...]) -> RefBackend: ...
    def parts(self) -> tuple[Ref[Any], ...] | None: ...
    def cut(self, ref: Ref[Any], count: int) -> list[Ref[Any]]: ...
    def facts(self) -> RefFacts: ...


_FACTS: Final = ("call", "state", "value", "size", "where")


class _Wait:
    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], Generator[Any, None, None]]) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait()


if TYPE_CHECKING:
    # To type checkers a ref is a Future, because `asyncio.wait` accepts only futures. At run time it behaves like one.
    _Future = asyncio.Future
else:
    _Future = Generic


class Ref(_Future[T_co]):  # type: ignore[type-var]  # a Future is invariant because it can be set, a ref cannot
    """A value that an actor makes or has made; await it, or pass it to another actor without awaiting it.

    It can be awaited any number of times; the value is fetched once. Pass it to any actor's method, also inside
    containers and records (see `lazy`): that actor gets the value straight from its producer. asyncio's own tools
    (`gather`, `wait`, `wait_for`, `shield`, `as_completed`, `timeout`) accept refs. Await it on the loop of its
    runtime; `def` methods and other threads wait with `result()`, and may also make calls, cancel and free. Two refs
    are equal if they are the same object; comparing a ref with a number, a text or a container is an error.

    Cancellation: cancelling the only awaiter cancels the remote call, unless another actor was given the ref.
    """

    __slots__ = ("__weakref__", "_state")

    def __init__(self, state: RefBackend) -> None:
        self._state: RefBackend = state  # type: ignore[assignment]  # to checkers, Future has an attribute of this name

    def __await__(self) -> Generator[Any, None, T_co]:
        return self._state.wait(self)

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:
            # Never initialised.
            return
        state.handle_dropped()

    def __copy__(self) -> Ref[T_co]:
        return self

    def __deepcopy__(self, memo: object) -> Ref[T_co]:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} travels only as, or inside, an argument or result of an actor's method")

    def __repr__(self) -> str:
        return f"<Ref of {self._state.label}, {_standing(self)}>"

    def _repr_html_(self) -> str:
        return page("Ref", facts(_facts_of(self)))

    def value(self) -> Coroutine[Any, Any, T_co]:
        """Await the ref, as a coroutine for `TaskGroup.create_task(ref.value())`."""
        return Awaiting(self)

    async def ready(self) -> None:
        """Wait until the call has ended; does not fetch the value.

        Cancellation: only this wait ends; the call goes on.
        """
        await _Wait(self._state.wait_settled)

    async def into(self, target: T) -> T:
        """Write the value, a tensor, into a tensor of the same shape and dtype, and return that tensor.

        The bytes go straight into a CPU tensor if it has no gaps and the same order of elements in memory as the value;
        `register(target)` prepares its memory once for many writes. For other targets the value is fetched first, then
        copied. Counts as one write in place, as `target.copy_()` does.

        Raises:
            TypeError: The value or the target is not a tensor; nothing was written.
            ValueError: Shape or dtype differ, or the target is expanded; nothing was written.
            DaftError: As for awaiting the ref. The target may hold a mixture of old and new elements.

        Cancellation: the target may hold the same mixture. Nothing is written after this returns or raises, so a
        cancellation waits for a copy under way or, over `ucx`, two pieces of 8 MiB.
        """
        await self._state.copy_into(target)
        return target

    def parts(self: Ref[Sequence[T]], n: int) -> list[Ref[T]]:
        """The `n` items of the value, a list or tuple, as refs of their own, in the process that makes it.

        Raises:
            ValueError: `n` is no positive whole number; from an await: the value has another number of items.
            TypeError: From an await: the value is neither a list nor a tuple.
            Exception: From an await: the error of the call. Cancellation: as for any ref; only that item is concerned.
        """
        if not is_count(n):
            raise ValueError(f"a value is cut into a positive number of parts, not {n!r:.80}")
        return self._state.cut(self, n)

    async def released(self) -> None:
        """Wait until no call under way has the value as an argument, and no process has it mapped.

        Then the producer may write again to memory that it lent with `borrow()` or `empty()`. The ref does not keep the
        value here, if it was awaited; another await brings it again.

        Cancellation: only this wait ends.
        """
        await _Wait(self._state.wait_released)

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the value in a thread that runs no event loop: in a `def` method, instead of `await`.

        The actor's loop goes on meanwhile; its other `def` methods wait. If the call of the ref waits for this one, it
        raises DeadlockDetected, as an await does, unless there is a timeout.

        On the loop, it gives results that need no waiting: the value of a ref that was awaited, or of a done ref whose
        value came with the answer (about 64 KiB); and the error of a call that has failed.

        Args:
            timeout: Seconds to wait. The call goes on after it; `cancel()` ends it, and a deadline that the actors
                know is `with aiodaft.deadline(seconds):`.

        Raises:
            RuntimeError: This thread runs an event loop, and would block it: use `await`.
            TimeoutError: The time is over.
            ValueError: The timeout is negative, or no number.
            Exception: As for awaiting the ref.

        Cancellation: if the method's call is cancelled, its deadline passes or its actor is stopped, `result` raises
        asyncio.CancelledError, and counts as a cancelled await.
        """
        if timeout is not None and not is_number(timeout, most=float("inf")):
            raise ValueError(f"a timeout is None or a number of seconds that is not negative, not {timeout!r}")
        value: T_co = self._state.result(self, None if timeout == float("inf") else timeout)
        return value

    def done(self) -> bool:
        """Whether the call has ended: the value exists, or the call failed or was cancelled."""
        return self._state.settled

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return isinstance(self._state.error, CallCancelled)

    def exception(self) -> BaseException | None:
        """The exception that the call raised, or None.

        Raises:
            asyncio.InvalidStateError: The call is not over.
        """
        if not self.done():
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        if self._state.error is not None:
            self._state.mark_seen()
        return self._state.error

    def cancel(self, msg: object = None) -> bool:
        """Cancel the remote call, even if other tasks or actors wait for it; False if it is over.

        Awaiting the ref raises CallCancelled when the call's cleanup has run, at the latest after the grace time, or
        the error that the call raises instead. If the call cannot be interrupted or ignores the cancellation, its
        result is dropped.

        Args:
            msg: Ignored; as in Future.cancel.
        """
        return self._state.cancel("Ref.cancel() was called")

    def free(self) -> None:
        """Free the value in every process now, before the last `Ref` object is dropped.

        Awaiting the ref or passing it on afterwards is an error.
        """
        self._state.free_now()

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        """Call `callback(ref)` on the loop when the call is over, in `context` or a copy of the current context."""
        # Not `or`: an empty context counts as false.
        context = copy_context() if context is None else context
        self._state.watch(_DoneCallback(self, callback, context), interested=True)

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`, in the loop's thread; returns the number of removed callbacks."""
        return self._state.unwatch(_DoneCallback(self, callback))

    if TYPE_CHECKING:
        # A Future is iterable, for generators that wait; a ref is not.
        __iter__: None  # type: ignore[assignment]  # see above

    else:
        # A ref used as a value is always a missing `await`: the error says so. Type checkers report it themselves.

        def _forgot_await(self, *_: object) -> NoReturn:
            raise TypeError(f"{self!r} is not a value yet: did you forget `await`?")

        def __getattr__(self, name: str) -> NoReturn:
            if name == "_state":
                # __repr__ needs it.
                raise AttributeError("a Ref that was never initialised")
            raise AttributeError(f"{self!r} has no attribute {name!r}: did you forget `await`?")

        def __eq__(self, other: object) -> bool:
            # Containers compare refs with other objects, so other comparisons are no errors.
            if isinstance(other, _VALUES) or hasattr(type(other), "__array__"):
                self._forgot_await()
            return NotImplemented

        __hash__ = object.__hash__

        def __format__(self, format_spec: str, /) -> NoReturn:
            raise TypeError(f"{self!r} is not a value yet: did you forget `await`? (`!r` formats the ref itself)")

        __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = __call__ = _forgot_await
        __int__ = __float__ = __index__ = __neg__ = __pos__ = __abs__ = __invert__ = _forgot_await
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _forgot_await
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _forgot_await
        __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _forgot_await
        __lt__ = __le__ = __gt__ = __ge__ = _forgot_await


class Awaiting(Coroutine[Any, Any, T]):
    """Awaits a ref. A task that is cancelled before its first step stops to wait for it, too."""

    __slots__ = ("__weakref__", "coro", "ref")

    def __init__(self, ref: Ref[T]) -> None:
        self.ref: Ref[T] | None = ref
        self.coro = _await(ref)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coro, name)  # for `Task.get_stack`, `repr` and debuggers

    def __await__(self) -> Generator[Any, None, T]:
        self.ref = None
        return self.coro.__await__()

    def send(self, value: Any, /) -> Any:
        """Take a step."""
        self.ref = None
        return self.coro.send(value)

    def throw(self, kind: Any, error: Any = None, traceback: Any = None, /) -> Any:
        """Raise an error where it waits, also before its first step."""
        ref, self.ref = self.ref, None
        if ref is not None and not ref.done():
            self.coro.send(None)
        try:
            return self.coro.throw(kind if error is None else error)
        finally:
            # The error's frames lead here: they must not lead back to the error.
            del kind, error, traceback

    def close(self) -> None:
        """End it."""
        self.coro.close()


async def _await(ref: Ref[T]) -> T:
    return await ref


@dataclass(frozen=True, slots=True)
class _DoneCallback:
    ref: Ref[Any]
    callback: Callable[[Any], object]
    context: Context = field(default_factory=Context, compare=False)

    def __call__(self, _: object) -> None:
        self.context.run(self.callback, self.ref)


class Refs(Generic[T_co]):
    """The results of one call to every member of a group, in the group's order.

    Awaiting gives the list of values; `async for` gives the refs in the order of completion; an index gives one ref;
    `gather()` gives one ref of the whole list, to pass to an actor.

    Cancellation: as for each ref.
    """

    __slots__ = ("_besides", "_refs")

    def __init__(self, refs: Sequence[Ref[T_co]], besides: Sequence[Ref[Any]] = ()) -> None:
        self._refs = tuple(refs)
        self._besides = tuple(besides)

    def __reduce__(self) -> tuple[Any, ...]:
        return Refs, (self._refs,)

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        return self._values().__await__()

    async def _values(self) -> list[T_co]:
        # Awaits all at the same time, so that a cancellation cancels all.
        waits = asyncio.gather(*self._refs, *map(_ended, self._besides), return_exceptions=True)
        try:
            results = await asyncio.shield(waits)
        except asyncio.CancelledError:
            # Only now: tasks that are cancelled before they have begun to wait would leave the calls as they are.
            waits.cancel()
            await waits
            raise
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) > 1:
            raise BaseExceptionGroup(f"{len(errors)} members failed", errors)
        if errors:
            raise errors[0]
        return cast("list[T_co]", results[: len(self._refs)])

    def __aiter__(self) -> AsyncIterator[Ref[T_co]]:
        return self._as_completed()

    async def _as_completed(self) -> AsyncGenerator[Ref[T_co], None]:
        completed: asyncio.Queue[Ref[T_co]] = asyncio.Queue()
        for ref in self._refs:
            ref._state.check_loop()
            ref.add_done_callback(completed.put_nowait)
        try:
            for _ in self._refs:
                yield await completed.get()
        finally:
            for ref in self._refs:
                ref.remove_done_callback(completed.put_nowait)

    def __getitem__(self, index: int) -> Ref[T_co]:
        return self._refs[index]

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[Ref[T_co]]:
        return iter(self._refs)

    def __repr__(self) -> str:
        return f"<Refs: {sum(ref.done() for ref in self._refs)} of {len(self._refs)} done>"

    def _repr_html_(self) -> str:
        rows = [(index, *_facts_of(ref).values()) for index, ref in enumerate(self._refs)]
        return page(repr(self).strip("<>"), table(["", *_FACTS], rows))

    def gather(self) -> Ref[list[T_co]]:
        """One ref of the list of all values.

        Raises:
            ValueError: There are no refs.
        """
        if not self._refs:
            raise ValueError("there are no refs to gather")
        return Ref(self._refs[0]._state.gathered(self._refs))

    def cancel(self) -> None:
        """Cancel every call that is not over."""
        for ref in (*self._refs, *self._besides):
            ref.cancel()


def _standing(ref: Ref[Any]) -> str:
    if not ref.done():
        return "pending"
    error = ref._state.error
    return "done" if error is None else f"failed: {type(error).__name__}"


def _facts_of(ref: Ref[Any]) -> dict[str, str]:
    # Code that shows the error has seen it.
    found, error = ref._state.facts(), ref.exception() if ref.done() else None
    state = _standing(ref) if error is None else f"{_standing(ref)}: {message_of(error)}"
    nbytes = "" if found.nbytes is None else amount(found.nbytes)
    return dict(zip(_FACTS, (found.call, state, found.kind, nbytes, found.where), strict=True))


async def _ended(ref: Ref[Any]) -> None:
    """Wait for a call, and raise its error; its value is not fetched."""
    try:
        await ref.ready()
    except asyncio.CancelledError:
        ref.cancel()
        raise
    if (error := ref.exception()) is not None:
        raise error


class LoopBackend(Protocol):
    """The part of the runtime that one `async for` over a `Stream` uses."""

    def next_item(self) -> Coroutine[Any, Any, Any]: ...
    def leave(self) -> None: ...


class StreamBackend(Protocol):
    """The part of the runtime that a `Stream` uses."""

    label: str

    def watch(self, callback: Callable[[Any], object]) -> None: ...
    async def next_item(self) -> Any: ...
    def loop(self) -> LoopBackend: ...
    async def aclose(self) -> None: ...
    def handle_dropped(self) -> None: ...


class Stream(Generic[T_co]):
    """The values that a generator of an actor yields, for `async for`.

    The producer runs ahead of the consumer by a bounded number of items. It ends, and its `finally` blocks run, when
    the last `async for` over the stream ends (by `break`, `return`, an exception or a cancellation), the stream is
    dropped, or `aclose()` is called; for a loop in an async generator see docs/promises.md. After its loop was left, a
    stream raises RuntimeError. `await anext(stream)` takes one item, and leaves the stream open.

    Cancellation: a cancelled `anext(stream)` loses no item; other tasks that take from the stream get every item, in
    order.
    """

    __slots__ = ("__weakref__", "_backend")

    def __init__(self, backend: StreamBackend) -> None:
        self._backend = backend

    def __aiter__(self) -> AsyncIterator[T_co]:
        return _Loop(self)

    async def __anext__(self) -> T_co:
        item: T_co = await self._backend.next_item()
        return item

    async def aclose(self) -> None:
        """End the producer, and wait for its cleanup, at most for the grace time. Idempotent."""
        await self._backend.aclose()

    async def __aenter__(self) -> Stream[T_co]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._backend.handle_dropped()

    def __repr__(self) -> str:
        return f"<Stream of {self._backend.label}>"

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self!r} is many values: use `async for`, not `await`")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} is asynchronous: use `async for`")

        def __reduce__(self) -> NoReturn:
            raise TypeError(f"{self!r} cannot be passed on: let the actors share a Channel")


class _Loop(Generic[T_co]):
    """One `async for` over a stream.

    Only the interpreter refers to it, on the stack of the loop's frame. So it is deleted as soon as the loop ends, even
    if names and tracebacks keep the frame and the stream.
    """

    __slots__ = ("_backend", "_stream")

    def __init__(self, stream: Stream[T_co]) -> None:
        # This may be the only reference to the stream.
        self._stream = stream
        self._backend = stream._backend.loop()

    def __aiter__(self) -> _Loop[T_co]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, T_co]:
        # Not a coroutine function: its frame, in the traceback of a cancellation, would keep this object alive.
        return self._backend.next_item()

    def __del__(self) -> None:
        self._backend.leave()


def parts_of(ref: Ref[Any]) -> tuple[Ref[Any], ...] | None:
    """The refs of a gathered ref; None for another ref."""
    return ref._state.parts()


def lazy(ref: Ref[T], /) -> T:
    """Tell type checkers that a ref is its value: for keyword arguments, and inside containers and records.

    Does nothing: an actor gets the values of refs in containers, dataclasses, and records of attrs, pydantic, msgspec.
    """
    return cast(T, ref)
