"""The process group of torch that the members of a group open together, and how a broken one lets them go.

torch.distributed with gloo does not end what waits for a dead process, apart from operations with that process itself.
Here each member watches the others. When one is gone, or has left by an error, each shuts down the connections that the
listeners of gloo and of the store in its process have accepted. One end of each connection is such a one, so everything
that waits ends at once, at every member.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiodaft._protocol.ids import ActorId, PeerId, can_share_memory, node_of
from aiodaft._runtime.actors.blocking import block_on
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.groups.blocks import NO_BLOCK, Begun, Blocks, Left, blocks_of
from aiodaft._runtime.groups.meeting_place import place_of
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.exceptions import ActorDied, DaftError
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOPBACK: Final = "lo"
# Seconds that operations have to fail when a member is lost, before this process is ended.
_FREE_WITHIN: Final = 5.0
# Seconds from a broken operation of torch until this process has heard which member is gone.
_HEARD_WITHIN: Final = 2.0

# The process of a member, and its number there.
Place: TypeAlias = tuple[PeerId, ActorId]


class Membership:
    """One member's part in one block: comes, watches the others, and leaves."""

    def __init__(
        self, caller: Caller, hosted: HostedActor, group: str, epoch: int, members: Sequence[Target], rank: int
    ):
        self.process = caller.process
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.name = f"{hosted.name}, rank {rank} of {group}"
        # What happened to the first other member that is gone or has left by an error.
        self.lost: Exception | None = None
        self.heard = threading.Event()
        self._caller = caller
        self._group = group
        self._place = hosted.id, epoch
        self._blocks = caller.process.part(Blocks)
        self._thread = threading.get_ident()
        self._over = False
        # The sockets that do not belong to the block.
        self._before = frozenset(_sockets().values())
        self._places: Sequence[Place] = ()
        self._watching: list[asyncio.Task[None]] = []
        self._waiting: asyncio.Task[Any] | None = None
        self._block = NO_BLOCK
        # Called when a member is lost.
        self.abort: Callable[[], object] = lambda: None

    async def gather(self, address: str, patience: float) -> None:
        """Come as rank 0, and wait for all others. Raises as `Blocks.come` does."""
        await self._begin(self._gather(address, patience))

    async def come(self, patience: float) -> str:
        """Come as another rank, and wait for all; returns where the store listens. Raises as `Blocks.come` does."""
        begun = await self._begin(self._come(patience))
        return begun.address

    async def meet(self, patience: float) -> None:
        """Wait until all are as far as this. Raises as `Blocks.come` does."""
        await self._wait(self._gather("", patience) if self.rank == 0 else self._come(patience))

    async def wait_others(self) -> None:
        """Say that this member has left, and wait until the others have, however they do."""
        self._blocks.leave(self._place[0], self._block, Left())
        await asyncio.gather(*self._watching)
        self._over = True
        self._blocks.forget(self._place[0], self._block)

    def leave(self, how: Left) -> None:
        """Leave early, and let go of the others."""
        self._over = True
        self._stop_watching()
        self._shut()
        if self._block != NO_BLOCK:
            self._blocks.leave(self._place[0], self._block, how)

    async def _begin(self, waiting: Coroutine[Any, Any, Begun]) -> Begun:
        try:
            self._places = await asyncio.gather(*map(place_of, self.members))
        except BaseException:
            waiting.close()
            raise
        self._watch()
        try:
            begun = await self._wait(waiting)
        finally:
            self._stop_watching()
        self._block = begun.name
        self._watch()
        return begun

    async def _wait(self, waiting: Coroutine[Any, Any, Begun]) -> Begun:
        """Wait for the others; a member that is lost ends it."""
        self._waiting = asyncio.current_task()
        try:
            return await waiting
        except asyncio.CancelledError:
            if self.lost is None:
                raise
            raise self.lost from None
        finally:
            self._waiting = None

    async def _gather(self, address: str, patience: float) -> Begun:
        actor, epoch = self._place
        return await self._blocks.gather(actor, epoch, self.size, address, patience)

    async def _come(self, patience: float) -> Begun:
        (first, actor), (_, epoch) = self._places[0], self._place
        return await blocks_of(self._caller, first).come(actor, epoch, self.rank, self.size, patience)

    def _watch(self) -> None:
        # The questions are sent now, and so before another member can hear that this one has left.
        others = [(rank, *place) for rank, place in enumerate(self._places) if rank != self.rank]
        questions = [(rank, blocks_of(self._caller, remote).left(actor, self._block)) for rank, remote, actor in others]
        for _, question in questions:
            # What it fails with is for `lost`.
            state_of(question).mark_seen()
        self._watching = [self.process.loop.create_task(self._watch_one(*question)) for question in questions]

    def _stop_watching(self) -> None:
        for task in self._watching:
            task.cancel()

    async def _watch_one(self, rank: int, question: Ref[Left]) -> None:
        member = self.members[rank]
        try:
            left = await question
        except DaftError as error:
            add_note(error, f"this was {member.label}, rank {rank} of {self._group}")
            lost: Exception = error
        else:
            if not left.error and not left.gone:
                return
            if left.follows:
                # What that came of will be heard as well.
                self._shut()
                return
            who = f"{member.label}, rank {rank} of {self._group},"
            how = "was stopped" if left.gone else f"left by an error: {left.error}"
            lost = ActorDied(f"{who} {how}") if left.gone else RuntimeError(f"{who} {how}")
        if self.lost is None:
            self.lost = lost
            self.heard.set()
            self.process.loop.call_later(_FREE_WITHIN, self._end_if_stuck)
        if self._waiting is not None:
            self._waiting.cancel()
        self._shut()

    def _end_if_stuck(self) -> None:
        """End this process if its block still waits in torch.distributed: gloo may miss the end of its connections."""
        frame = None if self._over else sys._current_frames().get(self._thread)
        if frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            sys.stderr.write(f"{self.name}: torch.distributed does not return after a member was lost: {self.lost}\n")
            os._exit(1)

    def _shut(self) -> None:
        with suppress(Exception):
            self.abort()
        for accepted in _accepted(self._before):
            with suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)


