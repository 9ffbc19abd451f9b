"""Refs: awaitable distributed futures. A ref names a value that an actor makes, or made, somewhere.

Passing a ref to another actor moves the value from actor to actor; awaiting it brings the value here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, TypeVar, cast

from aiodaft.exceptions import CallCancelled

__all__ = ["Borrowed", "Ref", "Refs", "Stream", "borrow", "lazy"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# No ref is equal to one of these; nor to a tensor or an array.
_VALUES: Final = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class RefBackend(Protocol):
    """What a `Ref` needs of the process it lives in."""

    error: BaseException | None
    seen: bool
    stored_bytes: int

    @property
    def label(self) -> str: ...
    @property
    def settled(self) -> bool: ...
    def wait(self, ref: Ref[Any]) -> Generator[Any, None, Any]: ...
    def result(self, ref: Ref[Any]) -> Any: ...
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


class _Wait:
    """Makes a generator function awaitable."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], Generator[Any, None, None]]) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait()


if TYPE_CHECKING:
    # To checkers a ref is a Future, because `asyncio.wait` takes nothing else. At run time it only behaves like one.
    _Future = asyncio.Future
else:
    _Future = Generic


class Ref(_Future[T_co]):  # type: ignore[type-var]  # a Future is invariant because it can be set, a ref cannot
    """A value that an actor makes, or made, somewhere: awaitable, and passable without awaiting.

    Await it as often as you like; the value comes once. Pass it to any actor's method, also inside lists, tuples,
    dicts and dataclasses, and that actor gets the value straight from its producer. asyncio's own tools
    (`gather`, `wait`, `wait_for`, `shield`, `as_completed`, `timeout`) take refs as they are. It is awaited on the loop
    that its runtime was opened on; `def` methods and other threads wait with `result()`, and may make calls, cancel and
    free. Two refs are equal if they are the same object; a comparison with a number, a text or a container is an error.

    Cancellation: cancelling the only awaiter of a ref that nothing else uses cancels the remote call.
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
        if not self.done():
            how = "pending"
        else:
            how = "done" if self._state.error is None else f"failed: {type(self._state.error).__name__}"
        return f"<Ref of {self._state.label}, {how}>"

    async def value(self) -> T_co:
        """The same as awaiting the ref, as a coroutine: for `TaskGroup.create_task(ref.value())`."""
        return await self

    async def ready(self) -> None:
        """Wait until the value exists somewhere, or the call has failed, without bringing the value here.

        Cancellation: only this wait ends; the call goes on.
        """
        await _Wait(self._state.wait_settled)

    async def into(self, target: T) -> T:
        """Write the value, a tensor, into a tensor of the same shape and dtype, and return that.

        Into a CPU tensor that has its elements in the same order in memory as the value, and no gaps, the bytes go
        straight from where they come from; `register(target)` prepares its memory for that once. Anything else is
        brought here first, and copied. `into` counts as one write in place, as `target.copy_()` does.

        Raises:
            TypeError: The value or the target is no tensor; nothing was written.
            ValueError: Shape or dtype differ, or the target is expanded; nothing was written.
            DaftError: As for awaiting the ref. The target may hold any mixture of old and new.

        Cancellation: the same mixture. Nothing writes to the target any more once this returns or raises, so that a
        cancellation waits for what cannot be stopped: a copy, or, over `ucx`, two pieces of 8 MiB.
        """
        await self._state.copy_into(target)
        return target

    async def released(self) -> None:
        """Wait until nobody reads the value: no call under way has it as an argument, no process has it mapped.

        What the producer lent with `borrow()` or `empty()` may then be written to again.

        Cancellation: only this wait ends.
        """
        await _Wait(self._state.wait_released)

    def result(self) -> T_co:
        """Wait for the value in a thread that runs no event loop: in a `def` method, instead of `await`.

        The actor's loop goes on meanwhile; its other `def` methods wait for this one. If the call behind the ref waits
        for this one, so that neither can end, DeadlockDetected is raised, as in an await.

        Raises:
            RuntimeError: This thread runs an event loop, which would stand still: use `await`.
            Exception: As for awaiting the ref.

        Cancellation: when the call of the method is cancelled, its deadline passes or its actor is stopped, the wait
        raises asyncio.CancelledError, and counts as an await that was cancelled.
        """
        value: T_co = self._state.result(self)
        return value

    def done(self) -> bool:
        """Whether the value exists somewhere, or the call has failed or was cancelled."""
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
        """Cancel the remote call, whoever else waits for it; False if it is over.

        Whoever awaits the ref gets CallCancelled once the call's own cleanup has run, at most after the grace time. If
        it cannot be interrupted, or refuses, the same: its result is dropped. What it raises instead is raised.

        Args:
            msg: Taken, as by a Future, and not used.
        """
        return self._state.cancel("Ref.cancel() was called")

    def free(self) -> None:
        """Free the value now, wherever it is, instead of when the last `Ref` object is dropped.

        Awaiting the ref afterwards, or passing it on, is an error.
        """
        self._state.free_now()

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        """Call `callback(ref)` on the loop once the call is over, in this context or a copy of the current one."""
        # Not `or`: an empty context counts as false.
        context = copy_context() if context is None else context
        self._state.watch(_DoneCallback(self, callback, context), interested=True)

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`, in the loop's thread; returns how many callbacks were removed."""
        return self._state.unwatch(_DoneCallback(self, callback))

    if TYPE_CHECKING:
        # A Future has it, for generators that wait.
        __iter__: None  # type: ignore[assignment]  # a ref has not

    else:
        # A ref in the place of a value is always the same mistake: say so instead of going on with nonsense. Type
        # checkers do not see these, so that they report the mistake too.

        def _forgot_await(self, *_: object) -> NoReturn:
            raise TypeError(f"{self!r} is not a value yet: did you forget `await`?")

        def __getattr__(self, name: str) -> NoReturn:
            if name == "_state":
                # Its own text could not be had without it.
                raise AttributeError("a Ref that was never initialised")
            raise AttributeError(f"{self!r} has no attribute {name!r}: did you forget `await`?")

        def __eq__(self, other: object) -> bool:
            # Anything else may be compared with anything, as containers do.
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


