"""One `Group.map`: its calls under way, and the results that the loop has not taken yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiodaft._runtime.groups.member_calls import UNDER_WAY, Unit
from aiodaft.actor import CallTarget
from aiodaft.ref import Ref

# Untaken results: their number per member, and the bytes of large ones.
_RESULTS: Final = 64
_RESULT_BYTES: Final = 256 << 20


class GroupMap:
    """The calls of one map.

    Args:
        items: What the calls are for.
        choose: Gives the unit to call next; told how many calls of this map are under way at each target.
        call: Calls a unit with an item.
        count: The number of units now.
    """

    def __init__(
        self,
        items: Iterator[Any],
        choose: Callable[[Mapping[CallTarget, int]], Unit],
        call: Callable[[Unit, Any], Ref[Any]],
        count: Callable[[], int],
    ) -> None:
        self._items = items
        self._choose = choose
        self._call = call
        self._count = count
        # Whether more items are taken; the error that `items` or a call to be made raised.
        self._open = True
        self._failure: Exception | None = None
        # Calls with untaken results: all in the order of items, the finished in the order in which they finished.
        self._calls: dict[Ref[Any], None] = {}
        self._over: dict[Ref[Any], None] = {}
        self._under_way: Counter[CallTarget] = Counter()
        self._stored_bytes = 0
        self._news = asyncio.Event()

    def results(self, label: str, *, ordered: bool) -> MapResults:
        """The results; see `Group.map`."""
        return MapResults(label, self._results(ordered=ordered))

    async def _results(self, *, ordered: bool) -> AsyncGenerator[Any, None]:
        try:
            while True:
                self._begin_calls()
                if not self._calls:
                    break
                ref = next(iter(self._calls if ordered or not self._over else self._over))
                if ref in self._over:
                    yield await ref
                    self._taken(ref)
                else:
                    self._news.clear()
                    await self._news.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            for ref in self._calls:
                ref._state.mark_seen()
                ref.cancel()

    def _begin_calls(self) -> None:
        """Make calls while members are free and the bounds allow it."""
        most = _RESULTS * max(1, self._count())
        while self._open and len(self._over) < most and self._stored_bytes < _RESULT_BYTES:
            unit = self._choose(self._under_way)
            target = unit.target
            if self._under_way[target] >= UNDER_WAY:
                return
            try:
                ref = self._call(unit, next(self._items))
            except StopIteration:
                self._open = False
                return
            except Exception as error:  # noqa: BLE001 - raised in the place of this item's result
                self._open, self._failure = False, error
                return
            self._calls[ref] = None
            self._under_way[target] += 1
            ref._state.watch(partial(self._ended, ref, target))

    def _ended(self, ref: Ref[Any], target: CallTarget, _: object) -> None:
        self._under_way[target] -= 1
        self._stored_bytes += ref._state.stored_bytes
        self._over[ref] = None
        if ref._state.error is not None:
            self._open = False
        self._news.set()

    def _taken(self, ref: Ref[Any]) -> None:
        del self._calls[ref], self._over[ref]
        self._stored_bytes -= ref._state.stored_bytes


class MapResults(AsyncGenerator[Any, None]):
    """What `Group.map` gives: an async generator, which says so where it is used as something else."""

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
