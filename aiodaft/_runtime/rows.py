"""Rows: steps of a graph that one actor does one after the other, as one call in its mailbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from aiodaft._protocol.ids import CallId
from aiodaft._protocol.mailbox import Rules
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.plan import Segment, Step
from aiodaft.exceptions import ActorDied
from aiodaft.methods import MethodSpec, Options

from .callers import capture, is_plain
from .failures import add_note, as_call_error
from .flow import NotAtHand, Value
from .incoming import IncomingCall

if TYPE_CHECKING:
    from .arguments import Arguments
    from .graphs import Part, Run
    from .hosting import Cell


class InputFailed(Exception):
    """A step cannot run: one of its arguments is an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Row:
    """What all runs know of a row: its steps, with their methods."""

    def __init__(self, part: Part, segment: Segment) -> None:
        plan = part.plan
        steps = [plan.steps[position] for position in segment.steps]
        self.steps: list[tuple[int, int, Step[Arguments]]] = [
            (position, plan.values[position], step) for position, step in zip(segment.steps, steps, strict=True)
        ]
        self.remote, self.actor = steps[0].actor
        rules = steps[0].rules
        self.cell = part.peer.cells.get(self.actor)
        self.methods = [self._method(step) for step in steps]
        rules = Rules(rules.name, rules.on_thread, rules.ordered, rules.concurrency, row=len(steps) > 1)
        run: Callable[..., Any] = RowCall.run_on_thread if rules.on_thread else RowCall.run_on_loop
        self.spec = MethodSpec(steps[0].label, rules.name, run, Options(rules))
        # Results that somebody outside the row waits for.
        self.leaving = {
            index for _, index, _ in self.steps if plan.sends[index] or index in plan.reports or index in part.waiting
        }

    def _method(self, step: Step[Arguments]) -> MethodSpec:
        if self.cell is None:
            # Every run will say so.
            return MethodSpec(step.label, step.data.method, _missing, Options(step.rules))
        spec = self.cell.find_spec(step.data.method)
        if spec is None:
            raise AttributeError(f"{self.cell.name} has no remote method {step.data.method!r:.80} ({step.line})")
        return spec


class RowCall(IncomingCall):
    """A row in one run, from its run's beginning to its end."""

    def __init__(self, run: Run, row: Row) -> None:
        super().__init__(run, run.id, CallId(0), cast("Cell", row.cell), row.spec, WANT_REPLY, ())
        self.run = run
        self.row = row
        # Steps whose results were given; results that the thread made.
        self._given = 0
        self._batch: deque[Value] = deque()
        self._made: dict[int, Value] = {}

    @property
    def label(self) -> str:
        """The step that runs, or is the next to."""
        return self.row.steps[min(self._given, len(self.row.steps) - 1)][2].label

    def deliver(self) -> None:
        """Put it into its actor's mailbox."""
        cell = self.run.part.peer.cells.get(self.row.actor)
        if cell is None:
            error = ActorDied("the actor was stopped", executed=False)
            self.run.fail(self, error, executed=False)
        else:
            self.args = (self,)
            cell.deliver(self)

    # Running. Called by the cell as if they were methods of the instance.

    @staticmethod
    async def run_on_loop(instance: Any, call: RowCall) -> None:
        """Do the steps; no error of theirs leaves this."""
        # It would keep itself alive.
        call.args = ()
        last = len(call.row.steps) - 1
        for number, (_, index, step) in enumerate(call.row.steps):
            method = call.row.methods[number]
            if last and number == last:
                call.cell.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(number, patient=False)
                except NotAtHand:
                    await call._fetch_own(number)
                    args, kwargs = call._arguments(number, patient=False)
                executed = True
                result = await method.fn(instance, *args, **kwargs)
                if is_plain(result):
                    value = Value(result)
                else:
                    kept = await capture(call.cell, result, step.label, "result", method.transport)
                    await call.cell.peer.store.pack(kept)
                    value = Value.of_kept(kept)
            except InputFailed as failed:
                value = Value.of_error(failed.error, executed=False)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - whatever a method raises is its caller's
                value = call._failure(step, error, executed)
            call._made[index] = value
            call._give(value)

    @staticmethod
    def run_on_thread(instance: Any, call: RowCall) -> None:
        """Do the steps on the actor's thread; no error of theirs leaves this."""
        call.args = ()
        store = call.cell.peer.store
        last = len(call.row.steps) - 1
        for number, (_, index, step) in enumerate(call.row.steps):
            method = call.row.methods[number]
            if last and number == last:
                call.cell.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(number, patient=True)
                except NotAtHand:
                    peer = call.cell.peer
                    asyncio.run_coroutine_threadsafe(call._fetch_own(number), peer.loop).result()
                    args, kwargs = call._arguments(number, patient=True)
                executed = True
                result = method.fn(instance, *args, **kwargs)
                if is_plain(result):
                    value = Value(result)
                else:
                    kept = store.keep_patiently(result, step.label, method.transport)
                    store.pack_here(kept)
                    value = Value.of_kept(kept)
            except InputFailed as failed:
                value = Value.of_error(failed.error, executed=False)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - whatever a method raises is its caller's
                value = call._failure(step, error, executed)
            call._made[index] = value
            call._batch.append(value)
            if number < last and index in call.row.leaving:
                call.cell.thread.to_loop(call.flush)

    async def _fetch_own(self, number: int) -> None:
        """Fetch what a step needs and was made in this process."""
        for value in self._values(number):
            if value.kept is not None:
                await value.fetch_own(self.cell.peer)

    def _arguments(self, number: int, *, patient: bool) -> tuple[Any, Any]:
        store = self.cell.peer.store
        values = self._values(number)
        taken = [value.take(store, patient=patient) for value in values]
        for value in values:
            value.used()
        return self.row.steps[number][2].data.make(store, taken, patient=patient)

    def _values(self, number: int) -> list[Value]:
        position, _, step = self.row.steps[number]
        part = self.run.part
        values: list[Value] = []
        for slot in step.data.slots:
            value = part.outside[position, -slot - 1] if slot < 0 else self._made.get(slot) or self.run.values[slot]
            if value.failure is not None:
                raise InputFailed(
                    value.error_for(step.label, part.plan.labels.get(slot, "a ref from outside the graph"))
                )
            values.append(value)
        return values

    def _failure(self, step: Step[Arguments], error: BaseException, executed: bool) -> Value:
        caught = as_call_error(error, f"raised by {step.label} in {self.cell.where}")
        add_note(caught, f"a step of a graph, captured at {step.line}")
        return Value.of_error(caught, executed=executed)

    # Its results, on the loop.

    def flush(self) -> None:
        """Give what the thread has made."""
        while self._batch:
            self._give(self._batch.popleft())

    def _give(self, value: Value) -> None:
        if self.over:
            # It was given up, and everybody has been told.
            if value.kept is not None:
                value.kept.release()
            return
        _, index, _ = self.row.steps[self._given]
        self._given += 1
        self.run.give(index, value)

    def give_up(self, error: BaseException, *, executed: bool | None) -> None:
        """There will be no more results."""
        value = Value.of_error(error, executed=executed)
        for number in range(self._given, len(self.row.steps)):
            _, index, step = self.row.steps[number]
            if number > self._given:
                before = self.row.steps[number - 1][2].label
                value = Value.of_error(value.error_for(step.label, before), executed=False)
            self.run.give(index, value)
        self.over = True
        self.args = ()


def _missing(*args: Any) -> None:
    raise AssertionError("the actor of this step is gone")