@dataclass(frozen=True, slots=True)
class _DoneCallback:
    """Calls back with a ref; equal to another one that would do the same."""

    ref: Ref[Any]
    callback: Callable[[Any], object]
    context: Context = field(default_factory=Context, compare=False)

    def __call__(self, _: object) -> None:
        self.context.run(self.callback, self.ref)


class Refs(Generic[T_co]):
    """The results of one call to every member of a group, in the group's order.

    Awaiting gives the list of values; `async for` gives the refs in the order in which they complete; an index gives
    one ref; `gather()` one ref of the whole list, to pass to an actor.

    Cancellation: as for each ref by itself.
    """

    __slots__ = ("_refs",)

    def __init__(self, refs: Sequence[Ref[T_co]]) -> None:
        self._refs = tuple(refs)

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        return self._values().__await__()

    async def _values(self) -> list[T_co]:
        # All are awaited at once, so that cancelling cancels all; the first error is raised when all are over.
        results = await asyncio.gather(*self._refs, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) > 1:
            raise _group_of(errors)
        if errors:
            raise errors[0]
        return cast("list[T_co]", results)

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

    def gather(self) -> Ref[list[T_co]]:
        """One ref that stands for the list of all values.

        Raises:
            ValueError: There are none.
        """
        if not self._refs:
            raise ValueError("there are no refs to gather")
        return Ref(self._refs[0]._state.gathered(self._refs))

    def cancel(self) -> None:
        """Cancel every call that is not over."""
        for ref in self._refs:
            ref.cancel()


def _group_of(errors: list[BaseException]) -> BaseExceptionGroup[BaseException]:
    return BaseExceptionGroup(f"{len(errors)} members failed", errors)


