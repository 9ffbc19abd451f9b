"""The streams of bytes that a process opens to others for their payloads; the node agents hand them out."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiodaft._protocol.ids import PeerId, is_attached
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError, ResourceExhausted
from aiodaft_transport import PeerGone

# The number of a stream that its process did not ask for: another one did.
UNASKED: Final = 0
# The number of a stream of another machine: the first bytes on it say it.
FROM_AFAR: Final = -1
# Seconds in which a stream comes that the other process has opened.
_PATIENCE: Final = 20.0


class DataStreams:
    def __init__(
        self,
        process: Process,
        ask: Callable[[PeerId, int], Awaitable[object]],
        take: Callable[[PeerId, socket.socket], object],
    ) -> None:
        """`ask` asks the node agent for a stream with a number; `take` takes the streams that others asked for."""
        self._process = process
        self._ask = ask
        self._take = take
        self._numbers = itertools.count(UNASKED + 1)
        self._asked: dict[int, tuple[PeerId, asyncio.Future[socket.socket]]] = {}

    async def open(self, remote: str) -> socket.socket:
        """Open a stream; see `Host.connect`.

        Raises:
            PeerGone: The process is lost, or there is no way to it.
            ResourceExhausted: There is no descriptor for it.
        """
        peer, number = PeerId(remote), next(self._numbers)
        if peer == self._process.id:
            ours, theirs = self._process.env.sockets.pair()
            self._take(peer, theirs)
            return ours
        stream: asyncio.Future[socket.socket] = self._process.loop.create_future()
        self._asked[number] = peer, stream
        self._process.tasks.create_task(self._ask_for(peer, number), name=f"ask for a stream to {peer}")
        try:
            return await stream
        except BaseException:
            if stream.done() and not stream.cancelled() and stream.exception() is None:
                # The task was cancelled when it had come.
                stream.result().close()
            raise
        finally:
            self._asked.pop(number, None)

    async def _ask_for(self, peer: PeerId, number: int) -> None:
        try:
            await self._ask(peer, number)
        except ResourceExhausted as error:
            self.failed(number, error)
        except (DaftError, OSError) as error:
            self.failed(number, PeerGone(f"there is no stream to {peer}: {error}"))
        else:
            if number in self._asked:
                # The other process has opened it, and it may be lost on its way to this one.
                late = PeerGone(f"a stream of {peer} did not come within {_PATIENCE:g} s")
                self._process.loop.call_later(_PATIENCE, self.failed, number, late)

    def came(self, peer: PeerId, number: int, stream: socket.socket) -> None:
        if number == UNASKED:
            self._take(peer, stream)
            return
        _, waiting = self._asked.pop(number, (peer, None))
        if waiting is None or waiting.done():
            # The task that wanted it was cancelled.
            stream.close()
        else:
            waiting.set_result(stream)

    def failed(self, number: int, error: Exception) -> None:
        _, waiting = self._asked.pop(number, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def lost(self, peer: PeerId, number: int, error: Exception) -> None:
        """A stream could not be taken. It is not known under which number one from afar was asked for, if it was."""
        if number != FROM_AFAR:
            self.failed(number, error)
        elif is_attached(peer):
            self._fail_all(peer, error)

    def peer_lost(self, peer: PeerId) -> None:
        self._fail_all(peer, PeerGone(f"{peer} is gone"))

    def _fail_all(self, peer: PeerId, error: Exception) -> None:
        for number in [number for number, (asked, _) in self._asked.items() if asked == peer]:
            self.failed(number, error)
