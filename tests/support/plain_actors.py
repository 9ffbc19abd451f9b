"""Actors and values of a runtime that refuses pickle."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiodaft import Actor, Channel, method


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Box:
    """Has no `__dict__`."""

    name: str
    corners: tuple[Point, ...] = ()
    inner: Box | None = None


@dataclass
class Settings:
    rate: float
    names: list[str] = field(default_factory=list)


class Pickled:
    """Pickle would take its attributes; nothing else knows how."""

    def __init__(self) -> None:
        self.value = 1


class OwnError(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class StrangeError(Exception):
    """Has an attribute that cannot travel."""

    def __init__(self) -> None:
        super().__init__("strange")
        self.what = Pickled()


class Worker(Actor):
    """Gives back its arguments, and calls others."""

    @method
    async def same(self, value: Any) -> Any:
        return value

    @method
    async def ask(self, other: Worker, value: Any) -> Any:
        return await other.same(value)

    @method
    async def fill(self, channel: Channel[Any], items: list[Any]) -> None:
        for item in items:
            await channel.send(item)

    @method
    async def count(self, number: int) -> AsyncIterator[Point]:
        for index in range(number):
            yield Point(index, 0)

    @method
    async def pickled(self) -> Any:
        return Pickled()

    @method
    async def fail(self) -> None:
        try:
            raise KeyError("root")
        except KeyError as error:
            raise OwnError("it failed", 7) from error

    @method
    async def fail_strangely(self) -> None:
        raise StrangeError
