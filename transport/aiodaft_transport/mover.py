"""Threads that move bytes between sockets and memory, so that a large transfer does not keep the event loop busy.

A copy into or out of the kernel runs without the interpreter lock. No socket is waited for alone: a peer that does not
read, or sends nothing, holds up no other transfer.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from aiodaft_transport.exceptions import PeerGone, TransportError
from aiodaft_transport.peers import BasePull
from aiodaft_transport.system import Doorbell, start_thread, usable_cpus

if TYPE_CHECKING:
    from aiodaft_transport.abc import Host

# The most bytes that one system call copies.
_STEP: Final = 4 << 20
# One thread of a machine with fewer processors than this fills any of its networks; others have more to do.
_PROCESSORS_PER_THREAD: Final = 4
_MOST_THREADS: Final = 4


class _Move(BasePull[None]):
    """The bytes of one buffer, on their way into or out of a socket."""

    def __init__(self, connection: socket.socket, memory: memoryview, event: int) -> None:
        super().__init__()
        self.connection = connection
        self.memory = memory
        self.event = event
        self.moved = 0
        # Set by the loop: move nothing more.
        self.stopped = False
        # Set by the thread: it does not use the memory any more.
        self.ended = False

    def step(self) -> bool:
        """Move the bytes that can be moved without waiting. Returns whether all are moved.

        Raises:
            OSError: The connection broke.
            PeerGone: The other side has ended it.
        """
        part = self.memory[self.moved : self.moved + _STEP]
        try:
            if self.event == selectors.EVENT_WRITE:
                self.moved += self.connection.send(part)
            else:
                count = self.connection.recv_into(part)
                if not count:
                    raise PeerGone(f"the stream ended after {self.moved} of {len(self.memory)} bytes")
                self.moved += count
        except BlockingIOError:
            return False
        return self.moved == len(self.memory)

    def end(self, error: Exception | None) -> None:
        if error is not None:
            self.set_error(error)
        elif not self.done.done():
            self.done.set_result(None)
        self.set_over()


class _Thread:
    """One thread and its moves.

    Raises:
        OSError: The system refuses the thread or its descriptors.
    """

    def __init__(self, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._call_soon = call_soon
        # New and stopped moves.
        self._orders: deque[_Move] = deque()
        self._closing = False
        # The number of moves that the loop waits for.
        self.load = 0
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._wakeup = opened.enter_context(closing(Doorbell()))
            self._selector.register(self._wakeup.fd, selectors.EVENT_READ)
            self._thread = start_thread(self._run, name="aiodaft moves payload")
            opened.pop_all()

    def order(self, move: _Move) -> None:
        """Begin a move, or end one that is stopped."""
        self._orders.append(move)
        self._wakeup.ring()

    def close(self) -> None:
        self._closing = True
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        with self._selector:
            while not self._closing:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._take_orders()
                    else:
                        self._step(key.data)
            left = [key.data for key in self._selector.get_map().values() if key.data is not None]
            for move in (*left, *self._orders):
                self._end(move, TransportError("the transport is closed"))

    def _take_orders(self) -> None:
        self._wakeup.heard()
        while self._orders:
            move = self._orders.popleft()
            if move.stopped:
                self._end(move, None)
            else:
                self._selector.register(move.connection, move.event, move)

    def _step(self, move: _Move) -> None:
        try:
            if move.step():
                self._end(move, None)
        except (OSError, PeerGone) as error:
            # Its frames refer to the memory.
            self._end(move, error.with_traceback(None))

    def _end(self, move: _Move, error: Exception | None) -> None:
        # A move may be stopped when it has just ended.
        if not move.ended:
            move.ended = True
            with suppress(KeyError):
                self._selector.unregister(move.connection)
            self._call_soon(partial(move.end, error))


class Mover:
    """Moves buffers of one process. Its threads start when they are needed and the system has one.

    While it has none, the loop makes the moves.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads: list[_Thread] = []
        self._most = min(_MOST_THREADS, max(1, usable_cpus() // _PROCESSORS_PER_THREAD))
        self._closed = False

    async def send(self, connection: socket.socket, memory: memoryview) -> None:
        """Send all of `memory` over a connection that does not block.

        Raises:
            OSError: The connection broke.
            TransportError: The transport is closed.

        Cancellation: ends the move; raised once the memory is not used any more.
        """
        await self._move(connection, memory, selectors.EVENT_WRITE)

    async def receive(self, connection: socket.socket, memory: memoryview) -> None:
        """Fill `memory` from a connection that does not block.

        Raises:
            OSError: The connection broke.
            PeerGone: The stream ended.
            TransportError: The transport is closed.

        Cancellation: as with `send`.
        """
        await self._move(connection, memory, selectors.EVENT_READ)

    def close(self) -> None:
        self._closed = True
        while self._threads:
            self._threads.pop().close()

    async def _move(self, connection: socket.socket, memory: memoryview, event: int) -> None:
        if self._closed:
            raise TransportError("the transport is closed")
        thread, move = self._least_loaded(), _Move(connection, memory, event)
        if thread is None:
            await _move_here(move)
            return
        thread.load += 1
        thread.order(move)
        try:
            await move.done
        except BaseException:
            if not (move.is_over or self._closed):
                move.stopped = True
                thread.order(move)
            await move.wait_over()
            raise
        finally:
            thread.load -= 1

    def _least_loaded(self) -> _Thread | None:
        if len(self._threads) < self._most and all(thread.load for thread in self._threads):
            with suppress(OSError):
                self._threads.append(_Thread(self._host.call_soon))
        return min(self._threads, key=lambda thread: thread.load, default=None)


async def _move_here(move: _Move) -> None:
    loop, descriptor = asyncio.get_running_loop(), move.connection.fileno()
    add, remove = (
        (loop.add_writer, loop.remove_writer)
        if move.event == selectors.EVENT_WRITE
        else (loop.add_reader, loop.remove_reader)
    )
    while not move.step():
        ready = asyncio.Event()
        add(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            remove(descriptor)
