"""How actors of this process came to be: what handles of them are made of, besides where they are."""

from __future__ import annotations

from typing import NamedTuple

from aiodaft._protocol.ids import PeerId


class Birth(NamedTuple):
    """How an actor of a program came to be.

    Attributes:
        cls: Its class.
        owner: The process that has had it made.
        follow: Whether handles follow its restarts; None if it is not supervised.
    """

    cls: type
    owner: PeerId
    follow: bool | None
