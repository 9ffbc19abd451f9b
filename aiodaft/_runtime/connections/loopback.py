"""A process as its own neighbour."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import Message
from aiodaft._runtime.connections.traffic import Traffic

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer


class Loopback:
    """A process's link to itself, for transports: what is sent is there at once."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.traffic = Traffic()
        self.lost: Exception | None = None

    @property
    def remote(self) -> PeerId:
        """The process itself."""
        return self._peer.id

    @property
    def peer(self) -> str:
        """The process itself (what transports call it)."""
        return self._peer.id

    def send(self, message: Message) -> None:
        """What a graph says to this process; it hears of it in the loop's next turn."""
        self._peer.loop.call_soon(self._peer.graphs.handlers[message[0]], self, message)

    def send_in_turn(self, message: Message) -> None:
        """What a graph says before the calls that this process makes next: those do not wait for a turn of the loop."""
        self._peer.graphs.handlers[message[0]](self, message)

    send_quietly = send_in_turn
    is_asleep = False

    def wake(self) -> None:
        """It never sleeps."""

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        """Hand a note to the transport."""
        self._peer.store.transport_named(transport).note_received(self, note, [os.dup(fd) for fd in fds])
