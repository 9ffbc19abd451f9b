"""Opens the lines that members of a group on one host share, and ends them: one actor of each process.

Rank 0 makes the descriptors. The others ask its process for them, which sends them over the connection, as transports
do. After that a line needs no message: each member has asked the processes of the others when these members are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from aiodaft._protocol.ids import PLANNING, ActorId, PeerId, can_share_memory
from aiodaft._runtime.actors.host import Enlisted, block_on, changed
from aiodaft._runtime.actors.hosted_actor import InboundCall, serving
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.groups.keyed import Keyed, apart, ask_gone
from aiodaft._runtime.groups.line import Line, close_all, make_line
from aiodaft._runtime.groups.meeting_place import loss_of, target_of_member, whereabouts_of
from aiodaft._runtime.groups.part import Part
from aiodaft._runtime.platform.linux import refusal
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, DaftError, ResourceExhausted
from aiodaft.methods import method

T = TypeVar("T")

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
