"""The coordinator's tables together. Pure.

A decision returns changes and alters nothing (but prolongs leases, and notes the free resources of nodes): the
coordinator stores them, then applies them, one decision at a time. So callers and watchers are told nothing that a
restart would not find.

A coordinator that starts where another one was does not know which members live. For the time of one lease it expires
none, while they join again with the epochs that they hold. If nothing was stored, it grants no names in that time,
because any name may be held.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from aiodaft._protocol.coordination.records import (
    Batch,
    Change,
    History,
    Kind,
    LeaseTable,
    Member,
    NamedActor,
    Record,
    check_name,
    check_node_name,
    first_revision,
)
from aiodaft._protocol.ids import ActorId, PeerId, is_attached, node_of
from aiodaft._protocol.numbers import Latest, next_state
from aiodaft.exceptions import CoordinatorUnavailable, LeaseLost, NameNotFound, NameTaken

# A name belongs to an incarnation of an actor; it is free again when that incarnation is gone. `get_or_create` reserves
# the name before there is an actor, so that of many callers only one makes it.

KeyT = TypeVar("KeyT")


class NameState(enum.Enum):
    FREE = "no actor has it"
    RESERVED = "a process makes the actor that is to have it"
    HELD = "an actor has it"


class NameEvent(enum.Enum):
    RESERVE = "a process begins to make an actor of that name"
    REGISTER = "an actor gets it, or is known by it again after a restart of the coordinator"
    FREED = "the actor, its process or its lease is gone"


_S: Final = NameState
_E: Final = NameEvent

TRANSITIONS: Final[dict[tuple[NameState, NameEvent], NameState]] = {
    (_S.FREE, _E.RESERVE): _S.RESERVED,
    (_S.FREE, _E.REGISTER): _S.HELD,
    (_S.RESERVED, _E.REGISTER): _S.HELD,
    (_S.RESERVED, _E.FREED): _S.FREE,
    # The same grant, or a newer one that the coordinator had forgotten.
    (_S.HELD, _E.REGISTER): _S.HELD,
    (_S.HELD, _E.FREED): _S.FREE,
}


class NameTable:
    """Names, and the actors that have them. Only `put` changes anything; decisions do not."""

    def __init__(self) -> None:
        self._names: dict[str, NamedActor] = {}
        self._of_process: dict[PeerId, dict[str, NamedActor]] = {}
        self._of_lease: dict[int, dict[str, NamedActor]] = {}

    def get(self, name: str) -> NamedActor | None:
        return self._names.get(name)

    def lookup(self, name: str) -> NamedActor:
        found = self._names.get(name)
        if found is not None and not found.reserved:
            return found
        known = ", ".join(one.name for one in self.named("")) or "none"
        raise NameNotFound(f"no actor is named {name!r}; names in use: {known}")

    def named(self, prefix: str) -> list[NamedActor]:
        found = [one for one in self._names.values() if one.name.startswith(prefix) and not one.reserved]
        return sorted(found, key=lambda one: one.name)

    def all(self) -> Iterable[NamedActor]:
        return self._names.values()

    def held_by(self, peer: PeerId, actor: ActorId | None = None) -> list[NamedActor]:
        """For a process also its reserved names."""
        held = self._of_process.get(peer, {}).values()
        return [one for one in held if actor is None or (one.actor == actor and not one.reserved)]

    def under(self, lease: int) -> list[NamedActor]:
        return list(self._of_lease.get(lease, {}).values())

    def grant(self, wanted: NamedActor) -> int:
        """The epoch of an earlier grant; 0: the request needs a new one.

        Raises:
            NameTaken: Another actor has it.
            LeaseLost: The request is of a reservation that is over.
        """
        held = self._names.get(wanted.name)
        if held is None:
            if wanted.epoch:
                raise LeaseLost(f"the name {wanted.name!r} is not reserved any more")
            return 0
        if held.is_same_actor(wanted) or (held.reserved and held.epoch == wanted.epoch):
            return held.epoch
        raise NameTaken(
            f"the name {wanted.name!r} is reserved for an actor that {held.peer} makes"
            if held.reserved
            else f"the name {wanted.name!r} belongs to {held.label}"
        )

    def regains(self, claimed: NamedActor, *, recovering: bool) -> bool:
        """Whether an actor still has the name that it was granted, after a restart of the coordinator or a lost link.

        `recovering`: names that the coordinator does not know may be held.
        """
        held = self._names.get(claimed.name)
        if held is None:
            return recovering and claimed.epoch > 0
        if held.epoch == claimed.epoch:
            return held.is_same_actor(claimed)
        # The coordinator does not know the newer grant: its store had lost the end of its log.
        return recovering and held.epoch < claimed.epoch

    def put(self, name: str, record: NamedActor | None) -> None:
        held = self._names.pop(name, None)
        state, event = _state_of(held), _event_of(record)
        assert next_state(TRANSITIONS, state, event) is _state_of(record)
        if held is not None:
            _remove(self._of_process, held.peer, name)
            _remove(self._of_lease, held.lease, name)
        if record is not None:
            self._names[name] = record
            self._of_process.setdefault(record.peer, {})[name] = record
            self._of_lease.setdefault(record.lease, {})[name] = record


def _remove(index: dict[KeyT, dict[str, NamedActor]], key: KeyT, name: str) -> None:
    del index[key][name]
    if not index[key]:
        del index[key]


def _state_of(record: NamedActor | None) -> NameState:
    if record is None:
        return NameState.FREE
    return NameState.RESERVED if record.reserved else NameState.HELD


def _event_of(record: NamedActor | None) -> NameEvent:
    if record is None:
        return NameEvent.FREED
    return NameEvent.RESERVE if record.reserved else NameEvent.REGISTER


# A node's name belongs to one incarnation, until its lease is over: a node that cannot be reached may still be alive.


class MemberTable:
    """Members by name. Only `put` changes anything; decisions do not."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._by_epoch: dict[int, Member] = {}

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def of(self, epoch: int) -> Member | None:
        return self._by_epoch.get(epoch)

    def all(self) -> list[Member]:
        return [self._members[name] for name in sorted(self._members)]

    def admit(self, wanted: Member) -> int:
        """The epoch of a process that missed the answer; 0: it needs a new one."""
        held = self._members.get(wanted.name)
        if held is None:
            return 0
        if held.peer == wanted.peer:
            return held.epoch
        raise NameTaken(
            f"{held.peer} at {held.address} is node {wanted.name!r}; the name is free when that node leaves, or is not "
            "heard for the time of its lease"
        )

    def check_holds(self, claimed: Member, *, recovering: bool) -> None:
        """Raise LeaseLost unless a node still has its epoch, after a restart of the coordinator or a lost link.

        `recovering`: members that the coordinator does not know may have leases.
        """
        held = self._members.get(claimed.name)
        if held is None:
            known = recovering
        elif held.epoch == claimed.epoch:
            known = held.peer == claimed.peer
        else:
            # The coordinator does not know the newer incarnation: its store had lost the end of its log.
            known = recovering and held.epoch < claimed.epoch
        if not known:
            raise LeaseLost(f"node {claimed.name!r} is not a member any more; it has to join as a new incarnation")

    def note_free(self, epoch: int, free: Mapping[str, float]) -> None:
        member = self._by_epoch[epoch]
        self._members[member.name] = self._by_epoch[epoch] = replace(member, free=dict(free))

    def put(self, name: str, record: Member | None) -> Member | None:
        before = self._members.pop(name, None)
        if before is not None:
            del self._by_epoch[before.epoch]
        if record is not None:
            self._members[name] = self._by_epoch[record.epoch] = record
        return before


