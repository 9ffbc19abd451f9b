"""The worker processes of a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.liveness import LastHeartbeat, Patience
from aiodaft._protocol.worker import WorkerEvent, WorkerState, next_state
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.launcher import ChildProcess
from aiodaft.exceptions import PeerLost


@dataclass(frozen=True, slots=True)
class Place:
    """The process, id and GPUs of a new actor."""

    peer: PeerId
    actor: ActorId
    gpus: tuple[int, ...]


class Conditions(NamedTuple):
    """What every incarnation of an actor is started with.

    Attributes:
        patience: How long its process may be silent. Default: the runtime's patience.
        worker_environment: What its process inherits from the controller; None if it shares another actor's process.
    """

    patience: Patience | None
    worker_environment: WorkerEnvironment | None


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process, as the node knows it without asking it."""

    id: PeerId
    pid: int
    actors: tuple[str, ...]
    gpus: tuple[int, ...]
    heartbeat: LastHeartbeat


@dataclass(eq=False)
class Worker:
    """A worker process of this node."""

    id: PeerId
    child: ChildProcess
    # The actor it was started for.
    label: str
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    # The names of the actors in it, and of all that ever were.
    actors: dict[ActorId, str] = field(default_factory=dict)
    placed: dict[ActorId, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    # Why it was told to end, in the state STOPPING.
    stop_reason: str = ""
    # Its error if it is killed because it was silent for too long.
    given_up: PeerLost | None = None
    # The file in which the kernel counts processes killed for want of memory.
    oom_counter: str | None = None

    @property
    def names(self) -> str:
        """The names of its actors, for errors."""
        # An actor that was restarted here was placed more than once.
        return " and ".join(dict.fromkeys(self.placed.values())) or self.label

    def __str__(self) -> str:
        return f"{self.names} (pid {self.pid})" if self.pid else f"{self.names} (not started yet)"

    def handle(self, event: WorkerEvent) -> None:
        """Change the state."""
        self.state = next_state(self.state, event)

    def stop(self, reason: str) -> None:
        """Note that its end is wanted; the first reason counts."""
        self.handle(WorkerEvent.STOP)
        self.stop_reason = self.stop_reason or reason

    def process(self) -> WorkerProcess:
        """What the node knows of it."""
        return WorkerProcess(self.id, self.pid, tuple(self.actors.values()), self.gpus, self.child.heartbeat.last())

    def add(self, actor: ActorId, label: str) -> None:
        """Add an actor."""
        self.actors[actor] = self.placed[actor] = label
        self.child.output.name = f"{'+'.join(self.actors.values())} pid={self.pid}"
