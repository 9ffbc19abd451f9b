"""What a process sent and received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """What a process sent to others and received from them.

    Attributes:
        messages_sent: Control messages: calls, answers, and what keeps values alive.
        messages_received: The same, the other way.
        control_sent: Bytes of these messages, with the small values inside them.
        control_received: The same, the other way.
        payloads_sent: Large values, or parts of them, that others were given to read.
        payloads_received: Those that were brought here.
        payload_sent: Bytes of these values.
        payload_received: The same, the other way.
        device_sent: Those of them that no memory of a host was used for: from GPU to GPU.
        device_received: The same, the other way.
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

    @property
    def control(self) -> int:
        """Bytes of control messages, both ways."""
        return self.control_sent + self.control_received

    @property
    def payload(self) -> int:
        """Bytes of large values, both ways."""
        return self.payload_sent + self.payload_received


def total(parts: Iterable[Traffic]) -> Traffic:
    """The sum of some traffic."""
    found = list(parts)
    return Traffic(*(sum(getattr(part, field.name) for part in found) for field in fields(Traffic)))
