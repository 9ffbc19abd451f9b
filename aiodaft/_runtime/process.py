"""The facts of a process for all of its parts: its id, its loop, its tasks, its clock, whether it is closed.

`Env` is the seam for time, randomness, identity and timeouts, so that a runtime can be simulated.

Functions that users call without a runtime (`Channel()`, `empty()`, unpickling) find their process, and its parts by
class, through `current_process()`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field
from typing import Any, Final, NamedTuple, TypeVar, cast

from aiodaft._protocol.diagnostics.failures import FailureLog, Kind, Subject
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.node.resources import Gpu
from aiodaft._protocol.node.worker import PERIOD, Code, Patience
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.linux import when_forked
from aiodaft._runtime.platform.tasks import Recorder, TaskOwner
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft.exceptions import InsufficientResources, RuntimeClosed
from aiodaft_transport import Key

# Claims on GPUs, so that two runtimes of a machine do not give the same GPU to their actors. A claim is a listening
# unix socket, named after the GPU in the abstract namespace. The kernel gives a name to one socket at a time, frees it
# when the process ends, and tells which process listens: no file is left behind. Processes in different network
# namespaces do not see each other's claims.

_DRIVER: Final = "/proc/driver/nvidia/gpus"
_DEVICES: Final = "/dev"
_LIBRARY: Final = "libcuda.so.1"
_NOT_INITIALIZED: Final = 3


def machine_gpus(driver: str = _DRIVER, devices: str = _DEVICES) -> list[Gpu]:
    """The NVIDIA GPUs that this process can reach, in the order of their numbers.

    The driver lists all GPUs of the machine, by their places on the bus. A container may have the device files of some
    of them, and a sandbox (gVisor) may have device files alone.
    """
    files = sorted(
        (name for name in _listed(devices) if re.fullmatch(r"nvidia\d+", name)), key=lambda name: int(name[6:])
    )
    known = [_gpu_at(driver, place) for place in sorted(_listed(driver))]
    # Before the first use of a GPU there may be no device file.
    return [gpu for gpu in known if gpu.device in files or not files] or [Gpu(name) for name in files]


def has_initialized_cuda() -> bool:
    try:
        # Only if it is loaded.
        library = ctypes.CDLL(_LIBRARY, os.RTLD_LAZY | os.RTLD_NOLOAD)
    except (AttributeError, OSError):
        return False
    return bool(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _gpu_at(driver: str, place: str) -> Gpu:
    told: dict[str, str] = {}
    with suppress(OSError), open(f"{driver}/{place}/information", encoding="utf-8", errors="replace") as file:
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in file)}
    uuid = told.get("GPU UUID", "")
    minor = told.get("Device Minor", "")
    # Until its first use, a GPU has question marks for an id.
    return Gpu(f"nvidia{minor}" if minor else place, "" if "?" in uuid else uuid)


_CREDENTIALS: Final = struct.Struct("3i")
_LONGEST_COMMAND: Final = 200


class GpuClaims:
    """The claims of one runtime. A GPU without an id was declared by hand, and is not claimed."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self._held: dict[int, socket.socket] = {}
        self._refused: set[int] = set()

    def take(self, gpu: int) -> str | None:
        """Claim a GPU, by its number in the runtime. Idempotent.

        Returns:
            The process of another runtime that has it; None if the claim succeeds.

        Raises:
            InsufficientResources: The machine refuses sockets.
        """
        if gpu in self._held or gpu >= len(self._ids) or not self._ids[gpu]:
            return None
        name = self._name(gpu)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(name)
            claim.listen()
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                self._refused.add(gpu)
                return _holder(name)
            raise InsufficientResources(f"GPU {gpu} cannot be claimed: {error}") from error
        self._held[gpu] = claim
        self._refused.discard(gpu)
        return None

    def give_back(self, gpu: int) -> None:
        claim = self._held.pop(gpu, None)
        if claim is not None:
            claim.close()

    async def given_back(self) -> None:
        """Wait until another runtime gives back a GPU that was refused here; for ever if it cannot be told when.

        The end of a connection to its socket tells: no process accepts it, and it ends with the claim.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        questions: list[socket.socket] = []
        try:
            for gpu in list(self._refused):
                try:
                    questions.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    questions[-1].setblocking(False)
                    questions[-1].connect(self._name(gpu))
                except ConnectionRefusedError:
                    self._refused.discard(gpu)
                    return
                except OSError:
                    # The queue of connections is full, or there are no descriptors.
                    continue
                loop.add_reader(questions[-1], _settle, over)
            await over
        finally:
            for question in questions:
                loop.remove_reader(question)
                question.close()

    def _name(self, gpu: int) -> str:
        return f"\0aiodaft-gpu-{self._ids[gpu]}"

    def close(self) -> None:
        """In a forked child, the copies of the sockets stay the parent's claims."""
        for gpu in list(self._held):
            self.give_back(gpu)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _holder(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(name)
            found = question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            # It has just ended, or its queue of connections is full.
            return "another process"
    pid, _, _ = _CREDENTIALS.unpack(found)
    try:
        with open(f"/proc/{pid}/cmdline", errors="replace", encoding="utf-8") as file:
            command = file.read().replace("\0", " ").strip()
    except OSError:
        return f"pid {pid}" if pid else "a process of another container"
    return f"pid {pid} ({command[:_LONGEST_COMMAND]})"


@dataclass(slots=True)
class Timeouts:
    """The times that the runtime waits, in seconds.

    Attributes:
        answer: For the answer of a process to the order to stop an actor, at least.
        report: For the answer of an actor's process to `rt.info`.
        exit_report: After a connection is lost.
        blame: For callers of a dead actor to report that its end failed their calls; else its scope gets the error.
        silence: Between two looks at a connection to a node of another machine.
    """

    answer: float = 1.0
    report: float = 1.0
    exit_report: float = 2.0
    blame: float = 0.1
    kill: float = 1.0
    fork_server_end: float = 5.0
    fork_server_look: float = 1.0
    silence: float = PERIOD


@dataclass(frozen=True, slots=True)
class Env:
    """The sources of everything that differs from run to run.

    Attributes:
        monotonic: Seconds of a clock that never jumps.
        random: Of choices that need not be secret; `token` is secret.
        thread: Makes a thread beside a loop, from the thread's name and the loop.
        remembered: The number of ended processes that are remembered.
        launcher: Takes the arguments of `WorkerLauncher`. None: that, or `ExecLauncher` where there is no fork server.
        network: See `far.Network`. None: TCP, with the key of the cluster.
    """

    monotonic: Callable[[], float] = time.monotonic
    random: random.Random = field(default_factory=random.Random)
    token: Callable[[int], bytes] = os.urandom
    gpus: Callable[[], Sequence[Gpu]] = machine_gpus
    hostname: Callable[[], str] = lambda: os.uname().nodename or "localhost"
    pid: Callable[[], int] = os.getpid
    sockets: Sockets = field(default_factory=Sockets)
    thread: Callable[[str, asyncio.AbstractEventLoop], HelperThread] = HelperThread
    remembered: int = 1024
    launcher: Callable[..., Any] | None = None
    network: Any = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def new_peer_id(self, kind: str, node: str = "") -> PeerId:
        return PeerId(f"{kind}-{self.token(6).hex()}" + (f"@{node}" if node else ""))


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
            self.loop.call_soon_threadsafe(_run_into, done, job)
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


def _run_into(done: Future[ResultT], job: Callable[[], ResultT]) -> None:
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
