"""The blocks of code in which the members of a group use one process group of torch: who is in, and how each left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Final, NamedTuple, cast

from aiodaft._protocol.groups.meeting import Left
from aiodaft._protocol.ids import BLOCKS, ActorId, PeerId, number_of
from aiodaft._runtime.actors.host import Enlisted, changed
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied
from aiodaft.methods import method

# The name of no block: a member leaves it only by its end.
NO_BLOCK: Final = ""
_TAKEN: Final = "this process has a process group already: give each member a process of its own"


class Begun(NamedTuple):
    """A block that all members have come to: its name, and where the store of torch listens."""

    name: str
    address: str


class Gathering:
    def __init__(self, size: int) -> None:
        self._size = size
        self._came: dict[int, asyncio.Future[Begun]] = {}
        self._begun: Begun | None = None

    def __len__(self) -> int:
        return len(self._came)

    async def come(self, rank: int, patience: float, begun: Begun | None = None) -> Begun:
        """Wait for the others, for so many seconds; rank 0 says what begins. Cancellation: the member has not come.

        Raises:
            TimeoutError: Not all came.
            Exception: The error given to `fail`.
        """
        future = self._came[rank] = asyncio.get_running_loop().create_future()
        self._begun = begun or self._begun
        try:
            if len(self._came) == self._size and self._begun is not None:
                for waiting in self._came.values():
                    waiting.set_result(self._begun)
            async with asyncio.timeout(patience):
                began: Begun = await future
                return began
        except TimeoutError:
            late = ", ".join(str(rank) for rank in range(self._size) if rank not in self._came)
            error = TimeoutError(f"rank {late} of {self._size} did not come to the process group in {patience:g} s")
            self.fail(error)
            raise error from None
        finally:
            del self._came[rank]
            if begun is not None:
                self._begun = None

    def fail(self, error: Exception) -> None:
        for future in self._came.values():
            if not future.done():
                future.set_exception(error)


class Blocks(Actor):
    """The blocks of the members in this process.

    The members of a group come together at rank 0. Then each asks the others how they leave the block.
    """

    def __init__(self, process: Process, enlisted: Enlisted) -> None:
        self._process = process
        self._enlisted = enlisted
        enlisted.on_told.append(self._told)
        enlisted.on_forgotten.append(self._forget_member)
        # By the actor with rank 0, the epoch of its group, and the call of the group that the members are in.
        self._gatherings: dict[tuple[ActorId, int, Hashable], Gathering] = {}
        # The process groups of the last block. A DDP model may hold the last other reference to one, and would free it
        # with the interpreter held, which waits for threads of gloo that may need the interpreter. Their Python objects
        # free them without it: later, when these threads have nothing to do.
        self.destroyed: list[object] = []
        # Of another thread than the one that has entered a block, if that was kept for several calls.
        self._is_free = threading.Lock()
        # How each member left a block; made by the member or a question, and kept, since a question may come later.
        self._left: dict[tuple[ActorId, str], asyncio.Future[Left]] = {}

    @property
    def gatherings(self) -> int:
        return len(self._gatherings)

    @method(ordered=False)
    async def come(self, actor: int, epoch: int, within: Hashable, rank: int, size: int, patience: float) -> Begun:
        """Come to the gathering at rank 0, which is `actor`, of those within the same; returns when all have come.

        Raises:
            TimeoutError: Not all came in time.
            ActorDied: A member is gone.
            GroupChanged: The group has a newer epoch.
        """
        if not self._enlisted.has(ActorId(actor)):
            raise ActorDied("rank 0 of the group was stopped", executed=False)
        return await self._come(ActorId(actor), epoch, within, size, rank, patience)

    @method(ordered=False)
    async def left(self, actor: int, block: str) -> Left:
        if not self._enlisted.has(ActorId(actor)):
            return Left(gone=True)
        return await asyncio.shield(self._how_left(ActorId(actor), block))

    @method(ordered=False)
    async def left_by_now(self, actor: int, block: str) -> Left | None:
        if not self._enlisted.has(ActorId(actor)):
            return Left(gone=True)
        left = self._left.get((number_of(ActorId(actor)), block))
        return left.result() if left is not None and left.done() else None

    @contextmanager
    def alone(self, is_taken: Callable[[], bool]) -> Generator[None]:
        """The process group of torch, and the variables, are those of this block: a process has one of each.

        Raises:
            RuntimeError: Another block has them, or `is_taken` says that other code has.
        """
        if not self._is_free.acquire(blocking=False):
            raise RuntimeError(_TAKEN)
        try:
            if is_taken():
                raise RuntimeError(_TAKEN)
            yield
        finally:
            self._is_free.release()

    async def gather(
        self, actor: ActorId, epoch: int, within: Hashable, size: int, address: str, patience: float
    ) -> Begun:
        begun = Begun(f"{self._process.id}/{self._process.next_number()}", address)
        return await self._come(actor, epoch, within, size, 0, patience, begun)

    def leave(self, actor: ActorId, block: str, how: Left) -> None:
        left = self._how_left(actor, block)
        if not left.done():
            left.set_result(how)

    def forget(self, actor: ActorId, block: str) -> None:
        self._left.pop((number_of(actor), block), None)

    def _told(self, actor: ActorId) -> None:
        standing = self._enlisted.find(actor)
        assert standing is not None
        for place in [place for place in self._gatherings if place[0] == number_of(actor)]:
            if place[1] < standing.roster.epoch:
                self._gatherings.pop(place).fail(changed(standing.roster.id, place[1], standing.roster.epoch))

    def _forget_member(self, actor: ActorId) -> None:
        number = number_of(actor)
        for key in [key for key in self._left if key[0] == number]:
            left = self._left.pop(key)
            if not left.done():
                left.set_result(Left(gone=True))
        for place in [place for place in self._gatherings if place[0] == number]:
            self._gatherings.pop(place).fail(ActorDied("rank 0 of the group was stopped", executed=False))

    async def _come(
        self,
        actor: ActorId,
        epoch: int,
        within: Hashable,
        size: int,
        rank: int,
        patience: float,
        begun: Begun | None = None,
    ) -> Begun:
        standing = self._enlisted.find(actor)
        if standing is not None and standing.roster.epoch > epoch:
            raise changed(standing.roster.id, epoch, standing.roster.epoch)
        where = number_of(actor), epoch, within
        gathering = self._gatherings.setdefault(where, Gathering(size))
        try:
            return await gathering.come(rank, patience, begun)
        finally:
            # It is dropped before if rank 0 is gone.
            if not gathering and self._gatherings.get(where) is gathering:
                del self._gatherings[where]

    def _how_left(self, actor: ActorId, block: str) -> asyncio.Future[Left]:
        key = number_of(actor), block
        if key not in self._left:
            self._left[key] = self._process.loop.create_future()
        return self._left[key]


def blocks_of(caller: Caller, remote: PeerId) -> Blocks:
    return cast("Blocks", caller.handle(remote, BLOCKS, f"blocks of {remote}", Blocks))
