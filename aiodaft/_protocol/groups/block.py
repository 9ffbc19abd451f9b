"""A block of code in which the members of a group use one process group of torch: members lost in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiodaft._protocol.ids import PeerId, node_of
from aiodaft.exceptions import ActorDied, DaftError


class Left(NamedTuple):
    """The way in which a member left a block.

    Attributes:
        error: The error by which it left early; "" if it did not.
        follows: Whether that error came of another member.
        gone: Whether the member is gone.
    """

    error: str = ""
    follows: bool = False
    gone: bool = False


class Others:
    """A member's knowledge of the others in a block.

    Args:
        group: The name of the group.
        labels: The names of its members, by rank.
    """

    def __init__(self, group: str, labels: Sequence[str]) -> None:
        self._group = group
        self._labels = labels
        # The error of the first member that is gone or has left by an error.
        self.lost: Exception | None = None

    def hear(self, rank: int, left: Left | DaftError) -> bool:
        """Note a member's departure, or the reason why it is gone; returns whether others may wait for it in vain."""
        if isinstance(left, Left):
            if not left.error and not left.gone:
                return False
            if left.follows:
                # The failure that led to it will be heard as well.
                return True
        if self.lost is None:
            self.lost = self._name(rank, left)
        return True

    def leave(self, error: BaseException, *, inside: bool, broken: bool) -> Left:
        """The departure of this member by an error.

        Args:
            error: The error.
            inside: Whether the block had begun.
            broken: Whether an operation of torch has failed.
        """
        follows = self.lost is not None and (broken or not inside)
        return Left(f"{type(error).__name__}: {error}", follows)

    def _name(self, rank: int, left: Left | DaftError) -> Exception:
        if isinstance(left, DaftError):
            left.add_note(f"this was {self._labels[rank]}, rank {rank} of {self._group}")
            return left
        who = f"{self._labels[rank]}, rank {rank} of {self._group},"
        return ActorDied(f"{who} was stopped") if left.gone else RuntimeError(f"{who} left by an error: {left.error}")


def torchrun_variables(rank: int, processes: Sequence[PeerId]) -> dict[str, str]:
    """The environment by which programs for torchrun know their place.

    Args:
        rank: The member.
        processes: Those of all members, by rank.
    """
    beside = [other for other, process in enumerate(processes) if node_of(process) == node_of(processes[rank])]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(processes)),
        "LOCAL_RANK": str(beside.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(beside)),
    }


def address_variables(host: str, port: int, interface: str) -> dict[str, str]:
    """The environment by which programs for torchrun find each other.

    Args:
        host: The host at which the store listens.
        port: The port of the store.
        interface: The network interface of gloo and NCCL.
    """
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
