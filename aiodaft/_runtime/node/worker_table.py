"""The worker processes of a node, as it knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.liveness import Patience
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.heartbeat import Vitals
from aiodaft._runtime.node.launcher import ChildProcess
from aiodaft.exceptions import PeerLost


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new actor goes."""

    peer: PeerId
    actor: ActorId
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every incarnation of an actor is started with.

    Attributes:
        patience: How long it is waited for when it does not answer; the runtime's if None.
        worker_environment: What its process inherits from the controller; None if it shares another actor's process.
    """

    patience: Patience | None
    worker_environment: WorkerEnvironment | None


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process, as others may know it; how it was when it was last heard of."""

    id: PeerId
    pid: int
    actors: tuple[str, ...]
    gpus: tuple[int, ...]
    vitals: Vitals


@dataclass(eq=False)
class Worker:
    """A worker process of this node."""

    id: PeerId
    child: ChildProcess
    # What it was started for.
    label: str
    pid: int = 0
    # The actors in it, and all that ever were, each with its name.
    actors: dict[ActorId, str] = field(default_factory=dict)
    placed: dict[ActorId, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    # Set when its end is wanted: it is then no accident.
    wanted: str | None = None
    # Somebody's calls failed of its end, so that somebody has been told.
    blamed: bool = False
    # It did not answer, and is being killed for that.
    lost: PeerLost | None = None
    # Where the kernel counts processes that it kills for want of memory.
    oom_counter: str | None = None

    @property
    def names(self) -> str:
        """What it is called in errors."""
        # An actor that was restarted here was placed more than once.
        return " and ".join(dict.fromkeys(self.placed.values())) or self.label

    def __str__(self) -> str:
        return f"{self.names} (pid {self.pid})" if self.pid else f"{self.names} (not started yet)"

    def process(self) -> WorkerProcess:
        """What others may know of it."""
        return WorkerProcess(self.id, self.pid, tuple(self.actors.values()), self.gpus, self.child.heartbeat.vitals())

    def add(self, actor: ActorId, label: str) -> None:
        """An actor moves in."""
        self.actors[actor] = self.placed[actor] = label
        self.child.output.name = f"{'+'.join(self.actors.values())} pid={self.pid}"
