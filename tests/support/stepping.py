"""An actor with generators of `def` methods."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiodaft
from aiodaft import Actor, method

step_of = contextvars.ContextVar("step_of", default=-1)


class Stepper(Actor):
    """Yields on its thread, and notes the order of events there."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.go_on = threading.Event()

    @method
    def note(self, what: str) -> None:
        self.happened.append(what)

    @method
    def noted(self) -> list[str]:
        return self.happened

    @method(ordered=False)
    async def let_go_on(self) -> None:
        self.go_on.set()

    @method
    def wait(self) -> None:
        self.go_on.wait()

    @method
    def count(self, to: int) -> Iterator[int]:
        self.happened.append("count begins")
        try:
            yield from range(to)
        finally:
            self.happened.append("count ends")

    @method
    def where(self, count: int) -> Iterator[tuple[int, int, int]]:
        """The thread of each step, the value that the step before left in the context, and the attempt."""
        for index in range(count):
            yield threading.get_ident(), step_of.get(), aiodaft.supervision.current_attempt()
            step_of.set(index)

    @method
    def thread(self) -> int:
        return threading.get_ident()

    @method
    def same_list(self, count: int, value: Any) -> Iterator[list[Any]]:
        """One list that grows between the items."""
        grows: list[Any] = []
        for _ in range(count):
            grows.append(value)
            yield grows

    @method
    def holds(self, size: int) -> Iterator[bytes]:
        """An item, and one more when the actor is told to go on."""
        yield b""
        try:
            self.happened.append("holds")
            self.go_on.wait()
            yield bytes(size)
        finally:
            self.happened.append("lets go")

    @method
    def relays(self, other: Any) -> Iterator[Any]:
        """The items of another actor, which hears when this ends."""
        try:
            while True:
                yield other.thread().result()
        finally:
            other.note("left").result()
            self.happened.append("relays ends")

    @method
    def asks(self, other: Any, me: Any = None) -> Iterator[Any]:
        """The items that another actor gives, or those that it takes from this one."""
        try:
            yield 0
            yield (other.wait() if me is None else other.takes(me)).result()
        finally:
            self.happened.append("asks ends")

    @method
    def lends(self) -> Iterator[list[int]]:
        yield aiodaft.borrow([1, 2])

    @method
    async def takes_what_it_lends(self, me: Any) -> list[Any]:
        return [item async for item in me.lends()]

    @method
    async def takes(self, other: Any) -> list[Any]:
        return [item async for item in other.count(1)]

    @method
    def fails(self, after: int, error: BaseException) -> Iterator[int]:
        yield from range(after)
        raise error

    @method
    def exits(self, code: int) -> Iterator[int]:
        yield 0
        raise SystemExit(code)

    @method
    def until_closed(self, path: str) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            Path(path).touch()

    @method
    def odd(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()
