"""Moves connections of one host to rings in shared memory, in the steps of `_protocol.connections.rings`."""

from __future__ import annotations

import os
from contextlib import suppress

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED
from aiodaft._protocol.connections.rings import Step
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.ring_poller import offer_rings, take_rings
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft.exceptions import RemoteProtocolError


def take_step(connection: Connection, step: Step) -> None:
    if step is Step.ASK:
        connection.send(m.ring(RING_WANTED))
    elif step is Step.OFFER:
        _offer(connection)
    elif step is Step.TAKE:
        _take(connection)
    elif step is Step.DROP:
        connection.drop_offer()
    elif step is not Step.NOTHING:
        # A read ends at a descriptor, so the byte that goes with the next one is never taken for a message.
        with suppress(OSError):
            Sockets().close_all(connection.take_fds(1))
        if step is Step.USE:
            connection.use_offer(m.ring(RING_USED))
        connection.read_rings()


def _offer(connection: Connection) -> None:
    try:
        ring, fds = offer_rings()
        connection.offer = ring, fds[0]
        connection.send_fds(m.ring(RING_OFFERED), fds)
    except OSError:
        connection.drop_offer()
        connection.upgrade.failed()


def _take(connection: Connection) -> None:
    memory: int | None = None
    try:
        memory, ours, theirs = connection.take_fds(3)
        ring = take_rings(memory, ours, theirs)
    except (OSError, ValueError) as error:
        if memory is not None:
            os.close(memory)
        if isinstance(error, ValueError):
            raise RemoteProtocolError(f"the rings of {connection.remote} cannot be used: {error}") from error
        connection.upgrade.failed()
        connection.send(m.ring(RING_REFUSED))
    else:
        connection.write_rings(ring, m.ring(RING_USED), memory)
