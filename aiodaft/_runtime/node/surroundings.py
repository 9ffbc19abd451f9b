"""The interfaces of a node agent to its machine and to the other nodes, and the options of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.resources import Resources
from aiodaft._runtime.contacts import Addresses, NodeContact
from aiodaft._runtime.node.worker import Tenant
from aiodaft._runtime.platform.gpu_claims import GpuClaims


class NodeOptions(NamedTuple):
    """The options of every worker of a node.

    Attributes:
        fork: False starts every worker by exec.
        preload: Modules that the fork server imports; None: those that are slow to import and loaded here.
        isolation: The command that isolates the fork server; see pid_namespace.py.
        uvloop: Whether workers run on uvloop.
    """

    fork: bool
    preload: tuple[str, ...] | None
    isolation: tuple[str, ...]
    uvloop: bool


class Offer(Protocol):
    """The offer of a machine to actors."""

    @property
    def resources(self) -> Resources[Tenant]: ...
    @property
    def gpu_names(self) -> Sequence[str]: ...

    @property
    def claims(self) -> GpuClaims: ...


class OtherNodes(Addresses, Protocol):
    """The nodes of the cluster."""

    def members(self) -> list[Member]: ...

    def is_member(self, name: str) -> bool: ...

    def process_of(self, peer: PeerId) -> PeerId:
        """The process that serves the node of a process.

        Raises:
            ActorDied: The node is not in the cluster any more.
        """
        ...

    def contact(self, peer: PeerId) -> NodeContact:
        """The agent of the node of a process. Raises as `process_of` does."""
        ...
