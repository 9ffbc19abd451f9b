"""Messages from member to member of a group: carries out the decisions of `_protocol.groups.inbox`.

Every process has an `Inboxes` actor, and every member one inbox in each group that it receives in. A message is a call
of that actor, which returns when the message is in the inbox. A small value is an argument. A large one stays with its
sender until the inbox admits it; then it goes from process to process, as any value does.

    sender -- put(tag, value or ref) --> Inboxes --> Inbox --> receiver      Watches of the senders that receivers
             <-- when it is there ----              (one per member)         wait for are calls of `ended`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeAlias

from aiodaft._protocol.groups.inbox import BYTES, Admit, Command, Inbox, Message, Stage, Tag, Wish
from aiodaft._protocol.ids import INBOXES, ActorId, number_of
from aiodaft._runtime.actors.host import Enlisted
from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.channels import QueuedItem
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.keyed import Keyed, apart, belongs_to
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft._runtime.serialization.small import encode_small
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, PeerLost, RuntimeClosed
from aiodaft.methods import MethodSpec, method, specs_of
from aiodaft.ref import Ref

# The sender of a message, its tag, the bytes of its value, and the call or run that it is within.
Head: TypeAlias = tuple[ActorId, Tag, int, Hashable]

_NUMBER: Final = 8


class Box:
    """The inbox of a member, and the watches of the members that it waits for."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.watches: dict[ActorId, asyncio.Task[None]] = {}
        self.closed: DaftError | None = None

    def run(self, commands: Iterable[Command]) -> None:
        left = deque(commands)
        while left:
            command = left.popleft()
            if isinstance(command, Admit):
                if (waiter := command.message.waiter) is not None and not waiter.done():
                    waiter.set_result(None)
            elif command.receive.waiter.done():
                # It was cancelled just now.
                left.extend(self.inbox.put_back(command.message))
            else:
                command.receive.waiter.set_result(command.message)

    def lose(self, source: ActorId, error: Exception) -> None:
        self.watches.pop(source, None)
        for receive in self.inbox.lose(source):
            if not receive.waiter.done():
                receive.waiter.set_exception(copy_error(error))

    def close(self, error: DaftError) -> None:
        self.closed = error
        for watch in self.watches.values():
            watch.cancel()
        waiters = [one.waiter for one in self.inbox.messages] + [one.waiter for one in self.inbox.waiting]
        for waiter in waiters:
            if waiter is not None and not waiter.done():
                waiter.set_exception(copy_error(error))


