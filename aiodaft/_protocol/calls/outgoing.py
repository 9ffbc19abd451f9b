"""Calls as their caller sees them: their order, the location of the actor, the ways of refs among arguments. Pure.

The owner of a ref, which makes the call, chooses the way of its value to the callee without a question:

    IN_MESSAGE  the value is plain and here: it travels in the call
    IN_PLACE    the process of the call makes the value, or stores it
    FORWARDED   the owner tells the producer with FORWARD; the producer answers the consumer as if that had sent PULL,
                or names itself if it has to be asked
    PULLED      the consumer asks; always possible, and needed for consumers that pass a value on to each other

A FORWARD is answered once, and each call consumes one answer, the first that comes. An answer does not come if the
producer is lost, or if the connection from the owner to the producer is: then the owner tells the consumer with ASK.
Nor if the connection from the producer to the consumer is: if the consumer does not notice that, the producer says so
as soon as there is another one (RENEWED). In each case the consumer asks the owner.

An answer does not say which call it is for. So from the first time that the consumer gets a new connection to a process
in place of a lost one, it drops the answers of that process, and those to the FORWARDs of that process, and its calls
ask: an answer may have been lost before its call came, and a call before its answer came.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from aiodaft._protocol.ids import ActorId, PeerId, epoch_of
from aiodaft._protocol.node.worker import Health
from aiodaft._protocol.numbers import is_count
from aiodaft._protocol.objects.broadcast import take_first
from aiodaft._protocol.objects.value import Key
from aiodaft.exceptions import ActorDied, DaftError, NotDelivered, Overloaded, PeerLost, StaleHandle

AnswerT = TypeVar("AnswerT")
TakerT = TypeVar("TakerT")

Expected: TypeAlias = tuple[PeerId, Key]


class Way(Enum):
    IN_MESSAGE = "it travels in the call"
    IN_PLACE = "the process of the call has or makes it"
    FORWARDED = "the producer is told to send it"
    PULLED = "the consumer asks for it"


IN_MESSAGE, IN_PLACE, FORWARDED, PULLED = Way


def choose(plain: bool, producer: PeerId | None, consumer: PeerId, *, relayed: bool) -> Way:
    """Choose the way of a value.

    Args:
        producer: The process that stores the value, or got the call for it, if a message from the owner gets there.
        relayed: Whether consumers pass the value on to each other.
    """
    if plain:
        return IN_MESSAGE
    if producer is None:
        return PULLED
    if producer == consumer:
        return IN_PLACE
    return PULLED if relayed else FORWARDED


class Handover(Generic[AnswerT, TakerT]):
    """The answers that a consumer expects of producers, and the takers of its calls."""

    def __init__(self) -> None:
        self._takers: dict[Expected, deque[TakerT]] = {}
        self._early: dict[Expected, deque[AnswerT]] = {}
        # Values, by producer, and processes, of which answers are dropped and calls ask.
        self._doubtful: set[Expected] = set()
        self._renewed: set[PeerId] = set()

    def expect(self, producer: PeerId, key: Key, taker: TakerT) -> AnswerT | PeerId | None:
        """A call came: its answer, or the owner, if it has to ask that; else `came` finds its taker."""
        expected = producer, key
        if expected in self._early:
            return take_first(self._early, expected)
        if self._is_doubtful(expected):
            return key[0]
        self._takers.setdefault(expected, deque()).append(taker)
        return None

    def came(self, producer: PeerId, key: Key, answer: AnswerT) -> TakerT | None:
        """An answer came: its taker, if there is one; else it waits for the call, if that does not ask."""
        expected = producer, key
        if expected in self._takers:
            return take_first(self._takers, expected)
        if not self._is_doubtful(expected):
            self._early.setdefault(expected, deque()).append(answer)
        return None

    def ask(self, key: Key) -> list[TakerT]:
        found = self._take(lambda expected: expected[1] == key)
        self._doubtful.update(expected for expected, _ in found)
        return [taker for _, taker in found]

    def doubt(self, peer: PeerId) -> list[tuple[Key, TakerT]]:
        """A process has another connection in place of a lost one."""
        found = self.lost(peer)
        self._renewed.add(peer)
        return found

    def lost(self, peer: PeerId) -> list[tuple[Key, TakerT]]:
        def concerns_it(expected: Expected) -> bool:
            return peer in (expected[0], expected[1][0])

        found = self._take(concerns_it)
        self._doubtful = {expected for expected in self._doubtful if not concerns_it(expected)}
        self._renewed.discard(peer)
        for expected in [expected for expected in self._early if expected[1][0] == peer]:
            del self._early[expected]
        return [(key, taker) for (_, key), taker in found if key[0] != peer]

    def _is_doubtful(self, expected: Expected) -> bool:
        producer, (owner, _) = expected
        return expected in self._doubtful or producer in self._renewed or owner in self._renewed

    def _take(self, chosen: Callable[[Expected], bool]) -> list[tuple[Expected, TakerT]]:
        taken = [expected for expected in self._takers if chosen(expected)]
        return [(expected, taker) for expected in taken for taker in self._takers.pop(expected)]

    @property
    def is_empty(self) -> bool:
        return not (self._takers or self._early or self._doubtful)


class Entry(Protocol):
    @property
    def lanes(self) -> Sequence[Hashable]: ...

    def may_go(self) -> bool: ...


EntryT = TypeVar("EntryT", bound=Entry)


class Order(Generic[EntryT]):
    """The entries that one process has submitted and not sent.

    The entries for one actor go out in the order of submission. An entry stands in the lanes of all actors that it is
    for, goes out when it may and stands first in each of them, and enters all at once: no two wait for each other.
    """

    def __init__(self) -> None:
        self.lanes: dict[Hashable, OrderedDict[EntryT, int]] = {}
        self._places = itertools.count()
        self._changed: deque[Hashable] = deque()
        self._taking = False

    def holds_up(self, lanes: Iterable[Hashable]) -> bool:
        return not self.lanes.keys().isdisjoint(lanes)

    def enter(self, entry: EntryT) -> None:
        place = next(self._places)
        for lane in entry.lanes:
            self.lanes.setdefault(lane, OrderedDict())[entry] = place

    def move(self, entry: EntryT, lanes: Sequence[Hashable]) -> None:
        """Take an entry to other lanes, where it gets the place of its submission."""
        place = self.lanes[entry.lanes[0]][entry]
        self.leave(entry)
        for lane in lanes:
            entries = self.lanes.setdefault(lane, OrderedDict())
            behind = [other for other, others_place in entries.items() if others_place > place]
            entries[entry] = place
            for other in behind:
                entries.move_to_end(other)

    def leave(self, entry: EntryT) -> None:
        for lane in entry.lanes:
            entries = self.lanes[lane]
            del entries[entry]
            if not entries:
                del self.lanes[lane]

    def ready(self, lanes: Iterable[Hashable]) -> Iterator[EntryT]:
        """Take out the entries that may go now, because something has changed in these lanes.

        Each entry has to be sent before the next is asked for. Changes that happen meanwhile are seen here, too.
        """
        self._changed.extend(lanes)
        if self._taking:
            return
        self._taking = True
        try:
            while self._changed:
                entries = self.lanes.get(self._changed.popleft())
                if entries is None:
                    continue
                entry = next(iter(entries))
                if self._is_first(entry) and entry.may_go():
                    self.leave(entry)
                    yield entry
                    self._changed.extend(entry.lanes)
        finally:
            self._taking = False

    def _is_first(self, entry: EntryT) -> bool:
        return all(next(iter(self.lanes[lane])) is entry for lane in entry.lanes)


NOWHERE: Final = PeerId("")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a supervised actor.

    Attributes:
        peer: NOWHERE while it is down.
        actor: Its incarnation; the next one while it is down.
        ended: The error of its calls, if it is gone for good.
    """

    peer: PeerId
    actor: ActorId
    ended: DaftError | None = None

    def why_missed(self, remote: PeerId | None, lost: DaftError | None) -> DaftError | None:
        # Perhaps only the connection broke, and the actor is where it was.
        return self.ended or (lost if self.peer == remote else None)


