"""A control group with little memory, where the machine lets tests make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def little_memory(limit: int) -> Generator[Path]:
    """A group of processes that may use `limit` bytes together. Skips the test where that cannot be had."""
    parent, setting = (_ROOT / "memory", "memory.limit_in_bytes")
    if (_ROOT / "cgroup.controllers").exists():
        parent, setting = (_ROOT, "memory.max")
    group = parent / f"aiodaft-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / setting).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"memory cannot be limited here: {error}")
        yield group
    finally:
        _remove(group)


def move(pid: int, group: Path) -> None:
    """Put a process into a group, with the processes that it starts from then on."""
    (group / "cgroup.procs").write_text(str(pid))


def _remove(group: Path) -> None:
    # Ended processes are counted for a moment longer.
    while True:
        try:
            group.rmdir()
        except OSError:
            os.sched_yield()
        else:
            return
