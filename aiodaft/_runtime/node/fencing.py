"""The effects of a node's lease on its actors with names; see `Fence`, `Membership` and `LeaseHolder`."""

from __future__ import annotations

from contextlib import suppress

from aiodaft._protocol.coordination.records import NamedActor
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.diagnostics.process_stack import is_answered
from aiodaft._runtime.node.local_node import LocalNode
from aiodaft._runtime.node.membership import Membership
from aiodaft._runtime.peer import Peer
from aiodaft.exceptions import DaftError
from aiodaft.ref import Ref


class Fencing:
    """Tells workers with named actors of the lease, and ends actors that were replaced."""

    def __init__(self, peer: Peer, local: LocalNode, membership: Membership) -> None:
        self._peer = peer
        self._local = local
        self._membership = membership
        # Workers in which actors have, or had, names.
        self._guarded: set[PeerId] = set()
        local.agent.on_named = self._named
        membership.on_prolonged = self._prolonged
        membership.on_replaced = self._end
        membership.is_there = self._is_there

    def _named(self, granted: NamedActor) -> None:
        self._membership.note_name(granted)
        # A supervised actor has the name by its owner, which is elsewhere.
        if not granted.supervised and granted.peer in self._local.launcher.workers:
            self._guarded.add(granted.peer)
            self._peer.agent_of(granted.peer).guard.tell(granted.actor, self._membership.until)

    def _prolonged(self, until: float) -> None:
        self._guarded &= self._local.launcher.workers.keys()
        for worker in self._guarded:
            self._peer.agent_of(worker).prolong.tell(until)

    async def _end(self, held: NamedActor) -> None:
        worker = self._local.launcher.workers.get(held.peer)
        if worker is None or held.supervised or held.actor not in worker.actors:
            return
        reason = f"its name {held.name!r} went to another actor while its node had no lease"
        if len(worker.actors) > 1:
            # Else its process ends, and callers hear the reason.
            with suppress(DaftError):
                await self._peer.agent_of(held.peer).stop(held.actor, reason, 0.0)
        await self._local.agent.vacate(worker.owner, held.peer, held.actor, reason)

    async def _is_there(self, held: NamedActor) -> bool:
        if held.supervised:
            connection = self._peer.connections.get(held.peer)
            return connection is not None and connection.lost is None
        report: Ref[object] = self._peer.agent_of(held.peer).report(held.actor)
        if await is_answered(report, self._peer.process.env.timeouts.report):
            with suppress(DaftError):
                await report
                return True
            return False
        # It is stopped, or busy.
        return True
