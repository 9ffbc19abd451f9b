"""The move of a connection between two processes of one host from its socket to rings in shared memory. Pure.

    process with the smaller id                 process with the larger id

                          <---  RING_WANTED                      only if this one wants rings
    makes rings           --->  RING_OFFERED + 3 descriptors     maps them
    reads, writes rings   <---  RING_USED + 1 descriptor         writes its ring from here on
                          --->  RING_USED + 1 descriptor         reads its ring from here on
    or drops them         <---  RING_REFUSED                     has no descriptors or memory

Only one side makes offers, so two offers never cross.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from aiodaft._protocol.connections.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED
from aiodaft.exceptions import RemoteProtocolError

# Whether one process polls for messages or sleeps until it is woken. Time comes as an argument; no clock, no I/O.
#
# Polling finds an answer within microseconds; a wake-up takes tens of microseconds. Polling pays only while answers
# come soon on average, there is a second processor, and no actor's thread of this process runs, because polling takes
# the GIL.

# Seconds of polling after the last message, and the longest average gap between messages at which polling pays: the
# time of a step with a megabyte.
POLL: Final = 300e-6
# Seconds of polling before this process yields the processor between looks.
ALONE: Final = 10e-6
# If yielding takes more seconds than this, another process ran.
SWITCH: Final = 3e-6
# If it takes more than this, others use up their time slices: a wake-up would have come sooner.
SLICE: Final = 100e-6
# Longer gaps count as this many seconds.
_LONG: Final = 1e-3
_NEVER: Final = float("-inf")
# Weight of a new gap in the average.
_WEIGHT: Final = 1 / 8


class Idle(Enum):
    LOOK = "look again in the next turn of the loop"
    YIELD = "let other processes run before that"
    SLEEP = "wait until it is woken"


class Pace:
    """The times of one process's messages.

    Attributes:
        may_poll: There is a second processor.
        since: The time of the last message, sent or received.
        crowded: Another process wants the processor.
    """

    def __init__(self, *, may_poll: bool) -> None:
        self.may_poll = may_poll
        self.since = 0.0
        self.threads = 0
        # The average gap from one message to the next one received.
        self._gap = 0.0
        self.crowded = False

    def came(self, now: float) -> None:
        gap = now - self.since
        self.since = now
        self._gap += ((gap if gap < _LONG else _LONG) - self._gap) * _WEIGHT

    def idle(self, now: float) -> Idle:
        """The next action after a turn in which nothing came."""
        if not self.may_poll or self.threads or self._gap >= POLL or now - self.since >= POLL:
            return Idle.SLEEP
        return Idle.YIELD if self.crowded or now - self.since > ALONE else Idle.LOOK

    def yielded(self, seconds: float) -> None:
        """Other processes could run for so long; one that ran may be about to answer."""
        self.crowded = seconds > SWITCH
        if seconds > SLICE:
            # Sleep at the next look, and let it count as a long gap.
            self.since = _NEVER


class Way(Enum):
    SOCKET = "messages go over the socket"
    OFFERED = "this side has made rings, and the peer has not answered"
    WRITING = "this side writes to its ring; the peer still sends over the socket"
    RINGS = "both sides use their rings"


class Step(Enum):
    NOTHING = "nothing"
    ASK = "send RING_WANTED"
    OFFER = "make rings, and send RING_OFFERED"
    TAKE = "open the offered rings, send RING_USED, and write to them"
    USE = "send RING_USED, and write to the rings that were offered and read them"
    READ = "read the rings"
    DROP = "close the rings that were offered"


# This process wants rings: no message.
_WANT: Final = -1

_MAKER: Final = {
    (Way.SOCKET, _WANT): (Step.OFFER, Way.OFFERED),
    (Way.SOCKET, RING_WANTED): (Step.OFFER, Way.OFFERED),
    # The offer is on its way.
    (Way.OFFERED, RING_WANTED): (Step.NOTHING, Way.OFFERED),
    (Way.RINGS, RING_WANTED): (Step.NOTHING, Way.RINGS),
    (Way.OFFERED, RING_USED): (Step.USE, Way.RINGS),
    (Way.OFFERED, RING_REFUSED): (Step.DROP, Way.SOCKET),
}

_TAKER: Final = {
    (Way.SOCKET, _WANT): (Step.ASK, Way.SOCKET),
    (Way.SOCKET, RING_OFFERED): (Step.TAKE, Way.WRITING),
    (Way.WRITING, RING_USED): (Step.READ, Way.RINGS),
}


class Upgrade:
    """The move of one connection, as one side sees it."""

    def __init__(self, *, makes: bool) -> None:
        self._table = _MAKER if makes else _TAKER
        self.way = Way.SOCKET

    def want(self) -> Step:
        """This process wants rings; nothing if they come already."""
        step, self.way = self._table.get((self.way, _WANT), (Step.NOTHING, self.way))
        return step

    def handle(self, stage: int) -> Step:
        """RING came.

        Raises:
            RemoteProtocolError: The peer has no reason to send it.
        """
        found = self._table.get((self.way, stage))
        if found is None or stage == _WANT:
            raise RemoteProtocolError("an unexpected RING message came")
        step, self.way = found
        return step

    def failed(self) -> None:
        """Without descriptors or memory, the connection keeps its socket."""
        self.way = Way.SOCKET
