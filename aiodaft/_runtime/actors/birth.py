"""The parts of a handle that do not depend on where its actor is: class, owner, restart mode."""

from __future__ import annotations

from typing import NamedTuple

from aiodaft._protocol.ids import PeerId


class Birth(NamedTuple):
    """The class, owner and restart mode of an actor of a program.

    Attributes:
        cls: Its class.
        owner: The process that has had it made.
        follow: Whether handles follow its restarts; None if it is not supervised.
    """

    cls: type
    owner: PeerId
    follow: bool | None
