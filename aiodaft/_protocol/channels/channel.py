"""A channel's queue as a state machine, and the messages about it between processes. Pure: messages in, messages out.

The `Keeper` decides about the queue, in the process that has it. An `End` (see `channel_end`) makes the sends and
receives of one process, and talks to the keeper. The queue begins at the channel's maker and moves at most once, to the
first process that receives: from then on each sender sends items straight to that process. The maker counts the
processes that hold the channel, and tells the keeper; if the maker ends, the keeper counts.

    Place     | first WANT of this process | first WANT of process P | HAVE of P | P is lost | anything else
    NEW       | SETTLED                    | MOVING: QUEUE to P      |           |           | served
    MOVING    | held                       | held                    | AWAY      | LOST      | held
    AWAY      | answer MOVED               | answer MOVED            |           | LOST      | answer MOVED
    LOST      | answer LOST                | answer LOST             |           |           | answer LOST
    SETTLED   | served                     | served                  |           |           | served (P begins here)

The keeper lends an item to a receiver with ITEM, and keeps it until the receiver confirms it with GOT. The keeper then
sends YOURS, and only now the receiver's user gets the item. So a receiver that dies loses no item that its user has not
seen, and no item is seen twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, IntEnum, auto
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from aiodaft._protocol.ids import CallId, PeerId

ChannelId: TypeAlias = tuple[PeerId, CallId]


class Kind(IntEnum):
    """`OFFER` to `FINISH` go from an end to the keeper, and carry the end's ticket."""

    OFFER = 0  # item: take it when there is room
    WITHDRAW = 1  # the offer is taken back
    WANT = 2  # whether the process may also send: lend the next item
    UNWANT = 3  # do not; or take back the lent item
    GOT = 4  # the lent item is here: may the user have it?
    BACK = 5  # item: the user did not take it
    CLOSE = 6  # refuse offers from now on
    FINISH = 7  # if there was an offer, close: no other process holds the channel, and this one may not send

    TAKEN = 8  # the offered item is in the queue
    ITEM = 9  # item: lent
    YOURS = 10  # the user may have it
    OVER = 11  # the channel is closed, and for a WANT also empty
    ORPHANED = 12  # process: it died, no process that may send holds the channel, and the queue is empty
    LOST = 13  # process: the queue was lost with it; None: the channel was dropped
    MOVED = 14  # process: ask there
    ALONE = 15  # no other process holds the channel
    COUNTING = 16  # the sender counts the holders instead of the maker: tell it when you drop the channel

    QUEUE = 17  # `Contents`: the queue is yours
    HAVE = 18  # the queue is here
    HELD = 19  # process: it holds the channel
    LEFT = 20  # process, `Leaving`: it no longer holds the channel
    DROP = 21  # no process holds the channel, as far as its maker knows
    MAY_SEND = 22  # whether a process that has asked for items may also send


class Leaving(IntEnum):
    """In the report of another process only `DROPPED` is certain."""

    DROPPED = 0
    ENDED = 1  # without an error
    DIED = 2


FOR_KEEPERS: Final = frozenset(kind for kind in Kind if kind <= Kind.FINISH or kind >= Kind.QUEUE)
_REQUESTS: Final = frozenset((Kind.OFFER, Kind.WANT, Kind.CLOSE))


class Message(NamedTuple):
    kind: Kind
    ticket: int = 0
    body: Any = None


class Contents(NamedTuple):
    capacity: int
    items: tuple[Any, ...]
    used: bool
    closed: bool
    holders: tuple[PeerId, ...]
    senders: tuple[PeerId, ...]
    missed: PeerId | None


class Tell(NamedTuple):
    to: PeerId
    message: Message


class Outcome(Enum):
    DONE = auto()  # with the item, for a receive
    CLOSED = auto()
    ORPHANED = auto()  # with the process that died
    LOST = auto()  # with the process that is gone, or None


class Settle(NamedTuple):
    ticket: int
    outcome: Outcome
    body: Any = None


Command: TypeAlias = Tell | Settle


class Place(Enum):
    NEW = auto()
    SETTLED = auto()
    MOVING = auto()
    AWAY = auto()
    LOST = auto()