class Inboxes(Actor):
    def __init__(self, caller: Caller, store: Store, enlisted: Enlisted) -> None:
        self.process = caller.process
        self._caller = caller
        self._store = store
        self._enlisted = enlisted
        enlisted.on_forgotten.append(self._forget_member)
        self._boxes: dict[tuple[str, ActorId], Box] = {}
        # Set when a member of this process sends nothing more to inboxes of this name: whether it lives.
        self._ends: dict[tuple[str, ActorId], asyncio.Future[bool]] = {}

    @method
    async def put(self, group: str, to: int, head: Head, value: Any, waits: bool) -> bool:
        """Take a message for a member, when there is room if it `waits`; returns whether it is in the inbox.

        Raises:
            ActorDied: The member is gone.
        """
        box = self._box(group, ActorId(to))
        message, commands = box.inbox.announce(*head)
        box.run(commands)
        try:
            if message.stage is Stage.ANNOUNCED:
                if not waits:
                    box.run(box.inbox.withdraw(message))
                    return False
                message.waiter = self.process.loop.create_future()
                with self._wait(message.waiter, f"send of {group}"):
                    await message.waiter
            if isinstance(value, QueuedItem):
                value = await value.open(self._store)
            if box.closed is not None:
                raise copy_error(box.closed)
        except BaseException:
            box.run(box.inbox.withdraw(message))
            raise
        box.run(box.inbox.came(message, value))
        return True

    @method(ordered=False)
    async def ended(self, group: str, actor: int) -> bool:
        number = ActorId(actor)
        return self._enlisted.has(number) and await asyncio.shield(self._end_of(group, number))

    async def send(self, group: str, to: Target, source: tuple[ActorId, Hashable], tag: Tag, value: Any) -> None:
        """Send a message to a member. Raises as `CurrentGroup.send` does.

        Args:
            source: Its sender, and its `within`, see `Coming`.
        """
        # In a call that hears that another one of its call of a group has failed, nothing waits for room.
        call = current_call.get()
        try:
            if await self._send(group, to, source, tag, value, waits=call is None or call.apart is None):
                return
        except CallCancelled:
            if call is None or call.apart is None:
                raise
        assert call is not None
        assert call.apart is not None
        raise apart(f"send of {group} to {to.label}", call.apart)

    async def _send(
        self, group: str, to: Target, source: tuple[ActorId, Hashable], tag: Tag, value: Any, *, waits: bool
    ) -> bool:
        number, (member, within) = number_of(to.actor), source
        if self._enlisted.has(number):
            return bool(await self.put(group, number, (member, tag, 0, within), value, waits))
        nbytes, packed = self._pack(value)
        return bool(await self._ask(to, _PUT, group, number, (member, tag, nbytes, within), packed, waits))

    async def receive(self, group: str, member: ActorId, wish: Wish, senders: Mapping[ActorId, Target]) -> Message:
        """Wait for a message; `senders` are the other members that may send it.

        Raises:
            ActorDied, PeerLost: They are gone, or the member is.
            CallCancelled: Another call of the same call of the group has failed.
        """
        box = self._box(group, member)
        receive, commands = box.inbox.ask(wish, senders)
        waiter: asyncio.Future[Message] = self.process.loop.create_future()
        receive.waiter = waiter
        box.run(commands)
        if not waiter.done():
            for number, target in senders.items():
                if number not in box.watches:
                    watch = self._watch(box, number, target, group)
                    box.watches[number] = self.process.tasks.create_task(watch, name=f"watch {target.label}")
        try:
            if waiter.done():
                return waiter.result()
            with self._wait(waiter, f"recv of {group}"):
                return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                box.run(box.inbox.put_back(waiter.result()))
            else:
                box.inbox.give_up(receive)
            raise

    def begin(self, title: str, what: Callable[[], Awaitable[Any]], call: InboundCall | None) -> Ref[Any]:
        target = Target(self._caller, self.process.id, INBOXES, title, None)
        return target.call(_RUN.named(title), (Opaque((what, call)),), {})

    @method(ordered=False)
    async def run(self, given: Opaque) -> Any:
        what, call = given.content
        current_call.set(call)
        return await what()

    def _ending(self, end: Callable[[DaftError], object]) -> AbstractContextManager[None]:
        """In the block, `end` is called if another call of the same call of a group fails, or has failed."""
        call = current_call.get()
        if call is None:
            return nullcontext()
        # The thread that tells it may be another one.
        return self.process.part(Keyed).ending(call, lambda why: self.process.call_soon(partial(end, why)))

    async def _together(self, asked: Ref[Any]) -> Any:
        with self._ending(lambda _: asked.cancel()):
            return await asked

    def _wait(self, waiter: asyncio.Future[Any], what: str) -> AbstractContextManager[None]:
        def end(why: DaftError) -> None:
            if not waiter.done():
                waiter.set_exception(apart(what, why))

        return self._ending(end)

    def limit(self, group: str, member: ActorId, messages: int, nbytes: int) -> None:
        box = self._box(group, member)
        box.run(box.inbox.limit(messages, nbytes))

    def end(self, group: str, member: ActorId) -> None:
        end = self._end_of(group, member)
        if not end.done():
            end.set_result(True)

    def drop(self, group: str, member: ActorId, error: DaftError) -> None:
        self._ends.pop((group, member), None)
        box = self._boxes.pop((group, member), None)
        if box is not None:
            box.close(error)

    def close(self, reason: str) -> None:
        for box in self._boxes.values():
            box.close(RuntimeClosed(reason))
        self._boxes.clear()

    def _box(self, group: str, member: ActorId) -> Box:
        box = self._boxes.get((group, member))
        if box is None:
            if not self._enlisted.has(member):
                raise ActorDied("the member was stopped", executed=False)
            box = self._boxes[group, member] = Box()
        return box

    def _end_of(self, group: str, member: ActorId) -> asyncio.Future[bool]:
        return self._ends.setdefault((group, member), self.process.loop.create_future())

    def _forget_member(self, actor: ActorId) -> None:
        number = number_of(actor)
        for key in [key for key in self._ends if key[1] == number]:
            end = self._ends.pop(key)
            if not end.done():
                end.set_result(False)
        for key in [key for key in self._boxes if key[1] == number]:
            self._boxes.pop(key).close(ActorDied("the member was stopped", executed=False))

    def _pack(self, value: Any) -> tuple[int, Any]:
        """The size of a value, as far as it is known, and the object that travels in its place."""
        if is_plain(value):
            return (len(value) if isinstance(value, str | bytes) else _NUMBER), value
        small = encode_small((value,), by_name=False)
        if small is not None:
            return len(small[0]), value
        ref: Ref[Any] = Ref(self._caller.objects.refs.put(value, "CurrentGroup.send"))
        stored = state_of(ref).stored
        # A value that takes long to encode counts as many bytes as fit.
        return (BYTES if stored is None else stored.size), QueuedItem(ref)

    async def _watch(self, box: Box, source: ActorId, target: Target, group: str) -> None:
        who = f"{target.label} of {group}"
        try:
            lives = await self._ask(target, _ENDED, group, source)
        except DaftError as error:
            add_note(error, f"{who} was waited for")
            box.lose(source, error)
        else:
            if lives:
                box.lose(source, ValueError(f"{who} has left the block: no message of it comes any more"))
                return
            stopped = ActorDied(f"{who} was stopped")
            stopped.actor = target.label
            box.lose(source, stopped)

    async def _ask(self, member: Target, spec: MethodSpec, *arguments: Any) -> Any:
        """Call the inboxes of the process where a member is; waits for a member that is being restarted."""
        while True:
            if isinstance(member, FollowingTarget):
                await member.arrive()
            remote = member.remote
            try:
                asked = Target(self._caller, remote, INBOXES, f"inboxes of {remote}", None).call(spec, arguments, {})
                return await (self._together(asked) if spec is _PUT else asked)
            except (ActorDied, PeerLost) as error:
                unsent = error.executed is False or _is_absence(error)
                if not (unsent and isinstance(member, FollowingTarget)):
                    raise
            connection = self._caller.connections.get(remote)
            member.not_found(remote)
            found, problem = await member.find(
                connection if connection is not None and connection.lost is not None else None, wait=True
            )
            if found.ended is None and problem is not None:
                raise problem
            member.move(found)


