"""Connects processes of a node with each other and with those elsewhere: by a socket from the node, or an address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from typing import Final, Protocol

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.ids import ActorId, PeerId, can_share_memory, node_of
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.peer import Addresses, NodeContact, OwnerContact
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.tasks import TaskOwner, logger
from aiodaft._runtime.serialization.errors import encoded_text
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown
from aiodaft.methods import method


class Introductions:
    """Connects processes with each other."""

    def __init__(
        self,
        here: PeerId,
        connections: Connections,
        nodes: Addresses,
        workers: Container[PeerId],
        why_ended: Callable[[PeerId], DaftError],
    ) -> None:
        self._here = here
        self._connections = connections
        self._nodes = nodes
        self._workers = workers
        self._why_ended = why_ended
        # How many connections each pair has got from here.
        self._connected: Counter[frozenset[PeerId]] = Counter()

    def introduce(self, first: PeerId, second: PeerId, known: int) -> str:
        """Connect the first process with the second; `known`: the introductions of the second that it has got.

        Returns:
            The address to connect to; "" if a socket comes instead, because both processes are on this machine.

        Raises:
            ActorDied: The second process is gone.
            ResourceExhausted: There is no descriptor for the connection.
        """
        if node_of(second) != node_of(self._here):
            return self._nodes.address_of(second)
        if not (second in self._workers or self.is_attached(second)):
            raise self._why_ended(second)
        if self.is_attached(first) or self.is_attached(second):
            return self._nodes.address_of(second)
        pair = frozenset((first, second))
        # Both processes may ask at the same time: they get one connection, and another one when they have lost it.
        if known >= self._connected[pair]:
            try:
                self._connections.to(first).introduce(self._connections.to(second))
            except OSError as error:
                raise exhausted(error, f"{first} and {second} cannot be connected") from error
            self._connected[pair] += 1
        return ""

    def is_attached(self, peer: PeerId) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and connection.far and connection.lost is None

    def open_stream(self, first: PeerId, second: PeerId, number: int) -> str:
        """Give the first process, under a number, and the second one the ends of a stream for payload.

        Returns:
            The address to connect to; "" if a socket comes instead, because both processes are on this machine.

        Raises:
            ActorDied: The second process is gone.
            ResourceExhausted: There is no descriptor for it.
        """
        if not can_share_memory(first, second) or not can_share_memory(second, self._here):
            return self._nodes.address_of(second)
        if second not in self._workers and second != self._here:
            raise self._why_ended(second)
        try:
            self._connections.join_by_stream(first, second, number)
        except OSError as error:
            raise exhausted(error, f"there is no stream from {first} to {second}") from error
        return ""

    def forget(self, peer: PeerId) -> None:
        for pair in [pair for pair in self._connected if peer in pair]:
            del self._connected[pair]


# Seconds before a node that could not be asked is asked again.
_PAUSE: Final = 0.5


class Owners(Protocol):
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
    def contact(self, peer: PeerId) -> NodeContact:
        """The agent of the node of a process.

        Raises:
            ActorDied: The node is not in the cluster any more.
        """
        ...


class FarOwners:
    """Workers of other nodes that own actors here. Their nodes know when they end.

    Args:
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
