"""Memory that the members of a group on one host share, and signals between them.

    words of all ranks | of each rank: why it has left | half 0: terms, window | half 1: terms, window

A rank writes into a half of its own, signals the others, and reads theirs when all have signalled. Halves take turns:
when a rank writes into one again, all others have signalled once more since, and so have read it.

The words of a rank count its signals. Ranks look at those of the others for a few microseconds, and then sleep: each
has an eventfd, which the rank that is the last to signal writes to. Processors that show others the writes of a rank
out of order have no words that count. There all ranks write to the eventfds of all, and the sum of the signals in one
counts: no rank can signal again before all have signalled as often, so it is full only when each has come. Bytes that a
rank writes before its signal are seen by those that have read the signal.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextvars import Context
from functools import partial
from mmap import PAGESIZE, mmap
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from aiodaft._protocol.ids import PLANNING, ActorId, PeerId, can_share_memory
from aiodaft._runtime.actors.host import Enlisted, block_on, changed
from aiodaft._runtime.actors.hosted_actor import InboundCall, serving
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.groups.keyed import Keyed, apart, ask_gone
from aiodaft._runtime.groups.meeting_place import Part, loss_of, target_of_member, whereabouts_of
from aiodaft._runtime.platform.linux import refusal
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, ResourceExhausted
from aiodaft.methods import method
from aiodaft_transport.memory import address_of, copy_memory

T = TypeVar("T")

# Bytes of a value that are under way at once, and of the terms of an exchange.
WINDOW: Final = 1 << 20
TERMS: Final = PAGESIZE
_HALF: Final = TERMS + WINDOW
_RANK: Final = PAGESIZE + 2 * _HALF
# The words of a rank, on a cache line of its own: the signals that it has sent; the numbers of its terms in each half;
# one more than the signals that it had sent when it has left, or 0.
_WORDS: Final = 8
_SENT, _NUMBER, _LEAVES = 0, 1, 3
_WORD: Final = 8
# Added to the signals of a rank that only have it look.
_LOOK: Final = 1 << 32
# Looks at the words before a thread sleeps: as long as it takes to wake it.
_LOOKS: Final = 100
_MAX_KEPT: Final = 500
ORDERED: Final = os.uname().machine == "x86_64"


def make_line(size: int) -> list[int]:
    """Descriptors for a line of so many members: the memory, and the signals of each.

    Raises:
        OSError: There are no descriptors or no memory left.
    """
    opened = [os.memfd_create("aiodaft-line", os.MFD_CLOEXEC)]
    try:
        os.ftruncate(opened[0], _first(size) + size * _RANK)
        opened.extend(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size))
    except BaseException:
        close_all(opened)
        raise
    return opened


def _first(size: int) -> int:
    return -(-size * _WORDS * _WORD // PAGESIZE) * PAGESIZE


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Line:
    """The end of one rank. Owns the descriptors, and closes them if it cannot be made.

    Raises:
        OSError: The system refuses the mapping.
    """

    def __init__(self, process: Process, group: str, rank: int, fds: Sequence[int]) -> None:
        self.group = group
        self.rank = rank
        self.size = len(fds) - 1
        memory, *signals = fds
        self.signals = signals
        try:
            self._mapping: Any = mmap(memory, _first(self.size) + self.size * _RANK)
        except OSError:
            close_all(signals)
            raise
        finally:
            # The mapping has a duplicate.
            os.close(memory)
        # Held by the thread or the task that does an exchange; the call that it belongs to; its half.
        self.turn = threading.Lock()
        self.call: InboundCall | None = None
        self.half = 0
        self.error: BaseException | None = None
        self._loop = process.loop
        self._address = address_of(self._mapping)
        self._words: Any = memoryview(self._mapping)[: _first(self.size)].cast("Q")
        self._mine = signals[rank]
        self._others = [fd for fd in signals if fd != self._mine]
        self._at = rank * _WORDS
        self._places = [other * _WORDS for other in range(self.size)]
        self._theirs = [place for place in self._places if place != self._at]
        # Signals that were sent to each other rank, and those of all others that were read.
        self._sent = self._came = 0
        # The terms in each half of this rank.
        self._told = [b"", b""]
        self._looks = _LOOKS if ORDERED and self.size <= len(os.sched_getaffinity(0)) else 0
        self._closing = False
        self._gate = threading.Lock()
        self._fence = threading.Lock()
        self.kept: dict[Any, Any] = {}
        # Watched by the loop: uvloop would make reads of the signals themselves fail where a thread has to block.
        self._poll: select.epoll | None = None

    def put(self, at: int, address: int, nbytes: int) -> None:
        copy_memory(self._address + self._start(self.rank) + TERMS + at, address, nbytes)

    def get(self, rank: int, at: int, address: int, nbytes: int) -> None:
        copy_memory(address, self._address + self._start(rank) + TERMS + at, nbytes)

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        found: T | None = self.kept.get(key)
        if found is None:
            if len(self.kept) >= _MAX_KEPT:
                self.kept.clear()
            found = self.kept[key] = make()
        return found

    def views(self, at: int, count: int, dtype: Any) -> list[Any]:
        key = self.half, at, count, dtype
        return self.keep(key, lambda: [self.view(rank, at, count, dtype) for rank in range(self.size)])

    def view(self, rank: int, at: int, count: int, dtype: Any) -> Any:
        import torch  # noqa: PLC0415 - optional package

        # Inside of such a mode it could only be read outside.
        with torch.inference_mode(False):
            if not count:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start(rank) + TERMS + at)

    def tell(self, number: int, terms: bytes) -> None:
        half = self.half
        self._words[self._at + _NUMBER + half] = number
        if self._told[half] is not terms:
            start = self._start(self.rank)
            self._mapping[start : start + len(terms)] = terms
            self._told[half] = terms

    def numbers(self) -> tuple[int, ...]:
        words, at = self._words, _NUMBER + self.half
        return tuple([words[place + at] for place in self._places])

    def terms(self) -> list[bytes]:
        starts = map(self._start, range(self.size))
        return [self._mapping[start : start + TERMS] for start in starts]

    def _start(self, rank: int) -> int:
        return _first(self.size) + rank * _RANK + PAGESIZE + self.half * _HALF

    def signal(self) -> None:
        self._sent += 1
        self._words[self._at + _SENT] = self._sent
        if ORDERED:
            # A lock is taken by an atomic instruction: before that, no later read of the others' words is done. So of
            # ranks that signal at once, one sees that it is the last.
            with self._fence:
                pass
            if not self.all_came():
                return
        for fd in self._others:
            os.eventfd_write(fd, 1)

    def all_came(self) -> bool:
        if not ORDERED:
            return self._came >= self._sent * len(self._others)
        words, sent = self._words, self._sent
        for at in self._theirs:  # noqa: SIM110 - a generator takes longer
            if words[at] < sent:
                return False
        return True

    def come_soon(self) -> bool:
        """Whether all others signal within a few microseconds."""
        for _ in range(self._looks):
            if self.all_came():
                return True
        return self.all_came()

    async def wait_here(self, _: object) -> None:
        while not self.all_came():
            self._check()
            self._came += os.eventfd_read(self._mine) % _LOOK

    async def wait_on_loop(self, _: object) -> None:
        if self._poll is None:
            self._poll = select.epoll()
            self._poll.register(self._mine, select.EPOLLIN)
        while not self.all_came():
            self._check()
            readable = self._loop.create_future()
            self._loop.add_reader(self._poll, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(self._poll)
            self._came += os.eventfd_read(self._mine) % _LOOK

    def _check(self) -> None:
        for rank in range(self.size):
            at = rank * _WORDS
            # One that has left after this step has come to it.
            if self.error is None and self._words[at + _LEAVES] and self._words[at + _LEAVES] <= self._sent:
                start = _first(self.size) + rank * _RANK
                reason = self._mapping[start : start + PAGESIZE].rstrip(b"\0").decode(errors="replace")
                self.error = CallCancelled(f"the plan of {self.group}: rank {rank} has left it: {reason}")
        if self.error is not None:
            # With frames, it would keep views of the memory.
            raise copy_error(self.error)

    def leave(self, error: BaseException, reason: str) -> None:
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                page, start = reason.encode()[:PAGESIZE], _first(self.size) + self.rank * _RANK
                self._mapping[start : start + len(page)] = page
                self._words[self._at + _LEAVES] = self._sent + 1
                for fd in self.signals:
                    os.eventfd_write(fd, _LOOK)

    def fail(self, error: BaseException) -> None:
        """End the line for this member: the others hear of it by themselves."""
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                os.eventfd_write(self._mine, _LOOK)

    def release(self) -> None:
        self.call = None
        self.turn.release()
        if self._closing:
            self.close()

    def close(self) -> None:
        self._closing = True
        if self.turn.acquire(blocking=False):
            with self._gate:
                fds, self.signals = self.signals, []
            if self._poll is not None:
                self._poll.close()
            self.kept.clear()
            self._words = self._mapping = None
            close_all(fds)
            self.turn.release()


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


# An actor of each process opens the lines of its members, and ends them.
#
# Rank 0 makes the descriptors. The others ask its process for them, which sends them over the connection, as transports
# do. After that a line needs no message: each member has asked the processes of the others when these members are gone.

PLANS: Final = "plans"
_AT_ONCE: Final = 8

Meet: TypeAlias = Callable[[Any], Awaitable[Sequence[Any]]]


class Opening(Generic[T]):
    """A plan that members open together: it begins when it is awaited, or asked for its result, once."""

    def __init__(self, process: Process, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._process = process
        self._begin = begin

    def result(self) -> T:
        """Block this thread, which runs no event loop, until the plan is open."""
        return block_on(self._process, self._begin(), "plan()")

    def __await__(self) -> Generator[Any, None, T]:
        return self._begin().__await__()


class _Use(NamedTuple):
    actor: ActorId
    epoch: int
    watching: Sequence[asyncio.Task[None]]


class Planning(Actor):
    """The lines of the members in this process."""

    def __init__(self, caller: Caller, enlisted: Enlisted, keyed: Keyed) -> None:
        self._caller = caller
        self._process = caller.process
        self._enlisted = enlisted
        self._lines: dict[Line, _Use] = {}
        # The descriptors that rank 0 has made; and those that have come here, by its process, the number and the rank.
        self._offered: dict[int, list[int]] = {}
        self._came: dict[tuple[PeerId, int, int], list[int]] = {}
        keyed.on_withdrawn.append(self._withdraw)
        enlisted.on_told.append(self._told)
        enlisted.on_forgotten.append(self._forgotten)

    def __len__(self) -> int:
        return len(self._lines)

    async def open(self, part: Part, meet: Meet) -> Line | None:
        """Open a line with all other members of a group, or of a part of it; None if they do not share memory.

        Raises:
            ResourceExhausted: A member has no descriptor or no memory for it.
            DaftError: As `meet` does.

        Cancellation: nothing is left open.
        """
        process, roster, rank = self._process, part.roster, part.rank
        members = list(map(target_of_member, roster.members))
        places = [await whereabouts_of(member) for member in members]
        (first, _), (_, actor) = places[0], places[rank]
        share = process.options.transport == "shm" and all(can_share_memory(process.id, peer) for peer, _ in places)
        number, fault, line = process.next_number(), "", None
        try:
            if share and rank == 0:
                try:
                    self._offered[number] = make_line(roster.size)
                except OSError as error:
                    fault = refusal(error, f"plan() of rank 0 of {roster.id}")
            told = await meet((share, number, fault))
            if not all(share for share, _, _ in told):
                return None
            if not (fault := told[0][2]):
                try:
                    line = Line(process, roster.id, rank, await self._fetch(first, told[0][1], rank, roster.size))
                except OSError as error:
                    fault = refusal(error, f"plan() of rank {rank} of {roster.id}")
            faults = [fault for fault in await meet(fault) if fault]
            if faults:
                raise ResourceExhausted(faults[0])
        except BaseException:
            if line is not None:
                line.close()
            raise
        finally:
            close_all(self._offered.pop(number, ()))
        assert line is not None
        others = [(line, other, member) for other, member in enumerate(members) if other != rank]
        # In a context of its own: the call that has opened it ends before.
        watching = [
            Context().run(partial(process.tasks.create_task, self._watch(*other), name="watch a member of a plan"))
            for other in others
        ]
        self._lines[line] = _Use(actor, roster.epoch, watching)
        # It may have changed meanwhile.
        self._told(actor)
        return line

    async def _fetch(self, first: PeerId, number: int, rank: int, size: int) -> list[int]:
        key = first, number, rank
        fds = self._came[key] = []
        try:
            await cast("Planning", self._caller.handle(first, PLANNING, PLANS, Planning)).give(number, rank)
            if len(fds) != size + 1:
                raise OSError("descriptors were lost on their way")
        except BaseException:
            close_all(fds)
            raise
        finally:
            del self._came[key]
        return fds

    @method(ordered=False)
    async def give(self, number: int, rank: int) -> None:
        """Send the descriptors of a line; they arrive before this returns.

        Raises:
            OSError: There is no room for them until they are sent.
        """
        route, fds = self._caller.connections.route_to(serving().caller), self._offered.get(number, [])
        for at in range(0, len(fds), _AT_ONCE):
            route.send_note(PLANS, f"{number} {rank}".encode(), fds[at : at + _AT_ONCE])

    def descriptors_came(self, peer: PeerId, note: bytes, fds: list[int]) -> None:
        """Keep the descriptors that `give` of another process has sent, if a member still waits for it."""
        number, rank = map(int, note.split())
        keep = self._came.get((peer, number, rank))
        if keep is None:
            close_all(fds)
        else:
            keep += fds

    def drop(self, line: Line, error: DaftError, reason: str = "") -> None:
        if reason:
            line.leave(error, reason)
        else:
            line.fail(error)
        line.close()
        use = self._lines.pop(line, None)
        for task in use.watching if use is not None else ():
            task.cancel()

    async def _watch(self, line: Line, rank: int, member: Any) -> None:
        who = f"this was {member.label}, rank {rank} of {line.group}"
        line.fail(await loss_of(member, who, partial(ask_gone, self._caller)))

    def _withdraw(self, call: InboundCall, why: DaftError) -> None:
        for line in self._lines:
            # With all others there, it goes on: they may have found together that they disagree, and go on, too.
            if line.call is call and not line.all_came():
                line.leave(apart(f"a plan of {line.group}", why), str(why))

    def _told(self, actor: ActorId) -> None:
        standing = self._enlisted.find(actor)
        for line, use in list(self._lines.items()):
            if use.actor != actor:
                continue
            if standing is None:
                self.drop(line, ActorDied(f"this member of {line.group} was stopped"))
            elif standing.roster.epoch > use.epoch:
                self.drop(line, changed(line.group, use.epoch, standing.roster.epoch, "this plan"))

    # It is no member any more.
    _forgotten = _told
