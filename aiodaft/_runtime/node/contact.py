"""The way to the coordinator of a cluster, also after that was started again, as another process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, cast

from aiodaft._protocol.connections.address import is_name, parse_address
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.ids import COORDINATOR, ActorId, PeerId, node_of
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.connections.far import Network, who_listens
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.nodes import Nodes
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError, PeerLost, VersionMismatch

# Seconds after which the coordinator is asked again.
_PAUSE: Final = 0.5


class CoordinatorContact:
    """The coordinator, as a process of the cluster calls it."""

    def __init__(self, caller: Caller, nodes: Nodes) -> None:
        self._caller = caller
        self._nodes = nodes
        # The address at which a node has found the coordinator at first. The host may be a name, which leads
        # elsewhere later.
        self.joined_at: str | None = None
        # The last address of the coordinator, also if its node is no member any more.
        self._address: str | None = None
        # Processes, and actors of processes that live, that have ended with names which may not be free yet.
        self._ended: dict[tuple[PeerId, ActorId | None], None] = {}
        self._freeing = False

    @property
    def now(self) -> Coordinator:
        process = self._caller.process.coordinator
        self._note_address()
        return cast("Coordinator", self._caller.handle(process, COORDINATOR, "coordinator", Coordinator))

    def _note_address(self) -> None:
        with suppress(PeerLost):
            self._address = self._nodes.address_of(self._caller.process.coordinator)

    @property
    def is_closed(self) -> bool:
        """Whether it is not asked any more, because this runtime is closed."""
        return self._caller.process.closed is not None

    def free_names(self, process: PeerId, actor: ActorId | None) -> None:
        """An actor, or all of a process, has ended: free its names as soon as the coordinator answers."""
        self._ended[process, actor] = None
        if not self._freeing and not self.is_closed:
            self._freeing = True
            self._caller.process.create_task(self._free_names(), name="free names")

    async def _free_names(self) -> None:
        # A message that got lost would leave a reservation, for which others wait.
        while self._ended:
            ended = next(iter(self._ended))
            try:
                await self.now.release(*ended)
                del self._ended[ended]
            except DaftError as error:
                logger.debug("the names of %s are not free yet: %s", ended, error)
                await asyncio.sleep(_PAUSE)
        self._freeing = False

    async def find_again(self) -> bool:
        """Look whether another process is the coordinator now; False if there is none where it may be."""
        process, nodes, far = self._caller.process, self._nodes, self._caller.connections.far
        self._note_address()
        addresses = [self.joined_at, self._address]
        if process.options.agent != process.id and (node := nodes.member(node_of(process.options.agent))) is not None:
            # First, because nothing refuses a connection to the address of a machine that is gone.
            addresses.insert(0, node.address)
        if far is None or not any(addresses):
            return True
        # The machine that a name led to may refuse while its new machine is not known here yet.
        may_be = self.joined_at is not None and is_name(parse_address(self.joined_at).host)
        for address in dict.fromkeys(filter(None, addresses)):
            try:
                if await self._is_at(address, far.network):
                    return True
                may_be = True
            except DaftError as error:
                tell = logger.warning if isinstance(error, VersionMismatch) else logger.debug
                tell("%s", error)
                # The machine is there, and says that nothing listens. Any other failure leaves it open.
                may_be = may_be or not isinstance(error.__cause__, ConnectionRefusedError)
        return may_be

    async def _is_at(self, address: str, network: Network) -> bool:
        process, nodes = self._caller.process, self._nodes
        found = await who_listens(network, process.id, address)
        if found.has_coordinator:
            if nodes.server_of(found.node_name) != found.node:
                # A new process, or the news that its predecessor is gone came after it was found.
                nodes.add(Member(found.node_name, found.node, address))
        elif found.coordinator == process.coordinator:
            return False
        else:
            # That node has found another one, and knows where it is.
            await nodes.learn_from(found.node)
        process.coordinator = found.coordinator
        return True
