"""The location of a supervised actor, as one process knows it, and the calls that are made again. Pure.

The process of the actor's supervisor, its owner, is told of every move. Every other process learns that the actor has
moved when a call does not find it, and then asks the owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from aiodaft._protocol.ids import ActorId, PeerId, epoch_of
from aiodaft._protocol.node.liveness import Health
from aiodaft._protocol.numbers import is_count
from aiodaft.exceptions import ActorDied, DaftError, NotDelivered, Overloaded, PeerLost, StaleHandle

NOWHERE: Final = PeerId("")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a supervised actor.

    Attributes:
        peer: Its process; NOWHERE while it is down.
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
    """The location of an actor, as far as one process knows. An end is final."""

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
        """The actor is not in a process, or that is gone.

        The owner's process must keep the location that it was told.
        """
        if remote == self.place.peer and not self.told:
            self.leave()

    def heard(self, place: Location) -> None:
        """A handle came from another process: if its incarnation is a later one, the known one is down."""
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
        # The actor lives, and would refuse the call again.
        return Failure.FINAL
    if error.executed is None:
        return Failure.DOUBTFUL
    return Failure.TURNED_AWAY if isinstance(error, StaleHandle | ActorDied) else Failure.UNSENT


def check_retries(retries: object, what: str, *, idempotent: bool, is_stream: bool) -> int:
    """Return the number of times that a call of a method may be repeated; `retries` is the user's wish.

    Raises:
        TypeError: Calls of the method cannot be made again.
        ValueError: It is not a positive integer.
    """
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
