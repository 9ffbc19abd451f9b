"""Calls and values between two hosts, next to bare TCP connections between the same processes.

Needs a node on the other host: `AIODAFT_ADDRESS=tcp://10.0.0.2:7777 python -m benchmarks hosts`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.ids import node_of
from aiodaft.methods import method
from aiodaft.runtime import Runtime

from .actors import Holder
from .far_end import configure
from .floors import apart, echo_over, open_server
from .results import Bench, seconds_of_one

_MIB: Final = 1 << 20
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Far(Holder):
    """The other host, also with bare sockets; these are idle when calls are measured, and the other way round."""

    @method
    async def machine(self) -> str:
        """An id of the machine, under any of its names."""
        return _BOOT.read_text()

    @method
    async def echo(self, host: str) -> int:
        """Echo the data that come to a port."""
        return await open_server(host)

    @method
    async def send(self, host: str, size: int) -> int:
        """Send so many bytes over the one connection that comes to a port, each time that a byte comes."""
        listener = _listen(host)
        asyncio.get_running_loop().run_in_executor(None, _send, listener, memoryview(bytearray(b"\x01") * size))
        return int(listener.getsockname()[1])


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _send(listener: socket.socket, content: memoryview) -> None:
    with listener:
        connection, _ = listener.accept()
    with connection:
        configure(connection)
        connection.setblocking(True)
        while connection.recv(1):
            connection.sendall(content)


async def run(bench: Bench) -> None:
    """Measure calls, and values that come from the other host."""
    address = os.environ.get("AIODAFT_ADDRESS")
    if not address:
        print("not measured: hosts needs $AIODAFT_ADDRESS, a node on another host", file=sys.stderr)
        return
    host = parse_address(address).host
    async with Runtime() as rt:
        far = await rt.on(node=node_of(rt._controller.process.options.agent)).spawn(Far)
        with apart(await far.pid()) if await far.machine() == _BOOT.read_text() else nullcontext():
            await _calls(bench, far, host)
        for size in (_MIB, 64 * _MIB, 256 * _MIB):
            await _values(bench, far, host, size)


async def _calls(bench: Bench, far: Far, host: str) -> None:
    async with echo_over(socket.create_connection((host, await far.echo(host)))) as bare:
        ours, floor = partial(seconds_of_one, far.on_loop, 200), partial(bare.round_trip, 200)
        await bench.compare("call of another host", ours, floor, "bare TCP echo", "<= 1.5")
        ours, floor = partial(seconds_of_one, far.on_thread, 200), partial(bare.round_trip, 200)
        await bench.compare("def method of another host", ours, floor, "bare TCP echo")


async def _values(bench: Bench, far: Far, host: str, size: int) -> None:
    repeats = max(1, 16 * _MIB // size)
    with socket.create_connection((host, await far.send(host, size))) as connection:
        configure(connection)
        connection.setblocking(True)
        target = memoryview(bytearray(b"\x02") * size)

        async def bare() -> float:  # noqa: RUF029 - the measuring code is async
            start = time.perf_counter()
            for _ in range(repeats):
                connection.send(b"?")
                received = 0
                while received < size:
                    received += connection.recv_into(target[received:])
            return (time.perf_counter() - start) / repeats

        ours = partial(seconds_of_one, partial(_make, far, size), repeats)
        budget = ">= 0.8" if size >= 256 * _MIB else ""
        await bench.compare(f"{size // _MIB} MiB from another host", ours, bare, "bare sockets", budget, size=size)


async def _make(far: Far, size: int) -> None:
    await far.make(size)
