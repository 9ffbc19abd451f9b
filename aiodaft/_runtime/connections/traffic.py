"""Counts the messages and bytes that a process sends and receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


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
