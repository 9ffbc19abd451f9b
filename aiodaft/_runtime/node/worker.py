"""The machine of a node, and a worker process as the node sees it, with its heartbeats."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import ActorId, PeerId, number_of
from aiodaft._protocol.node.liveness import Answer, LastHeartbeat, Liveness, Order, Patience
from aiodaft._protocol.node.resources import Resources, device_named, gpu_names
from aiodaft._protocol.node.worker import TRANSITIONS, Code, Ending, WorkerEvent, WorkerState
from aiodaft._protocol.numbers import next_state
from aiodaft._runtime.logs.console import Relay
from aiodaft._runtime.logs.worker_output import WorkerOutput
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.peer import Addresses, NodeContact
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.gpu_claims import GpuClaims
from aiodaft._runtime.process import ProcessOptions
from aiodaft.exceptions import OutcomeUnknown, SpawnFailed
from aiodaft_transport.system import usable_cpus


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
        worker_environment: The environment that its process inherits from the controller; None if it shares another
            actor's process.
        options: Those of the controller, for the whole runtime. Default: those of the node.
        code: The code that the program has shipped. Default: nothing.
        outlives: Whether it is to belong to its node as soon as it is made; see `NodeAgent.keep`.
    """

    patience: Patience | None
    worker_environment: WorkerEnvironment | None
    options: ProcessOptions | None = None
    code: Code = Code(PeerId(""))
    outlives: bool = False


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
        # The process that its actors belong to.
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
        # The file in which the kernel counts processes killed for want of memory.
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
        cpus: CPUs to offer. Default: the process's affinity.
        gpus: GPUs to offer. Default: all that the process may use.
        share_gpus: Whether other runtimes may use the same GPUs at the same time.
    """

    def __init__(
        self, env: Env, cpus: float | None, gpus: int | None, custom: Mapping[str, float] | None, *, share_gpus: bool
    ) -> None:
        machine = env.gpus()
        # The names of the GPUs in CUDA_VISIBLE_DEVICES.
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
