"""In every order of the events of a channel, no item is seen twice or vanishes, and no task waits for ever."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.channels.channel import ChannelId, Command, Keeper, Kind, Leaving, Message, Outcome, Settle, Tell
from aiodaft._protocol.channels.channel_end import ChannelTable, End
from aiodaft._protocol.ids import CallId, PeerId

MAKER: Final = PeerId("maker")
CHANNEL: Final[ChannelId] = (MAKER, CallId(1))
NAMES: Final = [MAKER, PeerId("a"), PeerId("b"), PeerId("c")]
CAPACITY: Final = 2


@dataclass
class Process:
    """One process's knowledge of the channel, and the actions of its users."""

    table: ChannelTable
    alive: bool = True
    # Tickets of users who wait: the operation, and (of a send) the item.
    waiting: dict[int, tuple[str, str]] = field(default_factory=dict)
    # The ticket of a receive that was lent an item, or has one.
    lent: int | None = None
    owned: str | None = None
    item: str = ""
    seen: list[str] = field(default_factory=list)
    # At some time it might not send.
    only_received: bool = False

    @property
    def name(self) -> PeerId:
        return self.table.here

    @property
    def end(self) -> End | None:
        return self.table.ends.get(CHANNEL)

    @property
    def keeper(self) -> Keeper | None:
        return self.table.keepers.get(CHANNEL)

    def waits_for(self, wanted: str) -> bool:
        return any(what == wanted for what, _ in self.waiting.values())

    @property
    def sends(self) -> bool:
        return self.waits_for("send")

    @property
    def receives(self) -> bool:
        return self.lent is not None or self.waits_for("receive")

    @property
    def may_confirm(self) -> bool:
        return self.lent is not None and not self.waits_for("confirm")


