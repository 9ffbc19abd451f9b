"""The entries for one actor go out in the order of submission, calls and runs of graphs alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from aiodaft._protocol.calls.outgoing import Order


@dataclass(eq=False)
class Entry:
    """A call, with one lane, or a run."""

    name: str
    lanes: tuple[Hashable, ...]
    ready: bool = True

    def may_go(self) -> bool:
        return self.ready


def waiting(*entries: Entry) -> Order[Entry]:
    order: Order[Entry] = Order()
    for entry in entries:
        order.enter(entry)
    return order


def gone(order: Order[Entry], *lanes: str) -> list[str]:
    return [entry.name for entry in order.ready(lanes)]


def test_nothing_waits_where_everything_goes_at_once() -> None:
    order = waiting()
    assert not order.holds_up(("a", "b"))
    assert gone(order, "a") == []


def test_a_call_goes_behind_a_run_that_waits() -> None:
    run = Entry("run", ("a", "b"), ready=False)
    order = waiting(run, Entry("call of a", ("a",)), Entry("call of b", ("b",)))
    assert order.holds_up(("b",))
    assert not order.holds_up(("c",))
    assert gone(order, "a", "b") == []
    run.ready = True
    assert gone(order, "a") == ["run", "call of a", "call of b"]
    assert order.lanes == {}


def test_a_run_waits_for_its_turn_at_each_of_its_actors() -> None:
    first, second = Entry("first", ("a",), ready=False), Entry("second", ("b",), ready=False)
    order = waiting(first, second, Entry("both", ("a", "b")))
    first.ready = True
    assert gone(order, "a") == ["first"]
    second.ready = True
    assert gone(order, "b") == ["second", "both"]


def test_entries_behind_one_that_leaves_may_go() -> None:
    run = Entry("run", ("a", "b"), ready=False)
    order = waiting(run, Entry("call", ("b",)))
    order.leave(run)
    assert gone(order, "a", "b") == ["call"]


def test_whether_an_entry_may_go_is_asked_only_when_its_turn_has_come() -> None:
    asked: list[str] = []

    class Asked(Entry):
        def may_go(self) -> bool:
            asked.append(self.name)
            return super().may_go()

    run = Asked("run", ("a",), ready=False)
    order = waiting(run, Asked("call", ("a",)))
    assert gone(order, "a") == []
    assert asked == ["run"]


def test_what_changes_while_an_entry_is_sent_comes_after_it() -> None:
    first, second = Entry("first", ("a",)), Entry("second", ("b",), ready=False)
    order = waiting(first, second, Entry("behind", ("a",)))
    sent: list[str] = []
    for entry in order.ready(["a"]):
        if entry is first:
            second.ready = True
            # The one that takes entries out goes on with this.
            assert gone(order, "b") == []
        sent.append(entry.name)
    assert sent == ["first", "second", "behind"]


def test_entries_that_move_to_another_actor_stand_there_where_they_were_submitted() -> None:
    blocker = Entry("blocker", ("b",), ready=False)
    first, both, second = Entry("first", ("a",)), Entry("both", ("a", "b")), Entry("second", ("a",))
    order = waiting(blocker, first, both, second)
    for entry in (first, second):
        order.move(entry, ("b",))
        entry.lanes = ("b",)
    assert gone(order, "a") == []
    blocker.ready = True
    assert gone(order, "b") == ["blocker", "first", "both", "second"]
    assert order.lanes == {}


def test_entries_behind_one_that_moves_away_may_go() -> None:
    run = Entry("run", ("a",), ready=False)
    order = waiting(run, Entry("call", ("a",)))
    order.move(run, ("b",))
    run.lanes = ("b",)
    assert gone(order, "a") == ["call"]
