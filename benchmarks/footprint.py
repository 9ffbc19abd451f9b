"""The costs of transfers beside time: memory, and processor time while nothing happens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from .far_end import FarEnd
from .results import Bench, Result

_MIB: Final = 1 << 20
_ROOM_MIB: Final = 64


async def memory(bench: Bench, far: FarEnd, name: str) -> None:
    """The peak of a 1 GiB transfer above the payload, and the memory that 2,000 of 8 MiB leave; the worse side."""
    await _move(far, _MIB, 1)
    before = _mebibytes(far, "VmRSS")
    _forget_peaks(far)
    await _move(far, 1024 * _MIB, 1)
    above = _most_above(before, _mebibytes(far, "VmHWM")) - 1024
    await _move(far, 8 * _MIB, 3)
    before = _mebibytes(far, "VmRSS")
    await _move(far, 8 * _MIB, 2000)
    grown = _most_above(before, _mebibytes(far, "VmRSS"))
    for what, value in (("1 GiB, peak above the payload", above), ("2,000 of 8 MiB, memory grown", grown)):
        result = Result(f"{name}, {what}", value, "MiB", _ROOM_MIB, "what is allowed", value / _ROOM_MIB, "<= 1.0")
        bench.results.append(result)


def _forget_peaks(far: FarEnd) -> None:
    for pid in ("self", far.pid):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


async def _move(far: FarEnd, size: int, count: int) -> None:
    for _ in range(count):
        await far.ask("prepare", size)
        (grant,) = await far.ask("grant", size, 1)
        view = await far.fetch(grant)
        bytes(view[::4096])
        del view
        await far.ask("release", size)


def _most_above(before: list[float], now: list[float]) -> float:
    return max(later - earlier for later, earlier in zip(now, before, strict=True))


def _mebibytes(far: FarEnd, field: str) -> list[float]:
    """A field of the status of both processes."""
    texts = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in ("self", far.pid)]
    return [int(text.partition(f"{field}:")[2].split()[0]) / 1024 for text in texts]


async def idle(bench: Bench, far: FarEnd) -> None:
    """Processor time that a connected pair takes while nothing is transferred."""
    # The rest of the last transfer's work.
    await asyncio.sleep(0.1)
    before, start = _processor_seconds(far), time.perf_counter()
    await asyncio.sleep(2)
    percent = 100 * (_processor_seconds(far) - before) / (time.perf_counter() - start)
    bench.add("ucx, idle pair, processor time", percent, "%", "<= 2.0")


def _processor_seconds(far: FarEnd) -> float:
    # Nanoseconds of the other's only thread; the fields of /proc/stat are ticks.
    fields = Path(f"/proc/{far.pid}/schedstat").read_text(encoding="ascii").split()
    return time.process_time() + int(fields[0]) / 1e9
