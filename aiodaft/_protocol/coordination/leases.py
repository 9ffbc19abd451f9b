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
    UNSEEN = "it held the lease before the coordinator started"
    HELD = "it has said that it is alive"
    OVER = "the lease is over"


class LeaseEvent(enum.Enum):
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
    def __init__(self, ttl: float, now: float) -> None:
        self.ttl = ttl
        self._leases: dict[int, Lease] = {}
        self._looked_at = now

    def begin(self, epoch: int, now: float, *, seen: bool) -> None:
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


# A lease, as the node that holds it sees it.
#
# The node says every so often that it is alive, and counts from the moment of sending: its lease ends sooner by its own
# clock than by the coordinator's. It fences itself `skew` seconds before that. Until it is renewed, no name and no
# epoch that hangs on the lease may be used, because the coordinator may give them to others. While the coordinator is
# known not to run at all, no lease is ended, and the next one, which knows or is told what was granted, gives each node
# the time of a lease to come back.
#
#                JOINED                SILENT
#     OUTSIDE ------------> HOLDING ------------> FENCED
#        ^                    ^                     |
#        |                    +------- KEPT --------+
#        +-- LOST, from HOLDING and FENCED
#
# LOST: the coordinator has ended the lease. The node joins again, with a new epoch and without its old names.

# Keepalives in the time of a lease.
_PER_LEASE: Final = 4


class HolderState(enum.Enum):
    OUTSIDE = "it has no lease"
    HOLDING = "it may act under its lease"
    FENCED = "its lease may be over: it may not act until the coordinator has answered"


class HolderEvent(enum.Enum):
    JOINED = "the coordinator has taken it in"
    KEPT = "the coordinator has prolonged the lease"
    SILENT = "the coordinator has not answered for too long"
    LOST = "the coordinator has ended the lease"


_H: Final = HolderState
_HE: Final = HolderEvent

HOLDER_TRANSITIONS: Final[dict[tuple[HolderState, HolderEvent], HolderState]] = {
    (_H.OUTSIDE, _HE.JOINED): _H.HOLDING,
    (_H.HOLDING, _HE.KEPT): _H.HOLDING,
    (_H.HOLDING, _HE.SILENT): _H.FENCED,
    (_H.FENCED, _HE.KEPT): _H.HOLDING,
    (_H.FENCED, _HE.SILENT): _H.FENCED,
    (_H.HOLDING, _HE.LOST): _H.OUTSIDE,
    (_H.FENCED, _HE.LOST): _H.OUTSIDE,
}


class LeaseHolder:
    def __init__(self, skew: float) -> None:
        self._skew = skew
        self._state = HolderState.OUTSIDE
        # The lease: the epoch of the node.
        self.epoch = 0
        # Until then it may act, unless the lease is LOST; and how much of that the coordinator has granted.
        self.fence_at = 0.0
        self._granted_until = 0.0
        self._send_at = 0.0
        self._ttl = 0.0

    def joined(self, epoch: int, good_for: float, ttl: float, sent_at: float) -> None:
        """The coordinator took the node in (or still knows it), for `good_for` seconds from the time of the request."""
        self._ttl = ttl
        if self._state is HolderState.OUTSIDE or epoch != self.epoch:
            self._handle(HolderEvent.JOINED)
            self.epoch = epoch
            self.fence_at = self._granted_until = sent_at + good_for - self._skew
            self.sent(sent_at)
        else:
            self._renew(good_for, sent_at)

    def kept(self, epoch: int, good_for: float, sent_at: float) -> None:
        """The coordinator prolonged a lease; late answers for an earlier one do not count."""
        if epoch == self.epoch and self._state is not HolderState.OUTSIDE:
            self._renew(good_for, sent_at)

    def unopposed(self, asked_at: float) -> None:
        """At that time there was no coordinator. A holder that is fenced by then stays so: one may have been there."""
        if self.state(asked_at) is HolderState.HOLDING:
            self.fence_at = max(self.fence_at, asked_at + self._ttl - self._skew)

    def lost(self, epoch: int) -> None:
        if epoch == self.epoch and self._state is not HolderState.OUTSIDE:
            self._handle(HolderEvent.LOST)

    def sent(self, now: float) -> None:
        self._send_at = now + self._ttl / _PER_LEASE

    def state(self, now: float) -> HolderState:
        if self._state is HolderState.HOLDING and now >= self.fence_at:
            self._handle(HolderEvent.SILENT)
        return self._state

    def is_alone(self, now: float) -> bool:
        return now >= self._granted_until

    def get_timer(self) -> float:
        return min(self._send_at, self.fence_at) if self._state is HolderState.HOLDING else self._send_at

    def _renew(self, good_for: float, sent_at: float) -> None:
        # An answer that took very long may be of no use any more; `state` tells.
        self._granted_until = max(self._granted_until, sent_at + good_for - self._skew)
        self.fence_at = max(self.fence_at, self._granted_until)
        self._handle(HolderEvent.KEPT)

    def _handle(self, event: HolderEvent) -> None:
        self._state = next_state(HOLDER_TRANSITIONS, self._state, event)
