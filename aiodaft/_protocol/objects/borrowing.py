"""Refs that several processes hold: which processes borrow this one's, and which refs this one borrows. Pure.

owner                                         borrower
 |  --- a value with the ref inside --->         |  `find`, and if it is not known `borrow`
 |  <-- BORROW, or a call `borrow` ---           |  counted by `lend` before anything can end the sender's hold
 |  <-- a call `give_back` -----------           |  `give_back`, when its last holder there is gone
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Key, Value

ValueT = TypeVar("ValueT", bound=Value)


class Borrowing(Generic[ValueT]):
    """The refs of one process that others may ask for, and those of others that it borrows."""

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

    # Refs of this process.

    def share(self, number: CallId, value: ValueT) -> None:
        """A ref goes to another process, which may ask for it from now on; nothing if it is borrowed. Idempotent."""
        if value.own and not value.shared:
            value.shared = True
            self.shared[number] = value

    def use(self, number: CallId, value: ValueT) -> None:
        """A call to another process has a ref as an argument: that process may ask for it until the call ends."""
        value.uses += 1
        self.used[number] = value

    def unused(self, number: CallId, value: ValueT) -> None:
        """No call under way has a ref as an argument; it may be another process's."""
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
        """Another process dropped a ref. Returns the values that no process borrows any more."""
        value = self._lent.get(number)
        if value is None:
            return []
        value.give_back(peer)
        return self._returned({number: value})

    def peer_lost(self, peer: PeerId) -> list[ValueT]:
        """A process is gone, and with it the refs that it borrowed.

        Returns the values that no process borrows any more.
        """
        # One end may lead to another end: the table can change meanwhile.
        for value in list(self._lent.values()):
            value.forget(peer)
        return self._returned(self._lent)

    def _returned(self, lent: dict[CallId, ValueT]) -> list[ValueT]:
        numbers = [number for number, value in lent.items() if not value.borrowers]
        return [self._lent.pop(number) for number in numbers]

    # Refs of other processes.

    def borrow(self, owner: PeerId, number: CallId, value: ValueT) -> None:
        """This process holds a ref, and registers with the owner."""
        self.borrowed[owner, number] = value
        value.registered = True

    def give_back(self, owner: PeerId, number: CallId, value: ValueT) -> bool:
        """A borrowed ref has no holders here any more. Returns whether its owner is to be told."""
        # A value that the garbage collector found is not in the table any more, and perhaps another one is.
        if self.borrowed.get((owner, number)) is value:
            del self.borrowed[owner, number]
        registered, value.registered = value.registered, False
        return registered
