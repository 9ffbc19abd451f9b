"""What a runtime owns in the controller's process: opens it, closes it, and abandons it when its loop is gone.

Stage      | open()  | aclose(), abandon() | fork, in the child
NEW        | OPEN    | ENDED               |
OPEN       |         | ENDED               | LEFT_BEHIND
ENDED      |         |                     |
LEFT_BEHIND|         |                     |
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from aiodaft._protocol.calls.following import Location
from aiodaft._protocol.ids import COORDINATOR, NODE, SUPERVISOR, ActorId, PeerId
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.node.resources import Resources
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.diagnostics.attach import answer
from aiodaft._runtime.diagnostics.process_stack import is_answered, stack_here
from aiodaft._runtime.node.coordinator import Coordinator
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.objects.ref_state import UnhandledErrors
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.gpu_claims import GpuClaims
from aiodaft._runtime.process import Process, ProcessOptions, closed, opened
from aiodaft._runtime.supervision.directory import Directory
from aiodaft.exceptions import DaftError, OutcomeUnknown, ProtocolError, RuntimeClosed
from aiodaft.stack import ProcessStack, RuntimeStack
from aiodaft_transport import Key

T = TypeVar("T")

# Seconds that a process gets to answer `aiodaft stack`.
_STACK_PATIENCE: Final = 1.0


class Stage(Enum):
    """How far a controller is; see the table above."""

    NEW = auto()
    OPEN = auto()
    ENDED = auto()
    LEFT_BEHIND = auto()


class ControllerOptions(NamedTuple):
    """What `Runtime(...)` was given, with the defaults filled in."""

    process: ProcessOptions
    stop_grace: float
    isolation: tuple[str, ...]
    patience: Patience
    preload: tuple[str, ...] | None
    fork: bool
    uvloop: bool
    gpu_names: Sequence[str]
    env: Env


class Root(Protocol):
    """What a controller tells the runtime's outermost scope."""

    def fail(self, error: BaseException, what: str) -> None: ...

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None: ...


