"""The operations of a process group whose members share memory: its plan carries them out one after the other.

Each is an exchange of the plan. Those that a plan has not begin by their key, when the members have agreed on them in
the plan. A thread that waits for an operation carries out those before it; if no thread waits, one of the block does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextvars import copy_context
from typing import Any, Final

from aiodaft._runtime.groups.planned import Exchange, Planned
from aiodaft._runtime.serialization.tensors import is_dense_tensor
from aiodaft.ref import Ref

# An exchange of so many bytes needs a member once: the others do not wait for it when it has begun.
_SHORT: Final = 1 << 17


class Operation(Future[Any]):
    """An operation of a group, as a future for any thread and for the loop.

    Args:
        operations: Those of the group.
        exchange: Its exchange.
        finish: Takes the result.
        by_key: If the plan does not have it: begins it by its key, and `finish` takes that result.
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
        """Carry it out, in this thread."""
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
    """The operations of one group, in their order.

    Args:
        plan: The plan of its members.
        executor: Has a thread for operations that no thread waits for.
    """

    def __init__(self, plan: Planned, executor: Executor) -> None:
        self.plan = plan
        self._executor = executor
        self._waiting: deque[Operation] = deque()
        # Held to carry out the first one.
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
        """Begin an operation; `by_key` begins one that the plan does not have."""
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
        """Carry out operations up to this one."""
        while not last.is_past:
            with self._turn:
                if not last.is_past:
                    self._carry_out_first()

    def carry_out_soon(self) -> None:
        """Have a thread carry out all operations."""
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
        """Give the others the part of this member, if no operation is before this one."""
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
        """The exchange for an operation, if the plan has it; its result goes to `out`, if there is one."""
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
