"""The records of the coordinator: actors with names, members (nodes), and their leases. Pure.

Every change has a revision. The epoch of a record is the revision at which it was granted: the next holder of the same
name has a greater one. Both only grow, and no coordinator uses one again: the high bits are the term of the
coordinator, which is greater at each start of one.
"""

# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeAlias, cast

from aiodaft._protocol.ids import ActorId, PeerId
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
    state: LeaseState
    deadline: float


class LeaseTable:
    """UNSEEN leases become HELD when they are KEPT. A holder stops a while before the end: see `LeaseHolder`."""

    def __init__(self, ttl: float, now: float) -> None:
        self.ttl = ttl
        self._leases: dict[int, Lease] = {}
        self._looked_at = now

    def begin(self, epoch: int, now: float, *, seen: bool) -> None:
        self._leases[epoch] = Lease(LeaseState.HELD if seen else LeaseState.UNSEEN, now + self.ttl)

    def keep(self, epoch: int, now: float) -> None:
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


# A lease, as the node that holds it sees it. The node counts from the moment of sending: its lease ends sooner by its
# own clock than by the coordinator's. It fences itself `skew` seconds before that. Until it is renewed, no name and no
# epoch that hangs on the lease may be used, because the coordinator may give them to others. While the coordinator is
# known not to run at all, no lease is ended, and the next one gives each node the time of a lease to come back.

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
        self.epoch = 0
        # Until then it may act, unless the lease is LOST; and how much of that the coordinator has granted.
        self.fence_at = 0.0
        self._granted_until = 0.0
        self._send_at = 0.0
        self._ttl = 0.0

    def joined(self, epoch: int, good_for: float, ttl: float, sent_at: float) -> None:
        """`good_for` counts from the time of the request."""
        self._ttl = ttl
        if self._state is HolderState.OUTSIDE or epoch != self.epoch:
            self._handle(HolderEvent.JOINED)
            self.epoch = epoch
            self.fence_at = self._granted_until = sent_at + good_for - self._skew
            self.sent(sent_at)
        else:
            self._renew(good_for, sent_at)

    def kept(self, epoch: int, good_for: float, sent_at: float) -> None:
        """Late answers for an earlier lease do not count."""
        if epoch == self.epoch and self._state is not HolderState.OUTSIDE:
            self._renew(good_for, sent_at)

    def unopposed(self, asked_at: float) -> None:
        """There was no coordinator. A holder that is fenced by then stays so: one may have been there."""
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


_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_TERM_SHIFT: Final = 32
_MAX_TERM: Final = 1 << 31


def check_name(name: str) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r:.80} cannot name an actor: use 1 to 255 of the characters A-Z a-z 0-9 _ . - and no leading dot"
        )
    return name


def check_prefix(prefix: str) -> str:
    if not isinstance(prefix, str) or (prefix and _NAME.fullmatch(prefix) is None):
        raise ValueError(f"no actor's name begins with {prefix!r:.80}")
    return prefix


def check_node_name(name: str) -> str:
    if not isinstance(name, str) or _NODE_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r:.80} cannot name a node: use 1 to 63 of the characters A-Z a-z 0-9 _ . -")
    return name


def first_revision(term: int, lot: int = 0) -> int:
    """The revision at which a coordinator begins; its changes have greater ones."""
    if not 0 < term < _MAX_TERM:
        raise ValueError(f"a term lies between 1 and {_MAX_TERM - 1}; this is {term}")
    return (term << _TERM_SHIFT) + lot


class Kind(enum.IntEnum):
    NAME = 0
    MEMBER = 1