class Whereabouts:
    """The location of an actor, as far as one process knows. An end is final.

    The owner is told of every move. Every other process learns of it when a call does not find the actor, and asks.
    """

    def __init__(self, place: Location, *, told: bool) -> None:
        self.place = place
        # This process is the owner.
        self.told = told

    def move(self, place: Location) -> bool:
        known = self.place
        if known.ended is not None or (place.ended is None and epoch_of(place.actor) < epoch_of(known.actor)):
            return False
        self.place = place
        return True

    def leave(self) -> None:
        if self.place.ended is None:
            self.place = Location(NOWHERE, self.place.actor)

    def not_found(self, remote: PeerId) -> None:
        """The owner's process must keep the location that it was told."""
        if remote == self.place.peer and not self.told:
            self.leave()

    def heard(self, place: Location) -> None:
        """A handle came from another process: a later incarnation of it shows that the known one is down."""
        if epoch_of(place.actor) > epoch_of(self.place.actor):
            self.leave()

    def health(self, seen: Health) -> Health:
        if self.place.ended is not None:
            return Health.LOST
        return Health.SUSPECT if seen is Health.LOST else seen


class Failure(Enum):
    FINAL = "the call ran, or another attempt would fail in the same way"
    DOUBTFUL = "the call may have run"
    UNSENT = "the call did not run"
    TURNED_AWAY = "the call did not run, because the actor was not where it went"


def failure_of(error: BaseException) -> Failure:
    if not isinstance(error, NotDelivered | ActorDied | PeerLost) or error.executed:
        return Failure.FINAL
    if isinstance(error, Overloaded):
        return Failure.FINAL
    if error.executed is None:
        return Failure.DOUBTFUL
    return Failure.TURNED_AWAY if isinstance(error, StaleHandle | ActorDied) else Failure.UNSENT


def check_retries(retries: object, what: str, *, idempotent: bool, is_stream: bool) -> int:
    """Raises TypeError: calls of the method cannot be made again. ValueError: it is not a positive integer."""
    if not idempotent:
        if retries is not None:
            raise TypeError(f"{what}: `retries` needs `idempotent=True`: only you can know that running twice is safe")
        return 0
    if is_stream:
        raise TypeError(f"{what} is a stream: it cannot be made again, because items of it have been taken")
    if retries is None:
        return 1
    if not is_count(retries):
        raise ValueError(f"{what}: `retries` is a positive integer, not {retries!r:.80}")
    return retries
