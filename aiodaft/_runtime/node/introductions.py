"""Connects processes of a node with each other and with those elsewhere: by a socket from the node, or an address."""

from __future__ import annotations

from collections.abc import Callable, Container

from aiodaft._protocol.ids import PeerId, can_share_memory, node_of
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.contacts import Addresses
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft.exceptions import DaftError


class Introductions:
    """Connects processes with each other.

    Args:
        here: The process of the node.
        connections: Its connections to the processes.
        nodes: The addresses of nodes.
        workers: The workers that live.
        why_ended: The error for a process that is gone.
    """

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
        # The pairs that have got a connection from here.
        self._connected: set[frozenset[PeerId]] = set()

    def introduce(self, first: PeerId, second: PeerId) -> str:
        """Connect the first process with the second.

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
        # Both processes may ask at the same time: they get one connection.
        if pair not in self._connected:
            self._connected.add(pair)
            try:
                self._connections.to(first).introduce(self._connections.to(second))
            except OSError as error:
                self._connected.discard(pair)
                raise exhausted(error, f"{first} and {second} cannot be connected") from error
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
        self._connected = {pair for pair in self._connected if peer not in pair}
