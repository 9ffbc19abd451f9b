"""Leases, as the coordinator sees them: a member is believed alive until its lease is over. Pure.

    UNSEEN --KEPT--> HELD        ENDED leads from both to OVER

A holder stops by itself a while before (see `holder`), so that names that end with a lease can be given to others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from aiodaft._protocol.numbers import next_state
from aiodaft.exceptions import LeaseLost

# A coordinator that has not looked for this part of a lease was stopped: its members' messages may wait to be read.
_STOPPED: Final = 0.5


class LeaseState(enum.Enum):
    """The coordinator's knowledge of the holder."""

    UNSEEN = "it held the lease before the coordinator started"
    HELD = "it has said that it is alive"
    OVER = "the lease is over"


class LeaseEvent(enum.Enum):
    """The events in the life of a lease."""

    KEPT = "its holder says that it is alive"
    ENDED = "its holder gives it up, or has been silent for too long"


_S: Final = LeaseState
_E: Final = LeaseEvent

TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.UNSEEN, _E.KEPT): _S.HELD,
    (_S.HELD, _E.KEPT): _S.HELD,
    (_S.UNSEEN, _E.ENDED): _S.OVER,
    (_S.HELD, _E.ENDED): _S.OVER,
}


@dataclass(slots=True)
class Lease:
    """One lease; `deadline` is a time of the coordinator's clock."""

    state: LeaseState
    deadline: float


class LeaseTable:
    """The leases by the epochs of their members."""

    def __init__(self, ttl: float, now: float) -> None:
        self.ttl = ttl
        self._leases: dict[int, Lease] = {}
        self._looked_at = now

    def begin(self, epoch: int, now: float, *, seen: bool) -> None:
        """Start a lease; not `seen`: of a member that was there before the coordinator."""
        self._leases[epoch] = Lease(LeaseState.HELD if seen else LeaseState.UNSEEN, now + self.ttl)

    def keep(self, epoch: int, now: float) -> None:
        """Prolong a lease, because its holder is alive.

        Raises:
            LeaseLost: It is over.
        """
        lease = self._leases.get(epoch)
        if lease is None:
            raise LeaseLost("the lease is over: the node has to join again, as a new incarnation")
        lease.state = next_state(TRANSITIONS, lease.state, LeaseEvent.KEPT)
        lease.deadline = max(lease.deadline, now + self.ttl)

    def end(self, epoch: int) -> None:
        lease = self._leases.pop(epoch)
        lease.state = next_state(TRANSITIONS, lease.state, LeaseEvent.ENDED)

    def is_late(self, epoch: int, now: float) -> bool:
        return self._leases[epoch].deadline <= now

    def state(self, epoch: int) -> LeaseState:
        lease = self._leases.get(epoch)
        return LeaseState.OVER if lease is None else lease.state

    def expired(self, now: float) -> list[int]:
        if now - self._looked_at > _STOPPED * self.ttl:
            for lease in self._leases.values():
                lease.deadline = max(lease.deadline, now + _STOPPED * self.ttl)
        self._looked_at = now
        return [epoch for epoch, lease in self._leases.items() if lease.deadline <= now]

    def next_look(self) -> float:
        usual = self._looked_at + _STOPPED * self.ttl / 2
        return min([usual, *(lease.deadline for lease in self._leases.values())])
