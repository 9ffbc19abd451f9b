"""Links between processes of one host go over to rings in shared memory."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from aiodaft._protocol.messages import RING, RING_OFFERED, RING_TAKEN, RING_WANTED, Message
from aiodaft.exceptions import RemoteProtocolError

from .descriptors import close_all
from .exhaustion import refusal
from .ring import offer_rings, take_rings

if TYPE_CHECKING:
    from .link import Link
    from .neighbour import Neighbour
    from .peer import Peer


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
        try:
            ring, fds = offer_rings()
        except OSError:
            # Without descriptors or memory, the socket will do.
            return
        link.write_rings(ring, (RING, RING_OFFERED), fds)
        # The others are dupped by now, and ours to keep.
        os.close(fds[0])

    def came(self, link: Link, message: Message) -> None:
        """RING came."""
        stage = message[1]
        first = self._peer.id < link.remote
        if stage == RING_WANTED and first:
            if link.ring is None:
                self._offer(link)
        elif stage == RING_OFFERED and not first and link.ring is None:
            self._take(link)
        elif stage == RING_TAKEN and first and link.ring is not None:
            # It only separates what comes before it from what comes after it.
            with suppress(OSError):
                close_all(link.take_fds(1))
            link.read_rings(link.ring)
        else:
            raise RemoteProtocolError(f"{link.remote} speaks of rings out of turn")

    def _take(self, link: Link) -> None:
        try:
            memory, ours, theirs = link.take_fds(3)
            back = os.dup(memory)
        except OSError as error:
            raise RemoteProtocolError(refusal(error, f"the rings of {link.remote} cannot be used")) from error
        try:
            ring = take_rings(memory, ours, theirs)
            # A read ends at a descriptor: so the byte that goes with the next one is never taken for a message.
            link.write_rings(ring, (RING, RING_TAKEN), (back,))
            link.read_rings(ring)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"the rings of {link.remote} cannot be used: {error}") from error
        finally:
            os.close(back)
