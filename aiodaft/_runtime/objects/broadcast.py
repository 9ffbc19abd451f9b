"""Values that many processes pull go from consumer to consumer, by the routes of `_protocol.objects.broadcast`.

Only for values of more than 1 MiB that are sent as bytes; in shared memory, one block serves all processes of a
machine. A consumer may change its value, so a process that passes one on keeps a copy for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects import broadcast
from aiodaft._protocol.objects.broadcast import Broadcasts, Fanout
from aiodaft._protocol.objects.value import Key
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft.exceptions import DaftError
from aiodaft_transport import Block, TransportError

Found: TypeAlias = Callable[[Any], object]
Fetching: TypeAlias = broadcast.Fetching[Found]

# Up to so many bytes, a value goes to each consumer directly.
DIRECT: Final = 1 << 20
# One process keeps at most this part of the machine's memory for others.
_SHARE: Final = 8


class Relays:
    """The values that one process passes on, and the processes that it sends to others."""

    def __init__(
        self,
        process: Process,
        connections: Connections,
        store: Store,
        locate_elsewhere: Callable[[Key, Found], object],
    ) -> None:
        self._process = process
        self._connections = connections
        self._store = store
        self._locate_elsewhere = locate_elsewhere
        self.table: Broadcasts[Found] = Broadcasts()
        self.wait = self.table.wait
        self.connection_lost = self.table.lost
        self._room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SHARE

    def source_for(self, connection: Connection, key: Key, stored: StoredValue) -> PeerId | None:
        """The process that gives a value to the peer that asks for it; None: this one."""
        if not stored.can_be_relayed(DIRECT, connection):
            return None
        fanout = self.table.fanouts.get(key)
        if fanout is None:
            fanout = self.table.fanouts[key] = Fanout(shared=stored.shared)
            stored.on_release = lambda: self._free(key)
        source = fanout.join(connection.remote)
        if source != connection.remote:
            connection.send(m.join(*key, fanout.keeps(connection.remote)))
        return source

    def root_of(self, connection: Connection, stored: StoredValue) -> PeerId | None:
        return self._process.id if stored.can_be_relayed(DIRECT, connection) else None

    def _free(self, key: Key) -> None:
        for member in self.table.fanouts.pop(key).members:
            self.leave(member, key, member)

    @contextmanager
    def fetching(self, key: Key) -> Generator[Fetching]:
        """While a value is being fetched, other processes may be sent here for it."""
        fetching = self.table.begin(key)
        try:
            yield fetching
        except BaseException:
            self._send_away(key, fetching)
            raise
        finally:
            if self.table.end(key):
                self._send_away(key, fetching)
                if fetching.root is not None and key not in self._store.entries:
                    self.leave(fetching.root, key, self._process.id)

    def answered(self, fetching: Fetching, key: Key) -> None:
        if fetching.waiting and fetching.is_alone:
            self._send_away(key, fetching)

    async def keep(self, fetching: Fetching, key: Key, received: ReceivedValue, via: str | None) -> None:
        store, root = self._store, fetching.root
        if root is None or key in store.entries or not fetching.wants_copy:
            return
        stored = StoredValue.copy_of(received, via, root)
        if store.relayed_bytes() + stored.size > self._room:
            self._send_away(key, fetching)
            return
        # Processes that ask meanwhile find it, and wait until it is packed.
        store.entries[key] = stored
        try:
            await store.pack(stored)
        except BaseException as error:
            if store.entries.get(key) is stored:
                store.drop(key)
            self._send_away(key, fetching)
            # This process has its value all the same.
            if not isinstance(error, (DaftError, TransportError, MemoryError, OSError)):
                raise
        if store.entries.get(key) is stored:
            for found in fetching.take_waiting():
                found(stored)

    def landing(self, fetching: Fetching, key: Key, nbytes: int) -> Block | None:
        """Memory in which other processes of this machine can read a coming value, if one waits for it."""
        store = self._store
        if fetching.root is None or key in store.entries or not fetching.wants_copy or not store.transport.shared:
            return None
        if store.relayed_bytes() + nbytes > self._room:
            return None
        # Without memory for others, this process gets its value all the same.
        with suppress(OSError):
            return store.transport.allocate(nbytes)
        return None

    def landed(self, fetching: Fetching, key: Key, stored: StoredValue) -> bool:
        """A value has come for others. Returns whether it is kept for them."""
        if fetching.root is None or key in self._store.entries:
            return False
        self._store.entries[key] = stored
        for found in fetching.take_waiting():
            found(stored)
        return True

    def _send_away(self, key: Key, fetching: Fetching) -> None:
        if fetching.waiting:
            for found in fetching.take_waiting():
                self._locate_elsewhere(key, found)

    def leave(self, remote: PeerId, key: Key, member: PeerId) -> None:
        connection = self._connections.get(remote)
        if connection is not None:
            connection.send(m.leave(*key, member))

    def join_came(self, connection: Connection, message: m.Message) -> None:
        owner, number, keep = m.read_join(message)
        if not self.table.joined((owner, number), connection.remote, keep=keep):
            self.leave(connection.remote, (owner, number), self._process.id)

    def leave_came(self, connection: Connection, message: m.Message) -> None:
        owner, number, member = m.read_leave(message)
        if self.table.left((owner, number), connection.remote, member):
            self._store.drop_relayed((owner, number), connection.remote)
