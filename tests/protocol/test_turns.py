"""However messages travel, the members of a group begin the calls of several callers in one order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.calls.mailbox import FETCHING, QUEUED, STARTED, WITHDRAWN, Mailbox, Rules, Stage
from aiodaft._protocol.groups.turns import STREAK, Asked, Key, Lead, Turns, asked_of
from aiodaft._protocol.ids import CallId, PeerId, roster_at, sibling_ids

OWNER, OTHER, THIRD = map(PeerId, ("owner", "other", "third"))
DEF: Final = Rules("def", on_thread=True)
ONE: Final = Rules("one", concurrency=1)
TWO: Final = Rules("two", concurrency=2)


@dataclass(eq=False)
class Call:
    caller: PeerId
    number: CallId
    rules: Rules
    stage: Stage = QUEUED
    behind: bool = False
    begun: bool = False
    last_begun: bool = False
    gate: Any = None
    attempt: int = 0
    apart: Exception | None = None
    ended: bool = False


class Net:
    """Messages: what one end says to the other comes in order, between different ends in any order."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lanes: dict[Hashable, deque[Callable[[], object]]] = defaultdict(deque)
        self.sent = 0

    def send(self, lane: Hashable, deed: Callable[[], object]) -> None:
        self.lanes[lane].append(deed)
        self.sent += 1

    def step(self) -> bool:
        """Deliver one message; False if there is none."""
        full = [lane for lane, queue in self.lanes.items() if queue]
        if not full:
            return False
        self.lanes[self.random.choice(full)].popleft()()
        return True