@dataclass(frozen=True, slots=True)
class NamedActor:
    """The holder of a name.

    Attributes:
        peer: The process of the actor; of a supervised one, the process that has its directory.
        lease: The lease with which the name ends: the epoch of a member. 0: none, as in an embedded runtime.
        reserved: Whether the actor is still to be made, by `peer`.
        supervised: Whether it may be restarted: `peer` knows its process.
        epoch: The grant of the name; 0 in a request for a new one.
    """

    name: str
    peer: PeerId
    actor: ActorId
    label: str
    class_names: tuple[str, ...]
    lease: int = 0
    reserved: bool = False
    supervised: bool = False
    epoch: int = 0
    revision: int = field(default=0, compare=False)

    def is_same_actor(self, other: NamedActor) -> bool:
        return (self.peer, self.actor, self.reserved) == (other.peer, other.actor, other.reserved)


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster.

    Attributes:
        free: The free part of them, when it last said so.
        epoch: The incarnation of the node, and its lease; 0 in a request for a new one.
    """

    name: str
    peer: PeerId
    address: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    totals: Mapping[str, float] = field(default_factory=dict[str, float])
    free: Mapping[str, float] = field(default_factory=dict[str, float])
    epoch: int = 0
    revision: int = field(default=0, compare=False)


Record: TypeAlias = NamedActor | Member


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the tables; without a record, it is gone."""

    revision: int
    kind: Kind
    key: str
    record: Record | None


def plain_of(record: Record) -> dict[str, Any]:
    return asdict(record)


_CLASSES: Final[Mapping[Kind, type[Record]]] = {Kind.NAME: NamedActor, Kind.MEMBER: Member}


def record_of(kind: Kind, plain: object) -> Record:
    cls = _CLASSES[kind]
    types = {each.name: str(each.type) for each in fields(cls)}
    values = dict(cast("dict[str, Any]", plain)) if isinstance(plain, dict) else {}
    if values.keys() != types.keys():
        raise ValueError(f"this is no record of a {kind.name.lower()}: {plain!r:.200}")
    for name, value in values.items():
        if type(value) is not _PLAIN[types[name]]:
            raise ValueError(f"{name}={value!r:.80} does not belong in the record of a {kind.name.lower()}")
    if "class_names" in values:
        values["class_names"] = tuple(values["class_names"])
    record = cls(**values)
    (check_name if kind is Kind.NAME else check_node_name)(record.name)
    return record


_PLAIN: Final[Mapping[str, type]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "PeerId": str,
    "ActorId": int,
    "tuple[str, ...]": list,
    "Mapping[str, str]": dict,
    "Mapping[str, float]": dict,
}


# Watching a table: the changes after a revision, without gap or duplicate. If that is too long ago, or was another
# coordinator's, the watcher gets all records instead, and its `View` finds the differences.

_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """An answer to a watcher.

    Attributes:
        revision: The last one that it covers; the watcher asks again from here.
        whole: Whether these are all records there are, instead of the changes since it asked.
    """

    revision: int
    whole: bool
    changes: tuple[Change, ...]


class History:
    def __init__(self, revision: int, remembered: int = _REMEMBERED) -> None:
        self._floor = revision
        self.revision = revision
        self._remembered = remembered
        self._changes: deque[Change] = deque()

    def append(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._changes.append(change)
            self.revision = change.revision
        while len(self._changes) > self._remembered:
            self._floor = self._changes.popleft().revision

    def since(self, revision: int, kind: Kind, prefix: str) -> Sequence[Change] | None:
        if not self._floor <= revision <= self.revision:
            return None
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.revision <= revision:
                break
            if change.kind is kind and change.key.startswith(prefix):
                found.append(change)
        return found[::-1]


class View:
    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.revision = 0
        self.records: dict[str, Record] = {}

    def take(self, batch: Batch) -> list[Change]:
        if batch.whole:
            there = {change.key for change in batch.changes}
            gone = [Change(batch.revision, self._kind, key, None) for key in self.records if key not in there]
            changes = [*gone, *batch.changes]
        else:
            changes = [change for change in batch.changes if change.revision > self.revision]
        self.revision = batch.revision if batch.whole else max(self.revision, batch.revision)
        return [change for change in changes if self._is_news(change)]

    def _is_news(self, change: Change) -> bool:
        known = self.records.pop(change.key, None)
        if change.record is not None:
            self.records[change.key] = change.record
        return known != change.record
