"""In any order of messages, each call gets its value or asks, and no answer is kept, through any broken connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, TypeAlias

import pytest

from aiodaft._protocol.calls.outgoing import Handover
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Key

OWNER, PRODUCER, CONSUMER = PeerId("owner"), PeerId("producer"), PeerId("consumer")
KEY: Key = (OWNER, CallId(7))

# The kind, and the number of a call.
Message: TypeAlias = tuple[str, int]
_RENEWED: Final = ("RENEWED", 0)


@dataclass
class End:
    """One end of a connection: as its process knows it, not as the network does."""

    near: PeerId
    far: PeerId
    used: bool = False
    lost: bool = False
    # Counts the connections to the same process.
    number: int = 0
    unsent: list[Message] = field(default_factory=list)
    came: deque[Message] = field(default_factory=deque)


class World:
    """Three processes. One value, three calls with it, and any of the possible events, by random numbers."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.handover: Handover[str, int] = Handover()
        self.ends = {
            (near, far): End(near, far)
            for near in (OWNER, PRODUCER, CONSUMER)
            for far in (OWNER, PRODUCER, CONSUMER)
            if near != far
        }
        self.made = 0
        # Calls that are at the consumer and wait.
        self.waiting: set[int] = set()
        # The FORWARDs that the producer has not answered: the connection for each answer.
        self.to_answer: list[int] = []
        self.owner_lost_producer = False
        self.sockets: set[frozenset[PeerId]] = set()

    # Actions of the processes.

    def make_call(self) -> None:
        """The owner makes a call."""
        self.send(OWNER, CONSUMER, ("APPLY", self.made))
        self.send(OWNER, PRODUCER, ("FORWARD", self.made))
        self.made += 1

    def answer(self) -> None:
        """The producer answers a FORWARD, unless the connection is lost."""
        number = self.to_answer.pop(self.random.randrange(len(self.to_answer)))
        if number == self.ends[PRODUCER, CONSUMER].number:
            self.send(PRODUCER, CONSUMER, ("VALUE", 0))

    def handle(self, end: End) -> None:
        """A process handles the next message."""
        kind, number = end.came.popleft()
        if kind == "FORWARD":
            self.to_answer.append(self.to(PRODUCER, CONSUMER).number)
        elif end.near == CONSUMER and kind == "RENEWED":
            self.ask(self.handover.doubt(end.far))
        elif kind == "ASK":
            self.waiting.difference_update(self.handover.ask(KEY))
        elif kind == "APPLY":
            self.to(CONSUMER, PRODUCER)
            if self.handover.expect(PRODUCER, KEY, number) is None:
                self.waiting.add(number)
        elif kind == "VALUE":
            self.to(CONSUMER, OWNER)
            taker = self.handover.came(PRODUCER, KEY, "value")
            if taker is not None:
                self.waiting.remove(taker)

    def lose(self, end: End) -> None:
        """A process learns that its connection is lost."""
        end.lost, end.used = True, False
        end.number += 1
        end.came.clear()
        if end.near == CONSUMER:
            self.ask(self.handover.lost(end.far))
            if end.far == OWNER:
                # It cancels its calls.
                self.waiting.clear()
        elif (end.near, end.far) == (OWNER, PRODUCER):
            self.owner_lost_producer = True
            self.to(OWNER, CONSUMER)
            self.send(OWNER, CONSUMER, ("ASK", 0))

    def to(self, near: PeerId, far: PeerId) -> End:
        """A connection for messages, in place of a lost one."""
        end = self.ends[near, far]
        if end.lost:
            end.lost, end.unsent = False, [_RENEWED]
            if near == CONSUMER:
                self.ask(self.handover.doubt(far))
        return end

    def ask(self, found: list[tuple[Key, int]]) -> None:
        self.waiting.difference_update(number for _, number in found)

    def send(self, near: PeerId, far: PeerId, message: Message) -> None:
        end = self.ends[near, far]
        if end.used:
            self.ends[far, near].came.append(message)
        elif not end.lost:
            end.unsent.append(message)

    # Actions of the network.

    def connect(self, end: End) -> None:
        """There is a socket: one process has it, the other one gets it later, or never."""
        back = self.to(end.far, end.near)
        self.to(end.near, end.far)
        end.came.clear()
        back.came.clear()
        self.sockets.add(frozenset((end.near, end.far)))
        self.use(end)

    def use(self, end: End) -> None:
        end.used = True
        self.ends[end.far, end.near].came.extend(end.unsent)
        end.unsent = []

    def break_off(self, end: End) -> None:
        """The socket breaks, and with it some of the messages on their way. The processes learn of it later."""
        self.sockets.remove(frozenset((end.near, end.far)))
        for side in (end, self.ends[end.far, end.near]):
            kept = self.random.randint(0, len(side.came)) if side.used else 0
            side.came = deque(list(side.came)[:kept])

    # The order.

    def steps(self, *, calm: bool) -> list[Callable[[], object]]:
        """The possible next events. When it is calm, nothing breaks any more, and no call is made."""
        found: list[Callable[[], object]] = [self.answer] if self.to_answer else []
        for end in self.ends.values():
            used = [end.used, self.ends[end.far, end.near].used]
            connected = frozenset((end.near, end.far)) in self.sockets
            if end.used and end.came:
                found += [partial(self.handle, end)] * 3
            if not connected:
                found += [partial(self.lose, end)] if end.used else []
                found += [] if any(used) else [partial(self.connect, end)]
            elif not end.used:
                found.append(partial(self.use, end))
            elif not calm:
                found.append(partial(self.break_off, end))
        # Messages that the producer gets after it has lost the first connection to the owner are about another value.
        to_both = self.ends[OWNER, PRODUCER].used and self.ends[OWNER, CONSUMER].used
        if not calm and self.made < 3 and to_both and not self.owner_lost_producer:
            found += [self.make_call] * 4
        return found

    def run(self) -> None:
        for _ in range(self.random.randint(10, 70)):
            self.random.choice(self.steps(calm=False))()
        while steps := self.steps(calm=True):
            self.random.choice(steps)()


@pytest.mark.parametrize("part", range(4))
def test_no_call_waits_for_an_answer_that_does_not_come_and_no_answer_for_a_call(part: int) -> None:
    for seed in range(250 * part, 250 * (part + 1)):
        world = World(seed)
        world.run()
        assert not world.waiting, f"seed {seed}"
        # An early answer for a call that was lost with its connection would be here.
        for number in range(3, 6):
            assert world.handover.expect(PRODUCER, KEY, number) != "value", f"seed {seed}"
