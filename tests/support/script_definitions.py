"""A script: its definitions travel, of every kind, and each process has its globals once. Prints its findings."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from enum import IntEnum, global_enum
from typing import Any, ClassVar, Generic, NewType, TypeVar

import aiodaft

T = TypeVar("T")
UserId = NewType("UserId", int)
SEEN: list[str] = []
LIMIT = 4
limits: dict[str, int] = {"rate": 1}


@global_enum
class Level(IntEnum):
    LOW = 1


class Missing:
    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def kind(_: object) -> str:
    return "object"


@kind.register
def _(_: int) -> str:
    return "int"


def double(x: int) -> int:
    SEEN.append("double")
    return 2 * x


HANDLERS: dict[Callable[[int], int], str] = {double: "double"}


class Box(Generic[T]):
    """A box of anything."""

    looks: ClassVar = [0]

    def __init__(self, content: T) -> None:
        self.content = content

    def look(self) -> int:
        SEEN.append("box")
        self.looks[0] += 1
        return len(SEEN)

    @functools.cached_property
    def size(self) -> int:
        return fibonacci(10)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - for the test
    def times(self, n: int) -> int:
        return 10 * n


class Worker(aiodaft.Actor):
    @aiodaft.method
    async def see(self, *given: Any) -> int:
        """The number of objects that this process has seen, with the words of each of the given."""
        SEEN.append("worker")
        for each in given:
            each.look()
        return len(SEEN)

    @aiodaft.method
    async def looks(self) -> int:
        return Box.looks[0]

    @aiodaft.method
    async def echo(self, x: Any) -> Any:
        return x

    @aiodaft.method
    async def same(self, user: UserId) -> list[Any]:
        cached = [fibonacci(20), fibonacci.cache_info().maxsize, Box(user).size, Box(1).times(2)]
        return [user, kind(user), kind(""), *cached]

    @aiodaft.method
    async def know(self, missing: Missing, function: Callable[[int], int]) -> list[Any]:
        return [
            missing is MISSING,
            HANDLERS.get(function),
            function is double,
            pickle.loads(pickle.dumps(double)) is double,
        ]

    @aiodaft.method
    async def limit(self) -> int:
        class Settings:
            limit = LIMIT

        return Settings.limit

    @aiodaft.method
    async def rate(self, change: Callable[[], None] | None = None) -> int:
        if change is not None:
            change()
        return limits["rate"]

    @aiodaft.method
    def in_children(self, method: str) -> list[int]:
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            return [box.content + box.size for box in pool.map(boxed, [1, 2])]


def boxed(n: int) -> Box[int]:
    return Box(double(n))


def faster() -> None:
    limits["rate"] += 10


def check(what: str, got: object, expected: object) -> None:
    if got != expected:
        print(f"{what}: {got!r}, expected {expected!r}")


async def main() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        worker, group = await rt.spawn(Worker), await rt.group(2, Worker)
        check("spawn", await worker.see(Box(1), Box(2)), 3)
        check("group", await group.all(Worker.see, Box(1)), [2, 2])
        check("later", await worker.see(Box(3)), 5)
        check("here", SEEN, [])
        check("an attribute of a class", [await worker.looks(), Box.looks], [3, [0]])
        check("what pickle names", await worker.same(UserId(3)), [3, "int", "object", 6765, None, 55, 20])
        check("identity there", await worker.know(MISSING, double), [True, "double", True, True])
        for value in (MISSING, double, fibonacci, kind, UserId, Box, Worker, Level.LOW):
            check(f"identity of {value} here", await worker.echo(value) is value, True)
        check("a type", [await worker.echo(T), await worker.echo([T])], [T, [T]])
        check("a body of a class", await worker.limit(), 4)
        # The actor's change of it stays, until the script changes it.
        check("rates", [await worker.rate(faster), await worker.rate(faster), limits["rate"]], [11, 21, 1])
        limits["rate"] = 2
        check("a changed rate", [await worker.rate(faster), await worker.rate(faster)], [12, 22])
        check("a rate back here", [(await worker.echo(faster))(), limits["rate"]], [None, 12])
        for method in ("spawn", "forkserver"):
            check(method, await worker.in_children(method), [57, 59])


async def briefly() -> None:
    async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Worker) as worker:
        check("in a child", await worker.same(UserId(3)), [3, "int", "object", 6765, None, 55, 20])
        check("a value of a child", type(await worker.echo(Box(1))), Box)


def in_child() -> None:
    aiodaft.run(briefly())


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=in_child)
    child.start()
    aiodaft.run(main())
    child.join()
    check("the exit status of a child", child.exitcode, 0)
