"""The facts of a process for all of its parts: its id, its loop, its tasks, its clock, whether it is closed.

Functions that users call without a runtime (`Channel()`, `empty()`, unpickling) find their process, and its parts by
class, through `current_process()`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import astuple
from typing import Any, Final, NamedTuple, TypeVar, cast

from aiodaft._protocol.diagnostics.failures import FailureLog, Kind, Subject
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.node.worker import Code, Patience
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.linux import when_forked
from aiodaft._runtime.platform.tasks import Recorder, TaskOwner
from aiodaft.exceptions import RuntimeClosed
from aiodaft_transport import Key

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

PICKLE: Final = "pickle"
MSGPACK: Final = "msgpack"

# uvloop's clock counts whole milliseconds.
_TICK: Final = 1e-3


class ProcessOptions(NamedTuple):
    """The options of a process of a runtime.

    Attributes:
        cluster: Name of the runtime, or of the cluster that it is part of; handles work inside it.
        owner: The controller whose end ends this process.
        direct: Whether the user has chosen none: tensors in GPU memory go from GPU to GPU, and values to other machines
            over the best transport that leads there.
        grace: Seconds that cancelled calls get for their cleanup.
        max_pending: Calls to one process that may be without an answer.
        codec: "pickle", or "msgpack": no process of the runtime pickles or unpickles.
        stop_grace: Seconds that calls under way get when their actor is stopped.
        patience: The limits of the `Patience` with its actors.
        program: The controller on another machine that shows the output and logs of this process; "": its node does.
        telemetry: The function that sets up OpenTelemetry in a process, packed; b"" for none. See `begin_telemetry`.
        seed: The seed of the random numbers of actors; None for random ones.
        python: The interpreter of actors that this process spawns; "": that of their node.
    """

    id: PeerId
    node: str
    cluster: str
    owner: PeerId
    agent: PeerId
    coordinator: PeerId
    transport: str
    direct: bool
    grace: float
    max_pending: int
    codec: str = PICKLE
    stop_grace: float = 5.0
    patience: Sequence[float | None] = astuple(Patience())
    program: PeerId = PeerId("")
    telemetry: bytes = b""
    seed: int | None = None
    python: str = ""


class Process:
    # Why the process is closed; None while it is open.
    closed: str | None = None
    # While a trace is recorded, or telemetry is on.
    recorder: Recorder | None = None

    def __init__(self, options: ProcessOptions, key: Key, env: Env) -> None:
        self.options = options
        self.id = options.id
        self.connect: Callable[[str], Awaitable[socket.socket]]
        # Another process, after the coordinator was started again.
        self.coordinator = options.coordinator
        # The code that the actors of this process import before any other.
        self.code = Code(options.id)
        self.grace = options.grace
        self.failures = FailureLog()
        self.env = env
        self.pid = env.pid()
        self.loop = asyncio.get_running_loop()
        self.tasks = TaskOwner(f"aiodaft {options.id}")
        self.helper_thread = env.thread(f"aiodaft {options.id} copies", self.loop)
        # Runs functions of transports there.
        self.in_thread = self.helper_thread.run
        self.key = key
        self.numbers = cast("Iterator[CallId]", itertools.count(1))
        self.next_number = self.numbers.__next__
        self._thread = threading.get_ident()
        self._parts: dict[type, object] = {}

    @property
    def runtime_name(self) -> str:
        return self.options.owner if self.closed is None else f"{self.options.owner}, which is closed"

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def is_past(self, deadline: float | None) -> bool:
        return deadline is not None and self.loop.time() + _TICK >= deadline

    def note_failure(self, what: Kind, actor: str, error: BaseException, method: str = "") -> None:
        self.failures.note(Subject(what, actor, method, self.id, self.pid), error, self.env.monotonic())

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        self.tasks.create_task(coro, name=name)

    def call_soon(self, callback: Callable[[], object], /) -> None:
        """Run something on the loop; from any thread, also while garbage is collected."""
        # A closed loop runs nothing; the objects that it would have freed went with it.
        with suppress(RuntimeError):
            if self.is_here:
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)

    def on_loop(self, job: Callable[[], ResultT]) -> ResultT:
        """Run a job on the loop, and block this thread until it is done, so its data does not change meanwhile.

        Raises:
            RuntimeClosed: The loop is closed.
            BaseException: The error of the job.
        """
        if self.is_here:
            return job()
        done: Future[ResultT] = Future()
        try:
            self.loop.call_soon_threadsafe(_settle, done, job)
        except RuntimeError:
            raise self.closing from None
        try:
            return done.result()
        finally:
            # An error refers to this frame: break the circle.
            del done

    @property
    def closing(self) -> RuntimeClosed:
        return RuntimeClosed(self.closed or "the runtime is closed")

    def check_open(self, what: str) -> None:
        if self.closed is not None:
            raise RuntimeClosed(f"{what}: {self.closed}")

    def provide(self, kind: type[PartT], part: PartT) -> None:
        self._parts[kind] = part

    def part(self, kind: type[PartT]) -> PartT:
        return cast("PartT", self._parts[kind])

    def find(self, kind: type[PartT]) -> PartT | None:
        return cast("PartT | None", self._parts.get(kind))


def _settle(done: Future[ResultT], job: Callable[[], ResultT]) -> None:
    try:
        done.set_result(job())
    except BaseException as error:  # noqa: BLE001 - the waiting thread gets every error
        done.set_exception(error)


_context_process: ContextVar[Process | None] = ContextVar("aiodaft_process", default=None)
# The open runtimes' processes, oldest first, and the function that each calls in a forked child. A worker has exactly
# one.
_open: dict[Process, Callable[[], object]] = {}


def opened(process: Process, stay_behind: Callable[[], object]) -> None:
    when_forked(_stay_behind)
    _open[process] = stay_behind
    _context_process.set(process)


def closed(process: Process) -> None:
    _open.pop(process, None)


def check_codec(codec: str) -> None:
    """Raise ValueError for an unknown codec, or one that no runtime may have beside the open ones."""
    if codec not in {PICKLE, MSGPACK}:
        raise ValueError(f"a codec is {PICKLE!r} or {MSGPACK!r}, not {codec!r}")
    if any(process.options.codec != codec for process in _open):
        raise ValueError(
            f"a runtime with another codec than {codec!r} is open: a process either unpickles its messages or not"
        )


def refuses_pickle() -> bool:
    """Whether this process neither pickles nor unpickles: the codec of its runtimes is "msgpack"."""
    # A copy: helper threads ask, too.
    return any(process.options.codec == MSGPACK for process in tuple(_open))


def _stay_behind() -> None:
    callbacks = list(_open.values())
    _open.clear()
    for callback in callbacks:
        callback()


def current_process() -> Process:
    """The process object of the runtime that surrounds the caller, or else the only open one.

    Raises:
        RuntimeClosed: No runtime is open, or several are and none surrounds the caller.
    """
    process = _context_process.get()
    if process is not None and process in _open:
        return process
    if len(_open) == 1:
        return next(iter(_open))
    if not _open:
        raise RuntimeClosed("no runtime is open: use this inside `async with aiodaft.Runtime()`")
    raise RuntimeClosed(f"{len(_open)} runtimes are open: use this inside the `async with` of the one you mean")
