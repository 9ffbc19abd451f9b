"""Processes as Linux knows them, their forked children, network interfaces, and the place where commands meet programs.

A signal that reaches a forked child before it has left the parent's signal handling goes to the parent instead: the
handler in C writes it to the wakeup socket of the loop, which both processes have, and the child forgets it. So a
process with a loop that handles signals blocks all signals of the forking thread, from before the fork until the child
has left the handling (in the child) or the fork is over (in the parent). `subprocess` runs these hooks only with a
`preexec_fn`; without one it uses vfork and blocks signals itself.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import gc
import glob
import io
import ipaddress
import os
import resource
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, NamedTuple

from aiodaft._protocol.connections.address import parse_address
from aiodaft.exceptions import ResourceExhausted

_STANDARD_ERROR: Final = 2
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

FOR_PROGRAM: Final = (signal.SIGUSR1, signal.SIGUSR2)
UNKNOWN: Final = (None, None)

_libc: Final = ctypes.CDLL(None, use_errno=True)
# Actions of the kernel at the end of a process, and its view of processes; other systems have neither.
HAS_PRCTL: Final = hasattr(_libc, "prctl")
SEES_PROCESSES: Final = os.path.exists("/proc/self/stat")


def fill_standard_streams() -> None:
    """Open those of standard input, output and error that this process was started without (`>&-`).

    Otherwise sockets would take their numbers: uvloop aborts a process that closes one.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(fd, True)
    os.close(fd)


def importable_path() -> list[str]:
    # Import hooks may add other objects.
    return [str(entry) for entry in sys.path]


def fresh_python(
    module: str, *numbers: int, front: Sequence[str] = (), path: Sequence[str] | None = None, python: str = ""
) -> list[str]:
    """The command of a new interpreter that calls `main(*numbers)` of a module.

    Args:
        front: Put before `path` when the module is loaded.
        path: Its `sys.path`. Default: that of this process.
        python: Another interpreter, which has its own `sys.path` after `path`.
    """
    first, last = 1 + len(numbers), 1 + len(numbers) + len(front)
    own = ""
    if python:
        here = tuple(sys.version_info[:2])
        wrong = "'a program of Python %d.%d has no actors of Python %d.%d'"
        own = f" + [*filter(None, sys.path)]; v = sys.version_info[:2]; v == {here} or sys.exit({wrong} % ({here} + v))"
    code = (
        f"import sys; sys.path[:] = sys.argv[{last}:]{own}; from {module} import main; "
        f"sys.path[:0] = sys.argv[{first}:{last}]; main(*map(int, sys.argv[1:{first}]))"
    )
    path = importable_path() if path is None else path
    return [python or sys.executable, "-c", code, *map(str, numbers), *front, *path]


def _prctl(option: int, value: int) -> None:
    if HAS_PRCTL:
        _libc.prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        # It ended before the request.
        os._exit(1)


