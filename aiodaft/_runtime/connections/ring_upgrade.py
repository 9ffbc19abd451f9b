"""Moves connections between processes of one host from their socket to rings in shared memory."""

from __future__ import annotations

import os
from contextlib import suppress

from aiodaft._protocol import messages as m
from aiodaft._protocol.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED, Message
from aiodaft._protocol.ring import Step, next_step
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.connections.shm_ring import offer_rings, take_rings
from aiodaft._runtime.platform.sockets import Sockets
from aiodaft._runtime.process import Process
from aiodaft.exceptions import RemoteProtocolError


class RingUpgrades:
    """Moves the connections of one process to rings."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def want(self, route: Route) -> None:
        """Use rings, if the route leads to another process that shares memory. Idempotent."""
        if not isinstance(route, Connection):
            return
        if self._process.options.transport != "shm" or route.lost is not None or route.ring is not None:
            return
        if self._process.id > route.remote:
            route.send(m.ring(RING_WANTED))
        else:
            self._offer(route)

    def _offer(self, connection: Connection) -> None:
        if connection.offers_rings:
            return
        # Without descriptors or memory, the connection keeps its socket.
        with suppress(OSError):
            ring, fds = offer_rings()
            connection.offer_rings(ring, fds[0])
            try:
                connection.send_fds(m.ring(RING_OFFERED), fds)
            except OSError:
                connection.drop_offer()

    def came(self, connection: Connection, message: Message) -> None:
        """Handle RING."""
        first = self._process.id < connection.remote
        match next_step(m.read_ring(message), first=first, writes=connection.ring is not None):
            case Step.OFFER:
                self._offer(connection)
            case Step.TAKE:
                self._take(connection)
            case Step.MOVE:
                _drop_mark(connection)
                ring, mark = connection.take_offer()
                connection.write_rings(ring, m.ring(RING_USED), mark)
                connection.read_rings(ring)
            case Step.READ:
                _drop_mark(connection)
                assert connection.ring is not None
                connection.read_rings(connection.ring)
            case Step.DROP:
                connection.drop_offer()
            case Step.NOTHING:
                pass
            case None:
                raise RemoteProtocolError(f"{connection.remote} sent an unexpected RING message")

    def _take(self, connection: Connection) -> None:
        memory: int | None = None
        try:
            memory, ours, theirs = connection.take_fds(3)
            ring = take_rings(memory, ours, theirs)
        except (OSError, ValueError) as error:
            if memory is not None:
                os.close(memory)
            if isinstance(error, ValueError):
                raise RemoteProtocolError(f"the rings of {connection.remote} cannot be used: {error}") from error
            # Without descriptors or memory, the connection keeps its socket.
            connection.send(m.ring(RING_REFUSED))
        else:
            connection.write_rings(ring, m.ring(RING_USED), memory)


def _drop_mark(connection: Connection) -> None:
    # A read ends at a descriptor, so the byte that goes with the next one is never taken for a message.
    with suppress(OSError):
        Sockets().close_all(connection.take_fds(1))
