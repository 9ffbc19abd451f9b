"""The fork server: the process that workers are forked from, and their parent.

Started once per runtime, by exec. It has one thread and no loop, GPU or socket of another process, so forking it is
safe; it imports the modules that all actors need, so a worker starts in milliseconds and shares that memory
copy-on-write. When its connection to the node ends, or the thread that started it, it kills every worker and all their
descendants, and ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.node.worker import (
    Exited,
    Failed,
    Importing,
    Kill,
    Message,
    Spawn,
    Spawned,
    Unforkable,
    Visited,
    change_environment,
    packed,
    start_fresh,
    unpacked,
)
from aiodaft._runtime.platform.capabilities import can_be_asked
from aiodaft._runtime.platform.linux import (
    FOR_PROGRAM,
    VISIT,
    adopt_orphans,
    children,
    describe_status,
    die_with_parent,
    fill_standard_streams,
    is_thread,
    kill,
    open_board,
    reap,
    session_of,
)
from aiodaft._runtime.process import has_initialized_cuda
from aiodaft_transport.system import remove_folder, sweep_folders

_MAX_MESSAGE: Final = 1 << 20
_MAX_FDS: Final = 4
# Seconds that workers have to end by themselves when the node is gone.
_LAST_GRACE: Final = 0.3
_LAST_BREATH: Final = 0.2
# Modules that the code of actors loads when it first uses them: loaded here, once for all workers.
OF_ACTORS: Final = (
    "uvloop",
    "tblib.pickling_support",
    "aiodaft._runtime.serialization.code_pickler",
    "aiodaft.channel",
    "aiodaft.deadlines",
    "aiodaft.member",
)
# Read by torch, which else initialises CUDA.
_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"


class ForkServer:
    def __init__(self, node: socket.socket, parent: int, thread: int, *, fork: bool) -> None:
        self._node = node
        self._pid = os.getpid()
        self._parent = parent
        self._thread = thread
        self._workers: dict[int, PeerId] = {}
        # The folders in which the node keeps the code that programs have shipped.
        self._code: set[str] = set()
        self._fork = fork
        self._environment = dict(os.environ)
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._board = open_board() if can_be_asked() else None

    def run(self) -> None:
        adopt_orphans()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        # The program may have been started with signals blocked, as some batch systems do.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # SIGTERM is for the node, with which this process ends, and signals that batch systems send to all are for
        # the program.
        for number in (signal.SIGCHLD, signal.SIGTERM, *FOR_PROGRAM, VISIT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCONT, lambda *_: self._continued())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._node, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        try:
            while self._serve():
                pass
        finally:
            self._sweep()
            self._let_go()

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGCONT, VISIT):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for end in (self._node, self._wakeup, self._wakeup_end):
            end.close()
        if self._board is not None:
            os.close(self._board)

    def _continued(self) -> None:
        """SIGCONT, which also wakes a stopped process: the parent is gone, or closes its runtime.

        A handler, because an import may take long; a kill at the parent's end would leave the descendants of the
        workers.
        """
        deadline = time.monotonic() + _LAST_BREATH
        while os.getpid() == self._pid and time.monotonic() < deadline:
            if self._node_is_gone():
                self._sweep()
                os._exit(0)
            if os.getppid() != self._parent or not is_thread(self._parent, self._thread):
                self._sweep()
                os._exit(1)
            select.select([], [], [], _LAST_BREATH / 20)

    def _node_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._node, 0)
        return bool(poll.poll(0))

    def _serve(self) -> bool:
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._wakeup in ready:
            numbers = b""
            with suppress(BlockingIOError):
                numbers = self._wakeup.recv(4096)
            if VISIT in numbers:
                self._send(Visited(self._pid))
            self._report_ended()
        return self._node not in ready or self._take_order()

    def _take_order(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._node, _MAX_MESSAGE, _MAX_FDS)
        except OSError:
            return False
        if not data:
            return False
        match unpacked(data):
            case Spawn() as order:
                self._spawn(order, fds)
            case Kill(worker, number):
                for pid in [pid for pid, other in self._workers.items() if other == worker]:
                    kill(pid, number)
        for fd in fds:
            os.close(fd)
        return True

    def _spawn(self, order: Spawn, fds: list[int]) -> None:
        try:
            os.chdir(order.directory)
        except OSError as error:
            why = f"the working directory that the controller had when it spawned the actor cannot be entered: {error}"
            self._send(Failed(order.worker, why))
            return
        if not order.python:
            sys.path[:] = order.path
        self._code.update(map(os.path.dirname, order.code))
        change_environment(self._environment, order.changes)
        try:
            self._import_all(order.modules)
            pid = self._fork_worker(order, fds) if self._fork and not order.python else _exec_worker(order, fds)
        except Exception:  # noqa: BLE001 - the node handles every failure
            self._send(Failed(order.worker, traceback.format_exc()))
        else:
            self._workers[pid] = order.worker
            self._send(Spawned(order.worker, pid))

    def _import_all(self, modules: list[str]) -> None:
        """Import modules, up to one that initialises CUDA: no child could use it, so none is forked from then on."""
        for name in modules:
            if self._fork and name not in sys.modules:
                self._send(Importing(name))
                # An actor that needs the module raises a better error.
                with suppress(Exception), _gpus_looked_for_without_cuda():
                    importlib.import_module(name)
                if has_initialized_cuda():
                    self._fork = False
                    self._send(Unforkable(name))

    def _fork_worker(self, order: Spawn, fds: list[int]) -> int:
        gc.collect()
        # The collector does not touch these objects, so workers go on sharing their memory.
        gc.freeze()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self._let_go()
            os.environ.update(order.environment)
            # Not in the fork server: its imports are for the workers of all programs.
            sys.path[:0] = order.code
            from aiodaft._runtime.node.worker_main import run_forked  # noqa: PLC0415 - only the child needs it, and it is loaded by then

            status = run_forked(parent, order.settings, *fds)
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(status)

    def _report_ended(self) -> None:
        ended = reap()
        for pid, status in ended:
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self._send(Exited(worker, *describe_status(status)))
        if ended:
            sweep_folders()
            # The children of an ended worker are ours now, and theirs will be: none may outlive the actor. Daemons of
            # live workers stay, by their sessions.
            for orphan in children():
                if orphan not in self._workers and session_of(orphan) not in self._workers:
                    kill(orphan, signal.SIGKILL)

    def _send(self, message: Message) -> None:
        # The end of the node is noticed where orders are read.
        with suppress(OSError):
            self._node.send(packed(message))

    def _sweep(self) -> None:
        """End every descendant. Workers end with their connection to the node; the rest is killed."""
        # Not within itself: an import that a signal interrupts cannot be made again.
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        deadline = time.monotonic() + _LAST_GRACE
        while children() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._wakeup:
                    with suppress(BlockingIOError):
                        self._wakeup.recv(4096)
            reap()
            if not set(children()) & set(self._workers):
                break
        while remaining := children():
            for pid in remaining:
                kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)
        for folder in self._code:
            # The node does this, unless it was killed.
            remove_folder(folder)
        sweep_folders()


@contextmanager
def _gpus_looked_for_without_cuda() -> Generator[None]:
    """Have torch.cuda.is_available(), which imports call, ask the driver without CUDA."""
    if _CHECK in os.environ:
        yield
        return
    os.environ[_CHECK] = "1"
    try:
        yield
    finally:
        os.environ.pop(_CHECK, None)


def _exec_worker(order: Spawn, fds: list[int]) -> int:
    process = start_fresh(order, os.environ, fds)
    process.returncode = 0
    return process.pid


def main(fd: int, parent: int, thread: int, fork: int) -> None:
    """Entry point of the process; `thread` is the thread of the parent that started it."""
    fill_standard_streams()
    server = ForkServer(socket.socket(fileno=fd), parent, thread, fork=bool(fork))
    die_with_parent(parent, signal.SIGCONT)
    # Imports the modules of every worker; an import has no side effects.
    from aiodaft._runtime.node import worker_main as worker  # noqa: F401, PLC0415 - loaded for the children

    for name in OF_ACTORS:
        with suppress(ImportError):
            importlib.import_module(name)
    server.run()
