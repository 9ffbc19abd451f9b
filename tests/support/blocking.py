"""Actors with `def` methods that wait for refs of others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from aiodaft import Actor, local, method


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
    async def ask_on_the_loop(self, other: Any, value: Any) -> Any:
        return other.echo(value).result()

    @method
    async def ask_in_another_thread(self, other: Any, value: Any) -> Any:
        return await asyncio.to_thread(other.echo(value).result)

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