def is_thread(process: int, thread: int) -> bool:
    return not SEES_PROCESSES or os.path.exists(f"/proc/{process}/task/{thread}")


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    try:
        # As bytes: decoding may import a codec, which this must not interrupt in a signal handler.
        with open("/proc/thread-self/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def resident_bytes() -> int:
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def sleeping_threads() -> dict[int, list[bytes] | None]:
    """By the kernel's number of a thread: a value that changes when it runs; None while it runs."""
    found: dict[int, list[bytes] | None] = {}
    for path in glob.glob("/proc/self/task/*/status"):
        with suppress(OSError), open(path, "rb") as file:
            lines = file.read().splitlines()
            sleeps = any(line.startswith(b"State:\tS") for line in lines)
            # The last two count its context switches.
            found[int(path.split("/")[4])] = lines[-2:] if sleeps else None
    return found


def clock_id() -> str:
    """Processes that give the same name have the same clock of `time.monotonic`."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
    return os.uname().nodename


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def parent_of(pid: int) -> int:
    fields = _stat_of(pid)
    return int(fields[1]) if fields else 0


def kill(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(leader: int) -> None:
    """Does nothing if no process of it is left."""
    # Some systems refuse it if only the remains of processes are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def reap() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended.append((pid, status))
    return ended


def status_of(pid: int) -> tuple[int | None, str | None] | None:
    """Exit code and signal, for a process with another parent: None until it ends, UNKNOWN once it was reaped."""
    fields = _stat_of(pid)
    if not fields:
        return UNKNOWN if fields is not None and SEES_PROCESSES else None
    return describe_status(int(fields[-1])) if fields[0] in {b"Z", b"X"} else None


def signs_of_life(pid: int, others: Collection[int]) -> object:
    """A value that changes while a process or its descendants, `others` left out, use CPU or memory; None while the
    process is stopped.

    Different each time if this process has no descriptor left to read it with.
    """
    if is_stopped(pid):
        return None
    stats = {process: _stat_of(process) for process in process_tree(pid, others)}
    return [
        (process, object() if stat is None else [stat[field : field + 1] for field in (7, 9, 11, 12)])
        for process, stat in stats.items()
    ]


def process_tree(pid: int, others: Collection[int] = ()) -> list[int]:
    """Zombies included; `others` and their descendants left out."""
    found = [pid]
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path, "rb") as file:
            for child in map(int, file.read().split()):
                found += process_tree(child, others) if child not in others else []
    return found


def kill_tree(pid: int) -> None:
    """Its descendants first, because it may adopt orphans."""
    killed = {pid}
    while new := set(process_tree(pid)) - killed:
        for process in new:
            kill(process, signal.SIGKILL)
        killed |= new
    kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """A process that a debugger holds is not stopped."""
    return (_stat_of(pid) or [])[:1] == [b"T"]


def _stat_of(pid: int) -> list[bytes] | None:
    """The fields of proc_pid_stat(5) from the third, the state, on; none if it has ended.

    None if this process has no descriptor left.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the name, may contain any character.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None


def describe_status(status: int) -> tuple[int | None, str | None]:
    return describe_exit(os.waitstatus_to_exitcode(status))


def describe_exit(code: int) -> tuple[int | None, str | None]:
    return (code, None) if code >= 0 else (None, signal.Signals(-code).name)


_LARGEST: Final = {resource.RLIM_INFINITY: "unlimited"}


def exhausted(error: OSError, what: str) -> ResourceExhausted:
    return ResourceExhausted(refusal(error, what))


def refusal(error: OSError, what: str) -> str:
    process, text = f"process {os.getpid()}", error.strerror or str(error)
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = (
            f"{process} has no file descriptors left, its limit is {soft}: close some, or raise the limit before the "
            f"program starts (`ulimit -n`, at most {_LARGEST.get(hard, hard)})"
        )
    elif error.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        reason = (
            f"{process} may make no file, and no shared memory, of more than {soft} bytes: raise the limit before the "
            "program starts (`ulimit -f`)"
        )
    elif error.errno == errno.ENFILE:
        reason = "the machine has no file descriptors left: close some, or raise the limit (`sysctl fs.file-max`)"
    elif error.errno == errno.EAGAIN:
        reason = (
            f"{process} gets no further thread ({text}): raise the limit of its user (`ulimit -u`) or of its container "
            "(pids), or stop other processes"
        )
    elif error.errno in {errno.ENOMEM, errno.ENOSPC}:
        reason = f"{process} gets no memory for it ({text}): free some, or raise the limit of its container"
    else:
        reason = f"{process} is refused it: {text}"
    return f"{what}: {reason}"


_SIOCGIFADDR: Final = 0x8915
_REQUEST: Final = struct.Struct("16s20x4x")
_ADDRESS: Final = slice(20, 24)
_INET6: Final = "/proc/net/if_inet6"


def interface_to(address: str) -> str:
    host, port = parse_address(address)
    family, kind, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(at)
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, ip in (*_addresses4(), *_addresses6()):
        found.setdefault(name, []).append(ip)
    return found


def _addresses4() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
                yield name, socket.inet_ntoa(answer[_ADDRESS])


def _addresses6() -> Iterator[tuple[str, str]]:
    with suppress(OSError), open(_INET6) as file:
        for line in file.read().splitlines():
            digits, *_, name = line.split()
            ip = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not ip.is_link_local:
                yield name, str(ip)


_callbacks: Final[dict[Callable[[], object], None]] = {}


class _Masks(threading.local):
    def __init__(self) -> None:
        self.before: list[set[int]] = []


_masks: Final = _Masks()


def when_forked(callback: Callable[[], object]) -> None:
    _watch()
    _callbacks[callback] = None


def no_more(callback: Callable[[], object]) -> None:
    _callbacks.pop(callback, None)


def leave_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def _watch() -> None:
    # For good: Python cannot undo it.
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_tell)