_PUT: Final = specs_of(Inboxes)["put"]
_ENDED: Final = specs_of(Inboxes)["ended"]
_RUN: Final = specs_of(Inboxes)["run"]


def _is_absence(error: DaftError) -> bool:
    return isinstance(error, ActorDied) and not error.actor and error.executed is not None


class Mail:
    """The messages of one member, at one epoch of its group; unless `by_calls`, those of different calls mix."""

    def __init__(
        self, inboxes: Inboxes, group: str, members: Sequence[Target], rank: int, *, by_calls: bool = True
    ) -> None:
        self._by_calls = by_calls
        self._inboxes = inboxes
        self._group = group
        self._members = members
        self._rank = rank
        self._numbers = [number_of(member.actor) for member in members]
        self._ranks = {number: rank for rank, number in enumerate(self._numbers)}
        self._sending: set[Ref[Any]] = set()

    def check(self) -> None:
        process = self._inboxes.process
        process.check_open("messages cannot be used")
        if asyncio._get_running_loop() is not process.loop:
            raise RuntimeError(
                "send and recv are for the event loop of the runtime: use an `async def` method, or isend and irecv, "
                "as in `group.irecv(source=0).result()`"
            )

    def begin(self, operation: str, what: Callable[[], Awaitable[Any]], call: InboundCall | None) -> Ref[Any]:
        self._inboxes.process.check_open("messages cannot be used")
        begun = self._inboxes.begin(f"{operation} of {self._group}", what, call)
        if operation == "isend":
            # It goes on if its ref is dropped.
            self._sending.add(begun)
            state_of(begun).watch(lambda _: self._sending.discard(begun), interested=True)
        return begun

    async def send(self, value: Any, to: int, tag: Tag) -> None:
        self._check_rank(to)
        _check_tag(tag)
        member = self._members[to]
        try:
            source = self._numbers[self._rank], self._within()
            await self._inboxes.send(self._group, member, source, tag, value)
        except (ActorDied, PeerLost) as error:
            who = f"{member.label}, rank {to} of {self._group}"
            if not _is_absence(error):
                add_note(error, f"a message was for {who}")
                raise
            stopped = ActorDied(f"{who}, was stopped", executed=False)
            stopped.actor = member.label
            raise stopped from None

    async def receive(self, source: int | None, tag: Tag | None) -> tuple[Message, int | None]:
        if source is not None:
            self._check_rank(source)
        if tag is not None:
            _check_tag(tag)
        me = self._numbers[self._rank]
        ranks = range(len(self._members)) if source is None else (source,)
        senders = {self._numbers[rank]: self._members[rank] for rank in ranks if rank != self._rank}
        wish = Wish(None if source is None else self._numbers[source], tag, self._within())
        message = await self._inboxes.receive(self._group, me, wish, senders)
        return message, self._ranks.get(message.source)

    def limit(self, messages: int, nbytes: int) -> None:
        self._inboxes.limit(self._group, self._numbers[self._rank], messages, nbytes)

    async def finish(self) -> None:
        # So no sender waits for room.
        self.limit(sys.maxsize, sys.maxsize)
        for sent in list(self._sending):
            await sent.ready()
        self._inboxes.end(self._group, self._numbers[self._rank])

    def close(self, error: DaftError) -> None:
        self._inboxes.drop(self._group, self._numbers[self._rank], error)

    def _within(self) -> Hashable:
        return belongs_to(current_call.get()) if self._by_calls else None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self._members):
            raise ValueError(f"{self._group} has ranks from 0 to {len(self._members) - 1}, not {rank}")


def _check_tag(tag: object) -> None:
    if not isinstance(tag, int | str):
        raise TypeError(f"a tag is a number or a string, not {tag!r}")