_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True)
class Stored:
    """The state with which a coordinator begins.

    Attributes:
        term: Greater than that of each coordinator before it.
        forgot: Whether there may be names and members that were not stored.
        lot: Added to the first epoch, unlike that of other coordinators with this term.
    """

    term: int
    records: Sequence[Record] = ()
    forgot: bool = False
    lot: int = 0


class Registry:
    """Names, members and leases. Times are seconds of the coordinator's clock, `ttl` those of a lease."""

    def __init__(self, stored: Stored, ttl: float, now: float) -> None:
        self.names = NameTable()
        self.members = MemberTable()
        self.leases = LeaseTable(ttl, now)
        # Members whose leases ended by themselves, until they join again: they may still run.
        self.lost = Latest[str, Member](_REMEMBERED)
        self._history = History(first_revision(stored.term, stored.lot))
        self._recovered_at = now + ttl if stored.forgot else now
        newest = max((record.revision for record in stored.records), default=0)
        self._last = max(self._history.revision, newest)
        for record in stored.records:
            self._put(_kind_of(record), record.name, record, now, seen=False)

    @property
    def revision(self) -> int:
        return self._history.revision

    def recovering_for(self, now: float) -> float:
        return max(0.0, self._recovered_at - now)

    def register(self, wanted: NamedActor, now: float) -> list[Change]:
        """Give a name to an actor, which may ask again, or which its name was reserved for (`wanted.epoch`).

        Raises:
            NameTaken: Another actor has it.
            LeaseLost: The node of the actor is not a member, or the reservation is over.
            CoordinatorUnavailable: It is recovering.
        """
        return self._grant(replace(wanted, reserved=False), now)

    def reserve(self, wanted: NamedActor, now: float) -> list[Change]:
        """Reserve a name for an actor that `wanted.peer` makes; nothing if an actor or a process has it.

        Raises:
            LeaseLost: The node of the process is not a member.
            CoordinatorUnavailable: It is recovering.
        """
        if self.names.get(check_name(wanted.name)) is not None:
            return []
        return self._grant(replace(wanted, reserved=True, epoch=0), now)

    def _grant(self, wanted: NamedActor, now: float) -> list[Change]:
        wanted = self._leased(wanted)
        epoch = self.names.grant(wanted)
        if not epoch and self.recovering_for(now) > 0:
            raise CoordinatorUnavailable(
                f"{wanted.name!r} may be the name of another actor: the coordinator was started again, and waits for "
                "the nodes to tell it the names of their actors"
            )
        return self._changes([replace(wanted, epoch=epoch or self._last + 1)])

    def _leased(self, wanted: NamedActor) -> NamedActor:
        check_name(wanted.name)
        node = node_of(wanted.peer)
        if not node:
            return wanted
        member = self.members.get(node) or self._heir(wanted)
        if member is None:
            raise LeaseLost(f"{wanted.label} cannot have a name: its node {node!r} is not a member of the cluster")
        return replace(wanted, lease=member.epoch)

    def release(self, peer: PeerId, actor: ActorId | None) -> list[Change]:
        return self._changes(gone=self.names.held_by(peer, actor))

    def release_name(self, name: str, epoch: int) -> list[Change]:
        held = self.names.get(name)
        return [] if held is None or held.epoch != epoch else self._changes(gone=[held])

    def unreserve(self, name: str, peer: PeerId, actor: ActorId) -> list[Change]:
        held = self.names.get(name)
        ours = held is not None and held.reserved and (held.peer, held.actor) == (peer, actor)
        return self._changes(gone=[held]) if held is not None and ours else []

    def join(self, member: Member, names: Sequence[NamedActor], now: float) -> list[Change]:
        """Take in a node: as a new incarnation, or with the epoch that it holds and the names of its actors.

        Raises:
            NameTaken: Another process has the node's name.
            LeaseLost: The epoch is over.
        """
        check_node_name(member.name)
        if not member.epoch:
            epoch = self.members.admit(member)
            if epoch:
                self.leases.keep(epoch, now)
            return self._changes([replace(member, epoch=epoch or self._last + 1)])
        recovering = self.recovering_for(now) > 0
        self.members.check_holds(member, recovering=recovering)
        held = self.members.get(member.name)
        if held is not None and held.epoch == member.epoch:
            self.leases.keep(member.epoch, now)
        claimed = [replace(one, name=check_name(one.name), lease=member.epoch, reserved=False) for one in names]
        kept = [one for one in claimed if self.names.regains(one, recovering=recovering)]
        # No grant may have the epoch of an earlier one, even if the clock that made the term went back.
        self._last = max([self._last, member.epoch, *(one.epoch for one in kept)])
        before = [] if held is None or held.epoch == member.epoch else self.names.under(held.epoch)
        names_kept = {one.name for one in kept}
        return self._changes([member, *kept], [one for one in before if one.name not in names_kept])

    def keep(self, epoch: int, free: Mapping[str, float], now: float) -> list[Change]:
        """Free resources are neither stored nor told to watchers.

        Raises:
            LeaseLost: The lease is over.
        """
        self.leases.keep(epoch, now)
        self.members.note_free(epoch, free)
        return []

    def leave(self, epoch: int) -> list[Change]:
        kept: dict[str, NamedActor] = {}
        for held in self.names.under(epoch):
            heir = self._heir(held, epoch)
            if heir is not None:
                kept[held.name] = replace(held, lease=heir.epoch)
        gone = [one for one in self._under(epoch) if isinstance(one, Member) or one.name not in kept]
        return self._changes(kept.values(), gone)

    def _heir(self, held: NamedActor, leaving: int = 0) -> Member | None:
        """The member with whose lease a program's name ends if the program's node is no member, or is `leaving`."""
        others = (member for member in self.members.all() if member.epoch != leaving)
        return next(others, None) if is_attached(held.peer) and not held.reserved else None

    def expire(self, now: float) -> list[Change]:
        return self._changes(gone=[record for epoch in self.leases.expired(now) for record in self._under(epoch)])

    def _under(self, epoch: int) -> list[Record]:
        member = self.members.of(epoch)
        return [] if member is None else [*self.names.under(epoch), member]

    # Changes.

    def _changes(self, there: Iterable[Record] = (), gone: Iterable[Record] = ()) -> list[Change]:
        changes: list[Change] = []
        for record in there:
            known = self.names.get(record.name) if isinstance(record, NamedActor) else self.members.get(record.name)
            if known != record:
                revision = self._last + 1 + len(changes)
                made = replace(record, revision=revision)
                changes.append(Change(revision, _kind_of(record), record.name, made))
        for record in gone:
            changes.append(Change(self._last + 1 + len(changes), _kind_of(record), record.name, None))
        return changes

    def apply(self, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            self._put(change.kind, change.key, change.record, now, seen=True)
        self._history.append(changes)
        self._last = max(self._last, self.revision)

    def _put(self, kind: Kind, key: str, record: Record | None, now: float, *, seen: bool) -> None:
        if kind is Kind.NAME:
            assert not isinstance(record, Member)
            self.names.put(key, record)
            return
        assert not isinstance(record, NamedActor)
        before = self.members.put(key, record)
        self.lost.pop(key, None)
        if before is not None and record is None and self.leases.is_late(before.epoch, now):
            self.lost[key] = before
        if before is not None and (record is None or record.epoch != before.epoch):
            self.leases.end(before.epoch)
        if record is not None and (before is None or record.epoch != before.epoch):
            self.leases.begin(record.epoch, now, seen=seen)

    def news(self, kind: Kind, prefix: str, since: int) -> Batch | None:
        """The news for a watcher that knows the revision `since`; None: there are none yet.

        Reservations are told to no watcher.
        """
        changes = self._history.since(since, kind, prefix)
        if changes is None:
            records: Iterable[Record] = self.names.all() if kind is Kind.NAME else self.members.all()
            told = [Change(one.revision, kind, one.name, one) for one in records if one.name.startswith(prefix)]
            changes = sorted(told, key=lambda change: change.revision)
            return Batch(self.revision, True, tuple(filter(_is_told, changes)))
        told = list(filter(_is_told, changes))
        return Batch(self.revision, False, tuple(told)) if told else None


def _kind_of(record: Record) -> Kind:
    return Kind.NAME if isinstance(record, NamedActor) else Kind.MEMBER


def _is_told(change: Change) -> bool:
    return not (isinstance(change.record, NamedActor) and change.record.reserved)
