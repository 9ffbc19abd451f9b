"""The machine of a node, and a worker process as the node sees it: its surroundings, orders for it, its heartbeats."""

from __future__ import annotations

import asyncio
import os
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import ActorId, PeerId, number_of
from aiodaft._protocol.node.resources import Resources, device_named, gpu_names
from aiodaft._protocol.node.worker import (
    TRANSITIONS,
    Answer,
    Code,
    Ending,
    LastHeartbeat,
    Liveness,
    Order,
    Patience,
    WorkerEvent,
    WorkerState,
)
from aiodaft._protocol.numbers import next_state
from aiodaft._runtime.logs.console import Relay
from aiodaft._runtime.logs.options import Levels, levels_here
from aiodaft._runtime.logs.worker_output import WorkerOutput
from aiodaft._runtime.peer import Addresses, NodeContact
from aiodaft._runtime.platform.linux import fresh_python, importable_path
from aiodaft._runtime.process import Env, GpuClaims, ProcessOptions
from aiodaft.exceptions import OutcomeUnknown, SpawnFailed
from aiodaft_transport.system import usable_cpus

# Read by OpenMP, MKL, OpenBLAS and torch.
_THREADS: Final = "OMP_NUM_THREADS"
_WORKER: Final = "aiodaft._runtime.node.worker_main"


class WorkerEnvironment(NamedTuple):
    """These in the process that spawns an actor.

    Attributes:
        code: The folders of the actor's machine with code that the program has shipped.
        terminal: The path of the terminal at which the program runs in the foreground; empty without one.
        own: Variables of the actor alone, for which it gets a new interpreter.
        cwd: The working directory that it must have; empty: that of the process that spawns it.
        python: Its interpreter; empty: that of its node.
    """

    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    code: Sequence[str] = ()
    terminal: str = ""
    levels: Levels = MappingProxyType({})
    own: Mapping[str, str] = MappingProxyType({})
    cwd: str = ""
    python: str = ""

    @classmethod
    def here(cls, own: Mapping[str, str] | None = None, cwd: str = "", python: str = "") -> WorkerEnvironment:
        try:
            directory = cwd or os.getcwd()
        except OSError as error:
            raise SpawnFailed(
                f"an actor needs the working directory of this process, which is gone ({error}): "
                "call os.chdir() with one that exists, and spawn again"
            ) from error
        argv = [str(argument) for argument in sys.argv]
        path = _path_of_program() if python else importable_path()
        return cls(dict(os.environ), directory, path, argv, (), _terminal(), levels_here(), own or {}, cwd, python)

    def as_far_as_it_is_here(self) -> WorkerEnvironment:
        """The same for another machine or an actor: its folders where they exist, and the variables of this process."""
        directory = self.directory if self.cwd or os.path.isdir(self.directory) else os.getcwd()
        path = [entry for entry in self.path if os.path.exists(entry)]
        if not self.python:
            path += [entry for entry in importable_path() if entry not in path]
        return self._replace(environment=dict(os.environ), directory=directory, path=path, terminal="")

    def for_share(self, cpus: float, gpus: Sequence[str]) -> dict[str, str]:
        variables = dict(self.own)
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if cpus and _THREADS not in self.environment | variables:
            variables[_THREADS] = str(max(1, int(cpus)))
        return variables

    def changes(self, base: dict[str, str]) -> dict[str, str | None]:
        changes: dict[str, str | None] = dict.fromkeys(base.keys() - self.environment.keys())
        changes.update((name, value) for name, value in self.environment.items() if base.get(name) != value)
        return changes

    def interpreter(self, node: str) -> str:
        """The interpreter that has to be started for the actor; empty if it may be forked.

        Raises:
            SpawnFailed: The machine has no such interpreter or working directory.
        """
        if self.cwd and not os.path.isdir(self.cwd):
            raise SpawnFailed(f"on(cwd={self.cwd!r}): {node} has no such folder")
        if self.python and shutil.which(self.python) is None:
            raise SpawnFailed(f"on(python={self.python!r}): {node} has no such interpreter")
        return self.python or (sys.executable if self.own else "")


