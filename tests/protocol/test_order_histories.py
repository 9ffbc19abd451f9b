"""Each actor gets everything in the order of submission, for any times of readiness and withdrawal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.calls.outgoing import Order

_ACTORS: Final = ["a", "b", "c"]
# Entries that are ready and not answered, of which there may be so many.
_ROOM: Final = 2


@dataclass(eq=False)
class Entry:
    """A call, or a run, which needs room, too."""

    history: AnyHistory
    number: int
    lanes: tuple[str, ...]
    prepared: bool
    sent: bool = False
    withdrawn: bool = False

    @property
    def is_run(self) -> bool:
        return len(self.lanes) > 1

    @property
    def waits(self) -> bool:
        return not self.sent and not self.withdrawn

    def may_go(self) -> bool:
        return self.prepared and (not self.is_run or len(self.history.running) < _ROOM)


class AnyHistory(RuleBasedStateMachine):
    """Submits as the runtime does: an entry that nothing holds up and that may go is sent without entering."""

    def __init__(self) -> None:
        super().__init__()
        self.order: Order[Entry] = Order()
        self.entries: list[Entry] = []
        self.running: list[Entry] = []

    def send(self, entry: Entry) -> None:
        assert entry.waits
        assert not [
            other
            for other in self.entries[: entry.number]
            if other.waits and not set(other.lanes).isdisjoint(entry.lanes)
        ], "overtook"
        entry.sent = True
        if entry.is_run:
            self.running.append(entry)

    def look_again(self, lanes: tuple[str, ...]) -> None:
        for entry in self.order.ready(lanes):
            self.send(entry)

    @rule(lanes=st.sets(st.sampled_from(_ACTORS), min_size=1), prepared=st.booleans())
    def submit(self, lanes: set[str], prepared: bool) -> None:
        entry = Entry(self, len(self.entries), tuple(sorted(lanes)), prepared)
        self.entries.append(entry)
        if self.order.holds_up(entry.lanes) or not entry.may_go():
            self.order.enter(entry)
        else:
            self.send(entry)

    @precondition(lambda self: any(entry.waits and not entry.prepared for entry in self.entries))
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([one for one in self.entries if one.waits and not one.prepared]))
        entry.prepared = True
        self.look_again(entry.lanes)

    @precondition(lambda self: any(entry.waits for entry in self.entries))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([one for one in self.entries if one.waits]))
        self.order.leave(entry)
        entry.withdrawn = True
        self.look_again(entry.lanes)

    @precondition(lambda self: any(entry.waits for entry in self.entries))
    @rule(data=st.data(), lanes=st.sets(st.sampled_from(_ACTORS), min_size=1))
    def move(self, data: st.DataObject, lanes: set[str]) -> None:
        entry = data.draw(st.sampled_from([one for one in self.entries if one.waits]))
        before, after = entry.lanes, tuple(sorted(lanes))
        self.order.move(entry, after)
        entry.lanes = after
        self.look_again((*before, *after))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_a_run(self, data: st.DataObject) -> None:
        self.running.remove(data.draw(st.sampled_from(self.running)))
        self.look_again(tuple(_ACTORS))

    @invariant()
    def what_waits_is_not_ready_or_stands_behind_something(self) -> None:
        for entry in self.entries:
            if entry.waits and entry.may_go():
                assert any(
                    other.waits and not set(other.lanes).isdisjoint(entry.lanes)
                    for other in self.entries[: entry.number]
                ), f"{entry.number} was forgotten"

    def teardown(self) -> None:
        """Once everything is prepared and runs end, nothing waits for anything else."""
        for entry in self.entries:
            entry.prepared = True
        self.look_again(tuple(_ACTORS))
        while self.running:
            self.running.pop()
            self.look_again(tuple(_ACTORS))
        assert not any(entry.waits for entry in self.entries)
        assert self.order.lanes == {}


def test_no_history_lets_an_entry_overtake_another_or_forgets_one() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=100, stateful_step_count=40),
    )
