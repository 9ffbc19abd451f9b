"""Compares the transport "ucx" with ucxx: `python tests/support/against_ucxx.py` prints both and the ratio.

ucxx is used as its users would: a listener that sends, an endpoint that receives into one buffer.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Final

from benchmarks.far_end import FarEnd, open_far_end
from benchmarks.results import Result, in_turns, table

_SIZE: Final = 64 << 20
_REPEATS: Final = 5

_SERVE: Final = """
import asyncio, sys, ucxx
async def main():
    content, count, over = bytearray(int(sys.argv[1])), int(sys.argv[2]), asyncio.Event()
    endpoints = []
    async def serve(endpoint):
        # An endpoint without a reference is closed, even during its last send.
        endpoints.append(endpoint)
        for _ in range(count):
            await endpoint.send(content)
        over.set()
    listener = ucxx.create_listener(serve, 0)
    print("port", listener.port, flush=True)
    await over.wait()
    sys.stdin.read()
asyncio.run(main())
"""
_FETCH: Final = """
import asyncio, sys, time, ucxx
async def main():
    target, count = bytearray(int(sys.argv[1])), int(sys.argv[2])
    endpoint = await ucxx.create_endpoint("127.0.0.1", int(sys.argv[3]))
    # The first one connects and touches the buffer.
    await endpoint.recv(target)
    start = time.perf_counter()
    for _ in range(count - 1):
        await endpoint.recv(target)
    print("seconds", (time.perf_counter() - start) / (count - 1), flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def seconds(size: int, count: int) -> float:
    """Seconds that it takes to bring `size` bytes from one process to another: the mean of `count` in a row."""
    server = await _started(_SERVE, size, count + 1)
    try:
        fetcher = await _started(_FETCH, size, count + 1, int(await _said(server, "port")))
        try:
            return float(await _said(fetcher, "seconds"))
        finally:
            await _end(fetcher)
    finally:
        await _end(server)


async def _started(code: str, *arguments: int) -> asyncio.subprocess.Process:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


async def _said(process: asyncio.subprocess.Process, what: str) -> str:
    """The value in a line that it prints; UCX prints warnings as well."""
    assert process.stdout is not None
    async for line in process.stdout:
        name, _, value = line.decode().partition(" ")
        if name == what:
            return value
    raise RuntimeError(f"a process that uses ucxx ended without saying its {what}")


async def _end(process: asyncio.subprocess.Process) -> None:
    # Its own way of ending takes seconds, and no other process needs its values.
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _ours(link: FarEnd) -> float:
    grants = await link.ask("grant", _SIZE, _REPEATS)
    start = time.perf_counter()
    for grant in grants:
        await link.fetch(grant)
    return (time.perf_counter() - start) / _REPEATS


async def main() -> None:
    """Measure both in turns."""
    async with open_far_end("ucx") as link:
        await link.ask("prepare", _SIZE)
        await _ours(link)
        mine, theirs, ratio = await in_turns(lambda: _ours(link), lambda: seconds(_SIZE, _REPEATS), 5)
        await link.ask("release", _SIZE)
    print(table([Result("ucx, 64 MiB", _SIZE / mine / 1e9, "GB/s", _SIZE / theirs / 1e9, "ucxx endpoints", 1 / ratio)]))


if __name__ == "__main__":
    asyncio.run(main())
