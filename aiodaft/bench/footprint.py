"""What transfers take beside time: memory, and processor time while nothing happens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final, Protocol

from aiodaft_transport import Transport

from .results import Result

_MIB: Final = 1 << 20
_ROOM_MIB: Final = 64
_MANY: Final = 2000
_IDLE_SECONDS: Final = 2.0


class Far(Protocol):
    """The other process, and this one's end of the transport."""

    pid: int
    peer: str
    transport: Transport

    def send_note(self, transport: str, note: bytes, fds: Any = ...) -> None: ...

    async def ask(self, *content: Any) -> Any: ...


async def memory(link: Far, name: str) -> list[Result]:
    """How far the peak of a 1 GiB transfer is above the payload, and what 2,000 of 8 MiB leave; the worse side."""
    await _move(link, _MIB, 1)
    before = _both(link, "VmRSS")
    _forget_peaks(link)
    await _move(link, 1024 * _MIB, 1)
    above = max(peak - earlier for peak, earlier in zip(_both(link, "VmHWM"), before, strict=True)) / _MIB - 1024
    await _move(link, 8 * _MIB, 3)
    before = _both(link, "VmRSS")
    await _move(link, 8 * _MIB, _MANY)
    grown = max(now - earlier for now, earlier in zip(_both(link, "VmRSS"), before, strict=True)) / _MIB
    return [
        _against_room(f"{name}, 1 GiB, peak above the payload", above),
        _against_room(f"{name}, {_MANY:,} of 8 MiB, memory grown", grown),
    ]


def _against_room(name: str, mebibytes: float) -> Result:
    return Result(name, mebibytes, "MiB", _ROOM_MIB, "what is allowed", mebibytes / _ROOM_MIB, "<= 1.0")


async def _move(link: Far, size: int, count: int) -> None:
    for _ in range(count):
        await link.ask("prepare", size)
        (grant,) = await link.ask("grant", size, 1)
        view = await link.transport.fetch(tuple(grant), link)
        bytes(view[::4096])
        del view
        await link.ask("release", size)


def _forget_peaks(link: Far) -> None:
    for pid in ("self", link.pid):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _both(link: Far, field: str) -> list[int]:
    return [_status_bytes("self", field), _status_bytes(link.pid, field)]


def _status_bytes(pid: int | str, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


async def idle(link: Far) -> Result:
    """Processor time that a connected pair takes while nothing is transferred."""
    # What the last transfer left to do.
    await asyncio.sleep(0.1)
    before, start = _processor_seconds(link), time.perf_counter()
    await asyncio.sleep(_IDLE_SECONDS)
    percent = 100 * (_processor_seconds(link) - before) / (time.perf_counter() - start)
    return Result("ucx, idle pair, processor time", percent, "%", budget="<= 2.0")


def _processor_seconds(link: Far) -> float:
    # Nanoseconds of the other's only thread; what /proc/stat has are ticks.
    fields = Path(f"/proc/{link.pid}/schedstat").read_text(encoding="ascii").split()
    return time.process_time() + int(fields[0]) / 1e9
