"""Links between processes of one host go over to rings in shared memory."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from aiodaft._protocol.messages import RING, RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED, Message
from aiodaft._runtime.connections.fd_passing import close_all
from aiodaft._runtime.connections.shm_ring import offer_rings, take_rings
from aiodaft.exceptions import RemoteProtocolError

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Link
    from aiodaft._runtime.connections.route import Neighbour
    from aiodaft._runtime.peer import Peer


class Upgrades:
    """The links of one process that have rings, or will.

    One side of each pair makes the offer, the one with the smaller id, so that two never cross.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def want(self, way: Neighbour) -> None:
        """Use rings, if it leads to another process that shares memory. Asking twice is asking once."""
        if way is self._peer.loopback:
            return
        link = cast("Link", way)
        if self._peer.options.transport != "shm" or link.lost is not None or link.ring is not None:
            return
        if self._peer.id > link.remote:
            link.send((RING, RING_WANTED))
        else:
            self._offer(link)

    def _offer(self, link: Link) -> None:
        if link.offers_rings:
            return
        # Without descriptors or memory, the socket will do.
        with suppress(OSError):
            ring, fds = offer_rings()
            link.offer_rings(ring, fds[0])
            try:
                link.send_fds((RING, RING_OFFERED), fds)
            except OSError:
                link.drop_offer()

    def came(self, link: Link, message: Message) -> None:
        """RING came."""
        stage = message[1]
        first = self._peer.id < link.remote
        if stage == RING_WANTED and first:
            if link.ring is None:
                self._offer(link)
        elif stage == RING_OFFERED and not first and link.ring is None:
            self._take(link)
        elif stage == RING_USED and first:
            _drop_mark(link)
            ring, mark = link.take_offer()
            link.write_rings(ring, (RING, RING_USED), mark)
            link.read_rings(ring)
        elif stage == RING_USED and link.ring is not None:
            _drop_mark(link)
            link.read_rings(link.ring)
        elif stage == RING_REFUSED and first:
            link.drop_offer()
        else:
            raise RemoteProtocolError(f"{link.remote} speaks of rings out of turn")

    def _take(self, link: Link) -> None:
        memory: int | None = None
        try:
            memory, ours, theirs = link.take_fds(3)
            ring = take_rings(memory, ours, theirs)
        except (OSError, ValueError) as error:
            if memory is not None:
                os.close(memory)
            if isinstance(error, ValueError):
                raise RemoteProtocolError(f"the rings of {link.remote} cannot be used: {error}") from error
            # Without descriptors or memory, the socket will do.
            link.send((RING, RING_REFUSED))
        else:
            link.write_rings(ring, (RING, RING_USED), memory)


def _drop_mark(link: Link) -> None:
    # A read ends at a descriptor: so the byte that goes with the next one is never taken for a message.
    with suppress(OSError):
        close_all(link.take_fds(1))
