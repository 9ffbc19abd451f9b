"""Actors with `def` methods that wait for refs of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from aiodaft import Actor, CallCancelled, deadline, local, method

T = TypeVar("T")


def in_thread(job: Callable[[], T]) -> T:
    """Do something in another thread while the loop waits: what is handed to the loop comes after it."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(job())
        except Exception as error:  # noqa: BLE001 - the test gets it
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class Blocking(Actor):
    """Waits on its thread."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.kept: Any = None

    @method
    def ask(self, other: Any, name: str, *args: Any) -> Any:
        """Give what a method of another actor gives."""
        self.events.append("asked")
        try:
            return getattr(other, name)(*args).result()
        except BaseException as error:
            self.events.append(type(error).__name__)
            raise

    @method
    def ask_within(self, seconds: float, other: Any, name: str, *args: Any) -> Any:
        return getattr(other, name)(*args).result(timeout=seconds)

    @method
    def ask_by(self, seconds: float, other: Any, name: str, *args: Any) -> Any:
        with deadline(seconds):
            return getattr(other, name)(*args).result()

    @method
    async def ask_on_the_loop(self, other: Any, value: Any) -> Any:
        return other.echo(value).result()

    @method
    async def ask_in_another_thread(self, other: Any, value: Any) -> Any:
        return await asyncio.to_thread(other.echo(value).result)

    @method
    async def cancel_before_it_is_handed_over(self, log: Any) -> bool | None:
        """Cancel a call that a thread has made, in the same turn of the loop; gives whether it ran."""
        ref = in_thread(lambda: log.note_async("from a thread"))
        assert ref.cancel()
        try:
            await ref
        except CallCancelled as error:
            return error.executed
        return True

    @method
    def around(self, others: list[Any]) -> Any:
        """Have the next one ask the one after it, and so on."""
        return others[0].around(others[1:]).result() if others else threading.current_thread().name

    @method
    async def history(self) -> list[str]:
        return self.events

    @method
    def one(self) -> int:
        return 1

    @method
    def two(self) -> int:
        return self.one() + local(self.one)()

    @method
    async def awaits_one(self) -> int:
        return await self.one()


class Inheriting(Blocking):
    """Calls what it overrides."""

    @method
    def one(self) -> int:
        return local(super().one)() + 10
