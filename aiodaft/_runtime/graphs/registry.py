"""The graphs that a process owns or takes part in: what comes for them goes from here to where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.codec import pack, pack_exts
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import FLOW, REPORT, RUN, SKIP, Message
from aiodaft._runtime.graphs.graph_value import GraphValue, fetch
from aiodaft._runtime.graphs.participant import Participant, Plan
from aiodaft._runtime.serialization.encoder import PLAIN, SLOT
from aiodaft.exceptions import DaftError

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.graphs.owner import GraphOwner
    from aiodaft._runtime.peer import Peer

# A value that is the value of a ref.
_FIRST_SLOT: Final = bytes((PLAIN,)) + pack(pack_exts(SLOT, 0))


class Graphs:
    """The graphs that a process owns or takes part in."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._parts: dict[tuple[PeerId, int], Participant] = {}
        self.own: dict[int, GraphOwner] = {}
        self.handlers: dict[int, Callable[[Route, Message], object]] = {
            RUN: self.run_came,
            FLOW: self.flow_came,
            REPORT: self.report_came,
            SKIP: self.skip_came,
        }

    # Parts.

    async def install(self, owner: PeerId, number: int, plan: Plan) -> None:
        """Take part in a graph. Refs from outside are waited for: their values are constants.

        Raises:
            AttributeError: An actor of the plan has no such method.
        """
        part = Participant(self._peer, owner, number, plan)
        for route in part.routes.values():
            self._peer.connections.ring_upgrades.want(route)
        for position, step in enumerate(plan.steps):
            for place, ref in enumerate(step.data.outside):
                part.outside[position, place] = await self._constant(ref)
        self._parts[owner, number] = part
        if any(part.routes[remote].lost is not None for remote in plan.receives):
            self._say_cut_off(part)

    async def _constant(self, ref: Any) -> GraphValue:
        peer = self._peer
        descriptor = peer.refs.describe(ref)
        return await fetch(peer, peer.connections.loopback, (0, _FIRST_SLOT, None, (), (descriptor,)))

    def _say_cut_off(self, part: Participant) -> None:
        """A process that sends values to this one, and thereby wakes it, does so no more. It may live."""
        self._peer.process.tasks.create_task(self._tell_cut_off(part), name="tell the owner of a graph")

    async def _tell_cut_off(self, part: Participant) -> None:
        # The parts of an owner that is gone end with it.
        with suppress(DaftError):
            await self._peer.agent_of(part.owner).cut_off(part.number)

    def cut_off(self, number: int) -> None:
        """A process that takes part in a graph of this one does not hear of its runs from another one any more."""
        own = self.own.get(number)
        if own is not None:
            own.cut_off(number)

    def uninstall(self, owner: PeerId, number: int) -> None:
        """Begin no more runs of a graph. Some may be under way that their owner gave up with a process that died."""
        part = self._parts.get((owner, number))
        if part is not None:
            part.finish(lambda: self._parts.pop((owner, number), None))

    def run_came(self, connection: Route, message: Message) -> None:
        """RUN came."""
        _, graph, run, oldest, left, numbers, items = message
        part = self._parts[connection.remote, graph]
        if part.pins:
            part.unpin(oldest)
        part.run(run).begin(left, numbers, items, connection)

    def flow_came(self, connection: Route, message: Message) -> None:
        """FLOW came; nobody may want it any more."""
        _, owner, graph, run, items = message
        part = self._parts.get((owner, graph))
        if part is not None:
            if run not in part.runs:
                # It may have been sent before this, and woken nobody.
                self._peer.connections.ring_poller.look()
            part.run(run).came(items, connection)
            return
        for _, _, blobs, *_ in (item for item in items if len(item) == 5):
            self._peer.store.decline(connection, blobs)

    def skip_came(self, connection: Route, message: Message) -> None:
        """SKIP came; the run may be over."""
        _, graph, number = message
        part = self._parts.get((connection.remote, graph))
        run = None if part is None else part.runs.get(number)
        if run is not None:
            run.skip()

    def report_came(self, connection: Route, message: Message) -> None:
        """REPORT came."""
        _, graph, run, items = message
        own = self.own.get(graph)
        if own is not None:
            own.reported(run, items, connection)

    def abandon(self, error: DaftError) -> None:
        """The runtime is closed: runs that wait here do not begin."""
        for own in list(self.own.values()):
            own.abandon(error)

    def parts_of(self, owner: PeerId) -> list[Participant]:
        """What this process does of a process's graphs."""
        return [part for (process, _), part in self._parts.items() if process == owner]

    def in_flight(self, connection: Connection) -> int:
        """Calls and runs under way that wait for a process: their errors tell of its end."""
        remote, session = connection.remote, connection.session
        calls = len(session.calls) - session.waiting
        own = sum(graph.in_flight_with(remote) for graph in self.own.values())
        return calls + own + sum(len(part.runs) for part in self._parts.values() if remote in part.plan.receives)

    def owner_lost(self, remote: PeerId) -> None:
        """A process is gone: nobody wants its graphs any more."""
        for key in [key for key in self._parts if key[0] == remote]:
            part = self._parts.pop(key)
            for run in list(part.runs.values()):
                run.skip()
            part.close()

    def connection_lost(self, remote: PeerId, error: DaftError) -> None:
        """A process is gone, and this is why: its values will not come."""
        # There may be runs that wait for them, and have not been noticed yet.
        self._peer.connections.ring_poller.look()
        for part in self._parts.values():
            for run in list(part.runs.values()):
                run.lost(remote, error)
            if remote in part.plan.receives:
                self._say_cut_off(part)
        for own in list(self.own.values()):
            own.lost(remote, error)
