"""Any events of calls in any order: each call starts once and in its turn, and none is forgotten."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.calls.mailbox import FETCHING, QUEUED, WITHDRAWN, Gate, Mailbox, Rules, Stage
from aiodaft._protocol.ids import PeerId

_METHODS: Final = [
    Rules("plain"),
    Rules("threaded", on_thread=True),
    Rules("two at a time", concurrency=2),
    Rules("one at a time", on_thread=True, concurrency=1),
    Rules("any order", ordered=False),
    Rules("any order, one at a time", ordered=False, concurrency=1),
]
_CALLERS: Final = [PeerId("a"), PeerId("b")]


@dataclass(eq=False)
class Call:
    """A call, and its fate."""

    caller: PeerId
    rules: Rules
    number: int
    stage: Stage
    behind: bool = False
    begun: bool = False
    last_begun: bool = False
    gate: Gate[Any] | None = None
    started: bool = False
    ended: bool = False

    @property
    def waits(self) -> bool:
        return not self.started and self.stage is not WITHDRAWN


class AnyHistory(RuleBasedStateMachine):
    """The mailbox, and the loop and the thread of an actor around it.

    The actor asks for more only when the mailbox says that there may be more: that is part of the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mailbox: Mailbox[Call] = Mailbox()
        self.calls: list[Call] = []
        # Started calls that the loop and the thread have not taken up; each takes them up in order.
        self.queues: dict[bool, deque[Call]] = {False: deque(), True: deque()}
        self.taken_up: list[Call] = []
        self.running: list[Call] = []

    def start(self, call: Call) -> None:
        assert not call.started, "started twice"
        assert call.stage is QUEUED
        assert call.stage is not WITHDRAWN
        assert not call.rules.ordered or not [
            earlier for earlier in self.lane(call.caller) if earlier.number < call.number and earlier.waits
        ], "overtook"
        call.started = True
        self.queues[call.rules.on_thread].append(call)

    def lane(self, caller: PeerId) -> list[Call]:
        """Calls of one caller that have an order."""
        return [call for call in self.calls if call.caller == caller and call.rules.ordered]

    def look_again(self) -> None:
        for call in self.mailbox.startable():
            self.start(call)

    def end(self, call: Call) -> None:
        call.ended = True
        if self.mailbox.finished(call):
            self.look_again()

    @rule(
        caller=st.sampled_from(_CALLERS),
        rules=st.lists(st.sampled_from(_METHODS), min_size=1, max_size=3),
        ready=st.sampled_from([True, True, False]),
    )
    def arrive(self, caller: PeerId, rules: list[Rules], ready: bool) -> None:
        for each in rules:
            call = Call(caller, each, len(self.calls), QUEUED if ready else FETCHING)
            starts = self.mailbox.arrive(call)
            if starts:
                self.start(call)
            self.calls.append(call)

    @precondition(lambda self: any(call.waits and call.stage is FETCHING for call in self.calls))
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from([call for call in self.calls if call.waits and call.stage is FETCHING]))
        call.stage = QUEUED
        self.look_again()

    @precondition(lambda self: any(not call.begun and call.stage is not WITHDRAWN for call in self.calls))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(
            st.sampled_from([call for call in self.calls if not call.begun and call.stage is not WITHDRAWN])
        )
        call.stage = WITHDRAWN
        if not call.started:
            self.look_again()

    @precondition(lambda self: self.queues[False])
    @rule()
    def begin_on_the_loop(self) -> None:
        self.begin(self.queues[False].popleft())

    @precondition(lambda self: self.queues[True] and not any(call.rules.on_thread for call in self.running))
    @rule()
    def begin_on_the_thread(self) -> None:
        self.begin(self.queues[True].popleft())

    def begin(self, call: Call) -> None:
        call.begun = True
        if call.stage is WITHDRAWN:
            # Cancelled after it was started: it ends when its turn comes, without having run.
            self.end(call)
            return
        self.taken_up.append(call)
        self.running.append(call)
        if self.mailbox.watching:
            self.look_again()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.running))
        self.running.remove(call)
        self.end(call)

    @invariant()
    def calls_of_a_caller_are_taken_up_in_the_order_they_were_made(self) -> None:
        for caller in _CALLERS:
            numbers = [call.number for call in self.taken_up if call.caller == caller and call.rules.ordered]
            assert numbers == sorted(numbers)

    @invariant()
    def no_method_runs_more_often_than_it_allows(self) -> None:
        for name, number in self.under_way().items():
            limit = next(rules.concurrency for rules in _METHODS if rules.name == name)
            assert limit is None or number <= limit

    @invariant()
    def whatever_waits_has_a_reason(self) -> None:
        waiting = [call for call in self.calls if call.waits]
        assert self.mailbox.queued == len(waiting)
        for call in waiting:
            assert self.reason(call), f"{call} was forgotten"

    def under_way(self) -> Counter[str]:
        return Counter(call.rules.name for call in self.calls if call.started and not call.ended)

    def reason(self, call: Call) -> bool:
        limit = call.rules.concurrency
        if call.stage is FETCHING or (limit is not None and self.under_way()[call.rules.name] >= limit):
            return True
        if not call.rules.ordered:
            return False
        return any(
            earlier.waits or (not earlier.begun and earlier.started and earlier.rules.on_thread != call.rules.on_thread)
            for earlier in self.lane(call.caller)
            if earlier.number < call.number
        )

    def teardown(self) -> None:
        """After any events, every call has run, or was withdrawn, once nothing stands in the way."""
        for call in self.calls:
            if call.stage is FETCHING:
                call.stage = QUEUED
        self.look_again()
        while any(self.queues.values()) or self.running:
            for call in list(self.running):
                self.running.remove(call)
                self.end(call)
            for queue in self.queues.values():
                if queue:
                    self.begin(queue.popleft())
        assert [call for call in self.calls if not call.ended and call.stage is not WITHDRAWN] == []
        assert self.mailbox.queued == 0
        assert self.mailbox.drain() == []


def test_no_history_forgets_a_call_or_starts_one_out_of_turn() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=100, stateful_step_count=40),
    )
