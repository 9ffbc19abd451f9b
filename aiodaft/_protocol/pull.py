"""The route of one pull: the process to ask for a value, and the next one. Pure.

The producer is asked first. It sends the value when the value exists, or names another process:

    producer  --MOVED-->  owner   the producer does not know the value; the owner always knows
    owner     --MOVED-->  producer, or the process that pulls
    root      --MOVED-->  relay   the producer broadcasts the value (see `broadcast`); the relay is a consumer

A relay that gives nothing is reported to the root, which is then asked again and names another process.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from aiodaft.exceptions import RemoteProtocolError

from .ids import CallId, PeerId

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
    """An answer without the value."""

    MOVED = "the name of another process"
    BROKEN = "an error"
    LOST = "the asked process ended"
    OWNER_LOST = "the asked process ended, and it was the owner"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Next(Enum):
    """The next step of a pull."""

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
    """One pull of one value.

    Attributes:
        asked: The process to ask.
    """

    def __init__(self, local: PeerId, owner: PeerId, number: CallId, first: PeerId) -> None:
        self._local = local
        self._owner = owner
        self._number = number
        self.asked = first
        # The process that named the asked one.
        self._named_by: PeerId | None = None
        self._hops = 0

    def handle(self, answer: Answer, named: PeerId | None, root: PeerId | None) -> Next:
        """Choose the process to ask next.

        Args:
            answer: The answer of the asked process.
            named: The process that a MOVED names.
            root: The root of the broadcast that this process takes part in for the value.

        Raises:
            RemoteProtocolError: The route is a circle.
        """
        if self.asked == self._local:
            kind = Asked.HERE
        else:
            kind = Asked.RELAY if root is not None and root == self._named_by else Asked.REMOTE
        if answer is Answer.LOST:
            answer = self._known_loss()
        step = _NEXT[kind, answer]
        self._hops += 1
        if self._hops == MAX_HOPS and step is not Next.FAIL:
            raise RemoteProtocolError(f"no process has the value of ref {self._number} of {self._owner}")
        if step is Next.ASK_NAMED:
            assert named is not None
            self.asked, self._named_by = named, None if kind is Asked.HERE else self.asked
        elif step is Next.ASK_OWNER:
            self.asked, self._named_by = self._owner, self.asked
        elif step is Next.ASK_ROOT:
            assert root is not None
            self.asked, self._named_by = root, None
        return step

    def _known_loss(self) -> Answer:
        if self.asked == self._owner:
            return Answer.OWNER_LOST
        # This process owns the ref: no other process knows more.
        return Answer.BROKEN if self._owner == self._local else Answer.LOST