class Controller:
    """Peer, launcher, node agent, coordinator, directory and GPU claims of one runtime."""

    peer: Peer
    process: Process
    launcher: WorkerLauncher
    node: NodeAgent
    coordinator: Coordinator
    directory: Directory

    def __init__(self, options: ControllerOptions, resources: Resources[ActorId], claims: GpuClaims) -> None:
        self.options = options
        self._resources = resources
        self._claims = claims
        self._stage = Stage.NEW
        self._why_closed = "the runtime is not open yet"
        self._labels: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, root: Root) -> None:
        """Start everything on the running loop.

        Raises:
            RuntimeClosed: It was opened before.
        """
        if self._stage is not Stage.NEW:
            raise RuntimeClosed("a runtime is opened once; make a new one")
        options = self.options
        peer_id = options.process.id
        peer = self.peer = Peer(options.process, Key(options.env.token(32)), options.env)
        process = self.process = peer.process
        self._loop = process.loop
        self.objects = peer.objects
        self.connections = peer.connections
        self.agent_of = peer.agent_of
        launcher: Callable[..., WorkerLauncher] = options.env.launcher or WorkerLauncher
        self.launcher = launcher(
            process.loop,
            fork=options.fork,
            preload=options.preload,
            prefix=options.isolation,
            timeouts=options.env.timeouts,
        )
        self.launcher.on_stack_request = self._show_stacks
        agent = self._make_agent(root)
        self.node = cast("NodeAgent", peer.caller.handle(peer_id, NODE, "node agent", NodeAgent))
        self.coordinator = cast("Coordinator", peer.caller.handle(peer_id, COORDINATOR, "coordinator", Coordinator))
        self.directory = Directory(peer.caller, self.node)
        self.directory.on_over = lambda number: self.coordinator.release.tell(peer_id, number)
        peer.add_actor(NODE, "node agent", agent)
        peer.add_actor(COORDINATOR, "coordinator", Coordinator())
        peer.add_actor(SUPERVISOR, "supervisor", self.directory)
        peer.objects.on_unheld = root.fail
        peer.on_forked = self._stay_behind
        opened(process, peer.stay_behind)
        self._stage = Stage.OPEN
        self._left_open = weakref.finalize(root, _warn_left_open)

    def _make_agent(self, root: Root) -> NodeAgent:
        options, peer = self.options, self.peer
        agent = NodeAgent(
            peer.process,
            peer.connections,
            self.launcher,
            self._resources,
            options.gpu_names,
            uvloop=options.uvloop,
            patience=options.patience,
        )
        agent.on_died = root.actor_died
        agent.on_unheld = root.fail
        agent.on_ended = self._process_ended

        async def explain(connection: Connection, reason: Exception) -> DaftError:
            ending = await agent.exit_report(connection.remote, peer.graphs.in_flight(connection))
            # A process that breaks the protocol is cut off and ends; callers need to know the former.
            return reason if isinstance(reason, ProtocolError) else ending

        peer.connections.explain = explain
        return agent

    def _process_ended(self, remote: PeerId, error: OutcomeUnknown, wanted: bool) -> None:
        if self._stage is Stage.OPEN:
            self.coordinator.release.tell(remote, None)
            self.directory.process_ended(remote, error, wanted)

    # Closing.

    def _end(self, why: str, stage: Stage = Stage.ENDED) -> bool:
        """Change the stage; True if there is something to be closed."""
        was_open = self._stage is Stage.OPEN
        if self._stage in {Stage.NEW, Stage.OPEN}:
            self._stage, self._why_closed = stage, why
        if was_open:
            self._left_open.detach()
            closed(self.process)
        return was_open

    async def aclose(self) -> None:
        """End all actors' processes, connections and tasks, and free all values. Idempotent."""
        why = "the runtime is closed"
        if self._end(why):
            try:
                await self.peer.aclose(why)
            finally:
                await self.launcher.aclose()
                self._claims.close()

    def abandon(self) -> None:
        """End the processes of a runtime without a running loop. Blocks until they have ended."""
        why = "the event loop it was opened on is gone"
        if self._end(why):
            self.peer.abandon(why)
            self.launcher.abandon()
            self._claims.close()

    def _stay_behind(self) -> None:
        if self._end("it stayed behind in the process that this one was forked from", Stage.LEFT_BEHIND):
            self.launcher.stay_behind()
            self._claims.close()

    # The stage.

    @property
    def name(self) -> str:
        """The id of its process; empty if it was never opened."""
        return "" if self._loop is None else self.process.id

    @property
    def is_open(self) -> bool:
        """Whether actors can be made and called."""
        return self._stage is Stage.OPEN

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, abandoned, or left behind in a forked child."""
        return self._stage in {Stage.ENDED, Stage.LEFT_BEHIND}

    @property
    def is_left_behind(self) -> bool:
        """Whether this process was forked from the one that has the runtime."""
        return self._stage is Stage.LEFT_BEHIND

    @property
    def is_stranded(self) -> bool:
        """Whether its loop does not run here any more, so that nothing can be awaited on it."""
        return self.is_left_behind or (self._loop is not None and not self._loop.is_running())

    def check_running(self, what: str) -> None:
        """Raise RuntimeClosed unless it is open; RuntimeError unless this is its loop."""
        if self._stage is not Stage.OPEN:
            raise RuntimeClosed(f"{what}: {self._why_closed}")
        self.check_loop(what)

    def check_loop(self, what: str) -> None:
        """Raise RuntimeError unless this is the loop that the runtime was opened on."""
        if self._loop is None or (running := asyncio._get_running_loop()) is self._loop:
            return
        if running is not None:
            raise RuntimeError(f"{what}: this is another event loop than the one the runtime was opened on")
        raise RuntimeError(
            f"{what} where no event loop runs: have the runtime's do it, by `loop.call_soon_threadsafe` or "
            "`asyncio.run_coroutine_threadsafe`"
        )

    # What scopes use.

    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that does not end with the task that asks for it.

        Raises:
            RuntimeClosed: The runtime is not open.
        """
        if self._stage is not Stage.OPEN:
            coro.close()
            raise RuntimeClosed(self._why_closed)
        return self.process.tasks.start(coro, name=name)

    def target(self, remote: PeerId, actor: ActorId, label: str, sink: UnhandledErrors | None = None) -> Target:
        """An actor, as this process calls it; `sink` gets the errors that no code sees."""
        return Target(self.peer.caller, remote, actor, label, sink)

    def follow(self, location: Location, label: str, sink: UnhandledErrors) -> FollowingTarget:
        """A supervised actor, as this process calls it."""
        return self.peer.followers.get(self.process.id, location, label, sink)

    def new_label(self, cls: type) -> str:
        """The name of the next actor of a class, such as "Model-2"."""
        self._labels[cls.__name__] += 1
        return f"{cls.__name__}-{self._labels[cls.__name__]}"

    async def stack(self, patience: float) -> RuntimeStack:
        """The stacks of every process, each of which gets `patience` seconds to answer; then the kernel is asked."""
        waits, now = self.peer.deadlocks.waits, self.process.env.monotonic

        async def ask(process: WorkerProcess) -> ProcessStack | None:
            asked_at = now()
            asked = self.agent_of(process.id).stack()
            if not await is_answered(asked, patience):
                dump = await self.node.dump(process.id)
                return ProcessStack(process.id, process.pid, process.actors, now() - asked_at, dump=dump)
            try:
                return await asked
            except DaftError:
                # The process has ended.
                return None

        others = await asyncio.gather(*map(ask, await self.node.processes()))
        return RuntimeStack((stack_here(waits), *filter(None, others)))

    def _show_stacks(self, fork_server: int) -> None:
        async def text() -> str:
            return str(await self.stack(_STACK_PATIENCE))

        if self._stage is Stage.OPEN:
            self.process.tasks.create_task(answer(fork_server, text), name="show the stacks")


def _warn_left_open() -> None:
    warnings.warn("a runtime was left open: its actors end with it, and no code waits for them", ResourceWarning, 2)
