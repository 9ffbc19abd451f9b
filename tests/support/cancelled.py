"""Actors for calls that are cancelled, in every state that a call can be in."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from actors import Box, Sleeper

from aiodaft import Actor, method


class Boss(Actor):
    """Makes calls that it does not await."""

    @method
    async def fan_out(self, sleeper: Sleeper) -> None:
        self.kept = sleeper.sleep(60, "kept")
        sleeper.sleep(60, "dropped")
        refs = [sleeper.sleep(60, name) for name in ("first", "second")]
        sleeper.sleep(60, "later")
        try:
            await asyncio.Event().wait()
        finally:
            sleeper.sleep(60, "goodbye")
        await asyncio.gather(*refs)


class Subject(Actor):
    """Notes the fate of its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.began = asyncio.Event()
        self.gate = asyncio.Event()
        self.release = threading.Event()

    def note(self, event: str) -> None:
        self.events.append(event)

    async def clean_up(self) -> None:
        """Takes several turns of the loop, as real cleanup does."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.note("cleaned up")

    @method
    async def run(self) -> None:
        self.note("began")
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.clean_up()

    @method
    async def linger(self) -> None:
        """Its cleanup waits for the gate."""
        try:
            await asyncio.Event().wait()
        finally:
            self.began.set()
            await self.gate.wait()
            await self.clean_up()

    @method
    async def call(self, *others: Subject) -> None:
        """Waits for the first of the others, which waits for the next, and so on."""
        try:
            await (others[0].call(*others[1:]) if len(others) > 1 else others[0].run())
        finally:
            await self.clean_up()

    @method
    async def stream(self) -> AsyncIterator[int]:
        self.note("began")
        try:
            yield 1
            self.began.set()
            await asyncio.Event().wait()
        finally:
            await self.clean_up()

    @method
    def block(self) -> bytes:
        """Cannot be interrupted; ends when it is released."""
        self.note("began")
        self._loop.call_soon_threadsafe(self.began.set)
        self.release.wait(20)
        self.note("ended")
        return bytes(1 << 20)

    @method
    async def call_block(self, other: Subject) -> None:
        """Waits for a call that cannot be interrupted."""
        try:
            await other.block()
        finally:
            await self.clean_up()

    @method
    async def stubborn(self, other: Any) -> Any:
        """Refuses to be cancelled; gives something large and a ref."""
        self.note("began")
        self.began.set()
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.note("refused")
        return bytes(1 << 20), Box(other.make())

    @method
    async def give_in_late(self, how: str) -> str:
        """Takes a while to clean up, and then gives or raises something all the same."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await self.clean_up()
        if how == "raise":
            raise ValueError("cleanup failed")
        return "done all the same"

    @method
    async def make(self) -> bytes:
        return bytes(1 << 20)

    @method
    async def use(self, value: Any) -> None:
        self.note("used")

    @method
    async def opened(self) -> str:
        await self.gate.wait()
        return "a value"

    # The test's questions, answered at any time.

    @method(ordered=False)
    async def has_begun(self) -> None:
        await self.began.wait()

    @method(ordered=False)
    async def remember_loop(self) -> None:
        self._loop = asyncio.get_running_loop()

    @method(ordered=False)
    async def let_go(self) -> None:
        self.release.set()
        self.gate.set()

    @method(ordered=False)
    async def history(self) -> list[str]:
        return self.events

    @method(ordered=False)
    async def tasks(self) -> int:
        """The number of tasks besides this one."""
        return len(asyncio.all_tasks()) - 1


class Blocking:
    """Knows nothing of aiodaft, and cannot be interrupted."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def block(self) -> None:
        self.began.set()
        threading.Event().wait(20)

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.began.wait)


class Stuck(Actor):
    """Keeps its loop from turning, until the test writes to a fifo."""

    @method
    async def keep_loop(self, path: str) -> None:
        os.close(os.open(path, os.O_RDONLY))

    @method
    async def keep_interpreter(self, path: str) -> None:
        library = ctypes.PyDLL(None)
        library.close(library.open(path.encode(), os.O_RDONLY))


class Clinging(Actor):
    """Takes a minute to leave."""

    async def __aenter__(self) -> Clinging:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(60)

    @method
    async def pid(self) -> int:
        return os.getpid()
