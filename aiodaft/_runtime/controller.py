"""The parts of a runtime in the controller's process: opens and closes them, and abandons them without a loop.

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
from collections.abc import Coroutine, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import COORDINATOR, PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.diagnostics.attach import Answers, Visits
from aiodaft._runtime.diagnostics.await_chains import LoopWatch, offer_dump, withdraw_dump
from aiodaft._runtime.diagnostics.tracing import begin_telemetry, set_up_telemetry
from aiodaft._runtime.logs.console import Console, ConsoleThread, Recent
from aiodaft._runtime.logs.options import LevelWatch, Logs
from aiodaft._runtime.node.membership import Attachment, Cluster, find_cluster
from aiodaft._runtime.node.nodes import LocalNode
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.node.workers import is_of_a_user
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Env, ProcessOptions, check_codec, closed, opened
from aiodaft._runtime.supervision.directory import Root
from aiodaft.exceptions import RuntimeClosed
from aiodaft_transport import Key

if TYPE_CHECKING:
    from aiodaft._runtime.connections.far import Network

T = TypeVar("T")


class Stage(Enum):
    NEW = auto()
    OPEN = auto()
    ENDED = auto()
    LEFT_BEHIND = auto()


class ControllerOptions(NamedTuple):
    process: ProcessOptions
    node: NodeOptions
    labels: Mapping[str, str]
    env: Env
    logs: Logs
    # The address of a node of a cluster, and the way to it; None: this machine alone.
    cluster: tuple[str, Network] | None


class Controller(Owner):
    site: LocalNode | Attachment

    def __init__(self, options: ControllerOptions, machine: Machine) -> None:
        super().__init__()
        self.options = options
        self._machine = machine
        # The questions of commands in other terminals, with their answers.
        self.answers: Answers = {}
        self._cluster: Cluster | None = None
        self._stage = Stage.NEW
        self._why_closed = (
            "the runtime is not open yet: use `async with aiodaft.Runtime() as rt`, or `rt = await aiodaft.start()`"
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: LoopWatch | None = None
        # Processes that are simulated have the stacks of this one.
        self._is_real = options.env.launcher is None

    async def find_cluster(self) -> None:
        """Ask the node at the given address which cluster it serves. Nothing in a runtime of one machine.

        Raises:
            PeerLost: No node of this cluster answers there.
        """
        if self.options.cluster is not None:
            process = self.options.process
            cluster = self._cluster = await find_cluster(*self.options.cluster, process.id)
            welcome = cluster.welcome
            local = PeerId(f"{process.id}@{welcome.node_name}")
            process = process._replace(
                id=local,
                cluster=cluster.network.cluster,
                owner=local,
                program=local,
                agent=welcome.node,
                coordinator=welcome.coordinator,
            )
            self.options = self.options._replace(process=process)

    async def ready(self) -> None:
        """Do nothing: `join_cluster` has learned of them."""

    async def join_cluster(self) -> None:
        if self._cluster is not None:
            await cast("Attachment", self.site).ready()

    def open(self, root: Root) -> None:
        """Start everything on the running loop.

        Raises:
            OSError: The folder for files with logs cannot be made.
            Exception: An error of the setup of telemetry.
            RuntimeClosed: It was opened before.
            ValueError: A runtime with another codec is open.
            ResourceExhausted: The system refuses a thread; then this has to be closed.
        """
        if self._stage is not Stage.NEW:
            raise RuntimeClosed("a runtime is opened once; make a new one")
        options = self.options
        check_codec(options.process.codec)
        cluster = self._cluster
        # These can fail: there is nothing yet that would have to be closed.
        console = Console(options.logs)
        if options.process.telemetry:
            set_up_telemetry(options.process.telemetry)
        key = Key(options.env.token(32)) if cluster is None else cluster.network.key
        peer = Peer(options.process, key, options.env)
        process = peer.process
        self._loop = process.loop
        self._own(peer, root)
        visits = Visits(process, self.answers)
        process.provide(Visits, visits)
        process.provide(Recent, console.recent)
        if cluster is None:
            self.nodes.add(Member("", process.id, "", options.labels))
            site = self.site = LocalNode(peer, self.nodes, self.contact, self._machine, options.node, console)
            site.launcher.on_visit = visits.begin
            site.agent.on_own_ended = self.directory.ended
            peer.add_actor(COORDINATOR, "coordinator", Coordinator())
        else:
            self.site = Attachment(peer, self.nodes, self.contact, cluster, ConsoleThread(process, console))
            self.site.on_back = self._node_back
            self.directory.on_shown = self.site.console.show
        if options.process.telemetry:
            begin_telemetry(peer.caller, peer.host, peer.inbound, peer.graphs)
        peer.objects.on_unheld = root.fail
        peer.on_forked = self._stay_behind
        opened(process, peer.stay_behind)
        self._stage = Stage.OPEN
        self._left_open = weakref.finalize(root, _warn_left_open)
        if self._is_real:
            offer_dump()
            self._watch = LoopWatch(process, self._has_calls, LevelWatch(self._spread_levels).look)

    def _end(self, why: str, stage: Stage = Stage.ENDED) -> bool:
        was_open = self._stage is Stage.OPEN
        if self._stage in {Stage.NEW, Stage.OPEN}:
            self._stage, self._why_closed = stage, why
        if was_open:
            self._left_open.detach()
            if self._is_real:
                withdraw_dump()
                if stage is Stage.ENDED and self._watch is not None:
                    # A forked child has no such thread.
                    self._watch.close()
            closed(self.process)
        return was_open

    async def aclose(self) -> None:
        why = "the runtime is closed"
        if self._end(why):
            try:
                await self.peer.aclose(why)
            finally:
                await self.site.aclose()

    def abandon(self) -> None:
        why = "the event loop it was opened on is gone"
        if self._end(why):
            self.peer.abandon(why)
            self.site.abandon()

    def _stay_behind(self) -> None:
        if self._end("it stayed behind in the process that this one was forked from", Stage.LEFT_BEHIND):
            self.site.stay_behind()

    @property
    def name(self) -> str:
        return "" if self._loop is None else self.process.id

    @property
    def is_open(self) -> bool:
        return self._stage is Stage.OPEN

    @property
    def is_closed(self) -> bool:
        return self._stage in {Stage.ENDED, Stage.LEFT_BEHIND}

    @property
    def is_left_behind(self) -> bool:
        return self._stage is Stage.LEFT_BEHIND

    @property
    def is_stranded(self) -> bool:
        """Whether its loop does not run here any more, so that nothing can be awaited on it."""
        return self.is_left_behind or (self._loop is not None and not self._loop.is_running())

    def check_running(self, what: str) -> None:
        if self._stage is not Stage.OPEN:
            raise RuntimeClosed(f"{what}: {self._why_closed}")
        self.check_loop(what)

    def check_loop(self, what: str) -> None:
        if self._loop is None or (running := asyncio._get_running_loop()) is self._loop:
            return
        if running is not None:
            raise RuntimeError(f"{what}: this is another event loop than the one the runtime was opened on")
        raise RuntimeError(
            f"{what} where no event loop runs: have the runtime's do it, by `loop.call_soon_threadsafe` or "
            "`asyncio.run_coroutine_threadsafe`"
        )

    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        if self._stage is not Stage.OPEN:
            coro.close()
            raise RuntimeClosed(self._why_closed)
        return self.process.tasks.start(coro, name=name)

    def _has_calls(self) -> bool:
        connections, graphs = self.connections.items(), self.peer.graphs.own.values()
        calls = (call for _, connection in connections for call in connection.session.under_way())
        runs = (graph.in_flight_with(remote) for remote, _ in connections for graph in graphs)
        return any(map(is_of_a_user, calls)) or any(runs)

    def _spread_levels(self, levels: dict[str, int]) -> None:
        for node in self.nodes.agents():
            node.set_levels.tell(self.process.options.program, levels)


def _warn_left_open() -> None:
    warnings.warn("a runtime was left open: its actors end with it, and no code waits for them", ResourceWarning, 2)
