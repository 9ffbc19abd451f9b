"""What Linux offers to make sure that no process outlives the one it works for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

IS_LINUX: Final = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    if IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal when the parent ends, whatever this process is doing.

    The signal comes when the *thread* of the parent ends that has started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        # It ended before we asked.
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The processes whose parent this single-threaded process is."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def session_of(pid: int) -> int:
    """The session of a process; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def kill(pid: int, number: int) -> None:
    """Send a signal to a child; nothing if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """Collect the children that ended: pid and status, as `waitpid` gives them."""
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended.append((pid, status))
    return ended


def describe_status(status: int) -> tuple[int | None, str | None]:
    """Exit code, or name of the signal, of an ended process."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, signal.Signals(-code).name)
