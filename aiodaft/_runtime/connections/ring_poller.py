"""Reads the rings of one process: polls them for a short while after each message, and otherwise waits for doorbells.

                     a message was sent or received
             +---------------------------------------------+
             |                                             v
          asleep                                        polling
             ^                                             |
             +---------------------------------------------+
              polling does not pay, and no data came while
              this asked the writers to ring the doorbell

State     `polling`    Writers ring the doorbell   In each turn of the loop
asleep    False        yes                         nothing
polling   True         no                          `_turn`: look, read, or yield the processor

`_protocol.connections.rings` decides whether polling pays. A process without traffic uses no processor time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Final, Protocol

from aiodaft._protocol.connections.rings import Idle, Pace
from aiodaft._runtime.connections.shm_ring import HEAD, ORDERED, RingPair, barrier
from aiodaft._runtime.platform.wakeup import Wakeups
from aiodaft_transport.system import usable_cpus

# Looks at rings in one turn of the loop; together they take less than ten microseconds.
_LOOKS: Final = 64

_now = time.perf_counter


class RingUser(Protocol):
    """The part of a connection that the poller uses."""

    def ring_readable(self) -> None:
        """The ring has data."""

    def ring_writable(self) -> None:
        """The ring may have room again."""


class RingPoller:
    """Reads every ring of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Tasks to continue after the messages of a turn.
        self.wakeups = Wakeups(loop)
        # Writes to make before the next look.
        self._writes: deque[Callable[[], object]] = deque()
        # Replaced with every change, so that a loop over the old tuple detects the change.
        self._rings: tuple[tuple[RingPair, RingUser], ...] = ()
        # The context of the code that added the last ring: turns run in it, not in the context of a task that sends.
        self._context = copy_context()
        # Number of turns of the loop with polling.
        self.turns = 0
        self.pace = Pace(may_poll=ORDERED and usable_cpus() > 1)
        self.polling = False

    def add(self, ring: RingPair, user: RingUser) -> None:
        self._rings = (*self._rings, (ring, user))
        self._context = copy_context()
        self._loop.add_reader(ring.doorbell, self._rang, ring, user)
        self.look()

    def remove(self, ring: RingPair) -> None:
        others = tuple(entry for entry in self._rings if entry[0] is not ring)
        if len(others) < len(self._rings):
            self._rings = others
            self._loop.remove_reader(ring.doorbell)

    def abandon(self) -> None:
        """Forget all rings of a loop that does not run."""
        self._rings = ()

    def look(self) -> None:
        """Begin to poll: a message was sent, and its answer may come soon."""
        self.pace.since = _now()
        if self._rings and not self.polling:
            self.polling = True
            self._wake()
            self._loop.call_soon(self._turn, context=self._context)

    def before_looking(self, write: Callable[[], object]) -> None:
        """Call `write` at the end of this turn, or before the next look."""
        self._writes.append(write)
        self.look()

    def _rang(self, ring: RingPair, user: RingUser) -> None:
        ring.quiet()
        try:
            user.ring_writable()
            if self._read():
                self.pace.came(_now())
        finally:
            # The doorbell does not ring again for data that was not read.
            self.look()
        self.wakeups.run()

    def _write(self) -> None:
        while self._writes:
            self._writes.popleft()()

    def _turn(self) -> None:
        self.turns += 1
        try:
            if self._writes:
                self._write()
            found = self._find()
            if found:
                self.pace.came(_now())
            else:
                now = _now()
                idle = self.pace.idle(now)
                if idle is Idle.YIELD:
                    os.sched_yield()
                    self.pace.yielded(_now() - now)
                elif idle is Idle.SLEEP and self._asleep():
                    self.polling = False
                    return
        except BaseException:
            # SystemExit or KeyboardInterrupt; the program may catch it outside of the loop, and go on.
            self._loop.call_soon(self._turn, context=self._context)
            raise
        self._loop.call_soon(self._turn, context=self._context)
        if found:
            self.wakeups.run()
            if self._writes:
                # The messages of the woken tasks.
                self._write()

    def _find(self) -> bool:
        # Look several times in a turn, because a turn of the loop takes longer than a look.
        rings, pace = self._rings, self.pace
        alone = pace.may_poll and not (pace.threads or pace.crowded)
        for _ in range(_LOOKS // (len(rings) or 1) + 1 if alone else 1):
            for ring, _ in rings:
                reader = ring.reader
                # `reader.filled`, inlined.
                if reader.words[HEAD] != reader.tail:
                    return self._read()
        return False

    def _read(self) -> bool:
        found = False
        rings, wakeups = self._rings, self.wakeups
        wakeups.collecting = True
        try:
            for ring, user in rings:
                if ring.reader.filled:
                    found = True
                    user.ring_readable()
                    if self._rings is not rings:
                        break
        finally:
            wakeups.collecting = False
        return found

    def _asleep(self) -> bool:
        """Ask for the doorbells; False if data came meanwhile."""
        for ring, _ in self._rings:
            ring.reader.sleep()
        barrier()
        if any(ring.reader.filled for ring, _ in self._rings):
            self._wake()
            return False
        return True

    def _wake(self) -> None:
        for ring, _ in self._rings:
            ring.reader.wake()
