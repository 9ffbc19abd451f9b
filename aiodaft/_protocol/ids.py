"""Ids. They are never reused: a late reply to call 7 must not answer a new call 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType, cast

# A process: unique in its cluster and in time. In a cluster, the name of its node follows an @.
PeerId = NewType("PeerId", str)
# One incarnation of an actor: its number, which stays, in the low bits, and its epoch, which grows with each restart. A
# message to one incarnation can never reach another.
ActorId = NewType("ActorId", int)
# A call, and its result: unique within the process that made the call. Negative: one of the calls of a call of a group.
CallId = NewType("CallId", int)

# Every process hosts actors that serve its peers.
AGENT: Final = ActorId(0)
CHANNELS: Final = ActorId(3)
NODE: Final = ActorId(1)
COORDINATOR: Final = ActorId(2)
SUPERVISOR: Final = ActorId(4)
CODE: Final = ActorId(5)
COLLECTIVES: Final = ActorId(6)
RESHARDING: Final = ActorId(7)
BLOCKS: Final = ActorId(8)
INBOXES: Final = ActorId(9)
KEYED: Final = ActorId(10)
PLANNING: Final = ActorId(11)
TURNS: Final = ActorId(12)
CHECKPOINTS: Final = ActorId(13)
FIRST_USER_ACTOR: Final = ActorId(16)
# No actor has this number: the actor of a call is chosen later.
NOBODY: Final = ActorId(-1)

_EPOCH_SHIFT: Final = 32
_WIDTH_BITS: Final = 5
_ROSTERS: Final = 15
_TAIL_BITS: Final = _WIDTH_BITS + 4
_UPPER_HALF: Final = 1 << 31


def node_of(peer: PeerId) -> str:
    return peer.partition("@")[2]


def is_attached(peer: PeerId) -> bool:
    """A controller that uses a cluster: no node has started it, and none can connect to it."""
    return peer.startswith("controller-") and "@" in peer


def is_node(peer: PeerId) -> bool:
    return peer.startswith("node-")


def is_worker(peer: PeerId) -> bool:
    return peer.startswith("worker-")


def can_share_memory(first: PeerId, second: PeerId) -> bool:
    return node_of(first) == node_of(second) and not is_attached(first) and not is_attached(second)


def incarnation(actor: ActorId, epoch: int) -> ActorId:
    return ActorId(number_of(actor) | epoch << _EPOCH_SHIFT)


def number_of(actor: ActorId) -> ActorId:
    return ActorId(actor & (1 << _EPOCH_SHIFT) - 1)


def first_number_beside(actor: ActorId) -> int:
    """The process of this actor hosts none with such numbers.

    All actors of one process have the same owner, and so numbers of the same half.
    """
    return FIRST_USER_ACTOR if actor & _UPPER_HALF else _UPPER_HALF


def epoch_of(actor: ActorId) -> int:
    return actor >> _EPOCH_SHIFT


def sibling_ids(serial: CallId, count: int, roster: int = 0) -> Sequence[CallId]:
    """The ids of the calls of one call of a group: each says which call of the group it belongs to."""
    width = (count - 1).bit_length()
    # Each is, with the sign turned: the serial number, that of the member, the roster, and how many bits the number of
    # the member takes.
    first = serial << width + _TAIL_BITS | roster << _WIDTH_BITS | width
    return cast("Sequence[CallId]", range(-first, -first - (count << _TAIL_BITS), -1 << _TAIL_BITS))


def roster_at(epoch: int) -> int:
    """Tells the members of a group from those at epochs near it; never 0."""
    return 1 + epoch % _ROSTERS


def roster_of(call: CallId) -> int:
    """Of a call of all members whose method runs one at a time; 0 for another call."""
    return 0 if call >= 0 else -call >> _WIDTH_BITS & (1 << _TAIL_BITS - _WIDTH_BITS) - 1


def serial_of(call: CallId) -> int:
    return call if call >= 0 else -call >> _TAIL_BITS + (-call & (1 << _WIDTH_BITS) - 1)


def group_call_of(caller: PeerId, call: CallId) -> tuple[PeerId, int] | None:
    """Names the call of a group that a call belongs to, in the cluster."""
    return None if call >= 0 else (caller, serial_of(call))
