"""A route to a process: a connection, or loopback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import Message
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft_transport import Control

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer


class Route(Control, Protocol):
    """Where a value comes from: another process over a connection, or this one."""

    @property
    def remote(self) -> PeerId:
        """Id of the process."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What went over it."""
        ...

    @property
    def lost(self) -> Exception | None:
        """Why it ended, once it has."""
        ...

    def send(self, message: Message) -> None:
        """Say something to the process. What is said after the end is lost."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether `send` has to wake the process, which takes a while."""
        ...

    def send_in_turn(self, message: Message) -> None:
        """The same, behind the calls that were submitted before."""
        ...

    def send_quietly(self, message: Message) -> None:
        """The same; if the process sleeps, it may notice only when something else wakes it."""
        ...

    def wake(self) -> None:
        """See to it that the process notices what was sent quietly."""
        ...


class Loopback:
    """A process's connection to itself, for transports: what is sent is there at once."""

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
