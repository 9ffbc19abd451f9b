"""Threads beside the loop: one per actor for its `def` methods, and one per process for copies and encodings."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from opcode import opmap
from types import FrameType
from typing import Final, TypeAlias, TypeVar

from aiodaft._runtime.platform.linux import exhausted, sleeping_threads
from aiodaft._runtime.platform.tasks import see_through
from aiodaft.exceptions import BorrowError
from aiodaft_transport.system import start_thread

T = TypeVar("T")


# A warm copy of this size takes about 50 us; larger copies go to the helper thread.
SYNC_COPY: Final = 1 << 20


class HelperThread:
    """The first job starts the thread."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    @property
    def backlog(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Callable[[], object]) -> None:
        """Raises ResourceExhausted: the system refuses the thread; the next job tries again."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._work, name=self._name)
            except OSError as error:
                refused = exhausted(error, f"the thread {self._name!r} cannot be started")
                raise refused.with_executed(False) from error
        self._jobs.put(job)

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                settle: Callable[[], object] = partial(done.set_result, function())
            except StopIteration as stop:
                # A future refuses it.
                error = RuntimeError("the function raised StopIteration")
                error.__cause__ = stop
                settle = partial(done.set_exception, error)
            except BaseException as error:  # noqa: BLE001 - the waiting task gets every error
                settle = partial(done.set_exception, error)
            self.to_loop(lambda: done.done() or settle())

        self.submit(job)
        return done

    async def run(self, function: Callable[[], T]) -> T:
        """Cancellation: the function runs to its end, and its result is dropped."""
        return await self.begin(function)

    async def run_to_end(self, function: Callable[[], T]) -> T:
        """Cancellation: raised when the function has ended."""
        return await see_through(self.begin(function))

    def to_loop(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """A method cannot be interrupted: ends the thread after its last job, without waiting."""
        if self._thread is not None:
            self._jobs.put(None)

    def abandon(self) -> None:
        """Block until the last job is done, without the loop. Idempotent."""
        self.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    async def aclose(self) -> None:
        if self._thread is not None:
            await self.run(lambda: None)
            self.abandon()

    async def close_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.aclose()
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


IDLE: Final = HelperThread._work.__code__


_Place: TypeAlias = tuple[FrameType, int]

# The instructions, besides calls, before which threads take turns.
_GIVES_WAY: Final = {code for name, code in opmap.items() if "JUMP_BACKWARD" in name or name == "RESUME"}

# Seconds: between two looks, first and at most; and until a thread that is where it was is taken for stuck there.
_FIRST_LOOK: Final = 0.0005
_LAST_LOOK: Final = 0.02
_PATIENCE: Final = 30.0


async def wait_passed() -> None:
    """Wait until each other Python thread has left the operation that it is in, or has been seen to wait in it.

    An operation of torch is the outermost call of torch's code: compiled functions and operators in Python count their
    writes at their ends, too.

    Raises:
        BorrowError: A thread has computed in one operation for 30 s.
    """
    places = _places()
    if not places:
        return
    loop = asyncio.get_running_loop()
    began, pause = loop.time(), _FIRST_LOOK
    sleepers = _Sleepers()
    while places := _still(places):
        if sleepers.have(places, loop.time()):
            return
        if loop.time() - began > _PATIENCE:
            name = next((thread.name for thread in threading.enumerate() if thread.ident in places), "a thread")
            raise BorrowError(
                f"the thread {name!r} has been in one operation for {_PATIENCE:.0f} s, which may write to a tensor "
                "that is lent: return x.clone(), or lend x when that operation is over"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_LOOK)


def _places() -> dict[int, _Place]:
    left_out = {thread.ident for thread in threading.enumerate() if thread.name.startswith("aiodaft ")}
    left_out.add(threading.get_ident())
    frames = sys._current_frames()
    found: dict[int, _Place] = {}
    for ident, top in frames.items():
        if ident not in left_out and top.f_code is not IDLE:
            place = frame, at = _outside(top)
            # A loop of Python gives way where it begins again: between two operations.
            if frame is not top or top.f_code.co_code[at] not in _GIVES_WAY:
                found[ident] = place
    return found


def _outside(top: FrameType) -> _Place:
    place, caller = top, top.f_back
    frame = top
    while caller is not None:
        if _is_torch(frame):
            place = caller
        frame, caller = caller, caller.f_back
    return place, place.f_lasti


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _still(places: dict[int, _Place]) -> dict[int, _Place]:
    now = _places()
    return {ident: place for ident, place in places.items() if now.get(ident) == place}


class _Sleepers:
    def __init__(self) -> None:
        self._seen: dict[int | None, tuple[object, float]] = {}

    def have(self, idents: Collection[int], now: float) -> bool:
        """Whether all of these threads sleep, and have not run for longer than one that waits for the GIL sleeps."""
        kernel = sleeping_threads()
        known = {thread.native_id: thread.ident for thread in threading.enumerate()}
        # In a fork, Python may know the first thread by its earlier number.
        known[threading.get_native_id()] = threading.get_ident()
        if any(runs is None for number, runs in kernel.items() if number not in known):
            # A thread that Python does not know may do the work of one that waits for it.
            self._seen = {}
            return False
        states = {known.get(number): state for number, state in kernel.items()}
        for ident in idents:
            state = states.get(ident, ())
            if state is None:
                self._seen.pop(ident, None)
            elif ident not in self._seen or self._seen[ident][0] != state:
                self._seen[ident] = state, now
        longest = 2 * sys.getswitchinterval()
        return all(ident in self._seen and now - self._seen[ident][1] > longest for ident in idents)
