"""Fork servers and nodes that are forked: each would load the same modules at its start, for 0.2 or 0.3 s of CPU.

A process that has loaded them forks itself for each runtime and node of the tests. The new process is a child of that
of the tests (CLONE_PARENT), with the streams, directory and environment that it has at that moment. It is started as
usual where the process of the tests is not as it was when the modules were loaded: in its limits, in the settings of
the interpreter, in the thread that asks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from leaks import STANDING

from aiodaft._runtime.node import forkserver, launcher
from aiodaft._runtime.platform.linux import die_with_parent

_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT: Final = 0x8000
_SETTINGS: Final = ("PYTHON", "LD_", "OMP_", "MALLOC_", "CUDA_")
_LIMITS: Final = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
# The name of the fork server's module is in its command, by which `aiodaft ps` finds it.
_MAIN: Final = "import sys; sys.path.insert(0, sys.argv[1]); from warm_servers import serve; serve(*sys.argv[2:])"
_OF_FORK_SERVERS: Final = (forkserver.__name__, "aiodaft._runtime.node.worker_main", *forkserver.OF_ACTORS)
_MAX_ORDER: Final = 1 << 20


class _Forked(subprocess.Popen[bytes]):
    """A child that another process has made."""

    def __init__(self, pid: int, command: Sequence[str], stdout: Any = None) -> None:
        self.pid, self.args = pid, list(command)
        self.returncode: Any = None
        self.stdin, self.stdout, self.stderr = None, stdout, None
        self._child_created, self._waitpid_lock = True, threading.Lock()


class _Source:
    """A process that has loaded modules, and forks itself."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            here = str(Path(__file__).parent)
            command = [sys.executable, "-c", _MAIN, here, str(fd), str(os.getpid()), *modules]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        STANDING.add(self.pid)
        self._surroundings = _surroundings(os.environ)

    def fits(self, environment: Mapping[str, str]) -> bool:
        asks = threading.current_thread() is threading.main_thread()
        return asks and self._surroundings == _surroundings(environment)

    def fork(self, command: Sequence[str], environment: Mapping[str, str], *fds: int) -> int:
        """Fork a process that does as a command would, with its output and errors, and other descriptors; its pid."""
        socket.send_fds(self._orders, [pickle.dumps((command, os.getcwd(), environment))], fds)
        return int(self._orders.recv(64))

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
        STANDING.discard(self.pid)


class WarmServers:
    """The sources of fork servers: one for each set of modules."""

    def __init__(self) -> None:
        self._sources: dict[tuple[str, ...], _Source] = {}
        self._modules: tuple[str, ...] = ()

    def start(self, *modules: str) -> None:
        """Have fork servers from now on come with these modules."""
        self._modules = modules
        if modules not in self._sources:
            self._sources[modules] = _Source((*_OF_FORK_SERVERS, *modules))

    def popen(self, command: list[str], *, pass_fds: tuple[int], env: dict[str, str], **options: Any) -> Any:
        source = self._sources.get(self._modules)
        if source is None or not source.fits(env):
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **options)
        return _Forked(source.fork(command, env, 1, 2, *pass_fds), command)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


@contextmanager
def warm_servers() -> Generator[WarmServers]:
    """Runtimes of this process get forked fork servers, where the machine is one that this file knows."""
    warm, started = WarmServers(), launcher.subprocess
    if _is_known():
        launcher.__dict__["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": warm.popen})
    try:
        yield warm
    finally:
        launcher.__dict__["subprocess"] = started
        warm.close()


class Commands:
    """Commands, `python -m MODULE`, whose output is read, forked from a process that has loaded their modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._source: _Source | None = None

    def load(self) -> None:
        """Have commands forked from now on."""
        if self._source is None and _is_known():
            self._source = _Source(self._modules)

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        if self._source is None or not self._source.fits(os.environ):
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        output, end = os.pipe()
        try:
            pid = self._source.fork(command, dict(os.environ), end, 2)
        finally:
            os.close(end)
        return cast("subprocess.Popen[str]", _Forked(pid, command, open(output, encoding="utf-8")))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def _is_known() -> bool:
    return sys.platform == "linux" and platform.machine() in _CLONE


def _surroundings(environment: Mapping[str, str]) -> object:
    """The circumstances that a process has from its start."""
    settings = {name: value for name, value in environment.items() if name.startswith(_SETTINGS)}
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    return settings, limits, os.sched_getaffinity(0), os.getresuid(), os.getresgid()


# In the process that is forked.


def serve(fd: str, parent: str, *modules: str) -> None:
    die_with_parent(int(parent))
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(fd)) as orders:
        while True:
            order, fds, _, _ = socket.recv_fds(orders, _MAX_ORDER, 3)
            if not order:
                return
            pid = _fork_beside()
            if pid == 0:
                break
            orders.send(str(pid).encode())
            for descriptor in fds:
                os.close(descriptor)
    _become(fds, *pickle.loads(order))


def _fork_beside() -> int:
    """Fork a child of this process's parent; its pid, and 0 in the child."""
    python, number = ctypes.pythonapi, _CLONE[platform.machine()]
    python.PyOS_BeforeFork()
    pid = ctypes.CDLL(None).syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return int(pid)


def _become(fds: Sequence[int], command: Sequence[str], directory: str, environment: Mapping[str, str]) -> None:
    """Do as a command would: that of a fork server, or `python -m MODULE`."""
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        os.dup2(fds[number - 1], number)
        os.close(fds[number - 1])
        setattr(sys, name, open(number, "w", buffering=1, errors=errors, closefd=False))  # noqa: SIM115 - for its life
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if command[1] == "-m":
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return
    os.setsid()
    # Behind the interpreter, its option, the code and four numbers comes the path.
    parent, thread, fork = map(int, command[4:7])
    sys.path[:] = command[7:]
    forkserver.main(*fds[2:], parent, thread, fork)