class LoopBackend(Protocol):
    """What one `async for` over a stream needs of its process."""

    def next_item(self) -> Coroutine[Any, Any, Any]: ...
    def leave(self) -> None: ...


class StreamBackend(Protocol):
    """What a `Stream` needs of the process it lives in."""

    label: str

    def watch(self, callback: Callable[[Any], object]) -> None: ...
    async def next_item(self) -> Any: ...
    def loop(self) -> LoopBackend: ...
    async def aclose(self) -> None: ...
    def handle_dropped(self) -> None: ...


class Stream(Generic[T_co]):
    """Values that an actor's async generator yields, as they come: `async for`.

    The producer runs ahead of the consumer by a bounded number of items. It ends, and its `finally` blocks run, when

    - the last `async for` over the stream is left: by `break`, `return`, an exception or a cancellation;
    - the task of that loop is cancelled, fails or returns None while the loop is suspended in an async generator. A
      task that returns something else is taken for one step of that generator, which another task may continue;
    - the stream is dropped, or `aclose()` is called.

    A stream that ended because its loop was left raises RuntimeError where it is used again. `await anext(stream)`
    takes one item, and leaves the stream open.

    Cancellation: a cancelled `anext(stream)` loses no item. If several tasks take from the stream, the others get
    every item, in order.
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
        """End the producer, and wait until its cleanup has run (at most for the grace time). Idempotent."""
        await self._backend.aclose()

    async def __aenter__(self) -> Stream[T_co]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._backend.handle_dropped()

    def __repr__(self) -> str:
        return f"<Stream of {self._backend.label}>"

    def when_over(self, callback: Callable[[Any], object]) -> None:
        """Call back once the producer has ended."""
        self._backend.watch(callback)

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self!r} is many values: use `async for`, not `await`")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} is asynchronous: use `async for`")

        def __reduce__(self) -> NoReturn:
            raise TypeError(f"{self!r} cannot be passed on: let the actors share a Channel")


class _Loop(Generic[T_co]):
    """One `async for` over a stream.

    Only the interpreter holds it, on the stack of the loop's frame. So it is deleted as soon as the loop is left, also
    where names and tracebacks keep the frame and the stream.
    """

    __slots__ = ("_backend", "_stream")

    def __init__(self, stream: Stream[T_co]) -> None:
        # The loop may have the only reference to the stream.
        self._stream = stream
        self._backend = stream._backend.loop()

    def __aiter__(self) -> _Loop[T_co]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, T_co]:
        # No coroutine function: its frame, in the traceback of a cancellation, would keep the loop alive.
        return self._backend.next_item()

    def __del__(self) -> None:
        self._backend.leave()


class Borrowed(Generic[T]):
    """A result that is lent, not copied; see `borrow`."""

    __slots__ = ("_released", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self._released: asyncio.Event | None = None

    async def released(self) -> None:
        """Wait until the caller has dropped its ref and nobody reads the value any more.

        Cancellation: only this wait ends.
        """
        if self._released is None:
            self._released = asyncio.Event()
        await self._released.wait()

    def mark_released(self) -> None:
        """Nobody reads it any more (called by the runtime)."""
        if self._released is None:
            self._released = asyncio.Event()
        self._released.set()


def borrow(value: T, /) -> T:
    """Return a result from a method without a copy being made of it: `return aiodaft.borrow(self.weights)`.

    The value must not be written to until `await ref.released()` (at the caller) or, where the lender keeps the
    object that this returns, `await lent.released()`. Writing to a lent tensor before is found out: the reader gets
    BorrowError, never a mixture. Statically the type of the value itself.
    """
    return cast(T, Borrowed(value))


def parts_of(ref: Ref[Any]) -> tuple[Ref[Any], ...] | None:
    """The refs that a gathered ref stands for; None for any other."""
    return ref._state.parts()


def lazy(ref: Ref[T], /) -> T:
    """Tell a type checker that a ref stands for its value: by keyword, or inside a container.

    Does nothing at run time.
    """
    return cast(T, ref)
