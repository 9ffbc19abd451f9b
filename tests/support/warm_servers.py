"""Fork servers that are forked: each would load the same modules at its start, for a quarter of a second of CPU.

A process that has loaded them forks itself for each runtime of the tests. The new fork server is a child of the
process of the tests (CLONE_PARENT), with the streams, directory and environment that it has at that moment. A runtime
starts its fork server itself where the process of the tests is not as it was when the modules were loaded: in its
limits, in the settings of the interpreter, in the thread that asks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from leaks import STANDING

from aiodaft._runtime.node import forkserver, launcher
from aiodaft._runtime.platform.linux import die_with_parent

_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT: Final = 0x8000
_SETTINGS: Final = ("PYTHON", "LD_", "OMP_", "MALLOC_", "CUDA_")
_LIMITS: Final = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
# The name of the fork server's module is in its command, by which `aiodaft ps` finds it.
_MAIN: Final = "import sys; sys.path.insert(0, sys.argv[1]); from warm_servers import serve; serve(*sys.argv[2:])"
_MAX_ORDER: Final = 1 << 20


class _Forked(subprocess.Popen[bytes]):
    """A child that another process has made."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args = pid, "a fork server"
        self.returncode: Any = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


class _Source:
    """A process that has loaded modules, and forks itself."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            here = str(Path(__file__).parent)
            command = [sys.executable, "-c", _MAIN, here, str(fd), str(os.getpid()), forkserver.__name__, *modules]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        self._surroundings = _surroundings(os.environ)

    def fits(self, environment: Mapping[str, str]) -> bool:
        asks = threading.current_thread() is threading.main_thread()
        return asks and self._surroundings == _surroundings(environment)

    def fork(self, command: Sequence[str], fd: int, environment: Mapping[str, str]) -> _Forked:
        socket.send_fds(self._orders, [pickle.dumps((command, os.getcwd(), environment))], [fd, 1, 2])
        return _Forked(int(self._orders.recv(64)))

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


class WarmServers:
    """The sources of fork servers: one for each set of modules."""

    def __init__(self) -> None:
        self._sources: dict[tuple[str, ...], _Source] = {}
        self._modules: tuple[str, ...] = ()

    def start(self, *modules: str) -> None:
        """Have fork servers from now on come with these modules."""
        self._modules = modules
        if modules not in self._sources:
            source = self._sources[modules] = _Source(modules)
            STANDING.add(source.pid)

    def popen(self, command: list[str], *, pass_fds: tuple[int], env: dict[str, str], **options: Any) -> Any:
        source = self._sources.get(self._modules)
        if source is None or not source.fits(env):
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **options)
        return source.fork(command, *pass_fds, env)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
            STANDING.discard(source.pid)


@contextmanager
def warm_servers() -> Generator[WarmServers]:
    """Runtimes of this process get forked fork servers, where the machine is one that this file knows."""
    warm, started = WarmServers(), launcher.subprocess
    if platform.machine() in _CLONE and sys.platform == "linux":
        launcher.__dict__["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": warm.popen})
    try:
        yield warm
    finally:
        launcher.__dict__["subprocess"] = started
        warm.close()


def _surroundings(environment: Mapping[str, str]) -> object:
    """The circumstances that a process has from its start."""
    settings = {name: value for name, value in environment.items() if name.startswith(_SETTINGS)}
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    return settings, limits, os.sched_getaffinity(0), os.getresuid(), os.getresgid()


# In the process that is forked.


def serve(fd: str, parent: str, *modules: str) -> None:
    die_with_parent(int(parent))
    for name in (*modules, "aiodaft._runtime.node.worker_main", *forkserver.OF_ACTORS):
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
                orders.close()
                _become(fds, *pickle.loads(order))
            orders.send(str(pid).encode())
            for descriptor in fds:
                os.close(descriptor)


def _fork_beside() -> int:
    """Fork a child of this process's parent; its pid, and 0 in the child."""
    python, number = ctypes.pythonapi, _CLONE[platform.machine()]
    python.PyOS_BeforeFork()
    pid = ctypes.CDLL(None).syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return int(pid)


def _become(fds: Sequence[int], command: Sequence[str], directory: str, environment: Mapping[str, str]) -> None:
    """Be the fork server that a command would start."""
    served, *streams = fds
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # Behind the interpreter, its option, the code and four numbers comes the path.
    parent, thread, fork = map(int, command[4:7])
    sys.path[:] = command[7:]
    try:
        forkserver.main(served, parent, thread, fork)
    finally:
        os._exit(0)
