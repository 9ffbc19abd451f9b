"""The common part of the modules of this folder. Importing it loads the standard library only."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

CALL = "awaited call of an async def method (us)"
IN_FLIGHT = "1,000 calls in flight (1/s)"
FAN_OUT = "one call to each of 8 actors (us)"
CHAIN = "chain of three actors through refs (us)"
HTTP = "HTTP request that an actor answers"
COMPILED = "compiled graph of one actor"
COMPILED_CHAIN = "compiled graph of a chain of three"

# Bytes, and how often a sample sends them.
_TENSORS = {
    "1 KiB tensor, actor to actor (us)": (1 << 10, 50),
    "1 MiB tensor, actor to actor (us)": (1 << 20, 20),
    "64 MiB tensor, actor to actor (us)": (64 << 20, 3),
}

Call = Callable[[], Awaitable[object]]
Sample = Callable[[], Awaitable[float]]
Lines = dict[str, Sample]
# Starts so many actors, and gives the lines that can be measured with them.
OpenLines = Callable[[int], AbstractAsyncContextManager[Lines]]


class Echo:
    """Answers at once, and makes and takes tensors."""

    async def same(self, value: int) -> int:
        """A small value, there and back."""
        return value

    async def prepare(self, size: int) -> None:
        """Make the tensor that is given later."""
        import torch  # noqa: PLC0415 - the other calls need none

        self.tensor = torch.ones(size, dtype=torch.uint8)

    async def give(self) -> Any:
        """A tensor."""
        return self.tensor

    async def take(self, tensor: Any) -> int:
        """Receive a tensor."""
        return len(tensor)

    async def fetch(self, source: Any) -> int:
        """Fetch the tensor of another actor."""
        return len(await source.give())


async def awaited(future: Awaitable[Any]) -> Any:
    """Await a future of a framework: asyncio.gather takes no such futures, but coroutines."""
    return await future


def one_by_one(call: Call, repeats: int) -> Sample:
    """Measures microseconds of a call that is awaited before the next."""

    async def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            await call()
        return (time.perf_counter() - start) / repeats * 1e6

    return sample


def many(call: Call, count: int, in_flight: int) -> Sample:
    """Measures calls per second with so many under way."""

    async def caller() -> None:
        for _ in range(count // in_flight):
            await call()

    async def sample() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return count / (time.perf_counter() - start)

    return sample


async def requests_per_second(url: str, clients: int) -> float:
    """Have `wrk` ask a server for a second, with so many connections.

    Raises:
        RuntimeError: The server did not answer all requests with 200.
    """
    command = ("wrk", "--threads=1", f"--connections={clients}", "--duration=1s", url)
    wrk = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output = (await wrk.communicate())[0].decode()
    found = re.search(r"^Requests/sec: +([0-9.]+)$", output, re.MULTILINE)
    if wrk.returncode or found is None or "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"{' '.join(command)}: {output}")
    return float(found[1])


def requests(url: str) -> Lines:
    """Measures requests, one at a time and with many clients."""

    async def one() -> float:
        return 1e6 / await requests_per_second(url, 1)

    async def several() -> float:
        return await requests_per_second(url, 64)

    return {f"{HTTP} (us)": one, f"{HTTP}, 64 clients (1/s)": several}


def runs(graph: str, run: Call, in_flight: Callable[[int], Sample]) -> Lines:
    """Measures runs of a graph, one at a time and several in flight."""
    several = {f"{graph}, {count} in flight (1/s)": in_flight(count) for count in (10, 16)}
    return {f"{graph} (us)": one_by_one(run, 100), **several}


def tensors(prepare: Callable[[int], Awaitable[object]], move: Call) -> Lines:
    """Measures how long it takes to move a tensor, which a call makes before."""

    def line(size: int, repeats: int) -> Sample:
        async def sample() -> float:
            await prepare(size)
            return await one_by_one(move, repeats)()

        return sample

    return {name: line(size, repeats) for name, (size, repeats) in _TENSORS.items()}


def serve(open_lines: OpenLines, run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
    """Measure the lines that standard input names, a sample each, and write it to the descriptor in `argv[1]`.

    Standard output belongs to the frameworks. Without a descriptor, make one call and end: the time of the process
    is measured from outside.
    """
    run(_answer(open_lines, int(sys.argv[1])) if sys.argv[1:] else _hello(open_lines))


async def _hello(open_lines: OpenLines) -> None:
    async with open_lines(1) as lines:
        await lines[CALL]()


async def _answer(open_lines: OpenLines, descriptor: int) -> None:
    async with open_lines(8) as lines:
        with os.fdopen(descriptor, "w", buffering=1) as answers:
            print(json.dumps(list(lines)), file=answers)
            # The frameworks have tasks of their own, which go on meanwhile.
            while name := (await asyncio.to_thread(sys.stdin.readline)).rstrip():
                print(json.dumps(await lines[name]()), file=answers)