class AnyHistory(RuleBasedStateMachine):
    """Processes that keep a channel, and the network between them: each pair's messages stay in order."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = {name: Process(ChannelTable(name)) for name in NAMES}
        self.wires: dict[tuple[PeerId, PeerId], deque[Message | None]] = {
            (one, other): deque() for one in NAMES for other in NAMES if one != other
        }
        maker = self.processes[MAKER]
        maker.table.create(CHANNEL, CAPACITY)
        maker.table.ends[CHANNEL] = End(MAKER)
        maker.table.ends[CHANNEL].senders = 1
        self.items = 0
        self.tickets = count(1)
        self.sent: list[str] = []
        self.closed = False
        # A task gave up, or its process died: then items may be lost, or come out of order to several receivers.
        self.disturbed = False
        self.deaths: list[PeerId] = []

    # The shell.

    def run(self, process: Process, commands: list[Command]) -> None:
        left = deque(process.table.run(CHANNEL, commands))
        while left:
            command = left.popleft()
            if isinstance(command, Settle):
                self.settle(process, command)
            elif self.processes[command.to].alive:
                self.wires[process.name, command.to].append(command.message)
            elif None not in self.wires[command.to, process.name]:
                # The end of the connection was noticed before.
                lost = process.table.peer_lost(CHANNEL, command.to, Leaving.DIED)
                left.extend(process.table.run(CHANNEL, lost))

    def settle(self, process: Process, settled: Settle) -> None:
        what, item = process.waiting.pop(settled.ticket, ("", ""))
        if what == "send" and settled.outcome is Outcome.DONE:
            self.sent.append(item)
        elif what == "send" and settled.outcome is Outcome.CLOSED:
            assert self.closed or process.only_received
        elif what == "receive" and settled.outcome is Outcome.DONE:
            process.lent, process.item = settled.ticket, settled.body
        elif what == "confirm":
            process.lent = None
            process.owned = process.item if settled.outcome is Outcome.DONE else None

    # Events.

    def living(self, *, holding: bool = True) -> list[Process]:
        return [one for one in self.processes.values() if one.alive and (one.end is not None or not holding)]

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def hand_on(self, data: st.DataObject) -> None:
        giver = data.draw(st.sampled_from(self.living()))
        taker = data.draw(st.sampled_from(self.living(holding=False)))
        assert giver.end is not None
        if taker is giver or taker.end is not None:
            return
        giver.end.was_handed_on = True
        taker.only_received = False
        taker.table.ends[CHANNEL] = end = End(giver.end.keeper)
        end.senders = 1
        maker = self.processes[MAKER]
        if maker.alive:
            self.run(maker, maker.table.holder_came(CHANNEL, taker.name))
        else:
            self.run(taker, taker.table.register(CHANNEL))

    def change_senders(self, process: Process, by: int) -> None:
        """More or fewer users of a process may send."""
        assert process.end is not None
        process.end.senders += by
        process.only_received |= not process.end.may_send and not process.end.was_handed_on
        self.run(process, process.end.say_whether_it_may_send())

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def a_user_comes(self, data: st.DataObject) -> None:
        self.change_senders(data.draw(st.sampled_from(self.living())), 1)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def a_user_only_receives(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.living()))
        assert process.end is not None
        if process.end.senders:
            self.change_senders(process, -1)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.living()))
        if process.waiting or process.lent is not None or process.owned is not None:
            return
        self.drop(process)

    def drop(self, process: Process) -> None:
        self.run(process, process.table.leave(CHANNEL))
        maker = self.processes[MAKER]
        # An end with an item on its way back stays.
        if process.end is None and maker.alive:
            self.run(maker, maker.table.holder_left(CHANNEL, process.name, Leaving.DROPPED))
            self.count_holders(maker)

    def count_holders(self, maker: Process) -> None:
        holders = self.living()
        if not holders:
            self.run(maker, maker.table.drop(CHANNEL))
        elif len(holders) == 1 and holders[0] is not maker:
            self.run(maker, [Tell(holders[0].name, Message(Kind.ALONE))])

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.living()))
        assert process.end is not None
        if not process.end.senders:
            self.change_senders(process, 1)
        self.items += 1
        item, ticket = f"{process.name} {self.items}", next(self.tickets)
        process.waiting[ticket] = ("send", item)
        self.run(process, process.end.send(ticket, item))

    @precondition(lambda self: any(one.sends for one in self.living()))
    @rule(data=st.data())
    def stop_sending(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in self.living() if one.sends]))
        assert process.end is not None
        given_up = data.draw(st.sampled_from([ticket for ticket, it in process.waiting.items() if it[0] == "send"]))
        del process.waiting[given_up]
        self.run(process, process.end.stop_sending(given_up))

    @precondition(lambda self: any(not (one.receives or one.owned) for one in self.living()))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.begin_to_receive(
            data.draw(st.sampled_from([one for one in self.living() if not (one.receives or one.owned)]))
        )

    def begin_to_receive(self, process: Process) -> None:
        assert process.end is not None
        ticket = next(self.tickets)
        process.waiting[ticket] = ("receive", "")
        self.run(process, process.end.receive(ticket))

    @precondition(lambda self: any(one.may_confirm for one in self.living()))
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        ready = [one for one in self.living() if one.may_confirm]
        self.begin_to_confirm(data.draw(st.sampled_from(ready)))

    def begin_to_confirm(self, process: Process) -> None:
        assert process.end is not None
        assert process.lent is not None
        process.waiting[process.lent] = ("confirm", "")
        self.run(process, process.end.confirm(process.lent))

    @precondition(lambda self: any(one.owned is not None for one in self.living()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.see(data.draw(st.sampled_from([one for one in self.living() if one.owned is not None])))

    def see(self, process: Process) -> None:
        assert process.end is not None
        assert process.owned is not None
        process.seen.append(process.owned)
        process.owned = None
        process.end.took()

    @precondition(lambda self: any(one.receives or one.owned for one in self.living()))
    @rule(data=st.data())
    def stop_receiving(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in self.living() if one.receives or one.owned]))
        assert process.end is not None
        self.disturbed = True
        process.waiting = {ticket: it for ticket, it in process.waiting.items() if it[0] not in {"receive", "confirm"}}
        process.lent = process.owned = None
        self.run(process, process.end.stop_receiving())

    @precondition(lambda self: self.living() and not self.closed)
    @rule(data=st.data(), chance=st.integers(0, 5))
    def close(self, data: st.DataObject, chance: int) -> None:
        if not chance:
            self.close_by(data.draw(st.sampled_from(self.living())))

    def close_by(self, process: Process) -> None:
        assert process.end is not None
        self.closed = True
        ticket = next(self.tickets)
        process.waiting[ticket] = ("close", "")
        self.run(process, process.end.close(ticket))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        wires = [wire for wire, messages in self.wires.items() if messages]
        if wires:
            self.arrive(data.draw(st.sampled_from(wires)))

    def arrive(self, wire: tuple[PeerId, PeerId]) -> None:
        sender, to = wire[0], self.processes[wire[1]]
        message = self.wires[wire].popleft()
        if not to.alive:
            return
        if message is not None:
            self.run(to, to.table.handle(CHANNEL, sender, message))
            return
        if to.name == MAKER:
            self.run(to, to.table.holder_left(CHANNEL, sender, Leaving.DIED))
        self.run(to, to.table.peer_lost(CHANNEL, sender, Leaving.DIED))
        if to.name == MAKER:
            self.count_holders(to)

    @precondition(lambda self: len(self.deaths) < 2)
    @rule(data=st.data(), chance=st.integers(0, 7))
    def kill(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        victim = data.draw(st.sampled_from(self.living(holding=False)))
        self.disturbed = True
        self.deaths.append(victim.name)
        victim.alive = False
        for other in NAMES:
            if other != victim.name:
                wire = self.wires[victim.name, other]
                # Messages that it had not written do not come.
                for _ in range(data.draw(st.integers(0, len(wire)))):
                    wire.pop()
                wire.append(None)

    # Invariants.

    @invariant()
    def no_item_is_seen_twice(self) -> None:
        seen = [item for one in self.processes.values() for item in one.seen]
        assert len(seen) == len(set(seen))

    @invariant()
    def the_queue_is_bounded(self) -> None:
        for one in self.living(holding=False):
            # A lent item may come back.
            assert one.keeper is None or one.keeper.waiting <= CAPACITY + len(NAMES)

    @invariant()
    def items_of_a_sender_come_in_order(self) -> None:
        if self.disturbed:
            return
        for one in self.processes.values():
            for name in NAMES:
                numbers = [int(item.split()[1]) for item in one.seen if item.split()[0] == name]
                assert numbers == sorted(numbers)

    def settle_down(self) -> None:
        """Everything that is under way arrives, and receivers go on."""
        while True:
            for wire in [wire for wire, messages in self.wires.items() if messages]:
                while self.wires[wire]:
                    self.arrive(wire)
            lent = [one for one in self.living() if one.may_confirm]
            owned = [one for one in self.living() if one.owned is not None]
            for one in lent:
                self.begin_to_confirm(one)
            for one in owned:
                self.see(one)
            if not (lent or owned or any(self.wires.values())):
                return

    def teardown(self) -> None:
        """Once the channel is closed and read to its end, no task waits and nothing is missing; dropped, it is gone."""
        self.settle_down()
        for one in self.living()[:1]:
            self.close_by(one)
        self.settle_down()
        for one in self.living():
            for _ in range(self.items + 1):
                if not one.receives:
                    self.begin_to_receive(one)
                self.settle_down()
        assert [one for one in self.living() if one.waiting] == []
        seen = {item for one in self.processes.values() for item in one.seen}
        if not self.deaths and self.living():
            assert set(self.sent) <= seen
        for one in self.living():
            self.drop(one)
            self.settle_down()
        if set(self.deaths) <= {MAKER} or MAKER not in self.deaths:
            assert [one for one in self.living(holding=False) if one.keeper is not None] == []


def test_no_history_loses_an_item_or_leaves_a_task_waiting() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=100, stateful_step_count=40),
    )
