"""The life of a value in one process, its holders, and the report of its error; and the life of a stream. Pure.

A ref is owned by the process that made the call. Its value lives while one of these holds it: a `Ref` object in the
owner, a call under way that has it as an argument, or another process that got the ref inside an object (a borrower).
When there is no holder left and the value exists, it is freed in every process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, Generic, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from aiodaft._protocol.ids import CallId, PeerId

Key: TypeAlias = tuple[PeerId, CallId]


class Status(Enum):
    PENDING = "the call is under way"
    HERE = "the answer carried the value, or the value never left this process"
    THERE = "the producer stores the value; it is pulled when code of this process needs it"
    FAILED = "there will be no value"
    FREED = "the value was freed; its error is ReferenceError"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


PENDING, HERE, THERE, FAILED, FREED = Status

# A late answer, after the call was given up, changes nothing.
_NEXT: Final = {
    PENDING: {HERE, THERE, FAILED},
    HERE: {FREED},
    THERE: {FREED},
    FAILED: {FREED},
    FREED: {FREED},
}


class Verdict(Enum):
    WAIT = "a holder may still be told of it"
    HOLD = "the scope raises it when it ends, if no code looks at it before"
    REPORT = "no code can see it any more: report it now"


class Where(Enum):
    NOWHERE = "it was freed: the process that asks dropped it too, and a copy stored now would never be freed"
    LOST = "its producer ended before the value was pulled"
    FAILED = "there is an error instead"
    PRODUCER = "its producer stores it"
    HERE = "this process has it"


class Value:
    status = PENDING
    handles = 0
    uses = 0
    borrowers: dict[PeerId, int] | None = None
    error: BaseException | None = None
    interested = 0
    # Code was told of the error.
    seen = False
    # The kind and text of errors that calls with this value had before it failed itself.
    foretold: tuple[tuple[str, str], ...] = ()
    # This process made the call, and so owns the ref.
    own = True
    # Other processes may ask the owner for it.
    shared = False
    # The owner counts, or is about to count, this process among the borrowers.
    registered = False

    @property
    def settled(self) -> bool:
        return self.status is not PENDING

    @property
    def free(self) -> bool:
        return self.status is not PENDING and not self.held

    @property
    def held(self) -> bool:
        return bool(self.handles or self.uses or self.borrowers)

    @property
    def in_use(self) -> bool:
        return bool(self.uses or self.borrowers)

    def goes_on(self, *, waiters: bool) -> bool:
        """A task stops waiting for the call; `waiters`: others wait."""
        return waiters or self.in_use or bool(self.interested) or not self.own

    def where(self, *, producer_lost: bool) -> Where:
        if self.free:
            return Where.NOWHERE
        if self.status is THERE and producer_lost:
            return Where.LOST
        if self.error is not None:
            return Where.FAILED
        return Where.PRODUCER if self.status is THERE else Where.HERE

    def advance(self, status: Status) -> bool:
        if status not in _NEXT[self.status]:
            return False
        self.status = status
        return True

    def borrow(self, peer: PeerId) -> None:
        if self.borrowers is None:
            self.borrowers = {}
        self.borrowers[peer] = self.borrowers.get(peer, 0) + 1

    def give_back(self, peer: PeerId) -> None:
        if self.borrowers and peer in self.borrowers:
            self.borrowers[peer] -= 1
            if not self.borrowers[peer]:
                del self.borrowers[peer]

    def forget(self, peer: PeerId) -> None:
        if self.borrowers:
            self.borrowers.pop(peer, None)

    def end_use(self, error: BaseException | None) -> bool:
        """A call that had the value as an argument ended. Returns whether the value's error counts as seen."""
        self.uses -= 1
        if self.error is not None:
            # The call failed with it, and the code that awaits that call gets it.
            return True
        if error is None or self.status is not PENDING:
            return False
        # The callee may learn first that the value failed; then the code that awaits the call gets the error.
        self.foretold = (*self.foretold, _described(error))
        return not (self.handles or self.uses)

    def judge_error(self) -> Verdict:
        if self.seen or self.uses or (self.foretold and self.error and _described(self.error) in self.foretold):
            return Verdict.WAIT
        return Verdict.HOLD if self.handles else Verdict.REPORT


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__qualname__, str(error)


