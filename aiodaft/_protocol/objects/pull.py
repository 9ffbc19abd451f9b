"""The route of one pull: the process to ask for a value, and the next one. Pure.

The producer is asked first. It sends the value when the value exists, or names another process:

    producer  --MOVED-->  owner   the producer does not know the value; the owner always knows
    owner     --MOVED-->  producer, or the process that pulls
    root      --MOVED-->  relay   the producer broadcasts the value (see `broadcast`); the relay is a consumer

A relay that gives nothing is reported to the root, which is then asked again and names another process.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Generic, TypeVar

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.value import Key
from aiodaft.exceptions import OwnerDied, RemoteProtocolError

WaiterT = TypeVar("WaiterT")
KeyT = TypeVar("KeyT")

# Longer routes are circles. The longest: owner, producer, and two relays, each with the root asked again.
MAX_HOPS: Final = 16


class Asked(Enum):
    """The kind of the asked process."""

    HERE = "the process that pulls"
    REMOTE = "another process"
    RELAY = "a consumer that the root of a broadcast named"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Answer(Enum):
    MOVED = "the name of another process"
    BROKEN = "an error"
    LOST = "the asked process ended"
    OWNER_LOST = "the asked process ended, and it was the owner"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Next(Enum):
    ASK_NAMED = "ask the process that the answer names"
    ASK_OWNER = "ask the owner"
    ASK_ROOT = "report the relay to the root, and ask the root again"
    FAIL = "fail with the error"


_NEXT: Final = {
    (Asked.HERE, Answer.MOVED): Next.ASK_NAMED,
    (Asked.HERE, Answer.BROKEN): Next.FAIL,
    (Asked.REMOTE, Answer.MOVED): Next.ASK_NAMED,
    (Asked.REMOTE, Answer.BROKEN): Next.FAIL,
    # The owner may have the value, and knows how the producer ended.
    (Asked.REMOTE, Answer.LOST): Next.ASK_OWNER,
    (Asked.REMOTE, Answer.OWNER_LOST): Next.FAIL,
    (Asked.RELAY, Answer.MOVED): Next.ASK_ROOT,
    (Asked.RELAY, Answer.BROKEN): Next.ASK_ROOT,
    (Asked.RELAY, Answer.LOST): Next.ASK_ROOT,
    (Asked.RELAY, Answer.OWNER_LOST): Next.FAIL,
}


class Pull:
    """One pull of one value."""

    def __init__(self, local: PeerId, key: Key, first: PeerId) -> None:
        self._local = local
        self._owner, self._number = key
        self.asked = first
        # The process that named the asked one.
        self._named_by: PeerId | None = None
        self._hops = 0
        # Why a process that was asked gave nothing: its connection breaks again and again, if the route is a circle.
        self._problem: BaseException | None = None

    def handle(self, answer: PeerId | BaseException, root: PeerId | None, *, lost: bool = False) -> PeerId | None:
        """Choose the process to ask next.

        Args:
            answer: The process that the asked one names, or the error.
            root: The root of the broadcast that this process takes part in for the value.

        Returns:
            The relay that gave nothing, to be reported to the root, which is asked next; None for other steps.

        Raises:
            RemoteProtocolError: The route is a circle.
            OwnerDied: The owner is lost.
            BaseException: The error, if no other process is to be asked.
        """
        asked = self.asked
        if asked == self._local:
            kind = Asked.HERE
        else:
            kind = Asked.RELAY if root is not None and root == self._named_by else Asked.REMOTE
        step = _NEXT[kind, self._kind_of(answer, lost)]
        self._hops += 1
        if isinstance(answer, BaseException):
            if step is Next.FAIL and lost and asked == self._owner:
                raise OwnerDied(f"the owner of a ref, {asked}, is gone: {answer}") from answer
            if step is Next.FAIL:
                raise answer
            self._problem = answer
        if self._hops == MAX_HOPS:
            raise self._problem or RemoteProtocolError(
                f"no process has the value of ref {self._number} of {self._owner}"
            )
        if step is Next.ASK_ROOT:
            assert root is not None
            self.asked, self._named_by = root, None
            return asked
        self._named_by = None if kind is Asked.HERE else asked
        self.asked = self._owner if isinstance(answer, BaseException) else answer
        return None

    def _kind_of(self, answer: PeerId | BaseException, lost: bool) -> Answer:
        if not isinstance(answer, BaseException):
            return Answer.MOVED
        if lost and self.asked == self._owner:
            return Answer.OWNER_LOST
        # If this process owns the ref, no other process knows more.
        return Answer.LOST if lost and self._owner != self._local else Answer.BROKEN


class Questions(Generic[WaiterT]):
    """The pulls of one process that wait for an answer. A process answers the pulls of one value in their order."""

    def __init__(self) -> None:
        # By asked process and value.
        self.open: dict[tuple[PeerId, Key], deque[WaiterT]] = {}

    def ask(self, remote: PeerId, key: Key, waiter: WaiterT) -> None:
        self.open.setdefault((remote, key), deque()).append(waiter)

    def asked(self, remote: PeerId, key: Key) -> bool:
        return (remote, key) in self.open

    def answered(self, remote: PeerId, key: Key) -> WaiterT:
        """An answer came. Returns the waiter for it.

        Raises:
            RemoteProtocolError: The process was not asked.
        """
        if not self.asked(remote, key):
            raise RemoteProtocolError(f"{remote} answers a pull that was not made")
        return take_first(self.open, (remote, key))

    def lost(self, remote: PeerId) -> list[WaiterT]:
        asked = [question for question in self.open if question[0] == remote]
        return [waiter for question in asked for waiter in self.open.pop(question)]


def take_first(table: dict[KeyT, deque[WaiterT]], key: KeyT) -> WaiterT:
    """Take the first that waits under a key; with the last one, the key goes."""
    waiting = table[key]
    first = waiting.popleft()
    if not waiting:
        del table[key]
    return first