@contextmanager
def process_group(
    membership: Membership, backend: str | None, interface: str | None, patience: float
) -> Generator[ProcessGroup]:
    """Open the default process group for the block; see `CurrentGroup.process_group`."""
    import torch.distributed  # noqa: PLC0415 - takes a second

    # Not all names have types.
    dist: Any = torch.distributed
    me, process = membership, membership.process
    if process.is_here:
        raise RuntimeError("process_group() is for `def` methods: torch.distributed would block the event loop")
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already: give each member a process of its own")
    if interface is None and not all(can_share_memory(process.id, member.remote) for member in me.members):
        raise ValueError("the members are on several machines: name the network, process_group(interface='eth0')")
    interface = interface or _LOOPBACK
    what = f"process_group() of {me.name}"
    inside = False
    try:
        if me.rank == 0:
            store = dist.TCPStore(_ip_of(interface), 0, me.size, is_master=True, wait_for_workers=False)
            block_on(process, me.gather(f"{store.host}:{store.port}", patience), what)
        else:
            host, _, port = block_on(process, me.come(patience), what).rpartition(":")
            store = dist.TCPStore(host, int(port), me.size, is_master=False)
        with _environment(_variables(me, store.host, store.port, interface)):
            try:
                dist.init_process_group(
                    backend, store=store, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=patience)
                )
                dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)
                # Those that are not as far would not hear of one that leaves.
                block_on(process, me.meet(patience), what)
                if dist.get_backend() != "gloo":
                    # What waits on a GPU. With gloo, an operation that begins after an abort would wait for ever.
                    me.abort = dist.group.WORLD.abort
                inside = True
                yield dist.group.WORLD
                block_on(process, me.wait_others(), what)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
    except BaseException as error:
        of_torch = not inside or isinstance(error, dist.DistError) or "gloo" in str(error)
        broken = isinstance(error, RuntimeError) and of_torch
        if broken:
            me.heard.wait(_HEARD_WITHIN)
        follows = me.lost is not None and (broken or not inside)
        process.call_soon(partial(me.leave, Left(f"{type(error).__name__}: {error}", follows)))
        if me.lost is not None and follows:
            raise me.lost from error
        raise


def _variables(me: Membership, host: str, port: int, interface: str) -> dict[str, str]:
    """What programs for torchrun read."""
    beside = [rank for rank, member in enumerate(me.members) if node_of(member.remote) == node_of(me.process.id)]
    return {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "LOCAL_RANK": str(beside.index(me.rank)),
        "LOCAL_WORLD_SIZE": str(len(beside)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _ip_of(interface: str) -> str:
    from aiodaft._runtime.platform.interfaces import interfaces  # noqa: PLC0415 - loads much that few need

    known = interfaces()
    if interface not in known:
        raise ValueError(f"there is no interface {interface!r} here: there are {', '.join(sorted(known))}")
    return known[interface][0]


def _sockets() -> dict[int, str]:
    """The sockets of this process: their descriptors and inodes."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _accepted(before: frozenset[str]) -> Iterator[socket.socket]:
    """Connections to listeners of this process that were not there before."""
    opened: list[socket.socket] = []
    for fd, inode in _sockets().items():
        if inode not in before:
            with suppress(OSError):
                opened.append(socket.socket(fileno=os.dup(fd)))
    try:
        opened = [sock for sock in opened if sock.family in {socket.AF_INET, socket.AF_INET6}]
        listening = {sock for sock in opened if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        ports = {sock.getsockname()[1] for sock in listening}
        yield from (sock for sock in opened if sock not in listening and sock.getsockname()[1] in ports)
    finally:
        for sock in opened:
            sock.close()
