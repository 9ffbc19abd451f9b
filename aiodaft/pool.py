"""Pools: actors that run plain functions, the tasks of distributed actors, futures and tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast, overload

from aiodaft._protocol.numbers import is_count
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.groups.member_calls import GroupMap, TaskQueue, Unit
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor, target_of
from aiodaft.group import Group
from aiodaft.methods import MethodSpec, method, specs_of
from aiodaft.ref import Ref

__all__ = ["Pool", "PoolExecutor"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")


class PoolWorker(Actor):
    """A member of a pool."""

    @method(ordered=False)
    def run(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Call a function on the actor's thread."""
        result = fn(*args, **kwargs)
        if inspect.iscoroutine(result):
            result.close()
            name = getattr(fn, "__qualname__", type(fn).__qualname__)
            raise TypeError(
                f"{name} is no `async def` function and returned the coroutine {result.__qualname__}: give the pool "
                "that function and its arguments, or an `async def` function that awaits it"
            )
        return result

    @method(ordered=False)
    async def run_async(self, fn: Callable[..., Awaitable[R]], /, *args: Any, **kwargs: Any) -> R:
        """Call an `async def` function."""
        return await fn(*args, **kwargs)


class Pool:
    """Actors that run functions; `rt.pool(n)` makes it.

    A function that the script defines travels with each call, as arguments do; one of an installed module by its name.
    A task waits in the process that submits it until a worker is free. A worker that dies is started again, and fails
    the tasks that it ran; those that wait go to the others.

    Attributes:
        group: The workers.
    """

    def __init__(self, group: Group[PoolWorker], concurrency: int, retries: int) -> None:
        self.group = group
        self._concurrency = concurrency
        self._retries = retries
        self._size = len(group)
        first = cast("Target", target_of(group[0]))
        self._queue = TaskQueue(f"pool {group.id}", first, self._workers, group._calls, concurrency)
        self._specs: dict[tuple[str, str], MethodSpec] = {}

    @overload
    def submit(self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def submit(
        self, fn: Callable[Concatenate[A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Ref[R]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Ref[Any]:
        """Run a function with arguments in a worker that is free, or the next one that is; returns at once.

        Args:
            fn: A function; `def` on a thread of the worker, `async def` on its loop.
            args: Its arguments, as those of a method: refs among them are given as their values.
            kwargs: The same, by keyword.

        Raises:
            TypeError: It is no function, or a generator.
            SerializationError: The function or an argument cannot travel.
            RuntimeClosed: The runtime is closed.

        Cancellation of the ref: a task that waits is not begun.
        """
        return self._queue.call(self._spec_of(fn), (fn, *args), kwargs)

    def map(
        self,
        fn: Callable[[A0], R],
        items: Iterable[A0] | AsyncIterable[A0],
        /,
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> AsyncGenerator[R, None]:
        """Run a function with each item; `async for` gives the results. See `Group.map` for its bounds.

        Args:
            fn: The function, of one argument.
            items: The arguments, also asynchronous; taken as workers become free.
            ordered: Whether results come in the order of the items; False gives each as soon as it exists.
            return_exceptions: Whether the error of a task is given in the place of its result, and the others go on.

        Raises:
            Exception: The error of a task (unless it is given) or of `items`, in the place of the result.
            TypeError: As `submit`.

        Cancellation: the tasks under way are cancelled, as they are when the loop is left.
        """
        spec = self._spec_of(fn)
        unit = Unit(0, self._queue, ())

        def call(_: Unit, item: Any) -> Ref[Any]:
            return self._queue.call(spec, (fn, item), {})

        # One more waits for each place, so that no worker is idle between two tasks.
        window = 2 * self._concurrency * self._size
        made = GroupMap(items, lambda _: unit, call, self.__len__, window, keeps_on=return_exceptions)
        return made.results(spec.label, ordered=ordered)

    def executor(self) -> PoolExecutor:
        """The pool as a `concurrent.futures.Executor`, for code that takes one, such as `loop.run_in_executor`."""
        return PoolExecutor(self)

    async def resize(self, n: int) -> None:
        """Change the number of workers. Those that leave end their tasks first; tasks that wait go to the others.

        Raises:
            ValueError: It is no positive whole number.
            Exception: As `Group.resize`.

        Cancellation: while tasks of workers that leave end, all stay; else as for `Group.resize`.
        """
        _check_size(n)
        self._size = min(n, len(self.group))
        try:
            leaving = [unit.target for unit in self.group._seats()[n:]]
            while busy := [call for target in leaving for call in self.group._calls.of(target)]:
                await asyncio.gather(*(Ref(call.hold()).ready() for call in busy))
            await self.group.resize(n)
        finally:
            self._size = len(self.group)
            self._queue.hand_out()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<Pool of {self._size} workers>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays in its process: pass its workers, `pool.group`")

    def _workers(self) -> list[Unit]:
        return self.group._seats()[: self._size]

    def _spec_of(self, fn: Callable[..., Any]) -> MethodSpec:
        bare = fn
        while isinstance(bare, partial):
            bare = bare.func
        if not callable(fn):
            raise TypeError(f"a pool runs functions, not {fn!r:.80}")
        if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
            raise TypeError(f"{bare.__qualname__} is a generator: a task has one result, return a list")
        kind = "run_async" if inspect.iscoroutinefunction(bare) else "run"
        key = kind, getattr(bare, "__qualname__", type(bare).__qualname__)
        if key not in self._specs:
            spec = self._specs[key] = specs_of(PoolWorker)[kind].named(key[1])
            spec.retries = self._retries
        return self._specs[key]


class PoolExecutor(concurrent.futures.Executor):
    """A pool for code that knows `concurrent.futures`. Its methods may be called in any thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._process = pool._queue.process
        self._open = True
        self._under_way: set[concurrent.futures.Future[Any]] = set()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        """See `concurrent.futures.Executor.submit`. `cancel()` of the future also ends a task that runs.

        Raises:
            RuntimeError: The executor was shut down.
            Exception: As `Pool.submit`.
        """
        if not self._open:
            raise RuntimeError("this executor was shut down")
        ref = self._pool.submit(fn, *args, **kwargs)
        future = _TaskFuture[R](self._process)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        future.add_done_callback(lambda ended: ref.cancel() if ended.cancelled() else None)
        carry = partial(self._process.tasks.create_task, name="the result of a task")
        self._process.call_soon(lambda: carry(_carry(ref, future, lambda: self._process.closing)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the executor, not the pool. See `concurrent.futures.Executor.shutdown`.

        Raises:
            RuntimeError: It would wait on the loop of the runtime, which the tasks need.
        """
        self._open = False
        futures = list(self._under_way)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait and futures:
            _check_away(self._process)
            concurrent.futures.wait(futures)


class _TaskFuture(concurrent.futures.Future[R]):
    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def result(self, timeout: float | None = None) -> R:
        self._check(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check(timeout)
        return super().exception(timeout)

    def _check(self, timeout: float | None) -> None:
        if timeout != 0 and not self.done():
            _check_away(self._process)


def _check_away(process: Process) -> None:
    if process.is_here:
        raise RuntimeError(
            "the loop cannot wait for tasks: await the futures, by `asyncio.wrap_future`, or run the code that waits "
            "for them in a thread, by `asyncio.to_thread`"
        )


async def _carry(ref: Ref[R], future: concurrent.futures.Future[R], closing: Callable[[], Exception]) -> None:
    try:
        value = await ref
    except asyncio.CancelledError:
        # The runtime ends before the task is over.
        if future.set_running_or_notify_cancel():
            future.set_exception(closing())
        raise
    except BaseException as error:  # noqa: BLE001 - the future carries it on
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


def _check_size(n: object) -> None:
    if not is_count(n):
        raise ValueError(f"a pool has a positive number of workers, not {n!r:.80}")
