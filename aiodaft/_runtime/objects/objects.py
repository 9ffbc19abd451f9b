"""Composes the parts of a process for values: the store, the refs, the transfers."""

from __future__ import annotations

from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.owner import ObjectsOwner
from aiodaft._runtime.objects.ref_host import RefHost
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.process import Process


class Objects(RefHost):
    """The values of one process."""

    def __init__(self, process: Process, connections: Connections, store: Store, owner: ObjectsOwner) -> None:
        super().__init__(process, store, owner, connections.ring_poller.wakeups)
        self.refs = RefTable(self, connections)
        self.transfer = Transfer(process, connections, store, self.refs, owner.running_call)
        self.pull = self.transfer.pull
