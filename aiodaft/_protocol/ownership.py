"""Who keeps a value alive. Pure.

A ref is owned by the process that made the call. Its value lives while any of these holds it: a `Ref` object in
the owner, a call under way that has it as an argument, or another process that got the ref inside an object
(a borrower). When the last of them lets go and the value is there, it is freed wherever it is.
"""

from __future__ import annotations

from .ids import PeerId


class Holders:
    """The holders of one ref in its owner process."""

    # Defaults live in the class: most refs are made, awaited and gone without ever changing them.
    handles = 0
    uses = 0
    borrowers: dict[PeerId, int] | None = None
    # A value that is still being made cannot be freed; it is when it comes.
    settled = False

    @property
    def free(self) -> bool:
        """Nobody holds the value, and it is there to be freed."""
        return self.settled and not self.held

    @property
    def held(self) -> bool:
        """Somebody holds the value."""
        return bool(self.handles or self.uses or self.borrowers)

    def borrow(self, peer: PeerId) -> None:
        """Another process holds the ref now."""
        if self.borrowers is None:
            self.borrowers = {}
        self.borrowers[peer] = self.borrowers.get(peer, 0) + 1

    def give_back(self, peer: PeerId) -> None:
        """Another process dropped the ref once."""
        if self.borrowers and peer in self.borrowers:
            self.borrowers[peer] -= 1
            if not self.borrowers[peer]:
                del self.borrowers[peer]

    def forget(self, peer: PeerId) -> None:
        """Another process is gone, and with it whatever it held."""
        if self.borrowers:
            self.borrowers.pop(peer, None)
