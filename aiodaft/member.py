"""The actor whose code runs: its handle, its background tasks, and its group, as a member knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar, cast
from weakref import ref

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.groups.inbox import BYTES, MESSAGES, Tag
from aiodaft._protocol.groups.roster import Roster, Steps
from aiodaft._runtime.actors.host import Enlisted, Standing, changed, start_background
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, current_call
from aiodaft._runtime.agent import acting, attended
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import Followers, PinnedTarget
from aiodaft._runtime.groups.collectives import written
from aiodaft._runtime.groups.inboxes import Inboxes, Mail
from aiodaft._runtime.groups.keyed import Keyed, belongs_to
from aiodaft._runtime.groups.line import Opening, Planning
from aiodaft._runtime.groups.meeting_place import Part
from aiodaft._runtime.groups.planned import Exchange, Planned
from aiodaft._runtime.groups.process_group import Membership, process_group
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor, Handle, handle_of, target_of
from aiodaft.collectives import How, Key, MemberCollectives, plain_key
from aiodaft.ref import Ref
from aiodaft.service import Service

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["CurrentGroup", "Exchange", "Message", "Planned", "create_task", "current_actor", "current_group"]

ActorT = TypeVar("ActorT")


class Message(NamedTuple):
    """A message from another member.

    Attributes:
        value: The sent value.
        source: The rank of its sender; None if that is no member at this epoch.
        tag: The tag that it was sent with.
    """

    value: Any
    source: int | None
    tag: int | str


class CurrentGroup(MemberCollectives, Generic[ActorT]):
    """A group as its member sees it, at one epoch: `group: CurrentGroup[Trainer] = aiodaft.current_group()`.

    A change or a restart of members gives the group a new epoch. Ask `current_group()` again to see that, or wait for
    `changed()`; an object that was asked for before stays as it was.
    """

    __slots__ = ("_asked_in", "_hosted", "_mail", "_standing", "_steps")

    def __init__(self, hosted: HostedActor, standing: Standing, steps: Steps = ()) -> None:
        self._hosted = hosted
        self._standing = standing
        # The arguments of `along` and `part`, one after another.
        self._steps = steps
        call = current_call.get()
        # The call that got it: kept, it must not keep what that one was given.
        self._asked_in = None if call is None else ref(call)
        self._mail: Mail | None = None

    @property
    def _place(self) -> tuple[Roster[Any], int]:
        # Not kept: the members become known later.
        return self._standing.roster.narrowed(self._standing.rank, self._steps)

    @property
    def id(self) -> str:
        """The name of the group: the same for all members and for the `Group`, and unique in the cluster."""
        return self._place[0].id

    @property
    def epoch(self) -> int:
        """Counts the changes and the restarts of the members, from 1."""
        return self._standing.roster.epoch

    @property
    def is_current(self) -> bool:
        """Whether this is the newest epoch that the member was told of."""
        return self._standing.is_current

    async def changed(self) -> CurrentGroup[ActorT]:
        """Wait until the group has changed since this epoch; returns it as it is now.

        Raises:
            RuntimeError: This member has left the group, and is about to be stopped.

        Cancellation: only this wait ends.
        """
        await self._standing.over.wait()
        now = self._hosted._process.part(Enlisted).find(self._hosted.id)
        if now is None or not now.is_current:
            raise RuntimeError(f"this member has left {self.id}, and is about to be stopped")
        return CurrentGroup(self._hosted, now, self._steps)

    @property
    def rank(self) -> int:
        """The number of this member, from 0."""
        return self._place[1]

    @property
    def size(self) -> int:
        """The number of members."""
        return self._place[0].size

    @property
    def axes(self) -> Mapping[str, int]:
        """The names and sizes of the axes; empty if the group has none. The last axis changes fastest with the rank."""
        return self._place[0].axes.sizes

    @property
    def coords(self) -> Mapping[str, int]:
        """The place of this member on each axis."""
        roster, rank = self._place
        return roster.axes.coords(rank)

    @property
    def members(self) -> tuple[ActorT, ...]:
        """Handles of all members by rank, this one among them; for a group of hosted classes the services.

        Raises:
            RuntimeError: The members are being made: this is a constructor, `__aenter__` or the like.
        """
        roster = self._place[0]
        if not roster.is_complete:
            raise RuntimeError(f"the members of {roster.id} are being made: ask for them in the first call, or later")
        return cast("tuple[ActorT, ...]", roster.members)

    def along(self, *axes: str) -> CurrentGroup[ActorT]:
        """The members that differ from this one only in these axes: with axes dp and tp, `along("tp")` is its replica.

        Each of them gets the same part, with an id of its own. Ranks in it follow the order of the axes of the group.

        Raises:
            ValueError: The group has no such axis.
        """
        self._place[0].axes.pick(axes)
        return CurrentGroup(self._hosted, self._standing, (*self._steps, axes))

    def part(self, ranks: Iterable[int]) -> CurrentGroup[ActorT]:
        """The members with these ranks, this one among them: a group of its own, with ranks from 0 in this order.

        All of them ask for it with the same ranks. It costs no message.

        Raises:
            ValueError: There is no such rank, one comes twice, or that of this member is none of them.
        """
        numbers, (roster, rank) = tuple(map(index, ranks)), self._place
        roster.some(rank, numbers)
        return CurrentGroup(self._hosted, self._standing, (*self._steps, numbers))

    @contextmanager
    def process_group(
        self, backend: str | None = None, *, interface: str | None = None, patience: float = 60.0
    ) -> Generator[ProcessGroup]:
        """The default process group of torch.distributed for a block of a `def` method that all members run.

        In the block, torch.distributed, DDP, FSDP, DTensor and DeviceMesh work as in a program for torchrun, whose
        variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...) are set. At its end each member waits for the others;
        then the group is destroyed and the variables are as before. To keep it for several calls, enter it into an
        `ExitStack` of the actor. Each member needs a process of its own.

        A script for torchrun that runs in the block gets its group from `torch.distributed.init_process_group()`,
        whatever backend it names; `destroy_process_group()` leaves that to the end of the block.

        When a member dies, is stopped or leaves the block by an error, all waits of the others fail at once. gloo
        rarely misses the end of its connections. So a process ends if its block, after a loss, stands for 5 seconds at
        one place in C code (of torch, or called by the block itself) and uses no CPU.

        Args:
            backend: "aiodaft": collectives and messages of this group, for tensors of the CPU, without store and port,
                and in its failures as they are; "gloo", "nccl" or another backend of torch; None lets torch choose:
                "nccl" where it finds a GPU. For tensors of both the GPU and the CPU it is "cpu:gloo,cuda:nccl".
            interface: The network interface, such as "eth0", if the members are on several machines. torch neither
                authenticates nor encrypts its traffic. On one machine nothing leaves it. Not used for "aiodaft".
            patience: Seconds that the other members have to come.

        Raises:
            ActorDied: Another member died or was stopped, and an operation failed because of that.
            TimeoutError: Members did not come; the error names their ranks.
            CallCancelled: The call of another member, of the same call of the group, failed before it came.
            GroupChanged: Another member was restarted before all had come.
            ResourceExhausted: This process has no file descriptor for it.
            RuntimeError: Another member left by an error, and an operation failed because of that. This is an `async
                def` method, or the process has a process group.
            ValueError: There is no such interface, or one is needed.

        Cancellation: an operation of torch that is under way goes on; the wait for the others ends.
        """
        if not self._place[0].is_complete:
            raise RuntimeError(f"process_group(): the members of {self.id} are being made: open it in a method")
        membership = Membership(self._hosted, self._standing, self._steps)
        with process_group(membership, backend, interface, patience) as group:
            yield group

    def plan(self, *, key: Key = None) -> Opening[Planned]:
        """Open a `Planned`: collectives of tensors that are repeated, at the speed of the members' shared memory.

        All members call it. In a `def` method: `current_group().plan().result()`.

        Args:
            key: As for collectives.

        Raises:
            ResourceExhausted: A member has no file descriptor or no memory for it.
            Exception: As collectives do, for awaiting it or at once.

        Cancellation: this member has not taken part, as in a collective.
        """
        key = ("plan",) if key is None else ("plan", plain_key(key))
        part, process = self._part("plan", How(key)), self._hosted._process
        return Opening(process, partial(self._open_plan, part, process, key))

    async def _open_plan(self, part: Part, process: Process, key: Key) -> Planned:
        def meet(operation: str, value: Any, op: Any, root: int) -> Ref[Any]:
            return self._take_part(operation, value, How(key, op=op, root=root))

        line = await process.part(Planning).open(part, lambda value: self.all_gather(value, key=key))
        return Planned(process, part.rank, part.roster.size, line, meet)

    async def send(self, value: Any, *, to: int, tag: Tag = 0) -> None:
        """Send a value to another member, from process to process; returns when it is in the member's inbox.

        It may change after that. A member in the same process gets the object itself. A ref arrives as a ref.

        An inbox has room for 1024 messages and 256 MiB, see `limit_inbox`. A message that does not fit waits with its
        sender, unless the member waits for it, or has no other message of this sender: so two members may send each
        other tensors of any size before they receive. Messages with one tag from one member to another arrive in the
        order of the sends. A message of a call of `group.all`, `each` or `split` is not received in another one.

        Args:
            value: Any value that a call could have as an argument.
            to: The rank of the member.
            tag: A tag that the receiver may ask for.

        Raises:
            ActorDied, PeerLost: The member is gone, or was before it had the message.
            CallCancelled: The message has to wait for room, this is a call of `group.all`, `each`, `split` or a graph,
                and that of another member has failed. The message is withdrawn.
            SerializationError: The value cannot travel.
            ValueError: There is no such rank.
            RuntimeError: The members are being made, or this is no coroutine of the event loop of the runtime.

        Cancellation: the message is withdrawn, unless it is in the inbox.
        """
        await self._mailing_here().send(value, to, tag)

    async def recv(self, *, source: int | None = None, tag: Tag | None = None) -> Any:
        """Receive the next message; waits until there is one.

        Args:
            source: The rank of its sender. Default: any.
            tag: Its tag. Default: any.

        Raises:
            ActorDied, PeerLost: The sender is gone, or without `source` all other members are. Messages that came
                before are received first. If the sender was restarted, only a receive that waited when it died fails.
            CallCancelled: This is a call of `group.all`, `each`, `split` or a graph, and that of another member has
                failed.
            ValueError: There is no such rank.
            RuntimeError: As for `send`.

        Cancellation: no message is lost; the next receive gets it.
        """
        message, _ = await self._mailing_here().receive(source, tag)
        return message.value

    async def recv_message(self, *, source: int | None = None, tag: Tag | None = None) -> Message:
        """Receive the next message, with its sender and its tag. As `recv` in all else."""
        message, rank = await self._mailing_here().receive(source, tag)
        return Message(message.value, rank, message.tag)

    def isend(self, value: Any, *, to: int, tag: Tag = 0) -> Ref[None]:
        """As `send`, but begins at once, in any thread of the actor; returns a ref, for `result()` or `await`.

        The value must not change before that is there. A ref that is dropped takes back no message.
        """
        mail = self._mailing()
        return mail.begin("isend", partial(mail.send, value, to, tag), self._call())

    def irecv(self, *, source: int | None = None, tag: Tag | None = None) -> Ref[Any]:
        """As `recv`, but begins at once, in any thread of the actor; returns a ref, for `result()` or `await`.

        Cancelling the ref loses no message; one that is only dropped still takes the next one.
        """
        mail = self._mailing()

        async def value() -> Any:
            message, _ = await mail.receive(source, tag)
            return message.value

        return mail.begin("irecv", value, self._call())

    def limit_inbox(self, *, messages: int = MESSAGES, nbytes: int = BYTES) -> None:
        """Bound the messages that wait in the inbox of this member; others wait with their senders.

        Objects of members in the same process count no bytes.

        Args:
            messages: The most messages.
            nbytes: The most bytes of their values, as they travel.

        Raises:
            ValueError: A bound is not positive.
        """
        if messages < 1 or nbytes < 1:
            raise ValueError(f"an inbox has room for a positive number of messages and bytes, not {messages}, {nbytes}")
        self._mailing_here().limit(messages, nbytes)

    def _mailing(self) -> Mail:
        if self._mail is None:
            targets = self._targets()
            inboxes = targets[self.rank].process.part(Inboxes)
            self._mail = Mail(inboxes, self.id, targets, self.rank)
        return self._mail

    def _mailing_here(self) -> Mail:
        mail = self._mailing()
        mail.check()
        return mail

    def _targets(self) -> list[Target]:
        return [cast("Target", target_of(handle_of(member))) for member in self.members]

    def _take_part(self, operation: str, value: Any, how: How) -> Ref[Any]:
        part, call = self._part(operation, how), self._call()
        return self._hosted._process.part(Keyed).begin(part, value, call, belongs_to(call))

    def _part(self, operation: str, how: How) -> Part:
        roster, rank = self._place
        if not self.is_current:
            raise changed(roster.id, self.epoch, what=f"this {operation}")
        if not roster.is_complete:
            raise RuntimeError(
                f"{operation}: the members of {roster.id} are being made: call it in the first call, or later"
            )
        _, timeout, out, op, root, lengths = how
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout={timeout}: seconds, not negative")
        if not 0 <= root < roster.size:
            raise ValueError(f"root is the rank of one of {roster.size} members, from 0, not {root}")
        if lengths is not None and (len(lengths) != roster.size or min(lengths) < 0):
            raise ValueError(f"lengths are those of the parts of {roster.size} members, not {list(lengths)}")
        finish = None if out is None else partial(written, out)
        return Part(
            operation, plain_key(how.key), roster, self._steps, rank, self._standing, op, root, timeout, lengths, finish
        )

    def _call(self) -> InboundCall | None:
        """The call that this code is part of; in a thread that knows none, the one that got this object."""
        call = current_call.get()
        if call is None and attended.get() is None and self._asked_in is not None:
            call = self._asked_in()
        return call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CurrentGroup) and (self.id, self.epoch, self.rank) == (
            other.id, other.epoch, other.rank
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.id, self.epoch, self.rank))

    def __repr__(self) -> str:
        return f"<CurrentGroup {self.id}, epoch {self.epoch}, rank {self.rank} of {self.size}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to its member: pass the `Group` instead, or the handles in `members`")


def current_group() -> CurrentGroup[Any]:
    """The group that the actor whose code calls this is a member of: its rank, its axes and the other members.

    For methods of any kind, the constructor, `__aenter__`, `__aexit__` and `on_restart`, in `def` methods, too. A
    restarted member has the rank that it had.

    Raises:
        RuntimeError: No code of an actor runs here, or the actor is no member of a group.
    """
    hosted = acting()
    if hosted is None:
        raise RuntimeError("current_group() is for methods of the members of a group: no code of an actor runs here")
    standing = hosted._process.part(Enlisted).find(hosted.id)
    if standing is None:
        raise RuntimeError(f"{hosted.name} is no member of a group: make it by `rt.group(n, Class, ...)`")
    return CurrentGroup(hosted, standing)


R = TypeVar("R")


def current_actor() -> Any:
    """The handle of the actor whose code calls this, to give to others: `me: Parent = aiodaft.current_actor()`.

    It is as the handle that spawning the actor gave: calls go through its mailbox, also its own; it follows restarts if
    that one does; it does not keep the actor. In an instance of a hosted class it is the `Service`. For methods of any
    kind, in `def` methods, too.

    Raises:
        RuntimeError: No code of an actor runs here, or the actor is being made and takes no calls yet.
    """
    hosted = acting()
    if hosted is None or hosted.birth is None:
        raise RuntimeError("current_actor() is for the code of actors: none runs here")
    process, (cls, owner, follow) = hosted._process, hosted.birth
    caller = process.part(Caller)
    if hosted.id not in caller.actors:
        raise RuntimeError(f"{hosted.name} is being made, and takes no calls yet: ask for its handle in a method")
    target: Target
    if follow is None:
        target = Target(caller, process.id, hosted.id, hosted.name, None)
    else:
        place = Location(process.id, hosted.id)
        followed = process.part(Followers).get(owner, place, hosted.name)
        target = followed if follow else PinnedTarget(followed, place)
    handle = Handle(target, cls)
    return handle if issubclass(cls, Actor) else Service(handle, cls)


def create_task(coro: Coroutine[Any, Any, R], *, name: str | None = None) -> asyncio.Task[R]:
    """Start a background task of the actor whose code calls this, for instance in `__aenter__`.

    Its error is the actor's: if it raises, the process of the actor ends, with the traceback in its output. Calls fail
    with `ActorDied`, and a supervised actor is restarted. (The error of a task of `asyncio.create_task` is seen by
    no code.) The runtime holds the task, and cancels it when the actor has been stopped and `__aexit__` has run.

    Args:
        coro: The coroutine to run.
        name: The name of the task. Default: that of the coroutine.

    Raises:
        RuntimeError: This is a thread, or no code of an actor runs here.

    Cancellation: `task.cancel()` ends the task, which is no error of the actor.
    """
    hosted = acting()
    if hosted is None or not hosted._process.is_here:
        coro.close()
        where = "no code of an actor runs here" if hosted is None else "this is a thread: use it in `async def` methods"
        raise RuntimeError(f"aiodaft.create_task() starts a background task of an actor: {where}")
    return start_background(hosted, coro, name or str(getattr(coro, "__qualname__", "task")))
