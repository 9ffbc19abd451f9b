"""Where values and news come from and go to: another process, or this one; and what the link to one needs of this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import Message
from aiodaft._runtime.connections.ring_poller import Waiter
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft_transport import Control

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Link


class Neighbour(Control, Protocol):
    """Where a value comes from: another process over a link, or this one."""

    @property
    def remote(self) -> PeerId:
        """Id of the process."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What went over it."""
        ...

    @property
    def lost(self) -> Exception | None:
        """Why it ended, once it has."""
        ...

    def send(self, message: Message) -> None:
        """Say something to the process. What is said after the end is lost."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether `send` has to wake the process, which takes a while."""
        ...

    def send_in_turn(self, message: Message) -> None:
        """The same, behind the calls that were submitted before."""
        ...

    def send_quietly(self, message: Message) -> None:
        """The same; if the process sleeps, it may notice only when something else wakes it."""
        ...

    def wake(self) -> None:
        """See to it that the process notices what was sent quietly."""
        ...


class LinkOwner(Protocol):
    """What a link needs of its process."""

    @property
    def handlers(self) -> Sequence[Callable[[Link, Message], object]]:
        """What handles each kind of message."""
        ...

    @property
    def waiter(self) -> Waiter:
        """What looks at the rings."""
        ...

    def link_lost(self, link: Link, reason: Exception) -> None:
        """The link ended; called once."""
        ...

    def dropped(self, link: Link, message: Message) -> None:
        """A call will not be sent."""
        ...
