"""Whether a node is silent, judged by the bytes that come from it over a connection between machines. No clock, no I/O.

Each process that has a connection to a node of another machine looks at it once a period. A node runs nothing of users
and answers at once: if it owes an answer and sends nothing, it is stopped, or its machine is, although the kernel there
keeps the connection alive. Processes of users are not judged like this: a worker may compute for as long as it wants,
and its own node watches it; no process waits for a controller.

Since the last look                                    | Order
something has come, or no answer is due                | nothing
nothing has come, though an answer is due: for once    | ASK a question that each process answers at once
    `GIVEN_UP_AFTER` times in a row                    | GIVE_UP: the connection ends, as if the network had cut it

A look that is late, because the watcher was stopped or blocked, counts as one.
"""

from __future__ import annotations

from typing import Final

from aiodaft._protocol.node.liveness import Order

# Seconds between two looks: so long that the keepalives of a usual lease, which come more often, save the questions.
PERIOD: Final = 3.0
# Silent looks. A node is given up when it has been silent for 12 to 15 s.
GIVEN_UP_AFTER: Final = 4


def period_of(lease: float) -> float:
    """The period of a node: never so long that others lose patience with the coordinator sooner than it with them."""
    return min(PERIOD, 0.3 * lease)


class Silence:
    """The silence on one connection."""

    def __init__(self) -> None:
        self._received = 0
        self._silent_looks = 0

    def look(self, received: int, *, awaited: bool) -> Order | None:
        """A period is over.

        Args:
            received: Bytes that have come since the beginning.
            awaited: Whether an answer is due.
        """
        if received != self._received or not awaited:
            self._received, self._silent_looks = received, 0
            return None
        self._silent_looks += 1
        if self._silent_looks == GIVEN_UP_AFTER:
            return Order.GIVE_UP
        return Order.ASK if self._silent_looks == 1 else None
