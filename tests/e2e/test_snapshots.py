"""A value is that of the moment when the call was made, or when the method returned, under any later change by its
code.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")
PRELOAD = ("numpy",)

# One of each kind: plain and long, pickled, and buffers of more than a MiB. Each is full of ones.
KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1] * 60_000,
    "deque": lambda: deque([1.0] * 60_000),
    "array": lambda: np.ones(1 << 18),
    "bytearray": lambda: bytearray(b"\1" * (2 << 20)),
}


def spoil(value: Any) -> None:
    """Change a value in place."""
    if isinstance(value, np.ndarray):
        value[:] = 0
    elif isinstance(value, bytearray):
        value[:] = bytes(len(value))
    else:
        value.clear()


def is_whole(kind: str, value: Any) -> bool:
    return bool(np.array_equal(value, KINDS[kind]()) if kind == "array" else value == KINDS[kind]())


class Witness:
    """Its copy knows the thread that encoded it."""

    def __reduce__(self) -> Any:
        return int, (threading.get_ident(),)


class Shelf(aiodaft.Actor):
    def __init__(self) -> None:
        self.value: Any = None
        self.told: list[bool] = []

    @aiodaft.method
    async def check(self, kind: str, value: Any) -> bool:
        self.told.append(is_whole(kind, value))
        return self.told[-1]

    @aiodaft.method
    async def checked(self) -> list[bool]:
        return self.told

    @aiodaft.method
    async def fill(self, kind: str) -> None:
        self.value = KINDS[kind]()

    @aiodaft.method
    async def give(self, _: int = 0) -> Any:
        return self.value

    @aiodaft.method
    def give_from_thread(self) -> Any:
        return self.value

    @aiodaft.method
    async def items(self) -> AsyncIterator[Any]:
        yield self.value
        spoil(self.value)

    @aiodaft.method
    def items_from_thread(self) -> Iterator[Any]:
        yield self.value
        spoil(self.value)

    @aiodaft.method
    async def spoil(self, _: int = 0) -> None:
        spoil(self.value)

    @aiodaft.method
    def spoil_from_thread(self) -> None:
        spoil(self.value)

    @aiodaft.method
    def call_from_thread(self, other: Any, kind: str) -> bool:
        value = KINDS[kind]()
        checked = other.check(kind, value)
        spoil(value)
        return bool(checked.result())

    @aiodaft.method
    def witness(self) -> Any:
        return Witness()

    @aiodaft.method
    def witnesses(self) -> Iterator[Any]:
        yield Witness()

    @aiodaft.method
    async def loop_thread(self) -> int:
        return threading.get_ident()


@pytest.mark.parametrize("kind", KINDS)
async def test_arguments_are_what_they_were_when_the_call_was_made(module_rt: aiodaft.Runtime, kind: str) -> None:
    rt = module_rt
    async with rt.group(2, Shelf) as group, aiodaft.compile(lambda x: group[0].check(kind, x)) as graph:
        shelf = group[0]
        ways: list[Callable[[Any], Any]] = [
            lambda value: shelf.check(kind, value),
            lambda value: shelf.check(kind, value=value),
            lambda value: group.all(Shelf.check, kind, value),
            lambda value: group.any(Shelf.check, kind, value),
            lambda value: shelf.check(kind, rt.put(value)),
            graph,
        ]
        for way in ways:
            value = KINDS[kind]()
            checked = way(value)
            spoil(value)
            assert await checked in (True, [True, True])
        value = KINDS[kind]()
        shelf.check.tell(kind, value)
        spoil(value)
        assert (await shelf.checked())[-1]
        # The process of the caller has to ask where a supervised actor is.
        supervised = await rt.on(restart=aiodaft.Restart(), with_=shelf).spawn(Shelf)
        for callee in (supervised, shelf):
            assert await group[1].call_from_thread(callee, kind)


async def test_collectives_and_parts_get_what_was_put(module_rt: aiodaft.Runtime) -> None:
    rt = module_rt
    kept = [[1], [2]]
    put = rt.put(kept)
    early = put.parts(2)
    kept[0][0] = kept[1][0] = 0
    assert [await part for part in (*early, *put.parts(2))] == [[1], [2], [1], [2]]
    assert await aiodaft.all_gather([put])[0] == [[[1], [2]]]
    for length in (3, 1 << 18):
        array = np.ones(length)
        put_array = rt.put(array)
        array[:] = 0
        totals = aiodaft.all_reduce([put_array, rt.put(np.ones(length))])
        assert [(await total)[-1] for total in totals] == [2.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
async def test_results_and_items_are_what_they_were_when_the_method_gave_them(
    module_rt: aiodaft.Runtime, kind: str
) -> None:
    async with module_rt.spawn(Shelf) as shelf, module_rt.spawn(Shelf) as other:
        for give in (shelf.give, shelf.give_from_thread):
            for ruin in (shelf.spoil, shelf.spoil_from_thread):
                _, given, ruined = shelf.fill(kind), give(), ruin()
                assert is_whole(kind, await given)
                await ruined
        for items in (shelf.items, shelf.items_from_thread):
            await shelf.fill(kind)
            assert [is_whole(kind, item) async for item in items()] == [True]

        def step(x: Any) -> Any:
            given = shelf.give(x)
            return given, other.check(kind, given), shelf.spoil(x)

        async with aiodaft.compile(step) as graph:
            await shelf.fill(kind)
            given, checked, _ = await asyncio.gather(*graph(0))
            assert (is_whole(kind, given), checked) == (True, True)


async def test_results_of_def_methods_are_encoded_while_the_loop_of_their_actor_does_nothing_else(
    module_rt: aiodaft.Runtime,
) -> None:
    async with module_rt.spawn(Shelf) as shelf, aiodaft.compile(lambda: shelf.witness()) as graph:
        here = await shelf.loop_thread()
        found = [await shelf.witness(), await graph(), *[item async for item in shelf.witnesses()]]
        assert found == [here] * 3
