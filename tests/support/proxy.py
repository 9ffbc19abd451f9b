"""A TCP proxy that delays, cuts up, damages and ends its streams, as a test tells it while it runs."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

_CHUNK: Final = 1 << 16
# Chunks that the proxy holds in one direction while the line is slow or the receiver does not read.
_MOST_HELD: Final = 16
# The turns per second in which a slow line takes some bytes.
_TURNS: Final = 50
# When a chunk is to arrive, by the clock of the loop, and the chunk; the last one is empty.
_Held: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"


@dataclass(frozen=True)
class Faults:
    """The faults in one direction of every connection."""

    # Seconds on the way, and the most that chance adds to them. The order of the bytes stays.
    latency: float = 0.0
    jitter: float = 0.0
    # Bytes per second.
    bandwidth: float | None = None
    # The most bytes of one write.
    slice: int | None = None
    # Seconds to collect data, which are then written in one piece.
    gather: float = 0.0
    # Nothing is forwarded. The proxy reads 1 MiB at most meanwhile.
    black_hole: bool = False
    # The byte of a connection, counted from 0, in which one bit is flipped.
    flip_at: int | None = None
    # A connection is reset when that many of its bytes have been forwarded.
    limit: int | None = None


class Proxy:
    """Forwards the connections to `address` to a target. Every method may be called by any thread.

    The listener and the sockets that `dial` gives may belong to hosts of a `network`. Equal seeds make equal choices
    for the bytes of the n-th connection.
    """

    def __init__(
        self,
        target: tuple[str, int],
        listener: socket.socket | None = None,
        dial: Callable[[], socket.socket] = socket.socket,
        seed: int = 0,
    ) -> None:
        self._listener: Final = listener or socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address: Final[tuple[str, int]] = self._listener.getsockname()[:2]
        self.seed: Final = seed
        self._target, self._dial = target, dial
        self._to_server, self._to_client = _Lane(), _Lane()
        self._links: dict[asyncio.Task[None], tuple[socket.socket, socket.socket]] = {}
        self._accepted = 0
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._run, name="proxy")
        self._serving: Future[asyncio.Task[None]] = Future()

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._serving.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._serving.result().cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def disturb(self, to_server: Faults | None = None, to_client: Faults | None = None) -> None:
        """Set the faults of a direction in place of those it has; None leaves them."""

        def change() -> None:
            for lane, faults in ((self._to_server, to_server), (self._to_client, to_client)):
                if faults is not None:
                    lane.change(faults)

        self._do(change)

    def heal(self) -> None:
        """Forward everything as it comes, the held data first."""
        self.disturb(Faults(), Faults())

    def reset(self) -> int:
        """End every connection by RST on both sides. Returns how many there were."""

        def end() -> int:
            for task, ends in self._links.items():
                _reset_at_close(*ends)
                task.cancel()
            return len(self._links)

        return self._do(end)

    def half_close(self, *, to_server: bool) -> None:
        """Tell one side of every connection that the other one sends no more; if that one does, it is reset."""

        def end() -> None:
            for server, client in self._links.values():
                (server if to_server else client).shutdown(socket.SHUT_WR)

        self._do(end)

    @property
    def accepted(self) -> int:
        """Connections so far."""
        return self._do(lambda: self._accepted)

    @property
    def forwarded(self) -> tuple[int, int]:
        """Bytes so far, to the server and to the client."""
        return self._do(lambda: (self._to_server.forwarded, self._to_client.forwarded))

    def _do(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)

    def _run(self) -> None:
        loop = asyncio.Runner(loop_factory=lambda: self._loop)
        with self._listener, loop, suppress(asyncio.CancelledError):
            loop.run(self._serve())

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.set_result(task)
        async with asyncio.TaskGroup() as tasks:
            # A cancelled sock_accept may lose a connection that it has accepted.
            self._loop.add_reader(self._listener, self._accept, tasks)
            try:
                await self._loop.create_future()
            finally:
                self._loop.remove_reader(self._listener)

    def _accept(self, tasks: asyncio.TaskGroup) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            self._accepted += 1
            task = tasks.create_task(self._forward(client, self._accepted))
            # The task itself does not, if it is cancelled before it begins.
            task.add_done_callback(lambda _: client.close())

    async def _forward(self, client: socket.socket, number: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._dial() as server:
            self._links[task] = (server, client)
            try:
                server.setblocking(False)
                await self._loop.sock_connect(server, self._target)
                async with asyncio.TaskGroup() as tasks:
                    for name, lane, source, sink in (
                        ("server", self._to_server, client, server),
                        ("client", self._to_client, server, client),
                    ):
                        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        held: _Held = asyncio.Queue(_MOST_HELD)
                        rng = random.Random(f"{self.seed} {number} {name}")
                        tasks.create_task(lane.read(source, held, rng))
                        tasks.create_task(lane.write(sink, held, rng))
            except* OSError:
                _reset_at_close(server, client)
            finally:
                del self._links[task]


class _Lane:
    """One direction of all connections."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.forwarded = 0
        self._changed = asyncio.Event()

    def change(self, faults: Faults) -> None:
        self.faults = faults
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, source: socket.socket, held: _Held, rng: random.Random) -> None:
        loop, data = asyncio.get_running_loop(), b"any"
        while data:
            data = await loop.sock_recv(source, _CHUNK)
            await held.put((loop.time() + self.faults.latency + rng.uniform(0, self.faults.jitter), data))

    async def write(self, sink: socket.socket, held: _Held, rng: random.Random) -> None:
        loop, offset, ended = asyncio.get_running_loop(), 0, False
        while not ended:
            due, data = await held.get()
            await asyncio.sleep(due - loop.time())
            ended = not data
            if self.faults.gather:
                await asyncio.sleep(self.faults.gather)
                while not (ended or held.empty()):
                    _, more = held.get_nowait()
                    data, ended = data + more, not more
            offset = await self._write_pieces(sink, bytearray(data), offset, rng)
        sink.shutdown(socket.SHUT_WR)

    async def _write_pieces(self, sink: socket.socket, rest: bytearray, offset: int, rng: random.Random) -> int:
        while rest:
            while self.faults.black_hole:
                await self._changed.wait()
            faults = self.faults
            size = min(len(rest), faults.slice or len(rest))
            if faults.limit is not None:
                size = min(size, max(0, faults.limit - offset))
            if faults.bandwidth is not None:
                size = min(size, max(1, int(faults.bandwidth / _TURNS)))
                await asyncio.sleep(size / faults.bandwidth)
            if faults.flip_at is not None and offset <= faults.flip_at < offset + size:
                rest[faults.flip_at - offset] ^= 1 << rng.randrange(8)
            await asyncio.get_running_loop().sock_sendall(sink, rest[:size])
            del rest[:size]
            offset += size
            self.forwarded += size
            if faults.limit is not None and offset >= faults.limit:
                raise ConnectionResetError("the connection has reached its limit")
        return offset


def _reset_at_close(*ends: socket.socket) -> None:
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