def first_error(values: Sequence[Value]) -> tuple[BaseException | None, bool]:
    """An error of which code was told is not reported again."""
    for value in values:
        if value.error is not None:
            return value.error, value.seen
    return None, False


# Refs that several processes hold: which processes borrow this one's, and which refs this one borrows.
#
# owner                                         borrower
#  |  --- a value with the ref inside --->         |  `find`, and if it is not known `borrow`
#  |  <-- BORROW, or a call `borrow` ---           |  counted by `lend` before anything can end the sender's hold
#  |  <-- a call `give_back` -----------           |  `give_back`, when its last holder there is gone

ValueT = TypeVar("ValueT", bound=Value)


class Borrowing(Generic[ValueT]):
    def __init__(self, local: PeerId) -> None:
        self._local = local
        # Weak: an error refers to frames, these to refs, and refs that nothing else holds must go.
        self.shared: WeakValueDictionary[CallId, ValueT] = WeakValueDictionary()
        self.borrowed: WeakValueDictionary[Key, ValueT] = WeakValueDictionary()
        # Those of this process that calls under way have as arguments.
        self.used: dict[CallId, ValueT] = {}
        # Those of this process that others hold.
        self._lent: dict[CallId, ValueT] = {}

    def find(self, owner: PeerId, number: CallId) -> ValueT | None:
        """A ref that this process borrows, or one of its own that others know of."""
        if owner == self._local:
            return self.shared.get(number) or self.used.get(number)
        return self.borrowed.get((owner, number))

    def share(self, number: CallId, value: ValueT) -> None:
        """From now on another process may ask for the ref; nothing if it is borrowed. Idempotent."""
        if value.own and not value.shared:
            value.shared = True
            self.shared[number] = value

    def use(self, number: CallId, value: ValueT) -> None:
        """The callee may ask for the ref until the call ends."""
        value.uses += 1
        self.used[number] = value

    def unused(self, number: CallId, value: ValueT) -> None:
        """No call under way has the ref, which may be another process's, as an argument."""
        if self.used.get(number) is value:
            del self.used[number]

    def forget(self, number: CallId) -> None:
        self.shared.pop(number, None)
        self._lent.pop(number, None)

    def lend(self, number: CallId, peer: PeerId) -> None:
        value = self.shared.get(number)
        if value is not None:
            value.borrow(peer)
            self._lent[number] = value

    @property
    def are_lent(self) -> bool:
        return bool(self._lent)

    def take_back(self, number: CallId, peer: PeerId) -> list[ValueT]:
        """Returns the values that no process borrows any more."""
        value = self._lent.get(number)
        if value is None:
            return []
        value.give_back(peer)
        return self._returned({number: value})

    def peer_lost(self, peer: PeerId) -> list[ValueT]:
        """Returns the values that no process borrows any more."""
        # One end may lead to another end: the table can change meanwhile.
        for value in list(self._lent.values()):
            value.forget(peer)
        return self._returned(self._lent)

    def _returned(self, lent: dict[CallId, ValueT]) -> list[ValueT]:
        numbers = [number for number, value in lent.items() if not value.borrowers]
        return [self._lent.pop(number) for number in numbers]

    def borrow(self, owner: PeerId, number: CallId, value: ValueT) -> None:
        self.borrowed[owner, number] = value
        value.registered = True

    def give_back(self, owner: PeerId, number: CallId, value: ValueT) -> bool:
        """The last holder here is gone. Returns whether the owner is to be told."""
        # A value that the garbage collector found is not in the table any more, and perhaps another one is.
        if self.borrowed.get((owner, number)) is value:
            del self.borrowed[owner, number]
        registered, value.registered = value.registered, False
        return registered


