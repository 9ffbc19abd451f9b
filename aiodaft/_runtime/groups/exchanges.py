"""The exchanges of a member in one block: collectives and messages of all members, or of some, in any thread.

If the members share memory, a plan carries out the operations of the block in order; each is an exchange of the plan.
Those that a plan has not begin by their key, when the members have agreed on them in the plan. A thread that waits for
an operation carries out those before it; else a thread of the block does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from aiodaft._protocol.groups.roster import Roster, Steps
from aiodaft._runtime.actors.host import Standing, changed
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, current_call
from aiodaft._runtime.groups.collectives import Reducer
from aiodaft._runtime.groups.inboxes import Inboxes, Mail
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.groups.line import Planning
from aiodaft._runtime.groups.meeting_place import Part, target_of_member
from aiodaft._runtime.groups.planned import Exchange, Planned
from aiodaft._runtime.serialization.encoded import is_dense_tensor
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import CallCancelled, ResourceExhausted
from aiodaft.ref import Ref

# An exchange of so many bytes needs a member once: the others do not wait for it when it has begun.
_SHORT: Final = 1 << 17


class Operation(Future[Any]):
    """An operation of a group, as a future for any thread and for the loop.

    Args:
        finish: Takes the result.
        by_key: Begins one that the plan does not have; `finish` takes that result.
    """

    def __init__(
        self,
        operations: Operations,
        exchange: Exchange[Any],
        finish: Callable[[Any], Any],
        by_key: Callable[[], Ref[Any]] | None,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        # The plan is done with it.
        self.is_past = False
        self._operations = operations
        self._finish = finish
        self._by_key = by_key
        self._ref: Ref[Any] | None = None

    def result(self, timeout: float | None = None) -> Any:
        if super().done():
            return super().result()
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{self.exchange.title} would block the event loop of this thread: wait in another one")
        if timeout is None:
            self._operations.carry_out(self)
        else:
            self._operations.carry_out_soon()
        return super().result(timeout)

    def done(self) -> bool:
        if not super().done():
            self._operations.carry_out_soon()
        return super().done()

    def __await__(self) -> Generator[Any, None, Any]:
        self._operations.carry_out_soon()
        return asyncio.wrap_future(self).__await__()

    def complete(self) -> None:
        self.set_running_or_notify_cancel()
        try:
            value = self.exchange.result()
            if self._by_key is not None:
                # Kept: one that nothing refers to is given up.
                self._ref = self._by_key()
                self._ref.add_done_callback(self._take)
                return
            self._finish(value)
        except BaseException as error:  # noqa: BLE001 - the one that waits gets it
            self.set_exception(error)
        else:
            self.set_result(None)

    def _take(self, ref: Ref[Any]) -> None:
        error = ref.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)


class Operations:
    """The operations of one group, in their order; `executor` has a thread for those that no thread waits for."""

    def __init__(self, plan: Planned, executor: Executor) -> None:
        self.plan = plan
        self._executor = executor
        self._waiting: deque[Operation] = deque()
        self._turn = threading.Lock()

    def begin(
        self,
        operation: str,
        value: Any,
        finish: Callable[[Any], Any],
        op: Any,
        lengths: tuple[int, ...] | None,
        by_key: Callable[[], Ref[Any]],
        out: Any,
    ) -> Operation:
        exchange = self._planned(operation, value, op, lengths, out)
        if exchange is None:
            begun = Operation(self, self.plan.barrier(operation), finish, by_key)
        else:
            begun = Operation(self, exchange, finish, None)
        self._waiting.append(begun)
        is_short = exchange is not None and operation != "all_to_all" and value.nbytes <= _SHORT
        if not self._start(begun) or not is_short:
            self.carry_out_soon()
        return begun

    def carry_out(self, last: Operation) -> None:
        while not last.is_past:
            with self._turn:
                if not last.is_past:
                    self._carry_out_first()

    def carry_out_soon(self) -> None:
        if self._waiting:
            # In the call of this thread: the exchange ends with it.
            self._executor.submit(copy_context().run, self._carry_out_all)

    def _carry_out_all(self) -> None:
        while self._waiting:
            with self._turn:
                if self._waiting:
                    self._carry_out_first()

    def _carry_out_first(self) -> None:
        first = self._waiting[0]
        first.complete()
        self._waiting.popleft()
        first.is_past = True

    def _start(self, operation: Operation) -> bool:
        if asyncio._get_running_loop() is not None or self._waiting[0] is not operation:
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if not operation.is_past:
                operation.exchange.start()
        finally:
            self._turn.release()
        return True

    def _planned(
        self, operation: str, value: Any, op: Any, lengths: tuple[int, ...] | None, out: Any
    ) -> Exchange[Any] | None:
        if operation == "all_to_all":
            kinds = {one.dtype if is_dense_tensor(one) and not one.is_quantized else None for one in value}
            return self.plan.all_to_all(value) if len(kinds) == 1 and None not in kinds else None
        if not is_dense_tensor(value) or value.is_quantized or callable(op):
            return None
        match operation:
            case "all_reduce":
                return self.plan.all_reduce(value, op, out=out)
            case "all_gather":
                return self.plan.all_gather(value, out=out)
            case "reduce_scatter":
                return self.plan.reduce_scatter(value, op, lengths=lengths, out=out)
        return None


# The value that members bring to the last collective of a group.
_END: Final = "the end of the block"

Finish = Callable[[Any], Any]


class Exchanges:
    """The exchanges of one member in one block, and their end.

    Args:
        steps: By which the members in the block are a part of the group.
    """

    def __init__(self, hosted: HostedActor, standing: Standing, steps: Steps, block: str) -> None:
        self.process = hosted._process
        self.standing = standing
        self.steps = steps
        self.block = block
        self.opened_in = current_call.get()
        # The reason why nothing is exchanged any more; and the first error of an exchange.
        self.over: Exception | None = None
        self.failed: BaseException | None = None
        self._under_way: WeakSet[Ref[Any]] = WeakSet()
        # Held to change it, in any thread, and to read it.
        self._gate = threading.Lock()
        self._mails: list[Mail] = []
        self._made: list[Among] = []
        self._plans: list[Planned] = []

    def among(self, ranks: Sequence[int], name: str) -> Among:
        everyone, _ = self.standing.roster.narrowed(self.standing.rank, self.steps)
        whole = tuple(ranks) == tuple(range(everyone.size))
        made = Among(self, self.steps if whole else (*self.steps, tuple(ranks)), f"{name} of {self.block}")
        self._made.append(made)
        return made

    async def finish(self) -> None:
        """Meet the members of each group at the end of the block: one that still waits for this one fails with it.

        Raises:
            ValueError: A member is in another collective.
        """
        ends = [one.begin("reduce", _END, lambda _: None, max) for one in self._made]
        await asyncio.gather(*(one.mailing().finish() for one in self._made), *ends)

    def check_open(self) -> None:
        if self.over is not None:
            raise copy_error(self.over)

    def begun(self, ref: Ref[Any]) -> Ref[Any]:
        with self._gate:
            self._under_way.add(ref)
        if self.over is not None:
            ref.cancel(str(self.over))
        return ref

    def mailing(self, mail: Mail) -> Mail:
        self._mails.append(mail)
        return mail

    def planning(self, plan: Planned) -> Planned:
        self._plans.append(plan)
        if self.over is not None:
            plan.end(self.over)
        return plan

    def reason(self, error: BaseException) -> BaseException:
        if self.over is not None:
            return copy_error(self.over)
        self.failed = self.failed or error
        return error

    def end(self, why: Exception) -> None:
        self.over = self.over or why
        with self._gate:
            under_way = list(self._under_way)
        for ref in under_way:
            ref.cancel(str(why))
        for plan in self._plans:
            plan.end(why)

    def close(self) -> None:
        closed = CallCancelled(f"the block {self.block} is over")
        self.end(closed)
        for mail in self._mails:
            mail.close(closed)
        for plan in self._plans:
            plan.close()


class Among:
    """The exchanges of some members in a block, one of them this one; `key` tells them from others of the group."""

    def __init__(self, exchanges: Exchanges, steps: Steps, key: str) -> None:
        self.exchanges = exchanges
        self._steps = steps
        self._key = key
        self._roster: Roster[Any]
        self._roster, self.rank = exchanges.standing.roster.narrowed(exchanges.standing.rank, steps)
        self._keyed = exchanges.process.part(Keyed)
        self._mail: Mail | None = None
        self._operations: Operations | None = None

    async def open_plan(self, executor: Executor) -> None:
        """Have the members use memory that they share, if they do and all have room for it; see `Operations`."""
        line, part = None, self._part("plan", _same)
        meet = partial(self._begin_by_key, "all_gather", finish=_same)
        # All members get that error.
        with suppress(ResourceExhausted):
            line = await self.exchanges.process.part(Planning).open(part, meet)
        if line is not None:
            plan = Planned(self.exchanges.process, self.rank, self._roster.size, line, _never)
            self._operations = Operations(self.exchanges.planning(plan), executor)

    def begin(
        self,
        operation: str,
        value: Any,
        finish: Finish,
        op: Reducer = "sum",
        root: int = 0,
        lengths: tuple[int, ...] | None = None,
        out: Any = None,
    ) -> Ref[Any] | Operation:
        """Begin a collective of the name; those of all members meet in their order.

        A plan has the result in `out`, if there is one, before it is given to `finish`.
        """
        exchanges = self.exchanges
        exchanges.check_open()
        if not exchanges.standing.is_current:
            raise changed(self._roster.id, self._roster.epoch, what=f"this {operation}")
        by_key = partial(self._begin_by_key, operation, value, finish, op, root, lengths)
        if self._operations is None:
            return by_key()
        return self._operations.begin(operation, value, finish, op, lengths, by_key, out)

    def _begin_by_key(
        self,
        operation: str,
        value: Any,
        finish: Finish,
        op: Reducer = "sum",
        root: int = 0,
        lengths: tuple[int, ...] | None = None,
    ) -> Ref[Any]:
        part = self._part(operation, finish, op, root, lengths)
        return self.exchanges.begun(self._keyed.begin(part, value, self._call(), None))

    def _part(
        self,
        operation: str,
        finish: Finish,
        op: Reducer = "sum",
        root: int = 0,
        lengths: tuple[int, ...] | None = None,
    ) -> Part:
        standing = self.exchanges.standing
        return Part(
            operation,
            self._key,
            self._roster,
            self._steps,
            self.rank,
            standing,
            op,
            root,
            None,
            lengths,
            finish,
        )

    def send(self, value: Any, to: int, tag: int) -> Ref[None]:
        return self._post("isend", partial(self.mailing().send, value, to, tag))

    def recv(self, source: int | None, tag: int, finish: Finish) -> Ref[int]:
        mail = self.mailing()

        async def rank() -> int | None:
            message, sender = await mail.receive(source, tag)
            finish(message.value)
            return sender

        return self._post("irecv", rank)

    def _post(self, operation: str, what: Callable[[], Any]) -> Ref[Any]:
        self.exchanges.check_open()
        return self.exchanges.begun(self.mailing().begin(operation, what, self._call()))

    def mailing(self) -> Mail:
        if self._mail is None:
            targets = [target_of_member(member) for member in self._roster.members]
            inboxes = self.exchanges.process.part(Inboxes)
            # An inbox of its own: the code of a member never receives one of these messages.
            self._mail = self.exchanges.mailing(
                Mail(inboxes, f"{self._roster.id} in {self._key}", targets, self.rank, by_calls=False)
            )
        return self._mail

    def _call(self) -> InboundCall | None:
        call = current_call.get() or self.exchanges.opened_in
        return None if call is None or call.answered else call


def _same(value: Any) -> Any:
    return value


def _never(*_: Any) -> Any:
    raise AssertionError("a plan with shared memory meets nowhere")
