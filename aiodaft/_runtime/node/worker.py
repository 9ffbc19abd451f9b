"""A worker process, as its node sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import ActorId, PeerId, number_of
from aiodaft._protocol.node.liveness import LastHeartbeat, Patience
from aiodaft._protocol.node.resources import Resources
from aiodaft._protocol.node.worker import TRANSITIONS, Code, Ending, WorkerEvent, WorkerState
from aiodaft._protocol.numbers import next_state
from aiodaft._runtime.contacts import Addresses, NodeContact
from aiodaft._runtime.logs.console import Relay
from aiodaft._runtime.logs.worker_output import WorkerOutput
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.heartbeat import HeartbeatWatch
from aiodaft._runtime.platform.gpu_claims import GpuClaims
from aiodaft._runtime.process import ProcessOptions
from aiodaft.exceptions import OutcomeUnknown, SpawnFailed


class Tenant(NamedTuple):
    owner: PeerId
    number: ActorId

    @classmethod
    def of(cls, owner: str, actor: int) -> Tenant:
        return cls(PeerId(owner), number_of(ActorId(actor)))


class Place(NamedTuple):
    """The process, id and GPUs of a new actor."""

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
    """A worker process, as the node knows it without asking it."""

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
        # The actor it was started for.
        self.label = label
        self.output = output
        # Takes its output to the program that shows it, if that is on another machine.
        self.relay: Relay | None = None
        self.heartbeat = heartbeat
        # 0 until it has started.
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
        # Why it was told to end, in the state STOPPING.
        self.stop_reason = ""
        # Its error if its node ends it; the error of its callers once it has ended.
        self.given_up: OutcomeUnknown | None = None
        self.error: OutcomeUnknown | None = None
        # The file in which the kernel counts processes killed for want of memory.
        self.oom_counter: str | None = None

    @property
    def names(self) -> str:
        # An actor that was restarted here was placed more than once.
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
        isolation: The command that isolates the fork server; see `prefix_of`.
    """

    fork: bool
    preload: tuple[str, ...] | None
    isolation: tuple[str, ...]
    uvloop: bool


class Offer(Protocol):
    """The offer of a machine to actors."""

    @property
    def resources(self) -> Resources[Tenant]: ...
    @property
    def gpu_names(self) -> Sequence[str]: ...

    @property
    def claims(self) -> GpuClaims: ...


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
