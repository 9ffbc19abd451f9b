"""Actors that fail."""

from __future__ import annotations

import asyncio
import builtins
import gc
import os
import signal
import sys
import threading
import types
from typing import Any

from aiodaft import Actor, method


class CustomError(Exception):
    """Cannot be rebuilt from its arguments alone."""

    def __init__(self, *, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class HostileError(Exception):
    """Refuses everything."""

    def __str__(self) -> str:
        raise RuntimeError("no text either")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle either")

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("nothing may be set, as in frozen dataclasses")


class Failing(Actor):
    """Fails in every way there is."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = asyncio.Event()

    @method
    async def raise_value_error(self, text: str = "bad value") -> int:
        self.calls += 1
        raise ValueError(text)

    @method
    def raise_on_thread(self, text: str = "bad thread") -> int:
        raise KeyError(text)

    @method
    async def raise_custom(self) -> int:
        raise CustomError(code=7, detail="by keyword")

    @method
    async def raise_hostile(self) -> int:
        raise HostileError

    @method
    async def raise_huge(self) -> int:
        raise ValueError("x" * 50_000_000)

    @method
    async def raise_unknown(self) -> int:
        """Of a class that no other process can import."""
        module = types.ModuleType("known_here")
        sys.modules[module.__name__] = module
        exec("class LocalError(Exception): pass", vars(module))
        raise module.LocalError("told all the same")

    @method
    async def raise_named(self, name: str) -> int:
        raise getattr(builtins, name)

    @method
    def raise_named_on_thread(self, name: str) -> int:
        raise getattr(builtins, name)

    @method
    async def raise_cancelled(self) -> int:
        raise asyncio.CancelledError

    @method
    def raise_stop_iteration(self) -> int:
        raise StopIteration(3)

    @method
    async def raise_with_cause(self) -> int:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error

    @method
    async def raise_later(self) -> int:
        await self.gate.wait()
        raise ValueError("bad value")

    @method
    async def raise_now(self) -> None:
        self.gate.set()

    @method
    async def use(self, value: Any, *others: Any) -> Any:
        self.calls += 1
        return value

    @method
    async def stop_collecting(self) -> None:
        """Objects in a circle stay from now on."""
        gc.disable()

    @method
    async def notes_of_consumers(self, other: Failing) -> list[int]:
        """The numbers of notes of a call's errors, of two others that need its result, and of the first one again."""
        bad = other.raise_value_error()
        errors = await asyncio.gather(bad, other.use(bad), other.use([bad]), bad, return_exceptions=True)
        return [len(error.__notes__) for error in errors if isinstance(error, ValueError)]

    @method
    async def count(self) -> int:
        return self.calls

    @method
    async def unencodable(self) -> Any:
        return threading.Lock()

    @method
    async def exit(self, code: int) -> None:
        sys.exit(code)

    @method
    async def exit_in_a_task(self, code: int | str) -> None:
        async def leave() -> None:
            sys.exit(code)

        leaving = asyncio.get_running_loop().create_task(leave())
        await asyncio.sleep(60)
        await leaving

    @method
    async def kill_itself(self, number: int = signal.SIGKILL) -> None:
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    @method
    def eat_memory(self) -> None:
        eaten = []
        while True:
            eaten.append(b"x" * (8 << 20))

    @method
    async def wait(self, seconds: float = 60) -> str:
        await asyncio.sleep(seconds)
        return "waited"
