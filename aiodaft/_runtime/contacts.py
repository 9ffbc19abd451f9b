"""The interfaces of two system actors, the node agent and the owner of actors; and the addresses of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.entries import Written
from aiodaft.actor import Actor
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.methods import method


class NodeContact(Actor):
    """The methods of a node agent, for every process."""

    @method
    async def introduce(self, other: str, known: int) -> str:
        """Connect the calling process with another one; returns the address to connect to if no socket comes.

        `known`: The number of sockets, or news of one that was lost, that have come for it before.
        """
        raise NotImplementedError

    @method
    async def open_stream(self, other: str, number: int) -> str:
        raise NotImplementedError

    @method
    async def locate(self, owner: str, number: int, wait: bool) -> Location:
        """Ask a controller, to which other controllers cannot connect; see `OwnerContact`."""
        raise NotImplementedError

    @method
    async def wait_end(self, peer: str) -> None:
        raise NotImplementedError

    @method
    async def exit_report(self, peer: str, in_flight: int) -> DaftError:
        """Return the error for the callers of a process that ended with `in_flight` calls of them."""
        raise NotImplementedError

    @method
    async def vacate(
        self, owner: str, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True
    ) -> None:
        """Remove an actor of `owner` from its process, and end the process if no other actor is there."""
        raise NotImplementedError


class OwnerContact(Actor):
    """The methods of an owner of actors, for other processes; `Directory` implements it."""

    @method
    async def locate(self, number: int, wait: bool) -> Location:
        """The location of a supervised actor; if it is down, and `wait`, as soon as it is up."""
        raise NotImplementedError

    @method(ordered=False)
    async def roster_after(self, group: str, epoch: int, since: int) -> Roster[Any] | None:
        """A group, as soon as it has a newer epoch: without its members if it has had them `since` that epoch.

        None if there is no such group any more.
        """
        raise NotImplementedError

    @method
    async def process_ended(self, peer: str, error: OutcomeUnknown, wanted: bool) -> None:
        """A worker ended: the error for callers of its actors, and whether the runtime wanted its end."""
        raise NotImplementedError

    @method
    async def actor_died(self, peer: str, actor: int, error: OutcomeUnknown) -> None:
        """An actor's process ended by accident, and no call failed because of that."""
        raise NotImplementedError

    @method
    async def node_draining(self, node: str, grace: float) -> None:
        """A node, served by this process, is being drained: its actors have so many seconds to go to others."""
        raise NotImplementedError

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        """An error that no code in a worker saw; `what` says what failed."""
        raise NotImplementedError

    @method
    async def show(self, written: Sequence[Written]) -> None:
        raise NotImplementedError


class Addresses(Protocol):
    """The addresses of a cluster's nodes, as a process knows them."""

    def address_of(self, peer: PeerId) -> str:
        """The address at which the node of a process listens.

        Raises:
            PeerLost: The node is not in the cluster any more.
        """
        ...
