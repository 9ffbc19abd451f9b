"""The table of names. Pure.

A name belongs to an incarnation of an actor; it is free again when that incarnation is gone. `get_or_create` reserves
the name before there is an actor, so that of many callers only one makes it.

            RESERVE               REGISTER
    FREE ------------> RESERVED ------------> HELD
     |                                         ^
     +---------------- REGISTER ---------------+

FREED leads from RESERVED and HELD to FREE.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, TypeVar

from aiodaft._protocol.coordination.records import NamedActor
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.numbers import next_state
from aiodaft.exceptions import LeaseLost, NameNotFound, NameTaken

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

    # Questions.

    def get(self, name: str) -> NamedActor | None:
        return self._names.get(name)

    def lookup(self, name: str) -> NamedActor:
        """The actor with a name.

        Raises:
            NameNotFound: No actor has it.
        """
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
        """The names that an actor, or every actor of a process, holds; for a process also its reserved ones."""
        held = self._of_process.get(peer, {}).values()
        return [one for one in held if actor is None or (one.actor == actor and not one.reserved)]

    def under(self, lease: int) -> list[NamedActor]:
        return list(self._of_lease.get(lease, {}).values())

    # Decisions.

    def grant(self, wanted: NamedActor) -> int:
        """The epoch at which a request for a name is granted; 0: it needs a new one.

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

    # Changes.

    def put(self, name: str, record: NamedActor | None) -> None:
        """Carry out a change.

        Raises:
            ValueError: It cannot happen.
        """
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
