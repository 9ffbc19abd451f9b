"""Values that many want pass from consumer to consumer: the producer says who asks whom, and sends only twice itself.

Only for values of 1 MiB or more whose bytes are really sent; where memory is shared, one block serves everybody. A
consumer's own value is its own to change, so a process that passes one on has a copy for that: made when the value
comes, if others wait by then or the producer asked for it, and freed with the value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from aiodaft._protocol.fanout import Fanout
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import JOIN, LEAVE, Message
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.store import Key, Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError
from aiodaft_transport import TransportError

SMALLEST: Final = 1 << 20
# Of the machine's memory, what one process keeps for others at most.
_SHARE: Final = 8


class Fetching:
    """One value that this process is getting, for one or several pulls."""

    __slots__ = ("keep", "pulls", "root", "waiting")

    def __init__(self) -> None:
        self.pulls = 0
        # Who says which process gets the value where; known if it may pass through other processes.
        self.root: PeerId | None = None
        # The root wants a copy to be here for others.
        self.keep = False
        # Others who were sent here.
        self.waiting: list[Callable[[Any], object]] = []


class Relays:
    """What one process passes on, and whom it sends to others."""

    def __init__(
        self,
        process: Process,
        connections: Connections,
        store: Store,
        locate_elsewhere: Callable[[PeerId, CallId, Callable[[Any], object]], object],
    ) -> None:
        self._process = process
        self._connections = connections
        self._store = store
        # Says where a value is that this process does not store.
        self._locate_elsewhere = locate_elsewhere
        self._fetching: dict[Key, Fetching] = {}
        self._fanouts: dict[Key, Fanout] = {}
        self._room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SHARE

    # Of values that are made here.

    def source_for(self, connection: Connection, key: Key, kept: StoredValue) -> PeerId | None:
        """Who gives a value to the peer that asks for it; None if this process does."""
        if not kept.can_be_relayed(SMALLEST):
            return None
        fanout = self._fanouts.get(key)
        if fanout is None:
            fanout = self._fanouts[key] = Fanout()
            kept.on_release = lambda: self._free(key)
        source = fanout.join(connection.remote)
        if source != connection.remote:
            connection.send((JOIN, *key, source is None and fanout.keeps(connection.remote)))
        return source

    def _free(self, key: Key) -> None:
        for member in self._fanouts.pop(key).members:
            connection = self._connections.get(member)
            if connection is not None:
                connection.send((LEAVE, *key, member))

    # Of values that are fetched.

    @contextmanager
    def fetching(self, key: Key) -> Generator[Fetching]:
        """While a value is being fetched, others may be sent here for it."""
        fetching = self._fetching.setdefault(key, Fetching())
        fetching.pulls += 1
        try:
            yield fetching
        except BaseException:
            self._send_away(key, fetching)
            raise
        finally:
            fetching.pulls -= 1
            if not fetching.pulls:
                del self._fetching[key]
                self._send_away(key, fetching)
                if fetching.root is not None and key not in self._store.entries:
                    self._tell(fetching.root, key, self._process.id)

    def wait(self, key: Key, found: Callable[[Any], object]) -> bool:
        """Tell `found` of the copy when it is here, or where else the value is; False if none is on its way."""
        fetching = self._fetching.get(key)
        if fetching is None:
            return False
        fetching.waiting.append(found)
        return True

    def let_down(self, root: PeerId, key: Key, source: PeerId) -> None:
        """The process that the root said to ask gave nothing."""
        self._tell(root, key, source)

    def answered(self, fetching: Fetching, key: Key) -> None:
        """The value is about to come: if nobody else is to be sent here, whoever waits here is mistaken."""
        if fetching.root is None:
            self._send_away(key, fetching)

    async def keep(self, fetching: Fetching, key: Key, arrived: ReceivedValue, via: str) -> None:
        """The value is here, and nobody has changed it yet: make a copy for others if there are any."""
        store = self._store
        if fetching.root is None or key in store.entries or not (fetching.keep or fetching.waiting):
            return
        kept = StoredValue.copy_of(arrived, via, fetching.root)
        if store.relayed_bytes() + kept.encoded.size > self._room:
            self._send_away(key, fetching)
            return
        # What comes meanwhile finds it, and waits until it is packed.
        store.entries[key] = kept
        try:
            await store.pack(kept)
        except BaseException as error:
            if store.entries.get(key) is kept:
                store.drop(key)
            self._send_away(key, fetching)
            # This process has its value all the same.
            if not isinstance(error, (DaftError, TransportError, MemoryError, OSError)):
                raise
        if store.entries.get(key) is not kept:
            # The value was freed meanwhile, or there is no memory for it.
            return
        waiting, fetching.waiting = fetching.waiting, []
        for found in waiting:
            found(kept)

    def _send_away(self, key: Key, fetching: Fetching) -> None:
        waiting, fetching.waiting = fetching.waiting, []
        for found in waiting:
            self._locate_elsewhere(*key, found)

    def _tell(self, root: PeerId, key: Key, who: PeerId) -> None:
        connection = self._connections.get(root)
        if connection is not None:
            connection.send((LEAVE, *key, who))

    # What peers say.

    def join_came(self, connection: Connection, message: Message) -> None:
        """JOIN came."""
        _, owner, number, keep = message
        fetching = self._fetching.get((owner, number))
        if fetching is None:
            # Nobody here wants it any more.
            self._tell(connection.remote, (owner, number), self._process.id)
        else:
            fetching.root = connection.remote
            fetching.keep = fetching.keep or keep

    def leave_came(self, connection: Connection, message: Message) -> None:
        """LEAVE came."""
        key, who = (message[1], message[2]), message[3]
        fanout = self._fanouts.get(key)
        if fanout is not None:
            if who == connection.remote:
                fanout.leave(who)
            else:
                fanout.fail(connection.remote, who)
            return
        self._store.drop_relayed(key, connection.remote)
        fetching = self._fetching.get(key)
        if fetching is not None and fetching.root == connection.remote:
            fetching.root = None

    def connection_lost(self, remote: PeerId) -> None:
        """A process is gone."""
        for fanout in self._fanouts.values():
            fanout.leave(remote)
        for fetching in self._fetching.values():
            if fetching.root == remote:
                fetching.root = None
