"""Calls of one caller start in the order they were made, within the limits of their methods, and none is forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

import pytest

from aiodaft._protocol.calls.mailbox import (
    FETCHING,
    QUEUED,
    WITHDRAWN,
    BoundedMailbox,
    Gate,
    Mailbox,
    Rules,
    Stage,
    check_concurrency,
    check_max_queue,
)
from aiodaft._protocol.ids import PeerId

_numbers: Final = count(1)


@dataclass(eq=False)
class Call:
    """A call, as the mailbox sees it."""

    caller: PeerId
    rules: Rules
    stage: Stage = QUEUED
    behind: bool = False
    begun: bool = False
    last_begun: bool = False
    gate: Gate[Any] | None = None
    # Shown when a test fails.
    number: int = field(default_factory=lambda: next(_numbers))


def call(
    caller: str = "a",
    *,
    name: str = "method",
    on_thread: bool = False,
    ordered: bool = True,
    concurrency: int | None = None,
    ready: bool = True,
    max_queue: int | None = None,
) -> Call:
    return Call(PeerId(caller), Rules(name, on_thread, ordered, concurrency, max_queue), QUEUED if ready else FETCHING)


def started(mailbox: Mailbox[Call], *calls: Call) -> None:
    """Let calls arrive that start at once."""
    for each in calls:
        assert mailbox.arrive(each)


def kept(mailbox: Mailbox[Call], *calls: Call) -> None:
    """Let calls arrive that have to wait."""
    for each in calls:
        assert not mailbox.arrive(each)


# Order.


def test_what_is_ready_starts_at_once() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second = call(), call()
    started(mailbox, first, second)
    assert mailbox.queued == 0
    assert [*mailbox.startable()] == []
    assert not mailbox.finished(first)
    assert not mailbox.finished(second)


def test_the_only_call_that_waits_is_taken_out_when_its_arguments_are_here() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first = call(ready=False)
    kept(mailbox, first)
    assert not mailbox.take_ready(first)
    first.stage = QUEUED
    assert mailbox.take_ready(first)
    assert not mailbox.holds_some


def test_unordered_calls_that_wait_for_arguments_are_not_looked_at_again_and_again() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    calls = [call(ordered=False, ready=False) for _ in range(3)]
    kept(mailbox, *calls)
    running = call(ordered=False)
    started(mailbox, running)
    assert not mailbox.finished(running)
    for one in calls[1], calls[0], calls[2]:
        one.stage = QUEUED
        assert mailbox.take_ready(one)
        assert not mailbox.finished(one)
    assert not mailbox.holds_some


@dataclass
class Doors:
    """Lets in the calls that it is told to."""

    open: set[int] = field(default_factory=set[int])
    asked: list[int] = field(default_factory=list[int])
    began_: list[int] = field(default_factory=list[int])

    def admits(self, entry: Call) -> bool:
        if entry.number not in self.asked:
            self.asked.append(entry.number)
        return entry.number in self.open

    def began(self, entry: Call) -> None:
        self.began_.append(entry.number)


def test_a_gate_decides_about_the_first_calls_of_a_caller_and_holds_up_no_other_caller() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    doors = Doors()
    first, second, plain, third = (call("a", on_thread=True) for _ in range(4))
    for one in first, second, third:
        one.gate = doors
    kept(mailbox, first, second, plain, third)
    started(mailbox, call("b", on_thread=True))
    # Not the one behind a call without a gate.
    assert doors.asked == [first.number, second.number]
    doors.open = {second.number}
    assert [*mailbox.startable()] == [second]
    doors.open |= {first.number, third.number}
    assert [*mailbox.startable()] == [first, plain, third]
    assert doors.began_ == [second.number, first.number, third.number]


def test_an_unordered_call_that_is_ready_waits_for_a_place() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running, waits = call(ordered=False, concurrency=1), call(ordered=False, concurrency=1, ready=False)
    started(mailbox, running)
    kept(mailbox, waits)
    waits.stage = QUEUED
    assert not mailbox.take_ready(waits)
    assert mailbox.finished(running)
    assert [*mailbox.startable()] == [waits]


@pytest.mark.parametrize("other", [call(), call("b", ready=False), call(ordered=False, ready=False)])
def test_with_others_that_wait_a_ready_call_starts_in_its_turn(other: Call) -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first = call(ready=False)
    kept(mailbox, first, other)
    first.stage = QUEUED
    assert not mailbox.take_ready(first)
    assert next(mailbox.startable()) is first


def test_a_ready_call_of_a_bounded_actor_waits_no_more() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(max_queue=1)
    first = call(ready=False)
    assert mailbox.admit(first) is None
    kept(mailbox, first)
    assert mailbox.admit(call()) is not None
    first.stage = QUEUED
    assert mailbox.take_ready(first)
    assert mailbox.admit(call()) is None


def test_a_call_that_waits_for_arguments_holds_up_its_callers_next_ones() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second, third = call(ready=False), call(), call()
    kept(mailbox, first, second, third)
    assert [*mailbox.startable()] == []
    assert mailbox.queued == 3
    first.stage = QUEUED
    assert [*mailbox.startable()] == [first, second, third]
    assert mailbox.queued == 0


def test_different_callers_do_not_hold_each_other_up() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    slow, other = call("a", ready=False), call("b")
    kept(mailbox, slow)
    started(mailbox, other)


def test_an_unordered_call_overtakes() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    kept(mailbox, call(ready=False))
    started(mailbox, call(ordered=False))


def test_an_unordered_call_that_waits_holds_up_no_other_call() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    waits, next_one = call(ordered=False, ready=False), call(ordered=False, ready=False)
    kept(mailbox, waits, next_one)
    started(mailbox, call(), call(ordered=False))
    next_one.stage = QUEUED
    assert [*mailbox.startable()] == [next_one]
    waits.stage = QUEUED
    assert [*mailbox.startable()] == [waits]


def test_a_withdrawn_call_makes_way() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second, loose = call(ready=False), call(), call(ordered=False, ready=False)
    kept(mailbox, first, second, loose)
    first.stage = loose.stage = WITHDRAWN
    assert mailbox.queued == 1
    assert [*mailbox.startable()] == [second]
    assert [*mailbox.startable()] == []
    started(mailbox, call())


# From the loop to the thread and back.


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_call_on_the_other_side_waits_until_the_one_before_has_begun(on_thread: bool) -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second = call(on_thread=on_thread), call(on_thread=not on_thread)
    started(mailbox, first)
    kept(mailbox, second)
    assert mailbox.watching
    first.begun = True
    assert [*mailbox.startable()] == [second]
    assert [*mailbox.startable()] == []
    assert not mailbox.watching


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_call_on_the_same_side_does_not_wait(on_thread: bool) -> None:
    mailbox: Mailbox[Call] = Mailbox()
    started(mailbox, call(on_thread=on_thread), call(on_thread=on_thread))
    assert not mailbox.watching


def test_a_call_on_the_other_side_may_start_at_once_after_one_that_has_begun_or_ended() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first = call(on_thread=True)
    started(mailbox, first)
    first.begun = True
    second = call()
    started(mailbox, second)
    mailbox.finished(first)
    second.begun = True
    mailbox.finished(second)
    started(mailbox, call(on_thread=True))


def test_the_end_of_an_earlier_call_does_not_hide_that_a_later_one_has_not_begun() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second, third = call(), call(), call(on_thread=True)
    started(mailbox, first, second)
    first.begun = True
    assert not mailbox.finished(first)
    kept(mailbox, third)
    second.begun = True
    assert [*mailbox.startable()] == [third]


def test_sides_do_not_matter_between_callers_or_without_order() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    started(mailbox, call("a", on_thread=True), call("b"), call("a", ordered=False))
    kept(mailbox, call("a"))


def test_it_keeps_watching_while_a_call_has_to_begin() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    firsts = [call(caller, on_thread=True) for caller in "ab"]
    seconds = [call(caller) for caller in "ab"]
    started(mailbox, *firsts)
    kept(mailbox, *seconds)
    firsts[1].begun = True
    assert [*mailbox.startable()] == [seconds[1]]
    assert mailbox.watching
    firsts[0].begun = True
    assert [*mailbox.startable()] == [seconds[0]]
    assert [*mailbox.startable()] == []
    assert not mailbox.watching


# Limits of running calls.


def test_concurrency_bounds_the_calls_of_one_method() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    calls = [call(concurrency=2) for _ in range(4)]
    started(mailbox, *calls[:2])
    kept(mailbox, *calls[2:])
    assert [*mailbox.startable()] == []
    assert mailbox.finished(calls[1])
    assert [*mailbox.startable()] == [calls[2]]
    assert mailbox.finished(calls[0])
    assert [*mailbox.startable()] == [calls[3]]
    assert not mailbox.finished(calls[2])
    assert not mailbox.finished(calls[3])


def test_concurrency_counts_all_callers_and_each_method_by_itself() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running = call("a", name="x", concurrency=1)
    started(mailbox, running, call("a", name="y", concurrency=1))
    waits = call("b", name="x", concurrency=1)
    kept(mailbox, waits)
    assert mailbox.finished(running)
    assert [*mailbox.startable()] == [waits]


def test_a_method_at_its_limit_holds_up_its_callers_next_calls_only() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running, waits, behind = call("a", name="x", concurrency=1), call("a", name="x", concurrency=1), call("a", name="y")
    started(mailbox, running)
    kept(mailbox, waits, behind)
    started(mailbox, call("b", name="y"))
    assert mailbox.finished(running)
    assert [*mailbox.startable()] == [waits, behind]


def test_unordered_calls_are_bounded_and_taken_in_turn() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    calls = [call(ordered=False, concurrency=1) for _ in range(3)]
    started(mailbox, calls[0])
    kept(mailbox, *calls[1:])
    assert mailbox.finished(calls[0])
    assert [*mailbox.startable()] == [calls[1]]
    assert mailbox.finished(calls[1])
    assert [*mailbox.startable()] == [calls[2]]


def test_a_caller_with_many_calls_does_not_starve_another() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running = call("greedy", concurrency=1)
    started(mailbox, running)
    kept(mailbox, call("greedy", concurrency=1), call("greedy", concurrency=1))
    modest = call("modest", concurrency=1)
    kept(mailbox, modest)
    # The greedy caller always has two more calls in its lane.
    taken: list[Call] = []
    while len(taken) < 3:
        assert mailbox.finished(running)
        (running,) = mailbox.startable()
        taken.append(running)
        kept(mailbox, call("greedy", concurrency=1))
    assert modest in taken


# Ending.


def test_draining_takes_out_what_waits_and_was_not_withdrawn() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running = call(concurrency=1)
    first, second, loose = call(ready=False), call(), call(ordered=False, ready=False)
    started(mailbox, running)
    kept(mailbox, first, second, loose)
    first.stage = WITHDRAWN
    assert mailbox.drain() == [second, loose]
    assert mailbox.queued == 0
    assert mailbox.drain() == [*mailbox.startable()] == []
    assert not mailbox.finished(running)


# Calls that wait for others.


def test_a_call_waits_for_the_first_of_its_line_and_that_for_what_fills_its_places() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    running = [call(concurrency=2), call(concurrency=2)]
    other_method = call(name="other")
    started(mailbox, *running, other_method)
    first, second, unordered = call(concurrency=2), call(name="free"), call("b", concurrency=2, ordered=False)
    kept(mailbox, first, second, unordered)
    assert mailbox.ahead_of(second, list) == [first]
    for waiting in (first, unordered):
        assert mailbox.ahead_of(waiting, lambda: [*running, other_method]) == running
        # One of them is out of sight: it is not known whether it goes on.
        assert mailbox.ahead_of(waiting, lambda: running[:1]) == []
    assert mailbox.in_the_way(lambda: running) == [*running, *running]


def test_a_call_that_waits_for_its_arguments_waits_for_no_call_here_and_others_wait_for_it() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    first, second = call(ready=False), call()
    kept(mailbox, first)
    assert mailbox.in_the_way(list) == []
    kept(mailbox, second)
    assert mailbox.ahead_of(first, list) == []
    assert mailbox.in_the_way(list) == [first]


def test_a_call_waits_for_the_one_before_it_that_the_thread_has_not_taken_up() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    queued, behind = call(on_thread=True), call()
    started(mailbox, queued)
    kept(mailbox, behind)
    assert mailbox.ahead_of(behind, list) == mailbox.in_the_way(list) == [queued]
    queued.begun = True
    assert mailbox.ahead_of(behind, list) == []


def test_a_call_waits_for_the_last_step_of_a_row_of_steps_before_it() -> None:
    mailbox: Mailbox[Call] = Mailbox()
    row, behind = call(), call()
    row.rules = replace(row.rules, segment=True)
    started(mailbox, row)
    row.begun = True
    kept(mailbox, behind)
    assert mailbox.ahead_of(behind, list) == mailbox.in_the_way(list) == [row]
    row.last_begun = True
    assert mailbox.ahead_of(behind, list) == []
    assert [*mailbox.startable()] == [behind]


# Limits of waiting calls.


def admitted(mailbox: BoundedMailbox[Call], *calls: Call) -> None:
    """Let calls come in that the mailbox takes."""
    for each in calls:
        assert mailbox.admit(each) is None
        mailbox.arrive(each)


def test_a_call_that_finds_too_many_waiting_is_refused() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(2)
    running, *waiting = [call(caller, concurrency=1) for caller in "abc"]
    admitted(mailbox, running, *waiting)
    assert mailbox.admit(call("d", name="other")) == "max_queue=2, and so many calls wait there already"
    assert mailbox.finished(running)
    assert next(mailbox.startable()) is waiting[0]
    admitted(mailbox, call("d", concurrency=1))
    assert mailbox.admit(call("a")) is not None


def test_calls_that_have_started_do_not_wait() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(1)
    admitted(mailbox, *(call() for _ in range(5)))


def test_a_bound_of_one_method_counts_its_calls_alone() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(None)
    bounded = [call(name="bounded", concurrency=1, max_queue=1) for _ in range(3)]
    admitted(mailbox, bounded[0], bounded[1], *(call(concurrency=1) for _ in range(5)))
    assert mailbox.admit(bounded[2]) == "max_queue=1, and so many calls of this method wait there already"
    assert mailbox.admit(call(name="free")) is None


def test_the_call_that_has_the_thread_does_not_wait_and_those_behind_it_do() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(1)
    # None of them has begun: the thread is still waking up.
    first, second, third = (call(caller, on_thread=True) for caller in "abc")
    admitted(mailbox, first, second)
    assert mailbox.admit(third) is not None
    first.begun = True
    assert mailbox.admit(third) is not None
    mailbox.finished(first)
    admitted(mailbox, third)
    assert mailbox.admit(call("d", on_thread=True)) is not None


def test_withdrawn_calls_do_not_wait() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(1)
    running, waits, on_thread, behind = call(concurrency=1), call(concurrency=1), call(on_thread=True), call()
    admitted(mailbox, running, waits)
    waits.stage = WITHDRAWN
    admitted(mailbox, on_thread)
    on_thread.stage = WITHDRAWN
    admitted(mailbox, behind)


def test_a_call_that_waits_for_its_arguments_counts_and_one_that_was_not_admitted_does_not() -> None:
    mailbox: BoundedMailbox[Call] = BoundedMailbox(1)
    step, unready = call("graph", ready=False), call("a", ready=False)
    kept(mailbox, step)
    admitted(mailbox, unready)
    assert mailbox.admit(call("b")) is not None


def test_limits_are_for_methods_that_can_have_them() -> None:
    assert check_max_queue(None, "Model.f") is None
    for number in (None, 1, 5):
        check_concurrency(number, "Model.f", on_thread=False)
    check_concurrency(None, "Model.f", on_thread=True)
    with pytest.raises(TypeError, match="is for async def"):
        check_concurrency(1, "Model.f", on_thread=True)