def _path_of_program() -> list[str]:
    """The entries of sys.path that this interpreter, or its virtual environment, does not have of itself."""
    of_python = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    inside = tuple(os.path.join(folder, "") for folder in of_python)
    found = [entry for entry in importable_path() if os.path.exists(entry or os.curdir)]
    return [entry for entry in found if entry not in of_python and not entry.startswith(inside)]


def _terminal() -> str:
    """The terminal of this process, if that is in the foreground and is no interpreter that reads commands."""
    with suppress(OSError):
        if not hasattr(sys, "ps1") and os.tcgetpgrp(0) == os.getpgrp():
            return os.ttyname(0)
    return ""


def change_environment(base: dict[str, str], changes: dict[str, str | None]) -> None:
    wanted = {name: value for name, value in {**base, **changes}.items() if value is not None}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in wanted.items() if os.environ.get(name) != value)


class WorkerSettings(NamedTuple):
    """The settings of a worker; they travel as plain data.

    Attributes:
        secret: The key of a runtime of one machine, or the whole identity of a cluster.
        digests: The code that its own actors are to be spawned with; the node has it.
    """

    options: ProcessOptions
    secret: bytes
    uvloop: bool
    levels: Levels
    argv: list[str]
    digests: Sequence[str] = ()
    terminal: str = ""

    def packed(self) -> bytes:
        options = self.options._replace(patience=list(self.options.patience))
        return pack([list(options), *self[1:-2], list(self.digests), self.terminal])

    @classmethod
    def unpacked(cls, data: bytes) -> WorkerSettings:
        options, *others = unpack(data)
        return cls(ProcessOptions(*options), *others)


class Spawn(NamedTuple):
    worker: PeerId
    directory: str
    path: list[str]
    code: list[str]
    # To the environment of the fork server; None removes a variable.
    changes: dict[str, str | None]
    modules: list[str]
    environment: dict[str, str]
    settings: bytes
    # The interpreter to be started; empty: the worker may be forked.
    python: str = ""


class Kill(NamedTuple):
    worker: PeerId
    signal: int


class Spawned(NamedTuple):
    worker: PeerId
    pid: int


class Failed(NamedTuple):
    worker: PeerId
    why: str


class Exited(NamedTuple):
    """A worker ended; exit code and signal are None if unknown."""

    worker: PeerId
    exit_code: int | None
    signal: str | None


class Importing(NamedTuple):
    module: str


class Unforkable(NamedTuple):
    """The import of a module has initialised CUDA: from now on workers are new interpreters."""

    module: str


class Visited(NamedTuple):
    """A command wants to ask something; has the pid of the fork server."""

    pid: int


Message: TypeAlias = Spawn | Kill | Spawned | Failed | Exited | Importing | Unforkable | Visited

_KINDS: Final[tuple[type[Message], ...]] = (Spawn, Kill, Spawned, Failed, Exited, Importing, Unforkable, Visited)


def packed(message: Message) -> bytes:
    return pack([_KINDS.index(type(message)), *message])


def unpacked(data: bytes) -> Message:
    kind, *fields = unpack(data)
    made: Message = cast("Any", _KINDS[kind])(*fields)
    return made


# In place of a descriptor: the kernel ends the worker with its parent.
BY_KERNEL: Final = -1