class Keeper:
    def __init__(self, here: PeerId, maker: PeerId, capacity: int) -> None:
        self.place = Place.NEW
        self._here = here
        self._maker = maker
        self._counts = False
        self._at = here
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._used = False
        self._closed = False
        self._offers: deque[tuple[PeerId, int, Any]] = deque()
        self._wants: deque[tuple[PeerId, int]] = deque()
        self._lent: dict[tuple[PeerId, int], Any] = {}
        # Holders; those that have sent, and may do so again; those that have received, and may not send.
        self._holders: dict[PeerId, None] = {maker: None}
        self._senders: dict[PeerId, None] = {}
        self._receivers: set[PeerId] = set()
        # With a lost connection; and those that have ended, as reported.
        self._gone: dict[PeerId, Leaving] = {}
        self._over: set[PeerId] = set()
        # None once another process has begun to send.
        self.missed: PeerId | None = None
        self._held: list[tuple[PeerId, Message]] = []
        self._out: list[Command] = []

    @property
    def is_here(self) -> bool:
        return self.place in {Place.NEW, Place.SETTLED}

    @property
    def waiting(self) -> int:
        return len(self._items)

    @property
    def is_over(self) -> bool:
        return self._counts and not self._holders

    def handle(self, sender: PeerId, message: Message) -> list[Command]:
        if message.kind is Kind.HELD:
            return self.holder_came(message.body)
        if message.kind is Kind.LEFT:
            peer, how = message.body
            return self.holder_left(peer, Leaving(how))
        if self.is_here:
            self._SERVE[message.kind](self, sender, message)
        elif message.kind is Kind.HAVE:
            self.place = Place.AWAY
            # The holders must find the queue even if the maker dies.
            for holder in self._holders:
                self._tell(holder, Kind.MOVED, 0, self._at)
            self._answer_held()
        elif message.kind is Kind.FINISH and self.place is not Place.LOST:
            self._tell(self._at, Kind.FINISH, 0)
        elif message.kind in _REQUESTS:
            self._held.append((sender, message))
            if self.place is not Place.MOVING:
                self._answer_held()
        return self._take_out()

    def holder_came(self, peer: PeerId) -> list[Command]:
        if self.is_here:
            self._hold(peer)
            return self._take_out()
        self._holders[peer] = None
        if self.place is not Place.LOST:
            self._tell(self._at, Kind.HELD, 0, peer)
            if self.place is Place.AWAY:
                self._tell(peer, Kind.MOVED, 0, self._at)
        return self._take_out()

    def holder_left(self, peer: PeerId, how: Leaving) -> list[Command]:
        if how is Leaving.DROPPED:
            self._holders.pop(peer, None)
        else:
            self._ended(peer, how)
        if self.is_here:
            self._pump()
        elif self.place is not Place.LOST:
            self._tell(self._at, Kind.LEFT, 0, (peer, int(how)))
        return self._take_out()

    def peer_lost(self, peer: PeerId, how: Leaving) -> list[Command]:
        if not self.is_here:
            if peer == self._at:
                self.place = Place.LOST
                self._answer_held()
            return self._take_out()
        self._offers = deque(offer for offer in self._offers if offer[0] != peer)
        self._wants = deque(want for want in self._wants if want[0] != peer)
        for owner in [owner for owner in self._lent if owner[0] == peer]:
            self._items.appendleft(self._lent.pop(owner))
        self._gone[peer] = how
        if peer == self._maker:
            self._count()
        elif self._counts or self._maker == self._here:
            self._forget(peer)
        elif peer in self._holders:
            # The maker sends this back, after its earlier messages about holders.
            self._tell(self._maker, Kind.LEFT, 0, (peer, int(how)))
        self._pump()
        return self._take_out()

    def drop(self) -> list[Command]:
        if self.place in {Place.MOVING, Place.AWAY}:
            self._tell(self._at, Kind.DROP, 0)
        return self._take_out()

    def _take_over(self, sender: PeerId, message: Message) -> None:
        _, items, self._used, self._closed, holders, senders, self.missed = message.body
        self.place = Place.SETTLED
        self._items.extend(items)
        self._holders, self._senders = dict.fromkeys(holders), dict.fromkeys(senders)
        self._tell(sender, Kind.HAVE, 0)

    def _offer(self, sender: PeerId, message: Message) -> None:
        if self._closed:
            self._tell(sender, Kind.OVER, message.ticket)
            return
        if sender not in self._senders:
            self._senders[sender] = None
            self.missed = None
        self._used = True
        self._hold(sender)
        self._offers.append((sender, message.ticket, message.body))
        self._pump()

    def _withdraw(self, sender: PeerId, message: Message) -> None:
        self._offers = deque(offer for offer in self._offers if offer[:2] != (sender, message.ticket))

    def _want(self, sender: PeerId, message: Message) -> None:
        if self.place is Place.NEW and sender != self._here:
            self._move(sender, message)
            return
        self.place = Place.SETTLED
        self._hold(sender)
        self._wants.append((sender, message.ticket))
        self._may_or_may_not_send(sender, message)

    def _may_or_may_not_send(self, sender: PeerId, message: Message) -> None:
        if message.body:
            self._receivers.discard(sender)
        else:
            self._receivers.add(sender)
            self._senders.pop(sender, None)
        self._pump()

    def _move(self, to: PeerId, want: Message) -> None:
        self.place, self._at = Place.MOVING, to
        items, holders, senders = tuple(self._items), tuple(self._holders), tuple(self._senders)
        contents = Contents(self._capacity, items, self._used, self._closed, holders, senders, self.missed)
        self._tell(to, Kind.QUEUE, 0, contents)
        self._held.append((to, want))
        self._held += [(peer, Message(Kind.OFFER, ticket)) for peer, ticket, _ in self._offers]
        self._items.clear()
        self._offers.clear()

    def _unwant(self, sender: PeerId, message: Message) -> None:
        want = sender, message.ticket
        if want in self._lent:
            self._items.appendleft(self._lent.pop(want))
        elif want in self._wants:
            self._wants.remove(want)
        self._pump()

    def _got(self, sender: PeerId, message: Message) -> None:
        del self._lent[sender, message.ticket]
        self._tell(sender, Kind.YOURS, message.ticket)
        self._pump()

    def _back(self, sender: PeerId, message: Message) -> None:
        self._items.appendleft(message.body)
        self._pump()

    def _close(self, sender: PeerId, message: Message) -> None:
        self._closed = True
        for peer, ticket, _ in self._offers:
            self._tell(peer, Kind.OVER, ticket)
        self._offers.clear()
        self._tell(sender, Kind.OVER, message.ticket)
        self._pump()

    def _finish(self, sender: PeerId, message: Message) -> None:
        self._closed |= self._used
        self._pump()

    def _hold(self, peer: PeerId) -> None:
        # The maker's HELD may come later, or never.
        if peer not in self._holders:
            self._holders[peer] = None
            if self._counts:
                self._tell(peer, Kind.COUNTING, 0)

    def _dropped(self, sender: PeerId, message: Message) -> None:
        # The maker may only have lost its connections to the holders.
        self._count()

    def _count(self) -> None:
        self._counts = True
        for gone in self._gone:
            self._forget(gone)
        for holder in self._holders:
            self._tell(holder, Kind.COUNTING, 0)

    def _forget(self, gone: PeerId) -> None:
        if gone in self._holders:
            del self._holders[gone]
            self._ended(gone, self._gone[gone])

    def _ended(self, peer: PeerId, how: Leaving) -> None:
        if peer in self._over:
            return
        self._over.add(peer)
        if how is Leaving.DIED and (peer in self._senders or peer not in self._receivers):
            self.missed = peer
        self._senders.pop(peer, None)

    def _pump(self) -> None:
        while True:
            while self._offers and len(self._items) < self._capacity:
                peer, ticket, item = self._offers.popleft()
                self._items.append(item)
                self._tell(peer, Kind.TAKEN, ticket)
            if not (self._items and self._wants):
                break
            want = self._wants.popleft()
            self._lent[want] = item = self._items.popleft()
            self._tell(want[0], Kind.ITEM, want[1], item)
        # A lent item may be returned.
        if self._items or self._lent:
            return
        orphaned = self.missed is not None and not any(map(self._may_send, self._holders))
        if self._closed or orphaned:
            kind, body = (Kind.OVER, None) if self._closed else (Kind.ORPHANED, self.missed)
            for peer, ticket in self._wants:
                self._tell(peer, kind, ticket, body)
            self._wants.clear()

    def _may_send(self, holder: PeerId) -> bool:
        if holder in self._over:
            return False
        # A maker that has not sent is assumed to only pass the channel on.
        return holder in self._senders or (holder not in self._receivers and holder != self._maker)

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        for peer, message in held:
            if self.place is Place.AWAY:
                self._tell(peer, Kind.MOVED, message.ticket, self._at)
            else:
                # A lost channel counts as closed.
                kind = Kind.OVER if message.kind is Kind.CLOSE else Kind.LOST
                self._tell(peer, kind, message.ticket, self._at)

    def _tell(self, to: PeerId, kind: Kind, ticket: int, body: Any = None) -> None:
        self._out.append(Tell(to, Message(kind, ticket, body)))

    def _take_out(self) -> list[Command]:
        out, self._out = self._out, []
        return out

    _SERVE: ClassVar[dict[Kind, Callable[[Keeper, PeerId, Message], None]]] = {
        Kind.QUEUE: _take_over,
        Kind.OFFER: _offer,
        Kind.WITHDRAW: _withdraw,
        Kind.WANT: _want,
        Kind.UNWANT: _unwant,
        Kind.GOT: _got,
        Kind.BACK: _back,
        Kind.CLOSE: _close,
        Kind.FINISH: _finish,
        Kind.DROP: _dropped,
        Kind.MAY_SEND: _may_or_may_not_send,
    }


def refusal(message: Message) -> Message | None:
    """The channel was dropped, or its maker is gone."""
    if message.kind not in _REQUESTS:
        return None
    return Message(Kind.OVER if message.kind is Kind.CLOSE else Kind.LOST, message.ticket)
