"""A program that uses actors where the system may have less than Linux: says what it saw, as a line of JSON.

The argument names one of `PROGRAMS`. `wait` waits to be killed, with an actor that blocks its event loop and one that
has started a program; the others end by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import aiodaft.testing
from aiodaft import Actor, ActorDied, Restart, method

# Of floats: 2 MiB, which a thread moves.
SIZE = 1 << 18


class Worker(Actor):
    """Makes and takes arrays."""

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    def make(self, value: float, size: int) -> np.ndarray:
        return np.full(size, value)

    @method
    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    @method
    async def count(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            yield number

    @method
    async def rest(self) -> None:
        await asyncio.Event().wait()

    @method
    async def block(self) -> None:
        print("the loop is blocked", flush=True)
        threading.Event().wait()

    @method
    async def start_program(self) -> int:
        return (await asyncio.create_subprocess_exec("sleep", "1000")).pid


async def killed(actor: Worker) -> dict[str, Any]:
    """The error that the caller of an actor gets when its process is killed."""
    call = actor.rest()
    left = await actor.start_program()
    os.kill(await actor.pid(), signal.SIGKILL)
    try:
        await call
    except ActorDied as death:
        return {"signal": death.signal, "left": left}
    raise AssertionError("the call has an answer")


async def journeys() -> None:
    async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Worker) as a, rt.spawn(Worker) as b:
        seen: dict[str, Any] = {
            "pids": [await a.pid(), await b.pid()],
            "total": await b.total(a.make(2.0, SIZE)),
            "stream": [number async for number in a.count(3)],
            "array": float((await a.make(1.0, SIZE)).sum()),
            "died": await killed(await rt.spawn(Worker)),
        }
        back = await rt.on(restart=Restart()).spawn(Worker)
        before = await back.pid()
        await killed(back)
        seen["came back"] = await back.pid() != before
    print(json.dumps(seen), flush=True)


async def wait() -> None:
    async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Worker) as blocked, rt.spawn(Worker) as parent:
        pids = [await blocked.pid(), await parent.pid(), await parent.start_program()]
        blocking = blocked.block()
        # In one piece: output of its actors comes in between.
        sys.stdout.write(f"{json.dumps(pids)}\n")
        sys.stdout.flush()
        await blocking


async def in_process() -> None:
    async with aiodaft.testing.in_process() as rt, rt.spawn(Worker) as a, rt.spawn(Worker) as b:
        print(await b.total(a.make(1.0, SIZE)))


async def forking() -> None:
    async with aiodaft.Runtime(fork=True):
        pass


PROGRAMS = {"journeys": journeys, "wait": wait, "in_process": in_process, "forking": forking}

if __name__ == "__main__":
    aiodaft.run(PROGRAMS[sys.argv[1]]())
