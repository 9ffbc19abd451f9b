"""Actors with `def` methods that wait for refs of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from aiodaft import Actor, CallCancelled, deadline, method
from aiodaft.typing import local

T = TypeVar("T")


def in_thread(job: Callable[[], T]) -> T:
    """Do something in another thread while the loop waits: its messages to the loop come after it."""
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
        """Give the result of another actor's method."""
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
    """Calls the methods that it overrides."""

    @method
    def one(self) -> int:
        return local(super().one)() + 10


class Locking(Actor):
    """Methods on the thread and on the loop that share a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = threading.Event()

    @method
    def ask(self, other: Any, value: Any) -> Any:
        """Call another actor while the loop waits for the lock."""
        with self._lock:
            self._waits.wait()
            ref = other.echo(value)
        return ref.result()

    @method
    async def wait_for_lock(self) -> None:
        """Stop the loop until the lock is free."""
        self._waits.set()
        with self._lock:
            pass
