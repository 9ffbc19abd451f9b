"""The consumer's end of a stream: items arrive as far as there is credit, and are taken one by one.

`_protocol.objects.value` has its states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Consumption, Phase
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import RefHost, RefState, release_inputs
from aiodaft._runtime.platform.tasks import current_task, shield_from_anyio
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft.exceptions import ActorDied, DaftError, RuntimeClosed

# An encoded item, a task that fetches one, or (in a tuple) an object of this process.
Item: TypeAlias = ReceivedValue | asyncio.Task[ReceivedValue] | tuple[Any]


class StreamState:
    def __init__(self, objects: RefHost, number: CallId, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = number
        self.label = label
        self.connection: Connection | None = None
        self.inputs: list[RefState] | None = None
        self.consumption: Consumption[Item] = Consumption()
        self._changed: asyncio.Future[None] | None = None
        self._watchers: list[Callable[[BaseException | None], object]] = []

    def on_plain(self, value: Any = None) -> None:
        self._end(None)

    # Never sent: streams give items.
    on_result = on_stored = on_plain

    def on_item(self, item: Item) -> None:
        if self.consumption.add(item):
            self._wake()

    def on_error(self, error: BaseException) -> None:
        self._end(error)

    def on_lost(self, error: DaftError) -> None:
        self._end(error)

    def on_away(self, remote: PeerId) -> None:
        self._end(ActorDied("the actor is in another process now", executed=False))

    def _end(self, error: BaseException | None) -> None:
        if not self.consumption.end(error):
            return
        release_inputs(self, error)
        if error is not None and self.process.recorder is not None:
            self.process.recorder.add(trace.failed((self.process.id, self.number), trace.outcome_of(error)))
        for watcher in self._watchers:
            self.process.loop.call_soon(watcher, error)
        self._watchers.clear()
        self._wake()

    def watch(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call back once the producer has ended, with its error; on the loop, never within this call."""
        if not self.process.is_here:
            self.process.call_soon(partial(self.watch, callback))
        elif self.consumption.is_over:
            self.process.loop.call_soon(callback, self.consumption.error)
        else:
            self._watchers.append(callback)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _wait_change(self) -> None:
        self.process.check_open(f"{self.label} cannot be awaited")
        if self._changed is None:
            self._changed = self.process.loop.create_future()
        # Several tasks may wait; cancelling one must not wake the others.
        await asyncio.shield(self._changed)

    async def next_item(self) -> Any:
        """The next item.

        Raises:
            StopAsyncIteration: There are no more.
            RuntimeError: The loop over the stream was left.
            BaseException: The error of the producer, after its last item.
        """
        stream = self.consumption
        if stream.left is not None:
            hint = "to take items one by one, use `await anext(stream)`"
            raise RuntimeError(f"{self.label}: the stream ended because {stream.left}; {hint}")
        stream.taking += 1
        try:
            while (item := stream.first()) is None:
                if stream.is_used_up:
                    raise stream.why_no_more()
                await self._wait_change()
            stream.opening = True
            try:
                value = await self._open(item)
            except Exception:
                # The item counts as taken: a consumer that goes on must not run out of credit.
                self._taken(item)
                raise
            else:
                self._taken(item)
                return value
            finally:
                stream.opening = False
                self._wake()
        finally:
            stream.taking -= 1

    async def _open(self, item: Item) -> Any:
        if isinstance(item, tuple):
            return item[0]
        if isinstance(item, ReceivedValue):
            received = item
        else:
            # Not awaited: the cancellation of that task must not look like one of the consumer.
            await asyncio.wait([item])
            if item.cancelled():
                raise RuntimeClosed(f"an item of {self.label} cannot be had: {self.process.closed}")
            received = item.result()
        return await self.objects.store.decode(received, refs=received.refs)

    def _taken(self, item: Item) -> None:
        credit = self.consumption.take(item)
        if credit and self.connection is not None:
            self.connection.send(m.credit(self.number, credit))
        elif credit:
            self.objects.owner.credit_local(self.number, credit)

    def loop(self) -> StreamLoop:
        loop = StreamLoop(self)
        self.consumption.begin_loop(loop)
        return loop

    def loop_left(self, loop: StreamLoop, why: str) -> None:
        """An `async for` is over. Safe in any thread, also while garbage is collected. Idempotent."""
        if self.consumption.end_loop(loop, why):
            self.process.call_soon(partial(self._end_loop, loop))

    def _end_loop(self, loop: StreamLoop) -> None:
        loop.follow(None)
        if self.consumption.left is not None:
            self._cancel()

    async def aclose(self) -> None:
        """End the producer and wait for its cleanup, at most for the grace time."""
        self._cancel()
        with shield_from_anyio(), suppress(TimeoutError):
            async with asyncio.timeout(self.process.grace):
                while not self.consumption.is_over:
                    await self._wait_change()
        self._end(None)

    def handle_dropped(self) -> None:
        if self.consumption.phase is Phase.OPEN:
            self.process.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.consumption.leave():
            return
        if self.connection is None:
            self.objects.owner.cancel_local(self.number)
        elif self.connection.withdraw(self.number):
            self._end(None)
        else:
            self.connection.send(m.cancel(self.number))


class StreamLoop:
    def __init__(self, stream: StreamState) -> None:
        self._stream = stream
        self._task: asyncio.Task[Any] | None = None

    def next_item(self) -> Coroutine[Any, Any, Any]:
        task = current_task(self._stream.process.loop)
        if task is not self._task:
            self.follow(task)
        return self._stream.next_item()

    def follow(self, task: asyncio.Task[Any] | None) -> None:
        """The steps of one async generator may be run by different tasks."""
        if self._task is not None:
            self._task.remove_done_callback(self._task_ended)
        self._task = task
        if task is not None:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        # Not `exception()`, which would mark the error as seen. A task that returns something ran one step of a
        # generator, and another task may run the next.
        if task._result is None:  # type: ignore[attr-defined]  # private
            self._stream.loop_left(self, "the task that ran the `async for` over it ended")

    def leave(self) -> None:
        self._stream.loop_left(self, "the `async for` over it was left")
