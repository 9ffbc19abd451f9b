"""The actors of this process."""

from __future__ import annotations

from typing import Final

from aiodaft._protocol.ids import ActorId
from aiodaft._protocol.numbers import Latest
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Shared
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import Process

# The number of stopped actors that a process remembers by name.
_REMEMBERED: Final = 1024


class Host(Shared):
    """The hosted actors of one process, and the objects that they share."""

    def __init__(self, process: Process, store: Store, ring_poller: RingPoller) -> None:
        super().__init__(process, store, ring_poller)
        self.actors: dict[ActorId, HostedActor] = {}
        # The names of the actors that were stopped last, and whether they have moved to other processes.
        self.stopped = Latest[ActorId, tuple[str, bool]](_REMEMBERED)

    def calls(self) -> list[InboundCall]:
        actors = list(self.actors.values())
        return [call for hosted in actors for call in (*hosted.under_way(), *hosted.mailbox.waiting())]

    def add(self, hosted: HostedActor) -> None:
        self.actors[hosted.id] = hosted

    def remove(self, hosted: HostedActor) -> None:
        self.actors.pop(hosted.id, None)
        self.stopped[hosted.id] = hosted.name, hosted.moves

    async def aclose(self, reason: str) -> None:
        for hosted in list(self.actors.values()):
            await hosted.stop(reason, 0)
        self.starter.close()
