"""A route to a process: a connection, or loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.process import Process
from aiodaft_transport import Control


@dataclass(slots=True)
class Traffic:
    """The traffic between a process and other processes.

    Attributes:
        messages_sent: Control messages: calls, answers, and messages that keep values alive.
        messages_received: Control messages received.
        control_sent: Bytes of the control messages sent, with the small values inside them.
        control_received: Bytes of the control messages received.
        payloads_sent: Large values, or parts of them, that other processes were allowed to read.
        payloads_received: Large values, or parts of them, that this process fetched.
        payload_sent: Bytes of the payloads sent.
        payload_received: Bytes of the payloads received.
        device_sent: Bytes of `payload_sent` that go from GPU to GPU, without memory of the host.
        device_received: Bytes of `payload_received` that came from GPU to GPU.
        ring_sent: Bytes of `control_sent` that went through rings in shared memory, without the kernel.
        ring_received: Bytes of `control_received` that came through such rings.
    """

    messages_sent: int = 0
    messages_received: int = 0
    control_sent: int = 0
    control_received: int = 0
    payloads_sent: int = 0
    payloads_received: int = 0
    payload_sent: int = 0
    payload_received: int = 0
    device_sent: int = 0
    device_received: int = 0
    ring_sent: int = 0
    ring_received: int = 0

    @property
    def control(self) -> int:
        return self.control_sent + self.control_received

    @property
    def payload(self) -> int:
        return self.payload_sent + self.payload_received


def total(parts: Iterable[Traffic]) -> Traffic:
    found = list(parts)
    return Traffic(*(sum(getattr(part, field.name) for part in found) for field in fields(Traffic)))


class Route(Control, Protocol):
    """A route to a process, over a connection or to this very process."""

    @property
    def remote(self) -> PeerId: ...
    @property
    def shares_memory(self) -> bool: ...

    @property
    def reached_by(self) -> tuple[str, ...]: ...

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
        self._loop.call_soon(self._handlers[message[0]], self, message)

    def send_in_turn(self, message: Message) -> None:
        self._handlers[message[0]](self, message)

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self._take_note(transport, self, note, [os.dup(fd) for fd in fds])
