"""What Linux offers to make sure that no process outlives the one it works for."""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

# Neither an exit code nor a signal.
UNKNOWN: Final = (None, None)

IS_LINUX: Final = sys.platform == "linux"


def importable_path() -> list[str]:
    """Where modules of this process come from."""
    # Import hooks may put other things there.
    return [str(entry) for entry in sys.path]


def fresh_python(module: str, *numbers: int) -> list[str]:
    """The command of a new interpreter that calls `main(*numbers)` of a module, found where this one finds it."""
    first = 1 + len(numbers)
    code = (
        f"import sys; sys.path[:] = sys.argv[{first}:]; from {module} import main; main(*map(int, sys.argv[1:{first}]))"
    )
    return [sys.executable, "-c", code, *map(str, numbers), *importable_path()]


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


def is_thread(process: int, thread: int) -> bool:
    """Whether a process, if it can be seen from here (0 if not), still has a thread."""
    return not IS_LINUX or not process or os.path.exists(f"/proc/{process}/task/{thread}")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The processes whose parent this single-threaded process is, by the pids that they have for it."""
    visible = _visible_children()
    return visible if visible_pid() == os.getpid() else [_pid_inside(pid) for pid in visible]


def visible_pid(child: int | None = None) -> int:
    """What everybody else calls this process, or a child of it: in a PID namespace, that is not its own pid."""
    try:
        own = int(os.readlink("/proc/self"))
    except OSError:
        return child or os.getpid()
    if child is None or own == os.getpid():
        return child or own
    return next((pid for pid in _visible_children() if _pid_inside(pid) == child), child)


def _visible_children() -> list[int]:
    try:
        # Bytes: a codec may have to be imported, which a signal handler that looks as well must not interrupt.
        with open("/proc/thread-self/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _pid_inside(visible: int) -> int:
    try:
        with open(f"/proc/{visible}/status", encoding="utf-8", errors="replace") as file:
            return next(int(line.split()[-1]) for line in file if line.startswith("NSpid:"))
    except (OSError, StopIteration):
        # Gone; no process has this pid.
        return 0


def session_of(pid: int) -> int:
    """The session of a process; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def kill(pid: int, number: int) -> None:
    """Send a signal to a child; nothing if it is gone."""
    if pid:
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


def status_of(pid: int) -> tuple[int | None, str | None] | None:
    """As `describe_status`, of a process that others wait for; None while it has not ended, UNKNOWN once they have."""
    try:
        fields = _stat_of(pid)
    except OSError:
        # This process has no descriptor to look with.
        return None
    if not fields:
        return UNKNOWN if IS_LINUX else None
    return describe_status(int(fields[-1])) if fields[0] in {b"Z", b"X"} else None


def signs_of_life(pid: int, others: Collection[int]) -> object:
    """What changes while a process, or a child that it waits for, does anything; None while the process is stopped.

    If this process has no descriptor to look with, what it gives is like nothing before.

    Args:
        pid: The process.
        others: Children that it does not wait for.
    """
    if is_stopped(pid):
        return None
    stats = {}
    try:
        for process in family(pid, others):
            stats[process] = _stat_of(process)
    except OSError:
        return object()
    # Page faults and CPU time.
    return [(process, [stat[field : field + 1] for field in (7, 9, 11, 12)]) for process, stat in stats.items()]


def family(pid: int, others: Collection[int] = ()) -> list[int]:
    """A process and its descendants, without some children and theirs. Those that wait to be reaped are among them."""
    found = [pid]
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path, "rb") as file:
            for child in map(int, file.read().split()):
                found += family(child, others) if child not in others else []
    return found


def kill_family(pid: int) -> None:
    """Kill a process that adopts orphans and does not run any more, after all its descendants."""
    killed = {pid}
    while new := set(family(pid)) - killed:
        for process in new:
            kill(process, signal.SIGKILL)
        killed |= new
    kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP). One that a debugger holds is not."""
    try:
        return _stat_of(pid)[:1] == [b"T"]
    except OSError:
        # This process has no descriptor to look with.
        return False


def _stat_of(pid: int) -> list[bytes]:
    """The fields of proc_pid_stat(5) from the third one, the state, to the last one, the status; none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the name, may contain anything.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def describe_status(status: int) -> tuple[int | None, str | None]:
    """Exit code, or name of the signal, of an ended process."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, signal.Signals(-code).name)
