"""The objects that a test must not leave behind."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The number of checks whether another program uses the segments that are left in shared memory.
_LOOKS: Final = 40
_OURS: Final = ("aiodaft", "ucx_")


# Processes that are there for all tests.
STANDING: Final[set[int]] = set()


def descendants(pid: int | None = None) -> set[int]:
    """Every living process below this one, without those that stand by for all tests."""
    found: set[int] = set()
    root = Path(f"/proc/{pid or os.getpid()}/task")
    try:
        tasks = list(root.iterdir())
    except FileNotFoundError:
        return found
    for task in tasks:
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            if child not in STANDING and is_alive(child):
                found.add(child)
                found |= descendants(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_gone(pids: Iterable[int], within: float = 30.0) -> set[int]:
    """The processes that do not end within so many seconds: by default, however slow this machine is."""
    deadline = time.monotonic() + within
    for pid in pids:
        with _end_of(pid) as end:
            if end is not None:
                select.select([end], [], [], max(0.0, deadline - time.monotonic()))
    return set(filter(is_alive, pids))


@contextmanager
def _end_of(pid: int) -> Generator[int | None]:
    """A descriptor that is readable when a process has ended; none if it is gone."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield end
    finally:
        os.close(end)


def open_files(pid: int | str = "self") -> dict[int, str]:
    """The descriptors of a process, and their files."""
    found: dict[int, str] = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue
        # CUDA opens more of them whenever it likes.
        if not target.startswith("/dev/nvidia"):
            found[int(entry)] = target
    return found


@dataclass(frozen=True)
class Snapshot:
    """The objects that exist now."""

    processes: frozenset[int]
    threads: frozenset[str]
    files: tuple[str, ...]
    shared_memory: frozenset[str]
    # Bytes that may not leave the memory: by mlock, or pinned for a device.
    locked: int

    @classmethod
    def take(cls) -> Snapshot:
        for thread in threading.enumerate():
            if "waitpid" in thread.name or "AnyIO worker" in thread.name:
                # The stock loop's own, and those of anyio, which end right after their purpose.
                thread.join(1)
        return cls(
            frozenset(descendants()),
            frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate()),
            tuple(sorted(_kind(target) for target in open_files().values())),
            frozenset(in_shared_memory()),
            status_bytes("VmLck") + status_bytes("VmPin"),
        )

    def new_since(self, earlier: Snapshot) -> dict[str, object]:
        """The objects that have come since; empty if there are none."""
        more = {
            "processes": self.processes - earlier.processes,
            "threads": self.threads - earlier.threads,
            "shared_memory": left_in_shared_memory(earlier.shared_memory),
            "files": _added(self.files, earlier.files),
            "locked": max(0, self.locked - earlier.locked),
        }
        return {name: found for name, found in more.items() if found}


def in_shared_memory() -> set[str]:
    """The files in /dev/shm under a name that this framework, or UCX in it, gives."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(_OURS)}


def left_in_shared_memory(before: Iterable[str], looks: int = _LOOKS) -> set[str]:
    """The files that have come since and are not in use by another program that uses the framework or UCX."""
    left = in_shared_memory() - set(before)
    for look in range(looks):
        left &= in_shared_memory()
        ours = {os.getpid(), *descendants()}
        others = (
            [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in ours] if left else []
        )
        left = {name for name in left if not any(_uses(pid, f"/dev/shm/{name}") for pid in others)}
        if not left:
            break
        if look < looks - 1:
            # A program that is about to map it, or to remove it, does so by the next look.
            threading.Event().wait(0.05)
    return left


def _uses(pid: int, path: str) -> bool:
    try:
        descriptors = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        return path in descriptors or path in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _kind(target: str) -> str:
    # Inode numbers differ; the number of each kind counts.
    return target.split(":[", maxsplit=1)[0]


def _added(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    rest = list(before)
    added: list[str] = []
    for name in now:
        if name in rest:
            rest.remove(name)
        else:
            added.append(name)
    return added


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return status_bytes("VmRSS", pid)


def status_bytes(field: str, pid: int | str = "self") -> int:
    """The kernel's figure of a process's memory, such as VmRSS or its highest value so far, VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def forget_peak(pid: int | str = "self") -> None:
    """Have VmHWM of a process begin anew from its present memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


async def ended(*pids: int) -> None:
    """Wait until these processes are gone."""
    loop = asyncio.get_running_loop()
    for pid in pids:
        with _end_of(pid) as end:
            if end is not None:
                over = asyncio.Event()
                loop.add_reader(end, over.set)
                try:
                    await over.wait()
                finally:
                    loop.remove_reader(end)


def wait_ended(*pids: int) -> None:
    """The same, in programs without a loop."""
    for pid in pids:
        with _end_of(pid) as end:
            if end is not None:
                select.select([end], [], [])
