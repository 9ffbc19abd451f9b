"""A worker process, as its node sees it, and its heartbeats: the node asks once a period, and a thread answers.

The thread also answers while the loop, a method or an import is busy. It is silent only if the process is stopped, or C
code holds the GIL; `_protocol/node/liveness.py` decides what follows from that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId, number_of
from aiodaft._protocol.node.liveness import Answer, LastHeartbeat, Liveness, Order, Patience
from aiodaft._protocol.node.resources import Resources
from aiodaft._protocol.node.worker import TRANSITIONS, Code, Ending, WorkerEvent, WorkerState
from aiodaft._protocol.numbers import next_state
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.diagnostics.attach import is_debugged
from aiodaft._runtime.diagnostics.wait_graph import on_loop
from aiodaft._runtime.logs.console import Relay
from aiodaft._runtime.logs.worker_output import WorkerOutput
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.peer import Addresses, NodeContact
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
    """

    fork: bool
    preload: tuple[str, ...] | None
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


_QUESTION: Final = b"?"
_MAX_ANSWER: Final = 1 << 12


class Heartbeat:
    def __init__(self, connection: socket.socket, host: Host) -> None:
        """Created in the thread of the process's loop."""
        self._connection = connection
        self._process = host.process
        self._host = host
        self._loop_thread = threading.get_ident()
        self._lag = 0.0
        # When a callback was scheduled on the loop; None once it has run.
        self._asked: float | None = None
        # The longest running call, as its caller and number, and when it was first seen.
        self._oldest: tuple[PeerId, CallId] | None = None
        self._name = ""
        self._since = 0.0

    def start(self) -> None:
        threading.Thread(target=self._answer_all, name="aiodaft heartbeat", daemon=True).start()

    def _answer_all(self) -> None:
        with suppress(OSError):
            while self._connection.recv(len(_QUESTION)):
                self._connection.send(self._answer(self._process.env.monotonic()))

    def _answer(self, now: float) -> bytes:
        culprit = line = ""
        if self._asked is None:
            self._asked = now
            self._process.call_soon(self._turned)
        else:
            self._lag = now - self._asked
            culprit, line = ("", "") if is_debugged() else self._find_culprit()
        # Raised if the loop changes its calls at this moment, and so is not blocked.
        with suppress(RuntimeError):
            call = next((call for call in self._host.calls() if _runs(call)), None)
            key = None if call is None else (call.caller, call.number)
            if key != self._oldest:
                self._oldest, self._name, self._since = key, "" if call is None else call.label, now
        name = f"{self._name} (in the debugger)" if is_debugged() else self._name
        return Answer(self._lag, now - self._since, name, culprit, line).pack()

    def _find_culprit(self) -> tuple[str, str]:
        """The call that blocks the loop and the line where it does so, if that is user code."""
        call, line = on_loop(self._loop_thread)
        if call is None:
            return "", line
        if call.hosted.id < FIRST_USER_ACTOR:
            # The agent makes an actor: imports may take long.
            return "", ""
        return f"{call.label} of {call.hosted.name}", line

    def _turned(self) -> None:
        if self._asked is not None:
            self._lag = self._process.env.monotonic() - self._asked
            self._asked = None


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
                self._connection.send(_QUESTION)
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


def _runs(call: InboundCall) -> bool:
    return call.begun and call.hosted.id >= FIRST_USER_ACTOR
