"""One order of the calls of a group by several callers, at all its members. Pure.

Methods that run one at a time stop each other for ever if one member begins the call of one caller, another member that
of another one, and both wait in a collective. As long as a group has one caller, its order is that of all members, and
nothing is said. The first call of another one makes the *lead*, rank 0, hold all members: from then on they begin such
a call when the lead grants it, and it grants a call when it could begin at every member. So a call that waits for an
argument holds up its own caller only. A caller that makes all calls for a while is set free again.

    member -- ask: a call could begin here --> lead     lead -- hold, grant, free --> members
    member -- ended, gone -------------------> lead

What one end says comes to the other in order. If it does not come, or the lead is lost, members are open: they begin
calls as these come, and the search for deadlocks finds those that stop each other.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from aiodaft._protocol.calls.mailbox import Rules
from aiodaft._protocol.ids import CallId, PeerId, group_call_of, roster_of

Key = tuple[PeerId, int]

_REMEMBERED: Final = 256
STREAK: Final = 8


class Asked(NamedTuple):
    """A call that could begin at a member.

    Attributes:
        runs_on: The calls that run one at a time with this one have the same.
        roster: The members that were called; see `roster_of`.
    """

    key: Key
    runs_on: str
    roster: int

    def is_beside(self, other: Asked) -> bool:
        return self.runs_on == other.runs_on or self.key[0] == other.key[0]


class Held(NamedTuple):
    """The state of a member that is held.

    Attributes:
        begun: The last calls that have begun, or are granted.
        floor: All calls of each caller up to a number have begun besides.
        running: The calls that have begun and not ended.
        waiting: Those that could begin.
    """

    begun: Collection[Key]
    floor: Mapping[PeerId, int]
    running: Collection[Asked]
    waiting: Collection[Asked]


class Entry(Protocol):
    caller: PeerId
    number: CallId
    rules: Rules
    # The number of earlier attempts: others of its group may have begun.
    attempt: int
    # Why it takes part in nothing with other members any more.
    apart: Exception | None


def runs_in_turn(rules: Rules) -> bool:
    """Whether calls of a method keep others waiting, and come in order."""
    return rules.ordered and (rules.on_thread or rules.concurrency is not None)


def asked_of(entry: Entry) -> Asked:
    key = group_call_of(entry.caller, entry.number)
    assert key is not None
    # The thread of an actor runs one `def` method at a time.
    return Asked(key, "" if entry.rules.on_thread else entry.rules.name, roster_of(entry.number))


class Line(Protocol):
    def ask(self, round_: Hashable, asked: Asked) -> object: ...
    def ended(self, key: Key) -> object: ...
    def gone(self, key: Key) -> object: ...


class Turns:
    """Says when the calls of a group begin at one member; those of the caller `free` begin as they come."""

    def __init__(self, free: PeerId, line: Line) -> None:
        self._free: PeerId | None = free
        self._is_open = False
        self._line = line
        self._round: Hashable = None
        self._waiting: dict[Key, Asked] = {}
        self._granted: dict[Key, Asked] = {}
        self._running: dict[Key, Asked] = {}
        # The oldest first; and, for each caller, the highest number of those that are not remembered any more.
        self._begun: dict[Key, None] = {}
        self._floor: dict[PeerId, int] = {}
        self._watched: frozenset[Key] = frozenset()

    def admits(self, entry: Entry) -> bool:
        """Whether a call that could begin may do so; if not, the lead is asked, once."""
        is_alone = entry.apart is not None or entry.attempt > 0
        is_free = self._is_open or entry.caller == self._free
        if is_alone or (is_free and not self._granted):
            return True
        asked = asked_of(entry)
        first = next((key for key, one in self._granted.items() if one.is_beside(asked)), None)
        if first == asked.key or (is_free and first is None):
            return True
        if not (is_free or asked.key in self._granted or asked.key in self._waiting):
            self._waiting[asked.key] = asked
            self._line.ask(self._round, asked)
        return False

    def began(self, entry: Entry) -> None:
        asked = asked_of(entry)
        key = asked.key
        self._running[key] = asked
        self._begun[key] = None
        if len(self._begun) > _REMEMBERED:
            caller, serial = oldest = next(iter(self._begun))
            del self._begun[oldest]
            self._floor[caller] = max(serial, self._floor.get(caller, 0))
        was_granted = self._granted.pop(key, None) is not None
        if self._waiting.pop(key, None) is not None and not was_granted:
            self._line.gone(key)

    def left(self, entry: Entry) -> None:
        key = asked_of(entry).key
        if self._running.pop(key, None) is not None:
            if key in self._watched:
                self._line.ended(key)
        elif self._granted.pop(key, None) is None and self._waiting.pop(key, None) is not None:
            self._line.gone(key)

    def hold(self, round_: Hashable) -> Held:
        self._free, self._is_open, self._round = None, False, round_
        self._watched = frozenset(self._running)
        begun = (*self._begun, *self._granted)
        return Held(begun, dict(self._floor), tuple(self._running.values()), tuple(self._waiting.values()))

    def grant(self, key: Key) -> None:
        """A call may begin when those that were granted before it, and run one at a time with it, have begun."""
        asked = self._waiting.pop(key, None)
        if asked is not None:
            self._granted[key] = asked

    def release(self, caller: PeerId) -> None:
        self._free = caller
        for key in [key for key in self._waiting if key[0] == caller]:
            del self._waiting[key]

    def forget(self, caller: PeerId) -> None:
        self._floor.pop(caller, None)

    def open(self) -> None:
        """Calls begin as they come."""
        self._is_open = True
        self._waiting.clear()
        self._granted.clear()

    def begin_again(self, free: PeerId) -> None:
        self._free, self._is_open, self._round = free, False, None
        self.release(free)
        for asked in self._waiting.values():
            self._line.ask(None, asked)


class Orders(Protocol):
    def hold(self, round_: int) -> object: ...
    def grant(self, key: Key) -> object: ...
    def grant_one(self, member: Hashable, key: Key) -> object: ...
    def release(self, caller: PeerId) -> object: ...
    def open(self) -> object: ...


@dataclass(slots=True)
class _Pending:
    asked: Asked
    # Those at which it could begin, or has begun.
    members: set[Hashable] = field(default_factory=set[Hashable])


class Lead:
    def __init__(self, members: Collection[Hashable], roster: int, orders: Orders) -> None:
        self._members = members
        self._roster = roster
        self._orders = orders
        self._round = 0
        # The members that do not answer `hold` yet; None: no member is held.
        self._missing: set[Hashable] | None = None
        self._free: PeerId | None = None
        self._pending: dict[Key, _Pending] = {}
        self._begun: dict[Hashable, tuple[frozenset[Key], Mapping[PeerId, int]]] = {}
        # What has begun at some members, where it runs, and not at others.
        self._partial: dict[Key, _Pending] = {}
        # Calls of other rosters begin where they come; a number of each caller up to which that is so.
        self._passed: dict[PeerId, int] = {}
        self._last: tuple[PeerId | None, int] = (None, 0)

    def change(self, members: Collection[Hashable], roster: int) -> None:
        self._members, self._roster = members, roster
        if self._round:
            self._hold()

    def ask(self, member: Hashable, round_: Hashable, asked: Asked) -> None:
        if self._pass(member, asked):
            return
        if self._missing is None:
            # Else it was asked before the member knew that its caller is free.
            if round_ != self._round or asked.key[0] != self._free:
                self._hold()
        elif round_ == self._round:
            self._note(member, asked)
            self._grant()

    def held(self, member: Hashable, round_: int, held: Held) -> None:
        if round_ != self._round or self._missing is None or member not in self._missing:
            return
        self._missing.discard(member)
        self._begun[member] = frozenset(held.begun), held.floor
        for asked in held.waiting:
            if not self._pass(member, asked):
                self._note(member, asked)
        for asked in held.running:
            self._partial.setdefault(asked.key, _Pending(asked)).members.add(member)
        if not self._missing:
            for key, one in self._pending.items():
                one.members |= self._begun_at(key)
            self._partial = {
                key: one for key, one in self._partial.items() if len(self._begun_at(key)) < len(self._members)
            }
            self._grant()

    def ended(self, member: Hashable, key: Key) -> None:
        partial = self._partial.get(key)
        if partial is not None:
            partial.members.discard(member)
            if not partial.members:
                del self._partial[key]
                self._grant()

    def gone(self, key: Key) -> None:
        """A call that a member has asked for begins nevertheless, or never: one of those of its group has failed."""
        self._pending.pop(key, None)

    def is_in(self, round_: int) -> bool:
        """Whether it has held the members last in this round, and still does."""
        return self._missing is not None and round_ == self._round

    def give_up(self) -> None:
        if self._round:
            self._round += 1
            self._missing = self._free = None
            self._orders.open()

    def _hold(self) -> None:
        self._round += 1
        self._missing, self._free, self._last = set(self._members), None, (None, 0)
        self._pending.clear()
        self._partial.clear()
        self._begun.clear()
        self._orders.hold(self._round)

    def _pass(self, member: Hashable, asked: Asked) -> bool:
        """Let a call begin that was not made of these members: the members that ask for it are not known."""
        caller, serial = asked.key
        if asked.roster == self._roster and serial > self._passed.get(caller, 0):
            return False
        self._orders.grant_one(member, asked.key)
        if serial > self._passed.get(caller, 0):
            self._passed[caller] = serial
            for key in [key for key in self._pending if key[0] == caller and key[1] <= serial]:
                del self._pending[key]
                self._partial.pop(key, None)
                self._orders.grant(key)
        return True

    def _note(self, member: Hashable, asked: Asked) -> None:
        one = self._pending.get(asked.key)
        if one is None:
            one = self._pending[asked.key] = _Pending(asked, self._begun_at(asked.key))
        one.members.add(member)

    def _begun_at(self, key: Key) -> set[Hashable]:
        caller, serial = key
        return {
            member for member, (begun, floor) in self._begun.items() if key in begun or serial <= floor.get(caller, 0)
        }

    def _grant(self) -> None:
        if self._missing is None or self._missing:
            return
        while (key := next(filter(self._may_begin, self._pending), None)) is not None:
            del self._pending[key]
            self._partial.pop(key, None)
            self._orders.grant(key)
            last, streak = self._last
            self._last = key[0], streak + 1 if last == key[0] else 1
        self._release()

    def _may_begin(self, key: Key) -> bool:
        """Whether a call could begin at all members, and not before one that it would run beside at another member."""
        one = self._pending[key]
        if len(one.members) < len(self._members):
            return False
        is_partial = key in self._partial
        # What has begun at some members goes on in the order of its caller.
        return not any(
            other != key
            and partial.asked.runs_on == one.asked.runs_on
            and (not is_partial or (other[0] == key[0] and other[1] < key[1]))
            for other, partial in self._partial.items()
        )

    def _release(self) -> None:
        caller, streak = self._last
        if caller is None or streak < STREAK or self._partial or any(key[0] != caller for key in self._pending):
            return
        self._missing, self._free = None, caller
        self._pending.clear()
        self._orders.release(caller)