def start_fresh(
    order: Spawn, environment: Mapping[str, str], fds: Sequence[int], lifeline: int = BY_KERNEL
) -> subprocess.Popen[bytes]:
    """Start a worker, in a session of its own; the caller closes its descriptors here.

    Args:
        environment: That of all workers; the order may add to it.
        fds: Those of its connection, its output, its errors and its heartbeat.
        lifeline: The pipe that it reads, and with which it ends: the pipe ends with the process that starts it.

    Raises:
        OSError: The machine refuses it.
    """
    import tempfile  # noqa: PLC0415 - takes long to import, and few workers are started so

    connection, out, err, heartbeat = fds
    kept = [fd for fd in (connection, heartbeat, lifeline) if fd >= 0]
    # A pipe has no room for any settings, and nothing reads it yet.
    with tempfile.TemporaryFile(prefix="aiodaft-") as settings:
        settings.write(order.settings)
        settings.seek(0)
        numbers = connection, settings.fileno(), heartbeat, lifeline
        return subprocess.Popen(
            fresh_python(
                "aiodaft._runtime.node.worker_main", *numbers, front=order.code, path=order.path, python=order.python
            ),
            env={**environment, **order.environment},
            cwd=order.directory,
            pass_fds=(*kept, settings.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


class Tenant(NamedTuple):
    owner: PeerId
    number: ActorId

    @classmethod
    def of(cls, owner: str, actor: int) -> Tenant:
        return cls(PeerId(owner), number_of(ActorId(actor)))


class Place(NamedTuple):
    peer: PeerId
    actor: ActorId
    gpus: tuple[int, ...]


class Conditions(NamedTuple):
    """The conditions for the process of every incarnation of an actor.

    Attributes:
        patience: The time that its process may be silent; None: as long as one that it shares may be anyway.
        worker_environment: That of the controller; None if it shares another actor's process.
        options: Those of the controller, for the whole runtime. Default: those of the node.
        code: That which the program has shipped. Default: nothing.
        outlives: Whether it is to belong to its node as soon as it is made; see `NodeAgent.keep`.
        restartable: Whether it keeps its resources until `vacate`, also while it has no process.
    """

    patience: Patience | None
    worker_environment: WorkerEnvironment | None
    options: ProcessOptions | None = None
    code: Code = Code(PeerId(""))
    outlives: bool = False
    restartable: bool = False


class WorkerProcess(NamedTuple):
    id: PeerId
    pid: int | None
    owner: PeerId
    actors: tuple[str, ...]
    gpus: tuple[int, ...]
    heartbeat: LastHeartbeat


class Worker:
    """A worker process: its launcher sets `pid`, `started` and `ended`, its node agent the fields after these."""

    def __init__(self, worker_id: PeerId, label: str, output: WorkerOutput, heartbeat: HeartbeatWatch) -> None:
        loop = asyncio.get_running_loop()
        self.id = worker_id
        self.label = label
        self.output = output
        # Takes its output to the program that shows it, if that is on another machine.
        self.relay: Relay | None = None
        self.heartbeat = heartbeat
        self.pid = 0
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self.state = WorkerState.STARTING
        # The names of the actors in it, and of all that ever were.
        self.actors: dict[ActorId, str] = {}
        self.placed: dict[ActorId, str] = {}
        self.owner = PeerId("")
        # The controller on another machine that it writes to; see `ProcessOptions`.
        self.program = PeerId("")
        # The process that has given its actors their numbers.
        self.maker = PeerId("")
        # Whether its owner was given up: if that comes back, it did not want the end of this process.
        self.orphaned = False
        self.gpus: tuple[int, ...] = ()
        self.stop_reason = ""
        # Its error if its node ends it; the error of its callers once it has ended.
        self.given_up: OutcomeUnknown | None = None
        self.error: OutcomeUnknown | None = None
        self.oom_counter: str | None = None

    @property
    def names(self) -> str:
        return " and ".join(dict.fromkeys(self.placed.values())) or self.label

    def __str__(self) -> str:
        return f"{self.names} (pid {self.pid})" if self.pid else f"{self.names} (not started yet)"

    def handle(self, event: WorkerEvent) -> None:
        self.state = next_state(TRANSITIONS, self.state, event)

    def fail(self, error: SpawnFailed) -> None:
        self.heartbeat.close()
        if not self.started.done():
            self.started.set_exception(error)
            # asyncio logs errors that no task retrieves.
            self.started.exception()

    def stop(self, reason: str) -> None:
        """Note that its end is wanted; the first reason counts."""
        self.handle(WorkerEvent.STOP)
        self.stop_reason = self.stop_reason or reason

    def snapshot(self) -> WorkerProcess:
        return WorkerProcess(
            self.id, self.pid or None, self.owner, tuple(self.actors.values()), self.gpus, self.heartbeat.last()
        )

    def add(self, actor: ActorId, label: str) -> None:
        self.actors[actor] = self.placed[actor] = label
        self.output.rename("+".join(self.actors.values()), self.pid)

    async def show_output(self, patience: float) -> None:
        """Have its output shown, also on another machine, if that takes no longer than so many seconds."""
        if self.relay is not None:
            self.output.catch_up()
            self.output.pass_on()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.relay.wait_idle()


class NodeOptions(NamedTuple):
    """The options of every worker of a node.

    Attributes:
        fork: False starts every worker by exec.
        preload: Modules that the fork server imports; None: those that are slow to import and loaded here.
    """

    fork: bool
    preload: tuple[str, ...] | None
    uvloop: bool


class Machine:
    """The resources that a machine offers to actors.

    Args:
        cpus: Default: the process's affinity.
        gpus: Default: all that the process may use.
        share_gpus: Whether other runtimes may use the same GPUs at the same time.
    """

    def __init__(
        self, env: Env, cpus: float | None, gpus: int | None, custom: Mapping[str, float] | None, *, share_gpus: bool
    ) -> None:
        machine = env.gpus()
        self.gpu_names = gpu_names(machine, os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
        self.claims = GpuClaims([] if share_gpus else [device_named(name, machine) for name in self.gpu_names])
        self.resources: Resources[Tenant] = Resources(
            cpus=usable_cpus() if cpus is None else cpus,
            gpus=len(self.gpu_names) if gpus is None else gpus,
            custom=custom,
            claims=self.claims,
        )


class OtherNodes(Addresses, Protocol):
    def members(self) -> list[Member]: ...

    def is_member(self, name: str) -> bool: ...

    def process_of(self, peer: PeerId) -> PeerId:
        """The process that serves the node of a process.

        Raises:
            ActorDied: The node is not in the cluster any more.
        """
        ...

    def contact(self, peer: PeerId) -> NodeContact: ...


QUESTION: Final = b"?"
_MAX_ANSWER: Final = 1 << 12


class HeartbeatWatch:
    def __init__(
        self, connection: socket.socket, loop: asyncio.AbstractEventLoop, is_stopped: Callable[[int], bool]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = loop
        self.is_stopped = is_stopped
        # Until `begin`, silence is no matter.
        self.liveness = Liveness(Patience(None, None), loop.time())
        self._pid = 0
        self._timer: asyncio.TimerHandle | None = None
        # Called with the call that blocks the loop ("" for another task or callback), its line, and the seconds.
        self.on_stall: Callable[[str, str, float], object] = lambda culprit, line, seconds: None
        # Called to report that the process is suspect, is not any more, or is to be given up.
        self.on_order: Callable[[Order], object] = lambda order: None

    def begin(self, patience: Patience, pid: int) -> None:
        self._pid = pid
        self.liveness = Liveness(patience, self._loop.time())
        self._look()

    def widen(self, patience: Patience) -> None:
        self.liveness.relax(self.liveness.patience.widened(patience))
        self._schedule()

    def last(self) -> LastHeartbeat:
        return self.liveness.last(self._loop.time())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection.close()

    def _look(self) -> None:
        # Answers are read only here: so they cost no wakeup, and one that came while this loop was busy counts.
        self._read_answer()
        stopped = self.liveness.is_silent and self.is_stopped(self._pid)
        order = self.liveness.handle_timer(self._loop.time(), stopped=stopped)
        if order is Order.ASK:
            # The connection reports the end of the process.
            with suppress(OSError):
                self._connection.send(QUESTION)
        elif order is not None:
            self.on_order(order)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.liveness.get_timer()
        if due is not None and self._connection.fileno() >= 0:
            self._timer = self._loop.call_at(due, self._look)

    def _read_answer(self) -> None:
        try:
            answer = Answer.unpack(self._connection.recv(_MAX_ANSWER))
        except OSError:
            return
        if answer is None:
            # It ends, or breaks the protocol; either counts as silence.
            return
        now = self._loop.time()
        if self.liveness.take(answer, now):
            self.on_stall(answer.culprit, answer.line, answer.lag)
        order = self.liveness.heard(now)
        if order is not None:
            self.on_order(order)
