"""One `Group.map`: its calls under way, and the results that the loop has not taken yet."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeGuard, cast

from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.groups.member_calls import Unit
from aiodaft.actor import CallTarget
from aiodaft.ref import Ref, Refs

# Untaken results: their number per member, and the bytes of large ones.
_RESULTS: Final = 64
_RESULT_BYTES: Final = 256 << 20


def is_asynchronous(items: Iterable[Any] | AsyncIterable[Any]) -> TypeGuard[AsyncIterable[Any]]:
    return isinstance(items, AsyncIterable) and not isinstance(items, Refs)


class GroupMap:
    """The calls of one map.

    Args:
        items: The first argument of each call; also asynchronous.
        choose: Gives the unit to call next; told which targets have no room.
        window: Calls that a unit may have under way.
        keeps_on: Whether the error of a call is a result as any other.
    """

    def __init__(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        choose: Callable[[Collection[CallTarget]], Unit],
        call: Callable[[Unit, Any], Ref[Any]],
        count: Callable[[], int],
        window: int,
        *,
        keeps_on: bool,
    ) -> None:
        self._items = aiter(items) if is_asynchronous(items) else iter(cast("Iterable[Any]", items))
        self._choose = choose
        self._call = call
        self._count = count
        self._window = window
        self._keeps_on = keeps_on
        self._open = True
        self._failure: Exception | None = None
        self._asking: asyncio.Task[Any] | None = None
        # By the numbers of items: calls, or why they could not be made, with untaken results; and those that are over,
        # in the order in which they ended.
        self._calls: dict[int, Ref[Any] | Exception] = {}
        self._over: dict[int, None] = {}
        self._numbers = itertools.count()
        self._under_way: Counter[CallTarget] = Counter()
        self._full: set[CallTarget] = set()
        self._stored_bytes = 0
        self._news = asyncio.Event()

    def results(self, label: str, *, ordered: bool) -> MapResults:
        return MapResults(label, self._results(ordered=ordered))

    async def _results(self, *, ordered: bool) -> AsyncGenerator[Any, None]:
        try:
            while True:
                self._begin_calls()
                if not self._calls and not self._open:
                    break
                number = next(iter(self._over if self._over and not ordered else self._calls), None)
                if number in self._over:
                    yield await self._result_of(self._calls[number])
                    self._taken(number)
                else:
                    self._news.clear()
                    await self._news.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            for ref in self._calls.values():
                if isinstance(ref, Ref):
                    ref._state.mark_seen()
                    ref.cancel()
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.wait([self._asking])

    async def _result_of(self, call: Ref[Any] | Exception) -> Any:
        if isinstance(call, Exception):
            return call
        try:
            return await call
        except Exception as error:
            if self._keeps_on:
                return error
            raise

    def _begin_calls(self) -> None:
        most = _RESULTS * max(1, self._count())
        while self._open and len(self._over) < most and self._stored_bytes < _RESULT_BYTES:
            unit = self._choose(self._full)
            if unit.target in self._full or not self._has_item(unit):
                return
            try:
                item = self._next_item()
            except (StopIteration, StopAsyncIteration):
                self._open = False
                return
            except Exception as error:  # noqa: BLE001 - raised in the place of this item's result
                self._open, self._failure = False, error
                return
            self._begin(unit, item)

    def _has_item(self, unit: Unit) -> bool:
        if isinstance(self._items, Iterator):
            return True
        if self._asking is None:
            tasks = cast("Target", unit.target).process.tasks
            self._asking = tasks.start_ahead(_next_of(self._items), name="the next item of a map")
            self._asking.add_done_callback(lambda _: self._news.set())
        return self._asking.done()

    def _next_item(self) -> Any:
        if self._asking is None:
            return next(cast("Iterator[Any]", self._items))
        asked, self._asking = self._asking, None
        if asked.cancelled():
            raise RuntimeError("the items of a map were cancelled")
        return asked.result()

    def _begin(self, unit: Unit, item: Any) -> None:
        number = next(self._numbers)
        try:
            ref = self._call(unit, item)
        except Exception as error:  # noqa: BLE001 - given or raised in the place of this item's result
            if self._keeps_on:
                self._calls[number] = error
                self._over[number] = None
            else:
                self._open, self._failure = False, error
            return
        self._calls[number] = ref
        self._under_way[unit.target] += 1
        if self._under_way[unit.target] == self._window:
            self._full.add(unit.target)
        ref._state.watch(partial(self._ended, number, ref, unit.target))

    def _ended(self, number: int, ref: Ref[Any], target: CallTarget, _: object) -> None:
        self._under_way[target] -= 1
        self._full.discard(target)
        self._stored_bytes += ref._state.stored_bytes
        self._over[number] = None
        if ref._state.error is not None and not self._keeps_on:
            self._open = False
        self._news.set()

    def _taken(self, number: int) -> None:
        del self._over[number]
        ref = self._calls.pop(number)
        if isinstance(ref, Ref):
            self._stored_bytes -= ref._state.stored_bytes


async def _next_of(items: AsyncIterator[Any]) -> Any:
    return await anext(items)


class MapResults(AsyncGenerator[Any, None]):
    """The result of `Group.map`: an async generator, which says so where it is used as something else."""

    def __init__(self, label: str, results: AsyncGenerator[Any, None]) -> None:
        self._label = label
        self._results = results

    def __anext__(self) -> Any:
        return self._results.__anext__()

    def asend(self, value: None, /) -> Any:
        return self._results.asend(value)

    def athrow(self, error: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        return self._results.athrow(error, value, traceback)

    def aclose(self) -> Any:
        return self._results.aclose()

    def __repr__(self) -> str:
        return f"<results of map({self._label})>"

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self!r} are many values: use `async for`, not `await`")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} are asynchronous: use `async for`")
