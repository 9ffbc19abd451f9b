"""A simulated machine of a cluster: its node, which can be killed, and started again at the same address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from aiodaft._protocol.coordination.records import Change, Kind, Record
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.node_process import NodeProcess, NodeProcessOptions
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Env, ProcessOptions
from aiodaft.exceptions import DaftError
from simulated.routes import Routes
from simulated.simulated_loop import SimulatedLoop, SimulatedProcess, settle

_NOBODY: Final = PeerId("")
_OPTIONS: Final = ProcessOptions(
    _NOBODY, "", "", _NOBODY, _NOBODY, _NOBODY, transport="shm", direct=True, grace=2.0, max_pending=1_000_000
)
# Seconds until a node that could not join is started again, at most.
_AGAIN: Final = 2.0


class MemoryStore:
    """The store of a coordinator; it outlives the coordinator, as a file does."""

    def __init__(self) -> None:
        self._term = 0
        self._records: dict[tuple[Kind, str], Record] = {}

    async def open(self) -> Stored:
        self._term += 1
        return Stored(self._term, tuple(self._records.values()))

    async def commit(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._records.pop((change.kind, change.key), None)
            if change.record is not None:
                self._records[change.kind, change.key] = change.record

    async def lost(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None:
        """Nothing is open."""


class SimulatedHost:
    """One machine.

    Args:
        name: Its name, also in addresses.
        first: The host with the coordinator; None: this one.
        lease: Seconds of a lease.
        stored: Whether the coordinator has a store; else one that is started again asks the nodes for their names.
    """

    def __init__(
        self,
        name: str,
        first: SimulatedHost | None,
        loop: SimulatedLoop,
        routes: Routes,
        env: Callable[[str], Env],
        *,
        lease: float,
        stored: bool,
    ) -> None:
        self.name = name
        self.address = f"tcp://{name}:7777"
        self._first = first
        self._loop = loop
        self._routes = routes
        self._env = env
        self._lease = lease
        self._store = MemoryStore() if stored else None
        self._starts = 0
        # The process of the node, and its contents; of all starts.
        self.nodes: list[tuple[NodeProcess, SimulatedProcess]] = []
        # Whether a node has become a member, and the waits for that, with their processes.
        self._has_joined = False
        self._waiting: list[tuple[SimulatedProcess, asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        return f"<host {self.name}>"

    @property
    def process(self) -> SimulatedProcess:
        return self.nodes[-1][1]

    @property
    def is_alive(self) -> bool:
        return bool(self.nodes) and self.process.alive

    @property
    def peers(self) -> list[tuple[Peer, SimulatedProcess]]:
        """The nodes that ran here, as far as they got."""
        return [(node._peer, process) for node, process in self.nodes if hasattr(node, "_peer")]

    def start(self) -> None:
        """Start the node; the host has power again, if it had none. Nothing if it runs."""
        if self.is_alive:
            return
        self._loop.note("start", self.name)
        self._routes.plug(self.name)
        self._starts += 1
        process = self._loop.new_process(f"node{self._starts}@{self.name}", self.name)
        node = self._make_node()
        self.nodes.append((node, process))
        self._loop.start(process, self._live(node, process))

    def _make_node(self) -> NodeProcess:
        env = self._env(self.name)
        options = NodeProcessOptions(
            name=self.name,
            listen=self.address,
            join=None if self._first is None else self._first.address,
            network=env.network,
            labels={},
            process=_OPTIONS._replace(node=self.name),
            node=NodeOptions(True, (), False),
        )
        machine = Machine(env, 100, 0, None, share_gpus=False)
        stored = Stored(term=self._starts, forgot=self._starts > 1)
        coordinator = (
            Coordinator(stored=stored, lease=self._lease, clock=self._loop.time)
            if self._store is None
            else Coordinator(self._store, lease=self._lease, clock=self._loop.time)
        )
        return NodeProcess(options, machine, coordinator, env)

    async def _live(self, node: NodeProcess, process: SimulatedProcess) -> None:
        try:
            await node.open()
        except (DaftError, OSError) as error:
            self._loop.note("not joined", self.name, type(error).__name__)
            # The host's init system starts it again.
            self._loop.later(self._loop.rng.random() * _AGAIN, self._start_again, process)
        else:
            self._joined()
            await node.run()
            await node.aclose()
        self._loop.kill(process)

    def _joined(self) -> None:
        self._has_joined = True
        for process, joined in self._waiting:
            self._loop.within(process, settle, joined, None)
        self._waiting.clear()

    async def wait_joined(self) -> None:
        """Wait until its first node is a member of the cluster."""
        if not self._has_joined:
            joined: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((self._loop.current, joined))
            await joined

    def _start_again(self, process: SimulatedProcess) -> None:
        if process is self.process and not self._routes.is_down(self.name):
            self.start()

    def end(self) -> None:
        if self.is_alive:
            self._loop.within(self.process, self.nodes[-1][0].end)

    def kill(self) -> None:
        """Kill the node; its workers end with it."""
        if self.is_alive:
            self._loop.kill(self.process)

    def unplug(self) -> None:
        """Take the power from the host: nothing tells others of it."""
        self._loop.note("unplug", self.name)
        self._routes.unplug(self.name)
        for process in self._loop.processes:
            if process.host == self.name:
                self._loop.kill(process)