def _block_signals() -> None:
    # A call of its own: a handler may raise out of the second one, and the mask has changed by then.
    _masks.before.append({*signal.pthread_sigmask(signal.SIG_BLOCK, ())})
    if leave_signals in _callbacks:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock_signals() -> None:
    # Empty if a handler raised before anything was blocked.
    if _masks.before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _tell() -> None:
    callbacks = list(_callbacks)
    _callbacks.clear()
    try:
        for callback in callbacks:
            callback()
    finally:
        _unblock_signals()


# `io.IOBase` is an abstract class, which those in C are registered with.
_FILE: Final = io.IOBase.__mro__[1]


def finish() -> None:
    with suppress(BaseException):
        _keep_operators()
        atexit._run_exitfuncs()
    files: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), _FILE)]
    _flush(files)
    # Those in Python, such as of gzip, write an end to the file below them.
    for file in files:
        if type(file).__module__ != "_io":
            with suppress(Exception):
                file.close()
    _flush(files)


def _keep_operators() -> None:
    """torch would withdraw its operators from itself, which takes 30 ms."""
    finalizers: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]  # private
    for finalizer, info in list(finalizers.items()):
        if getattr(info.func, "__module__", None) == "torch.library":
            finalizer.atexit = False


def _flush(files: list[Any]) -> None:
    for file in files:
        with suppress(Exception):
            file.flush()


# Sent to a fork server. Programs do not use it, unlike SIGUSR1.
VISIT: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
_CREDENTIALS: Final = struct.Struct("3i")
_ROOT: Final = 0
# Names the file of a fork server in which a command says where it listens. Only the fork server's user and root reach
# it, by /proc, so that no stranger can take the command's place.
_BOARD: Final = "aiodaft-command"
_LONGEST: Final = 100


class OtherEnd(NamedTuple):
    pid: int
    uid: int


def open_board() -> int:
    return os.memfd_create(_BOARD, os.MFD_CLOEXEC)


@contextmanager
def asking(fork_server: int, address: str) -> Generator[None]:
    """Say where a command listens for the processes that a fork server leads to.

    Raises:
        BlockingIOError: Another command asks these.
        OSError: The fork server is gone, or belongs to another user.
    """
    with open(_open_board(fork_server, os.O_RDWR), "r+b", buffering=0) as board:
        fcntl.flock(board, fcntl.LOCK_EX | fcntl.LOCK_NB)
        board.truncate()
        board.write(address.encode())
        yield


def address(fork_server: int) -> str:
    with open(_open_board(fork_server, os.O_RDONLY), "rb", buffering=0) as board:
        return board.read(_LONGEST).decode()


def _open_board(fork_server: int, flags: int) -> int:
    folder = f"/proc/{fork_server}/fd"
    for fd in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{fd}").startswith(f"/memfd:{_BOARD} "):
                return os.open(f"{folder}/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {fork_server} is no fork server of this release")


def debug_address(pid: int | None) -> str:
    """None: for all processes of this user."""
    return f"\0aiodaft-debug-user-{os.getuid()}" if pid is None else f"\0aiodaft-debug-{pid}"


def debug_addresses() -> list[str]:
    server = os.getppid()
    return [debug_address(pid) for pid in (os.getpid(), server, parent_of(server), None) if pid != 0]


def other_end(connection: socket.socket) -> OtherEnd:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return OtherEnd(pid, uid)


def may_debug(connection: socket.socket) -> bool:
    return other_end(connection).uid in {os.geteuid(), _ROOT}