# The life of a stream at its consumer: the items that came, the code that takes them, and the producer's credit.
#
# OPEN --END--> ENDED       the producer ended: the items that are left, then its error, can still be taken
#   |             |
# LEAVE         LEAVE
#   v             v
# CLOSING --END-> CLOSED    the consumer left: items are dropped, and a producer that runs is cancelled

ItemT = TypeVar("ItemT")

# Items that the producer may be ahead of the consumer.
CREDIT_WINDOW: Final = 16


class Phase(Enum):
    OPEN = "items arrive and are taken"
    ENDED = "no more items arrive"
    CLOSING = "no more items are taken; the producer was told"
    CLOSED = "both"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Event(Enum):
    END = "the producer ended"
    LEAVE = "the consumer left"

    __hash__ = object.__hash__


_PHASES: Final = {
    (Phase.OPEN, Event.END): Phase.ENDED,
    (Phase.OPEN, Event.LEAVE): Phase.CLOSING,
    (Phase.ENDED, Event.LEAVE): Phase.CLOSED,
    (Phase.CLOSING, Event.END): Phase.CLOSED,
}

OVER: Final = (Phase.ENDED, Phase.CLOSED)
LEFT: Final = (Phase.CLOSING, Phase.CLOSED)


class Consumption(Generic[ItemT]):
    """One stream, as its consumer sees it.

    Attributes:
        taking: Tasks that wait for an item or open one.
        opening: A task opens the first item. It stays the first until then: a cancelled consumer leaves it to the next
            one, in its place.
        left: Why the last loop was over before the producer was.
    """

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.taking = 0
        self.opening = False
        self.left: str | None = None
        self._items: deque[ItemT] = deque()
        self._error: BaseException | None = None
        self._loops: set[object] = set()
        self._taken = 0

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def is_over(self) -> bool:
        return self.phase in OVER

    def add(self, item: ItemT) -> bool:
        """Returns whether code can take the item."""
        if self.phase in LEFT:
            return False
        self._items.append(item)
        return True

    def end(self, error: BaseException | None) -> bool:
        if not self._handle(Event.END):
            return False
        self._error = error
        return True

    def first(self) -> ItemT | None:
        """None if there is no item, or another task opens it. The caller then sets `opening`."""
        return self._items[0] if self._items and not self.opening else None

    @property
    def is_used_up(self) -> bool:
        return not self._items and self.phase is not Phase.OPEN

    def why_no_more(self) -> BaseException:
        """The exception that the consumer gets instead of an item; the producer's error once."""
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None or self.phase in LEFT else error

    def take(self, item: ItemT) -> int:
        """Returns the credit to give: half a window at a time, so in few messages."""
        if self._items and self._items[0] is item:
            self._items.popleft()
        self._taken += 1
        if self._taken < CREDIT_WINDOW // 2 or self.phase in OVER:
            return 0
        credit, self._taken = self._taken, 0
        return credit

    def leave(self) -> bool:
        """Returns whether a producer runs that is to be told."""
        if not self._handle(Event.LEAVE):
            return False
        self._items.clear()
        return self.phase is Phase.CLOSING

    def begin_loop(self, loop: object) -> None:
        self._loops.add(loop)

    def end_loop(self, loop: object, why: str) -> bool:
        """An `async for` is over; False if that is known. If no other code takes items, the stream is over with it."""
        if loop not in self._loops:
            return False
        self._loops.remove(loop)
        if not (self._loops or self.taking or self.phase in LEFT or (self.is_over and not self._items)):
            # At once, before the loop's next turn: code that takes another item must not get one by chance.
            self.left = why
        return True

    def _handle(self, event: Event) -> bool:
        phase = _PHASES.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None
