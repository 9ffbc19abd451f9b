"""The ways of a ref's value to the process of a call that has it as an argument, without a question. Pure.

The owner of the ref, which makes the call, chooses the way:

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

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.pull import take_first
from aiodaft._protocol.objects.value import Key

AnswerT = TypeVar("AnswerT")
TakerT = TypeVar("TakerT")

# The producer that answers, and the value.
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
        consumer: The process of the call that needs the value.
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
    """The answers that a consumer expects of producers, and the takers that its calls have for them."""

    def __init__(self) -> None:
        self._takers: dict[Expected, deque[TakerT]] = {}
        # Answers that came before the call that needs them.
        self._early: dict[Expected, deque[AnswerT]] = {}
        # Values, by producer, and processes, of which answers are dropped and calls ask.
        self._doubtful: set[Expected] = set()
        self._renewed: set[PeerId] = set()

    def expect(self, producer: PeerId, key: Key, taker: TakerT) -> AnswerT | PeerId | None:
        """A call came: its answer, or the owner, if it has to ask that; else `came` finds its taker for the answer."""
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
        """Answers of this key may not come: the takers that have to ask."""
        found = self._take(lambda expected: expected[1] == key)
        self._doubtful.update(expected for expected, _ in found)
        return [taker for _, taker in found]

    def doubt(self, peer: PeerId) -> list[tuple[Key, TakerT]]:
        """A process has another connection in place of a lost one: as `lost`, and its answers are dropped."""
        found = self.lost(peer)
        self._renewed.add(peer)
        return found

    def lost(self, peer: PeerId) -> list[tuple[Key, TakerT]]:
        """A process is lost: the takers of its answers, which have to ask. Calls and values of its own are gone."""

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