class Member:
    """A member: the mailbox of its actor, and what runs there."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.mailbox: Mailbox[Call] = Mailbox()
        self.turns = Turns(OWNER, self)
        self.calls: dict[Key, Call] = {}
        self.running: list[Call] = []
        # In the order in which they started.
        self.started: list[Key] = []

    # As the line to the lead.

    def say(self, deed: Callable[[], object]) -> None:
        self.world.net.send(("to lead", self.rank), lambda: None if self.world.lead is None else deed())

    def ask(self, round_: Hashable, asked: Asked) -> None:
        self.say(lambda: self.world.the_lead.ask(self.rank, round_, asked))

    def ended(self, key: Key) -> None:
        self.say(lambda: self.world.the_lead.ended(self.rank, key))

    def gone(self, key: Key) -> None:
        self.say(lambda: self.world.the_lead.gone(key))

    # The actor.

    def come(self, call: Call) -> None:
        self.calls[asked_of(call).key] = call
        call.gate = self.turns
        if self.mailbox.arrive(call):
            self._start(call)

    def look_again(self) -> None:
        again = True
        while again:
            again = False
            for call in self.mailbox.startable():
                again = True
                self._start(call)

    def _start(self, call: Call) -> None:
        call.stage, call.begun = STARTED, True
        self.running.append(call)
        self.started.append(asked_of(call).key)

    def end(self, call: Call) -> None:
        call.ended = True
        self.running.remove(call)
        self.turns.left(call)
        self.mailbox.finished(call)
        self.look_again()

    def runs(self, key: Key) -> bool:
        """Whether a call has got so far that it takes part in collectives: the thread runs one at a time."""
        call = self.calls.get(key)
        if call is None or call not in self.running:
            return False
        return not call.rules.on_thread or next(one for one in self.running if one.rules.on_thread) is call

    def withdraw(self, key: Key, why: Exception) -> None:
        """The call is cancelled here, or has failed elsewhere."""
        call = self.calls.get(key)
        if call is not None and call.stage in (QUEUED, FETCHING):
            call.apart = why
            call.stage, call.ended = WITHDRAWN, True
            self.turns.left(call)
            self.look_again()


@dataclass
class World:
    """Callers, members and rank 0 as the lead."""

    random: Random
    size: int = 3
    # Whether calls meet in a collective: none ends before all are there.
    meet: bool = True
    lead: Lead | None = None
    epoch: int = 1
    made: dict[Key, Rules] = field(default_factory=dict[Key, Rules])
    apart: set[Key] = field(default_factory=set[Key])

    def __post_init__(self) -> None:
        self.net = Net(self.random)
        self.members = [Member(self, rank) for rank in range(self.size)]
        self.lead = Lead(range(self.size), roster_at(self.epoch), self)

    @property
    def the_lead(self) -> Lead:
        assert self.lead is not None
        return self.lead

    # As the orders of the lead.

    def _tell(self, rank: int, deed: Callable[[Member], object]) -> None:
        def come() -> None:
            deed(self.members[rank])
            self.members[rank].look_again()

        self.net.send(("from lead", rank), come)

    def hold(self, round_: int) -> None:
        def hold(member: Member) -> None:
            held = member.turns.hold(round_)
            member.say(lambda: self.the_lead.held(member.rank, round_, held))

        for rank in range(self.size):
            self._tell(rank, hold)

    def grant(self, key: Key) -> None:
        for rank in range(self.size):
            self._tell(rank, lambda member: member.turns.grant(key))

    def grant_one(self, member: Hashable, key: Key) -> None:
        assert isinstance(member, int)
        self._tell(member, lambda one: one.turns.grant(key))

    def release(self, caller: PeerId) -> None:
        for rank in range(self.size):
            self._tell(rank, lambda member: member.turns.release(caller))

    def open(self) -> None:
        for rank in range(self.size):
            self._tell(rank, lambda member: member.turns.open())

    # Callers.

    def call(
        self, caller: PeerId, rules: Rules, unready: frozenset[int] = frozenset(), epoch: int | None = None
    ) -> Key:
        serial = CallId(len(self.made) + 1)
        numbers = sibling_ids(serial, self.size, roster_at(self.epoch if epoch is None else epoch))
        key = caller, int(serial)
        self.made[key] = rules
        for rank, number in enumerate(numbers):
            call = Call(caller, number, rules, FETCHING if rank in unready else QUEUED)
            self.net.send((caller, rank), lambda rank=rank, call=call: self.members[rank].come(call))  # type: ignore[misc]
        return key

    def make_ready(self, rank: int, key: Key) -> None:
        call = self.members[rank].calls.get(key)
        if call is not None and call.stage is FETCHING:
            call.stage = QUEUED
            self.members[rank].look_again()

    def cancel(self, rank: int, key: Key) -> None:
        """Cancel the call of one member, if it has not begun: its caller tells the others."""
        call = self.members[rank].calls.get(key)
        if call is None or call.stage is not QUEUED:
            return
        why = ValueError("cancelled")
        self.members[rank].withdraw(key, why)
        self.apart.add(key)
        for other in range(self.size):
            if other != rank:
                self.net.send(("told", key[0], other), lambda other=other: self.tell_apart(other, key, why))  # type: ignore[misc]

    def tell_apart(self, rank: int, key: Key, why: Exception) -> None:
        call = self.members[rank].calls.get(key)
        if call is None:
            # It is told again, once it has it.
            self.net.send(("told", key[0], rank), lambda: self.tell_apart(rank, key, why))
            return
        call.apart = why
        self.members[rank].look_again()

    # The world goes on.

    def end_some(self) -> bool:
        """End a call that can end; False if there is none."""
        can: list[tuple[Member, Call]] = []
        for member in self.members:
            for call in member.running:
                key = asked_of(call).key
                alone = not self.meet or call.apart is not None
                there = all(
                    other.calls.get(key) and (other.calls[key].ended or other.runs(key)) for other in self.members
                )
                if member.runs(key) and (alone or there):
                    can.append((member, call))
        if not can:
            return False
        member, call = self.random.choice(can)
        member.end(call)
        return True

    def run(self) -> None:
        """Until nothing more can happen."""
        while True:
            if self.random.random() < 0.7:
                if not self.net.step() and not self.end_some():
                    return
            elif not self.end_some() and not self.net.step():
                return

    @property
    def unended(self) -> list[Key]:
        return [key for key in self.made if not all(one.calls[key].ended for one in self.members if key in one.calls)]


def orders(world: World, rules: Rules) -> list[list[Key]]:
    return [[key for key in member.started if world.made[key] == rules] for member in world.members]


@given(st.integers(0, 1 << 30))
@settings(max_examples=50, deadline=None)
def test_calls_of_several_callers_that_meet_all_end(seed: int) -> None:
    random = Random(seed)
    world = World(random, size=random.randint(2, 4))
    later: list[tuple[int, Key]] = []
    for _ in range(random.randint(2, 40)):
        caller = random.choice([OWNER, OTHER, OTHER, THIRD])
        unready = frozenset(rank for rank in range(world.size) if random.random() < 0.15)
        key = world.call(caller, random.choice([DEF, DEF, ONE, TWO]), unready)
        later += [(rank, key) for rank in unready]
        for _ in range(random.choice([0, 0, 3, 30])):
            if random.random() < 0.8:
                world.net.step()
            else:
                world.end_some()
    world.run()
    # Now the arguments come, in any order.
    random.shuffle(later)
    for rank, key in later:
        world.make_ready(rank, key)
        for _ in range(random.randint(0, 6)):
            world.net.step()
    world.run()
    assert world.unended == []


def test_what_a_free_caller_makes_takes_no_message() -> None:
    world = World(Random(1))
    for _ in range(20):
        world.call(OWNER, DEF)
    sent = world.net.sent
    world.run()
    assert world.net.sent == sent == 60
    assert world.unended == []


def test_a_caller_that_makes_all_calls_for_a_while_takes_no_more_messages() -> None:
    world = World(Random(1))
    for _ in range(STREAK):
        world.call(OTHER, DEF)
        world.run()
    for caller in (OTHER, OTHER):
        world.call(caller, DEF)
        sent = world.net.sent
        world.run()
        assert world.net.sent == sent
    # Another one, and it is held again.
    world.call(OWNER, DEF)
    world.run()
    world.call(OTHER, DEF)
    sent = world.net.sent
    world.run()
    assert world.net.sent > sent
    assert world.unended == []


@pytest.mark.parametrize("free", [False, True])
def test_a_call_that_waits_for_an_argument_holds_up_no_other_caller(free: bool) -> None:
    world = World(Random(1), meet=False)
    if not free:
        world.call(THIRD, DEF)
        world.run()
    unready = world.call(OWNER, DEF, frozenset({1}))
    world.run()
    done = [world.call(OTHER, DEF) for _ in range(3)]
    world.run()
    assert world.unended == [unready]
    assert all(key in member.started for key in done for member in world.members)
    world.make_ready(1, unready)
    world.run()
    assert world.unended == []


@given(st.integers(0, 1 << 30))
@settings(max_examples=50, deadline=None)
def test_calls_that_are_cancelled_or_fail_hold_up_nothing(seed: int) -> None:
    random = Random(seed)
    world = World(random)
    for _ in range(random.randint(2, 30)):
        world.call(random.choice([OWNER, OTHER, THIRD]), random.choice([DEF, ONE]))
        for _ in range(random.choice([0, 2, 20])):
            if random.random() < 0.8:
                world.net.step()
            else:
                world.end_some()
        if random.random() < 0.3:
            world.cancel(random.randrange(3), random.choice(list(world.made)))
    world.run()
    assert world.unended == []


@given(st.integers(0, 1 << 30))
@settings(max_examples=50, deadline=None)
def test_whatever_becomes_of_lead_and_roster_every_call_begins(seed: int) -> None:
    random = Random(seed)
    # Without collectives: there is no order any more when the lead is lost.
    world = World(random, meet=False)
    for _ in range(random.randint(2, 30)):
        epoch = max(1, world.epoch - random.choice([0, 0, 0, 1]))
        world.call(random.choice([OWNER, OTHER, THIRD]), random.choice([DEF, ONE]), epoch=epoch)
        for _ in range(random.choice([0, 2, 20])):
            if random.random() < 0.8:
                world.net.step()
            else:
                world.end_some()
        deed = random.random()
        if deed < 0.1:
            world.epoch += 1
            world.the_lead.change(range(world.size), roster_at(world.epoch))
        elif deed < 0.2:
            world.the_lead.give_up()
        elif deed < 0.3:
            # Another process: what was said to the old one is lost.
            world.lead = Lead(range(world.size), roster_at(world.epoch), world)
            for member in world.members:
                world.net.lanes["to lead", member.rank].clear()
                world.net.lanes["from lead", member.rank].clear()
                member.turns.begin_again(OWNER)
                member.look_again()
    world.run()
    assert world.unended == []


def test_a_member_without_a_lead_is_open() -> None:
    world = World(Random(1), meet=False)
    key = world.call(OTHER, DEF)
    while world.net.lanes[OTHER, 0]:
        world.net.step()
    world.lead = None
    world.run()
    assert world.unended == [key]
    for member in world.members:
        member.turns.open()
        member.look_again()
    world.run()
    assert world.unended == []
