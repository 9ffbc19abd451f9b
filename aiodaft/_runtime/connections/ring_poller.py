"""Looks at the rings of a process: for a short while again and again, and after that asleep until a doorbell rings.

An answer that comes within microseconds is found by looking; being woken costs tens of them. How long looking pays is
measured: while what comes next comes late, or there is one processor only, or a thread of this process works (which
looking would keep from the interpreter), it sleeps at once. A process without traffic takes no time at all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Final, Protocol

from aiodaft._runtime.connections.shm_ring import HEAD, ORDERED, RingPair, barrier
from aiodaft._runtime.platform.wakeup import Wakeups

# Seconds of looking after the last sign of life: what a step with a megabyte takes. Gaps are worth that if they are
# shorter on average.
_LOOK: Final = 300e-6
# Looks at one ring or another in one turn of the loop; they take less than ten microseconds.
_LOOKS: Final = 64
# Seconds of looking before others who want the processor may have it in between.
_ALONE: Final = 10e-6
# Seconds after which a call that lets others run must have done that.
_SWITCH: Final = 3e-6
# Gaps that are longer than this count as this long.
_LONG: Final = 1e-3
# How much of the average gap each new one makes up.
_WEIGHT: Final = 1 / 8

_now = time.perf_counter


class RingUser(Protocol):
    """A connection, as the waiter sees it."""

    def ring_readable(self) -> None:
        """There is something to read."""
        ...

    def ring_writable(self) -> None:
        """There may be room again."""
        ...


class RingPoller:
    """Waits for every ring of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Those for whom something has come.
        self.wakeups = Wakeups(loop)
        # What is said before anybody looks.
        self._unsaid: deque[Callable[[], object]] = deque()
        # A new tuple with every change, so that a loop over the old one notices.
        self._rings: tuple[tuple[RingPair, RingUser], ...] = ()
        # That of whoever added the last one: who sends something makes this look, and leaves nothing of his own in it.
        self._context = copy_context()
        # Jobs of actors' threads under way.
        self.threads = 0
        # Counts those turns of the loop in which somebody looks, or has sent something.
        self.turns = 0
        self._may_look = ORDERED and len(os.sched_getaffinity(0)) > 1
        self._looking = False
        self._since = 0.0
        self._gap = 0.0
        # Others want the processor.
        self._crowded = False

    def add(self, ring: RingPair, user: RingUser) -> None:
        """Begin to read a ring."""
        self._rings = (*self._rings, (ring, user))
        self._context = copy_context()
        self._loop.add_reader(ring.doorbell, self._rang, ring, user)
        self.look()

    def remove(self, ring: RingPair) -> None:
        """Look at a ring no more."""
        kept = tuple(entry for entry in self._rings if entry[0] is not ring)
        if len(kept) < len(self._rings):
            self._rings = kept
            self._loop.remove_reader(ring.doorbell)

    def abandon(self) -> None:
        """Look at none any more, where the loop does not run."""
        self._rings = ()

    def look(self) -> None:
        """There was a sign of life: something was sent, and may be answered soon."""
        self._since = _now()
        if self._rings and not self._looking:
            self._looking = True
            self._wake()
            self._loop.call_soon(self._turn, context=self._context)

    def before_looking(self, say: Callable[[], object]) -> None:
        """Call that at the end of this turn, or before rings are looked at for the next time."""
        self._unsaid.append(say)
        self.look()

    def _rang(self, ring: RingPair, user: RingUser) -> None:
        ring.quiet()
        try:
            user.ring_writable()
            if self._read():
                self._came()
        finally:
            # The doorbell does not ring again for what has not been read.
            self.look()
        self.wakeups.run()

    def _say(self) -> None:
        while self._unsaid:
            self._unsaid.popleft()()

    def _turn(self) -> None:
        self.turns += 1
        try:
            if self._unsaid:
                self._say()
            found = self._find()
            if found:
                self._came()
            elif not self._worth_looking() and self._asleep():
                self._looking = False
                return
            else:
                self._let_others_run()
        except BaseException:
            # Something ends the program, and may be caught outside.
            self._loop.call_soon(self._turn, context=self._context)
            raise
        self._loop.call_soon(self._turn, context=self._context)
        if found:
            self.wakeups.run()
            if self._unsaid:
                # What those say who went on.
                self._say()

    def _let_others_run(self) -> None:
        now = _now()
        if self._crowded or now - self._since > _ALONE:
            os.sched_yield()
            # Somebody else has run meanwhile, and may be the one who answers.
            self._crowded = _now() - now > _SWITCH

    def _find(self) -> bool:
        # A turn of the loop takes longer than a look.
        alone = self._may_look and not (self.threads or self._crowded)
        looks = _LOOKS // (len(self._rings) or 1) if alone else 0
        rings = self._rings
        for _ in range(looks + 1):
            for ring, _ in rings:
                reader = ring.reader
                # What `filled` says; what is called here comes so much later.
                if reader.words[HEAD] != reader.tail:
                    return self._read()
        return False

    def _worth_looking(self) -> bool:
        return self._may_look and not self.threads and self._gap < _LOOK and _now() - self._since < _LOOK

    def _came(self) -> None:
        now = _now()
        gap = now - self._since
        self._since = now
        self._gap += ((gap if gap < _LONG else _LONG) - self._gap) * _WEIGHT

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
        """Fall asleep, unless something came in the last moment."""
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
