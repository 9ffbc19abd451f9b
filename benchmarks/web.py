"""The part of an HTTP request that a call to an actor adds: a server with uvicorn and FastAPI under load by `wrk`."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from statistics import median

from .peers.serving import requests_per_second
from .results import Bench, Result, in_turns

_LINES = {"routed": "a call", "ingress": "Ingress and a call"}


def missing() -> str:
    """The missing tools and packages of servers."""
    return "" if shutil.which("wrk") and find_spec("fastapi") and find_spec("uvicorn") else "wrk, or aiodaft[web]"


async def run(bench: Bench) -> None:
    """Measure requests that an actor answers, next to those that a coroutine of the server answers."""
    if lacking := missing():
        print(f"web: there is no {lacking}: left out", file=sys.stderr)
        return
    async with AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(serving(name)) for name in ("local", *_LINES)}
        for name, what in _LINES.items():
            await _compare(bench, what, urls[name], urls["local"])


async def _compare(bench: Bench, what: str, ours: str, floor: str) -> None:
    rate = requests_per_second
    for url in (ours, floor):
        await rate(url, 64)
    pairs = [(1e6 / await rate(ours, 1), 1e6 / await rate(floor, 1)) for _ in range(bench.turns)]
    bench.add(f"web: {what} adds to a request", median(our - their for our, their in pairs), "us", "<= 120")
    mine, theirs, ratio = await in_turns(lambda: rate(ours, 64), lambda: rate(floor, 64), bench.turns)
    name = f"web: {what}, 64 clients"
    bench.results.append(Result(name, mine, "1/s", theirs, "a coroutine of the server", ratio, ">= 0.85"))


@asynccontextmanager
async def serving(name: str) -> AsyncGenerator[str]:
    """The address of a server that is up, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        port: int = listening.getsockname()[1]
        descriptor = listening.fileno()
        command = (sys.executable, "-m", "benchmarks.web_app", name, str(descriptor))
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[descriptor])
    try:
        await _answered(port)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def _answered(port: int) -> None:
    """Wait for a first answer: the start of a server is not measured."""
    answer, request = await asyncio.open_connection("127.0.0.1", port)
    request.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    await answer.read()
    request.close()
    await request.wait_closed()
