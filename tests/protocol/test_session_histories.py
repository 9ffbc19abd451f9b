"""Calls that are submitted, prepared, withdrawn and answered in any order: none is lost and none is sent twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.connections.codec import FrameDecoder
from aiodaft._protocol.connections.messages import CALL, SKIP, Message
from aiodaft._protocol.connections.session import WINDOW_BYTES, Session
from aiodaft._protocol.ids import CallId, PeerId, serial_of, sibling_ids
from aiodaft.exceptions import Overloaded

MAX_PENDING = 8


def id_of(number: int) -> CallId:
    """The id of a call: each second one belongs to a call of a group."""
    return sibling_ids(CallId(number), 3)[1] if number % 2 else CallId(number)


def call(number: int) -> Message:
    return (CALL, id_of(number), 16, "method", ())


def make_session(window: int) -> Session[str]:
    """One end of a conversation, with its greeting sent."""
    one: Session[str] = Session(PeerId("a"), 100, remote=PeerId("b"), max_pending=MAX_PENDING, window=window)
    one.data_to_send()
    return one


def sent(one: Session[str]) -> list[int]:
    """Numbers of the calls, and negative ones of the runs, that went out since the last time."""
    messages = FrameDecoder().feed(one.data_to_send())
    return [serial_of(message[1]) if message[0] == CALL else -message[1] for message in messages]


class AnyHistory(RuleBasedStateMachine):
    """Calls are submitted, provided, withdrawn and answered in any order; a model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.one = make_session(window=3)
        self.window = self.base = 3
        self.next = 0
        # The waiting calls, in order: the cost of each, or None while it is prepared. Runs have negative numbers.
        self.waiting: dict[int, int | None] = {}
        self.runs = 0
        self.flying: dict[int, int] = {}
        # The runtime's own calls that wait, with the calls that were being prepared before them; and those sent.
        self.own: dict[int, set[int]] = {}
        self.own_flying: list[int] = []
        self.over: set[int] = set()
        self.submitted: list[int] = []
        self.went: list[int] = []
        self.answers = 0
        self.stalled = False

    def _collect(self) -> None:
        for number in sent(self.one):
            if number in self.own:
                assert number == next(iter(self.own)), "not in order"
                assert not self.own.pop(number) & self.unprepared
                self.own_flying.append(number)
                continue
            assert number == next(iter(self.waiting)), "not in order"
            cost = self.waiting.pop(number)
            if number < 0:
                continue
            assert cost is not None
            assert len(self.flying) < self.window
            assert not self.flying_bytes or self.flying_bytes + cost <= WINDOW_BYTES or self.stalled
            self.flying[number] = cost
            self.went.append(number)

    @property
    def unprepared(self) -> set[int]:
        return {number for number, cost in self.waiting.items() if cost is None}

    @property
    def flying_bytes(self) -> int:
        return sum(self.flying.values())

    @rule(
        costs=st.lists(st.sampled_from([0, 0, 0, 1, WINDOW_BYTES // 3, WINDOW_BYTES, 2 * WINDOW_BYTES]), max_size=4),
        ready=st.sampled_from([True, True, False]),
    )
    def submit(self, costs: list[int], ready: bool) -> None:
        for cost in costs:
            self.submit_one(cost if ready else None)

    def submit_one(self, cost: int | None) -> None:
        number, self.next = self.next, self.next + 1
        pending = len(self.waiting_calls) + len(self.flying)
        self.waiting[number] = cost
        try:
            self.one.submit(id_of(number), f"call {number}", None if cost is None else call(number), cost or 0)
        except Overloaded:
            del self.waiting[number]
            assert pending == MAX_PENDING
        else:
            self.submitted.append(number)
            assert pending < MAX_PENDING
        self._collect()

    @rule()
    def submit_own(self) -> None:
        number, self.next = self.next, self.next + 1
        self.own[number] = self.unprepared
        self.submitted.append(number)
        self.one.submit_own(id_of(number), f"call {number}", call(number))
        self._collect()

    @precondition(lambda self: self.own_flying)
    @rule(data=st.data())
    def answer_own(self, data: st.DataObject) -> None:
        self.answer_own_now(data.draw(st.sampled_from(self.own_flying)))

    @property
    def waiting_calls(self) -> list[int]:
        return [number for number in self.waiting if number >= 0]

    @rule()
    def line_up(self) -> None:
        """A run goes behind the calls that wait, and needs no place in the window."""
        self.runs += 1
        self.waiting[-self.runs] = 0
        self.one.line_up((SKIP, self.runs, 0))
        self._collect()

    @precondition(lambda self: None in self.waiting.values())
    @rule(data=st.data(), cost=st.sampled_from([0, 1, WINDOW_BYTES // 2]))
    def provide(self, data: st.DataObject, cost: int) -> None:
        number = data.draw(st.sampled_from([number for number, known in self.waiting.items() if known is None]))
        self.provide_now(number, cost)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.submitted))
        waits = number in self.waiting or number in self.own
        assert self.one.withdraw(id_of(number)) is waits
        if waits:
            self.waiting.pop(number, None)
            self.own.pop(number, None)
            self.over.add(number)
        self._collect()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.answer_now(data.draw(st.sampled_from(sorted(self.flying))))

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        assert self.one.settle(id_of(data.draw(st.sampled_from(sorted(self.over))))) is None
        self._collect()

    @rule()
    def look_for_stall(self) -> None:
        self.stalled = not self.answers
        self.window = min(self.window * 2, MAX_PENDING) if self.stalled else self.base
        self.answers = 0
        assert self.one.look_for_stall() is bool(self.one.waiting)
        self._collect()

    @invariant()
    def nothing_is_lost_or_sent_twice(self) -> None:
        assert len(set(self.went)) == len(self.went)
        assert self.went == sorted(self.went)
        assert set(map(serial_of, self.one.calls)) == {*self.waiting_calls, *self.flying, *self.own, *self.own_flying}
        assert self.one.waiting == len(self.waiting_calls)

    @invariant()
    def what_may_go_has_gone(self) -> None:
        if self.own:
            assert next(iter(self.own.values())) & self.unprepared
        if self.waiting:
            number, cost = next(iter(self.waiting.items()))
            assert number >= 0
            if len(self.flying) >= self.window:
                return
            assert cost is None or (self.flying and self.flying_bytes + cost > WINDOW_BYTES)

    def teardown(self) -> None:
        """After any events, everything ends well once all calls are prepared and answered."""
        for number in [number for number, cost in self.waiting.items() if cost is None]:
            self.provide_now(number, 0)
        while self.flying:
            self.answer_now(next(iter(self.flying)))
        while self.own_flying:
            self.answer_own_now(self.own_flying[0])
        assert (self.waiting, self.own, self.one.calls, self.one.waiting) == ({}, {}, {}, 0)

    def provide_now(self, number: int, cost: int) -> None:
        self.waiting[number] = cost
        self.one.provide(id_of(number), call(number), cost)
        self._collect()

    def answer_now(self, number: int) -> None:
        del self.flying[number]
        self.over.add(number)
        self.answers += 1
        assert self.one.settle(id_of(number)) == f"call {number}"
        self._collect()

    def answer_own_now(self, number: int) -> None:
        self.own_flying.remove(number)
        self.over.add(number)
        assert self.one.settle(id_of(number)) == f"call {number}"
        self._collect()


def test_no_history_loses_a_call_or_sends_one_twice() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=100, stateful_step_count=40),
    )
