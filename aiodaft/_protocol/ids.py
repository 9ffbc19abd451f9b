"""Ids. They are never reused: a late reply to call 7 must not answer a new call 7."""

from __future__ import annotations

from typing import Final, NewType

# A process: unique in its cluster and in time.
PeerId = NewType("PeerId", str)
# One incarnation of an actor: its number, which stays, in the low bits, and its epoch, which grows with each restart. A
# message to one incarnation can never reach another.
ActorId = NewType("ActorId", int)
# A call, and its result: unique within the process that made the call.
CallId = NewType("CallId", int)

# Every process hosts two actors that serve its peers; the controller (or a node process) hosts more.
AGENT: Final = ActorId(0)
CHANNELS: Final = ActorId(3)
NODE: Final = ActorId(1)
COORDINATOR: Final = ActorId(2)
SUPERVISOR: Final = ActorId(4)
FIRST_USER_ACTOR: Final = ActorId(16)

_EPOCH_SHIFT: Final = 32


def incarnation(actor: ActorId, epoch: int) -> ActorId:
    """The id of another incarnation of an actor."""
    return ActorId(number_of(actor) | epoch << _EPOCH_SHIFT)


def number_of(actor: ActorId) -> ActorId:
    """The id of an actor's first incarnation, the same for all of them."""
    return ActorId(actor & (1 << _EPOCH_SHIFT) - 1)


def epoch_of(actor: ActorId) -> int:
    """How often the actor has been restarted."""
    return actor >> _EPOCH_SHIFT
