"""The owners of the actors of a node: controllers, and workers whose actors have spawned others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiodaft._protocol.calls.following import Location
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.contacts import NodeContact, OwnerContact
from aiodaft._runtime.platform.tasks import TaskOwner, logger
from aiodaft._runtime.serialization.errors import encoded_text
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown
from aiodaft.methods import method

# Seconds before a node that could not be asked is asked again.
_PAUSE: Final = 0.5


class Owners(Protocol):
    """The messages of a node to the owners of actors."""

    def process_ended(self, owner: PeerId, peer: PeerId, error: OutcomeUnknown, *, wanted: bool) -> None: ...

    def actor_died(self, owner: PeerId, peer: PeerId, actor: ActorId, error: OutcomeUnknown) -> None: ...

    def node_draining(self, owner: PeerId, node: PeerId, grace: float) -> None: ...

    def locate(self, owner: PeerId, number: int, *, wait: bool) -> Awaitable[Location]: ...


class KeptActors(OwnerContact):
    """Owns the actors of a node that outlive their programs: the log tells how they fail."""

    @method
    async def process_ended(self, peer: str, error: OutcomeUnknown, wanted: bool) -> None:
        """Do nothing: callers have the error."""

    @method
    async def actor_died(self, peer: str, actor: int, error: OutcomeUnknown) -> None:
        logger.error("an actor died while no call was under way: %s", error)

    @method
    async def node_draining(self, node: str, grace: float) -> None:
        """Do nothing: they run on until the grace is over."""

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        # The exception itself may be of a class that no node can import.
        logger.error("%s\n%s", what, encoded_text(encoded))


class Contacts(Protocol):
    """The agents of other nodes."""

    def contact(self, peer: PeerId) -> NodeContact:
        """The agent of the node of a process.

        Raises:
            ActorDied: The node is not in the cluster any more.
        """
        ...


class FarOwners:
    """Workers of other nodes that own actors here. Their nodes know when they end.

    Args:
        tasks: Owns the tasks that wait for that.
        nodes: The other nodes.
        on_lost: Called with a worker that has ended, or whose node is gone, and with the reason.
    """

    def __init__(self, tasks: TaskOwner, nodes: Contacts, on_lost: Callable[[PeerId, str], object]) -> None:
        self._tasks = tasks
        self._nodes = nodes
        self._on_lost = on_lost
        self._known: set[PeerId] = set()

    def add(self, owner: PeerId) -> None:
        """Wait for the end of a worker, also if it has ended. Idempotent."""
        if owner not in self._known:
            self._known.add(owner)
            self._tasks.create_task(self._wait_end(owner), name=f"wait for the end of {owner}")

    async def _wait_end(self, owner: PeerId) -> None:
        while True:
            try:
                await self._nodes.contact(owner).wait_end(owner)
                break
            except ActorDied:
                # Its node is gone.
                break
            except DaftError as error:
                logger.debug("the node of %s is not heard: %s", owner, error)
                await asyncio.sleep(_PAUSE)
        self._known.remove(owner)
        self._on_lost(owner, f"its owner {owner} is gone")
