"""A route to a process: a connection, or loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft._runtime.process import Process
from aiodaft_transport import Control


class Route(Control, Protocol):
    """A route to a process, over a connection or to this very process."""

    @property
    def remote(self) -> PeerId: ...
    @property
    def shares_memory(self) -> bool: ...

    @property
    def reached_by(self) -> tuple[str, ...]:
        """The transports, beside "tcp", that lead from one machine to the other."""
        ...

    @property
    def traffic(self) -> Traffic: ...
    @property
    def lost(self) -> Exception | None: ...
    def send(self, message: Message) -> None: ...
    def send_in_turn(self, message: Message) -> None: ...


class Loopback:
    """The route of a process to itself, for transports and graphs."""

    def __init__(
        self,
        process: Process,
        handlers: Sequence[Callable[[Any, Message], object]],
        take_note: Callable[[str, Route, bytes, list[int]], object],
    ) -> None:
        self._loop = process.loop
        self._handlers = handlers
        self._take_note = take_note
        self.remote = process.id
        self.peer: str = process.id
        self.shares_memory = True
        self.reached_by: tuple[str, ...] = ()
        self.traffic = Traffic()
        self.lost: Exception | None = None

    def send(self, message: Message) -> None:
        """Handle a message of a graph in the loop's next turn."""
        self._loop.call_soon(self._handlers[message[0]], self, message)

    def send_in_turn(self, message: Message) -> None:
        """Handle a message of a graph now: the next calls of this process do not wait for a turn of the loop."""
        self._handlers[message[0]](self, message)

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self._take_note(transport, self, note, [os.dup(fd) for fd in fds])
