"""Transports without the runtime, between two processes, each against the bare thing it is made of."""

from __future__ import annotations

import ctypes
import socket
import sys
import time
from functools import partial
from typing import Final

from aiodaft_transport import Grant, Unreachable, check_name
from aiodaft_transport.memory import address_of

from . import footprint
from .far_end import FarEnd, configure, open_far_end
from .floors import Copy
from .results import Bench, Sample

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_SIZES: Final = (_KIB, _MIB, 64 * _MIB)
# Name: budget from 64 MiB on, floor.
_TRANSPORTS: Final = {
    "shm": (">= 0.7", "one memcpy"),
    "tcp": (">= 0.8", "blocking sockets"),
    "ucx": (">= 0.9", "bare libucp GETs"),
}


async def run(bench: Bench) -> None:
    """Measure every transport that works here."""
    for name in _TRANSPORTS:
        try:
            check_name(name)
        except Unreachable as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        async with open_far_end(name) as far:
            for size in _SIZES if name != "tcp" else (*_SIZES, 256 * _MIB):
                await _measure(bench, far, name, size)
            if name == "shm":
                await _second_consumer(bench, far)
            if name == "ucx":
                await footprint.idle(bench, far)
        async with open_far_end(name) as far:
            # In processes that have done nothing else.
            await footprint.memory(bench, far, name)


async def _second_consumer(bench: Bench, far: FarEnd) -> None:
    """The payload that the first one read already: mapped again, and a byte of each page read."""
    size = 64 * _MIB

    async def ours() -> float:
        (grant,) = await far.ask("grant", size, 1)
        start = time.perf_counter()
        view = await far.fetch(grant)
        bytes(view[::4096])
        return time.perf_counter() - start

    name = "shm, 64 MiB, second consumer"
    await bench.compare(name, ours, Copy(size).seconds, "one memcpy", ">= 5.0", size=size)


async def _measure(bench: Bench, far: FarEnd, name: str, size: int) -> None:
    repeats = max(1, min(50, 32 * _MIB // size))
    await far.ask("prepare", size)
    own = ctypes.create_string_buffer(b"\x02" * size, size)

    async def ours() -> float:
        grants = await far.ask("grant", size, repeats)
        start = time.perf_counter()
        for grant in grants:
            view = await far.fetch(grant)
            if name == "shm":
                # Reading moves the bytes: one copy, as in the floor.
                ctypes.memmove(own, address_of(view), size)
            del view
        return (time.perf_counter() - start) / repeats

    budget, floor_name = _TRANSPORTS[name]
    if name == "shm":
        floor: Sample = Copy(size).seconds
    elif name == "tcp":
        floor = partial(_bare_sockets, far, size, repeats)
    else:
        (grant,) = await far.ask("grant", size, 1)
        floor = _bare_gets(far, tuple(grant), repeats)
    budget = budget if size >= 64 * _MIB else ""
    if size < _MIB:
        await bench.compare(f"{name}, {size // _KIB} KiB", ours, floor, floor_name)
    else:
        await bench.compare(f"{name}, {size // _MIB} MiB", ours, floor, floor_name, budget, size=size)


async def _bare_sockets(far: FarEnd, size: int, repeats: int) -> float:
    """Ask for the bytes with one byte, and receive them into the same buffer again and again."""
    target = memoryview(bytearray(b"\x02") * size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await far.ask("send", size, listener.getsockname()[1], repeats + 1)
        connection, _ = listener.accept()
    with connection:
        configure(connection)
        start = 0.0
        for number in range(repeats + 1):
            if number == 1:
                # The first one opens the window and touches the buffer.
                start = time.perf_counter()
            connection.send(b"?")
            received = 0
            while received < size:
                received += connection.recv_into(target[received:])
        return (time.perf_counter() - start) / repeats


def _bare_gets(far: FarEnd, grant: Grant, repeats: int) -> Sample:
    """One GET after the other over the same connection, into the same registered memory, spinning meanwhile."""
    from aiodaft_transport.ucx.transport import UcxTransport  # noqa: PLC0415 - loads libucp's binding

    transport = far.transport
    assert isinstance(transport, UcxTransport)
    remote, segment = transport.source_of(grant, far)
    assert remote.endpoint is not None
    _, offset, size, _ = grant
    landing = transport.landing.allocate(int(size))
    worker, endpoint = transport.driver.worker, remote.endpoint.handle
    target, memory = landing.address, transport.landing.memory_of(landing.segment, worker)
    key = segment.rkey = segment.rkey or worker.unpack(endpoint, segment.packed)
    source = segment.address + int(offset)

    async def sample() -> float:  # noqa: RUF029 - the measuring code is async
        start = time.perf_counter()
        for _ in range(repeats):
            if not worker.get(endpoint, target, landing.nbytes, source, key, memory, 0):
                while not worker.completed:
                    worker.progress()
                worker.completed.clear()
        return (time.perf_counter() - start) / repeats

    return sample
