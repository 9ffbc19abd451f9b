"""Arenas for tests, and the memory and descriptors of a transport in a process."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from leaks import open_files

from aiodaft_transport.memory import DEFAULT_KEEP, Arena, ArenaBlock

_NAME = "memfd:aiodaft"


def memfds(pid: int | None = None) -> int:
    """The number of different segments that a process has open."""
    if pid is None:
        found = [fd for fd, target in open_files().items() if _NAME in target]
        return len({os.fstat(fd).st_ino for fd in found})
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(_NAME in target for target in links)


def descriptors_of_segments() -> int:
    """The number of descriptors of segments here; Python's mmap keeps one of its own for each mapping."""
    return sum(_NAME in target for target in open_files().values())


def segments_mapped(pid: int | str = "self") -> int:
    """The number of different segments that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[4] for line in lines if _NAME in line})


def mappings(pid: int | str = "self") -> int:
    """The number of mappings of segments in a process."""
    return sum(_NAME in line for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines())


@contextmanager
def opened_arena(*, shared: bool = True, keep: int = DEFAULT_KEEP, closed: list[int] | None = None) -> Generator[Arena]:
    """An arena that is closed at the end; `closed` gets the ids of segments as they go."""
    arena = Arena(shared=shared, keep=keep, on_segment_closed=None if closed is None else closed.append)
    try:
        yield arena
    finally:
        arena.close()


def spans(blocks: list[ArenaBlock]) -> list[tuple[int, int]]:
    return sorted((block.address, block.address + block.nbytes) for block in blocks)


@contextmanager
def no_more_files(left: int = 0) -> Generator[None]:
    """Let this process open just so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sorted(open_files())
    gaps = len(set(range(used[-1] + 1)) - set(used))
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(gaps)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(*used, *fillers, 0) + 1 + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


@contextmanager
def no_more_threads() -> Generator[None]:
    """Refuse each further thread of this process, in the words of Python. The limit of the system is one of a user."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    threading.Thread.start = refuse  # type: ignore[method-assign]  # the system's refusal
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]  # as it was
