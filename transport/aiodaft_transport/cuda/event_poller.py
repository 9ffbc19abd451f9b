"""Reports events of a device to the loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from aiodaft_transport.cuda.device import Driver, Event
from aiodaft_transport.exceptions import TransportError

# Seconds in which small copies end; each turn of the loop asks.
_EAGER: Final = 0.0001
# Afterwards, the time to the next question is this part of the time since the last event was added, up to a limit: the
# delay of an event is a small part of its time, and long events cost little.
_PART: Final = 0.1
_LONGEST: Final = 0.001

_CLOCK_MONOTONIC: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)

Happened: TypeAlias = Callable[[TransportError | None], object]


class EventWatch:
    """Reports events of a device on the running loop.

    A device has nothing that a loop could wait on, short of a function that it calls in the middle of the user's
    stream, and never calls if it has failed. So it is asked, which never waits, as long as something is awaited.
    """

    def __init__(self, driver: Callable[[], Driver]) -> None:
        self._driver = driver
        self._awaited: dict[Event, Happened] = {}
        self._since = 0.0
        self._turn_soon: asyncio.Handle | None = None
        self._alarm: _Alarm | None = None
        # Number of questions to devices.
        self.questions = 0

    @property
    def is_asking(self) -> bool:
        return self._turn_soon is not None or (self._alarm is not None and self._alarm.is_set)

    def add(self, event: Event, on_happened: Happened) -> None:
        """Call back once the event has happened or failed; at once if it has already."""
        self._awaited[event] = on_happened
        self._ask(event)
        if event in self._awaited:
            self._since = asyncio.get_running_loop().time()
            self._ask_again()

    def finish(self) -> None:
        self._stop()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        for event in list(self._awaited):
            self._driver().wait(event)
            self._ask(event)

    def _stop(self) -> None:
        if self._turn_soon is not None:
            self._turn_soon.cancel()
            self._turn_soon = None
        if self._alarm is not None and self._alarm.is_set:
            self._alarm.set(0)

    def _turn(self) -> None:
        self._turn_soon = None
        for event in list(self._awaited):
            self._ask(event)
        if self._awaited:
            self._ask_again()
        else:
            self._stop()

    def _ask_again(self) -> None:
        loop = asyncio.get_running_loop()
        waited = loop.time() - self._since
        if waited < _EAGER:
            if self._turn_soon is None:
                self._turn_soon = loop.call_soon(self._turn)
            return
        if self._alarm is None:
            self._alarm = _Alarm(loop, self._turn)
        self._alarm.set(min(waited * _PART, _LONGEST))

    def _ask(self, event: Event) -> None:
        self.questions += 1
        error: TransportError | None = None
        try:
            if not self._driver().happened(event):
                return
        except TransportError as caught:
            error = caught
        on_happened = self._awaited.pop(event)
        with suppress(TransportError):
            # A device that was reset has no events.
            self._driver().forget(event)
        on_happened(error)


class _Time(ctypes.Structure):
    """struct itimerspec: the interval, which is 0 for a timer that goes off once, and the time to the end."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "seconds", "nanoseconds")]


class _Alarm:
    """A timer of a loop that is finer than the loop's own, which count milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self.is_set = False
        self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer for the events of a device")
        loop.add_reader(self._fd, self._rang)

    def set(self, seconds: float) -> None:
        """Call back once after this time, and not at an earlier set time; never if it is 0."""
        self.is_set = seconds > 0
        time = _Time(seconds=int(seconds), nanoseconds=int(seconds % 1 * 1e9))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(time), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rang(self) -> None:
        # It may have been set anew meanwhile.
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
            self.is_set = False
            self._callback()
