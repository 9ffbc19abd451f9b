"""How the value of a ref gets to the process of a call that has it as an argument, without a question. Pure.

The owner of the ref, which makes the call, chooses the way:

    IN_MESSAGE  the value is plain and here: it travels in the call
    IN_PLACE    the process of the call makes the value, or stores it
    FORWARDED   the owner tells the producer with FORWARD; the producer answers the consumer as if that had sent PULL,
                or names itself if it has to be asked
    PULLED      the consumer asks; always possible, and needed for consumers that pass a value on to each other

A FORWARD is answered once, and each call consumes one answer, whichever comes first. An answer does not come if the
producer is lost, or if the connection from the owner to the producer is: then the owner tells the consumer with ASK.
In both cases the consumer asks the owner.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Generic, TypeVar

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.value import Key

AnswerT = TypeVar("AnswerT")
TakerT = TypeVar("TakerT")


class Way(Enum):
    """How a value gets to a call."""

    IN_MESSAGE = "it travels in the call"
    IN_PLACE = "the process of the call has or makes it"
    FORWARDED = "the producer is told to send it"
    PULLED = "the consumer asks for it"


IN_MESSAGE, IN_PLACE, FORWARDED, PULLED = Way


def choose(plain: bool, producer: PeerId | None, consumer: PeerId, *, relayed: bool) -> Way:
    """Choose the way of a value.

    Args:
        plain: Whether the owner has the value, and it is plain.
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
        # None: the taker asks the owner, and the answer may still come.
        self._takers: dict[tuple[PeerId, Key], deque[TakerT | None]] = {}
        # Answers that came before the call that needs them.
        self._early: dict[tuple[PeerId, Key], deque[AnswerT]] = {}

    def expect(self, producer: PeerId, key: Key, taker: TakerT) -> AnswerT | None:
        """A call came: its answer, if that is here, else `came` gives it to the taker."""
        early = self._early.get((producer, key))
        if early is None:
            self._takers.setdefault((producer, key), deque()).append(taker)
            return None
        answer = early.popleft()
        if not early:
            del self._early[producer, key]
        return answer

    def came(self, producer: PeerId, key: Key, answer: AnswerT) -> TakerT | None:
        """An answer came: its taker, if there is one; else it waits for the call."""
        takers = self._takers.get((producer, key))
        if takers is None:
            self._early.setdefault((producer, key), deque()).append(answer)
            return None
        taker = takers.popleft()
        if not takers:
            del self._takers[producer, key]
        return taker

    def ask(self, key: Key) -> list[TakerT]:
        """Answers of this key may not come: the takers that have to ask."""
        found: list[TakerT] = []
        for asked, takers in self._takers.items():
            if asked[1] == key:
                found += [taker for taker in takers if taker is not None]
                self._takers[asked] = deque([None] * len(takers))
        return found

    def lost(self, peer: PeerId) -> list[tuple[Key, TakerT]]:
        """A process is lost: the takers of its answers, which have to ask. Calls and values of its own are gone."""
        found: list[tuple[Key, TakerT]] = []
        for asked in [asked for asked in self._takers if peer in (asked[0], asked[1][0])]:
            takers = self._takers.pop(asked)
            if asked[1][0] != peer:
                found += [(asked[1], taker) for taker in takers if taker is not None]
        for asked in [asked for asked in self._early if asked[1][0] == peer]:
            del self._early[asked]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is expected or kept."""
        return not (self._takers or self._early)
