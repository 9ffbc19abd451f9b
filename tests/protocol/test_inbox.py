"""The inbox of a member of a group: selection, order, room, ends; and any history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.groups.inbox import Admit, Command, Give, Inbox, Message, Receive, Stage, Tag, Wish
from aiodaft._protocol.ids import ActorId
from aiodaft.exceptions import LocalProtocolError

A, B, C = ActorId(16), ActorId(17), ActorId(18)
ANY: Final = Wish(None, None)
WITHIN: Final = st.sampled_from(["one", "other", None])


def arrive(inbox: Inbox, source: ActorId, tag: Tag = 0, nbytes: int = 1) -> Message:
    """A message that is admitted at once, and whose value is here."""
    message, commands = inbox.announce(source, tag, nbytes)
    assert commands == [Admit(message)]
    assert inbox.came(message, f"{source} {tag}") == []
    return message


def test_a_receive_gets_the_first_message_that_it_wants() -> None:
    inbox = Inbox()
    first, tagged, other = arrive(inbox, A, "x"), arrive(inbox, A, "y"), arrive(inbox, B, "y")
    for wish, message in [(Wish(A, "y"), tagged), (Wish(None, "y"), other), (ANY, first)]:
        receive, commands = inbox.ask(wish, {A, B})
        assert commands == [Give(receive, message)]
    assert (len(inbox), inbox.nbytes, inbox.admitted) == (0, 0, 0)


def test_a_receive_meets_only_what_is_within_the_same_or_by_itself() -> None:
    inbox = Inbox(messages=1)
    # The first message within each is admitted, however much room the others take.
    one, other, alone = (inbox.announce(A, 0, 1, within)[0] for within in ("one", "other", None))
    for message in (one, other, alone):
        assert inbox.came(message, None) == []
    late, commands = inbox.ask(Wish(A, 0, "late"), {A})
    assert commands == [Give(late, alone)]
    again, commands = inbox.ask(Wish(A, 0, "other"), {A})
    assert commands == [Give(again, other)]
    waits, commands = inbox.ask(Wish(None, None, "other"), {A})
    assert commands == []
    by_itself, commands = inbox.ask(ANY, {A})
    assert commands == [Give(by_itself, one)]
    # A receive by itself that waits gets a message within anything.
    by_itself, _ = inbox.ask(ANY, {A})
    one, _ = inbox.announce(A, 0, 1, "one")
    assert inbox.came(one, None) == [Give(by_itself, one)]
    assert inbox.waiting == [waits]
    other, commands = inbox.announce(A, 0, 1, "other")
    assert inbox.came(other, None) == [Give(waits, other)]


def test_a_message_goes_to_the_receive_that_has_waited_longest() -> None:
    inbox = Inbox()
    receives = [inbox.ask(wish, {A})[0] for wish in (Wish(B, None), Wish(A, 1), ANY, Wish(A, None))]
    for receive in receives[1:]:
        message, commands = inbox.announce(A, 1, 1)
        assert commands == [Admit(message)]
        assert inbox.came(message, None) == [Give(receive, message)]
    assert inbox.waiting == receives[:1]


def test_a_later_message_does_not_overtake_one_whose_value_is_on_its_way() -> None:
    inbox = Inbox()
    slow, _ = inbox.announce(A, "x", 1)
    fast, _ = inbox.announce(A, "x", 1)
    other, _ = inbox.announce(A, "y", 1)
    receive, commands = inbox.ask(Wish(A, "x"), {A})
    assert commands == inbox.came(fast, "fast") == []
    # Another tag, and another sender, go ahead.
    inbox.came(other, "other")
    by_tag, commands = inbox.ask(Wish(A, "y"), {A})
    assert commands == [Give(by_tag, other)]
    beside = arrive(inbox, B, "x")
    by_any, commands = inbox.ask(ANY, {A, B})
    assert commands == [Give(by_any, beside)]
    assert inbox.came(slow, "slow") == [Give(receive, slow)]
    last, commands = inbox.ask(ANY, {A, B})
    assert commands == [Give(last, fast)]


def test_what_is_withdrawn_lets_the_next_one_go() -> None:
    inbox = Inbox()
    slow, _ = inbox.announce(A, 0, 1)
    fast, _ = inbox.announce(A, 0, 1)
    receive, _ = inbox.ask(Wish(A, 0), {A})
    inbox.came(fast, "fast")
    assert inbox.withdraw(slow) == [Give(receive, fast)]
    # One with another tag, too.
    slow, _ = inbox.announce(A, 0, 1)
    other = arrive(inbox, A, 1)
    receive, _ = inbox.ask(Wish(A, None), {A})
    assert inbox.withdraw(slow) == [Give(receive, other)]
    # A message that is here, or was given, stays.
    kept = arrive(inbox, A)
    assert inbox.withdraw(fast) == inbox.withdraw(kept) == []
    assert inbox.messages == [kept]


def test_an_inbox_has_room_for_a_number_of_messages_and_of_bytes() -> None:
    inbox = Inbox(messages=3, nbytes=10)
    first = arrive(inbox, A, nbytes=100)
    arrive(inbox, B, nbytes=100)
    too_large, commands = inbox.announce(A, 0, 1)
    assert commands == []
    behind, commands = inbox.announce(B, 0, 1)
    assert commands == []
    # Messages wait in order, but for the first message of a sender.
    newcomer, commands = inbox.announce(C, 0, 100)
    assert commands == [Admit(newcomer)]
    assert inbox.limit(5, 400) == [Admit(too_large), Admit(behind)]
    full, commands = inbox.announce(A, 0, 1)
    assert commands == []
    receive, commands = inbox.ask(Wish(A, None), {A})
    assert commands == [Give(receive, first), Admit(full)]


def test_a_receive_does_not_wait_for_room() -> None:
    inbox = Inbox(messages=1)
    arrive(inbox, A, "x")
    full, _ = inbox.announce(A, "x", 1)
    wanted, commands = inbox.announce(A, "y", 1)
    assert commands == []
    receive, commands = inbox.ask(Wish(None, "y"), {A, B})
    assert commands == [Admit(wanted)]
    # Another receive of the same kind waits for the next.
    second, commands = inbox.ask(Wish(None, "y"), {A, B})
    assert commands == []
    next_one, commands = inbox.announce(A, "y", 1)
    assert commands == []
    assert inbox.came(wanted, None) == [Give(receive, wanted), Admit(next_one)]
    assert inbox.came(next_one, None) == [Give(second, next_one)]
    # At once, also if it is announced later than the receive.
    third, _ = inbox.ask(Wish(A, "z"), {A})
    late, commands = inbox.announce(A, "z", 1)
    assert commands == [Admit(late)]
    assert inbox.came(late, None) == [Give(third, late)]
    assert inbox.messages[1] is full


def test_receives_from_any_sender_let_one_message_after_the_other_come() -> None:
    inbox = Inbox(messages=1)
    for source in (A, B, C):
        inbox.announce(source, "x", 1)
    from_a, from_b, from_c = (inbox.announce(source, "y", 1)[0] for source in (A, B, C))
    wish = Wish(None, "y")
    first, commands = inbox.ask(wish, {A, B, C})
    assert commands == [Admit(from_a)]
    second, commands = inbox.ask(wish, {A, B, C})
    assert commands == []
    assert inbox.withdraw(from_a) == [Admit(from_b)]
    assert inbox.came(from_b, None) == [Give(first, from_b), Admit(from_c)]
    assert inbox.came(from_c, None) == [Give(second, from_c)]


def test_what_a_receive_could_not_take_comes_first_again() -> None:
    inbox = Inbox()
    first, second = arrive(inbox, A, 1), arrive(inbox, A, 2)
    receive, _ = inbox.ask(ANY, {A})
    assert inbox.put_back(first) == []
    assert (inbox.messages, inbox.nbytes) == ([first, second], 2)
    inbox.give_up(receive)
    receive, commands = inbox.ask(ANY, {A})
    assert commands == [Give(receive, first)]
    waiting, _ = inbox.ask(Wish(A, 1), {A})
    assert inbox.put_back(first) == [Give(waiting, first)]
    ended, _ = inbox.ask(Wish(B, None), {B})
    inbox.give_up(ended)
    inbox.give_up(ended)
    assert inbox.waiting == []


def test_a_receive_ends_with_the_last_of_those_that_could_send() -> None:
    inbox = Inbox()
    from_a, _ = inbox.ask(Wish(A, 1), {A})
    from_any, _ = inbox.ask(Wish(None, 1), {A, B})
    from_itself, _ = inbox.ask(Wish(C, 1), ())
    kept = arrive(inbox, A)
    assert inbox.lose(A) == [from_a]
    assert inbox.lose(C) == []
    assert inbox.lose(B) == [from_any]
    assert inbox.waiting == [from_itself]
    # Messages that came before are still there.
    receive, commands = inbox.ask(Wish(A, None), {A})
    assert commands == [Give(receive, kept)]


def test_a_value_comes_once_and_only_when_it_is_admitted() -> None:
    inbox = Inbox(messages=1)
    message = arrive(inbox, A)
    waits, _ = inbox.announce(A, 0, 1)
    for wrong in (message, waits):
        with pytest.raises(LocalProtocolError, match="came twice, or before it was admitted"):
            inbox.came(wrong, None)


class AnyHistory(RuleBasedStateMachine):
    """An inbox with few places, senders that come and go, and receives that are cancelled at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox(messages=3, nbytes=6)
        self.messages: list[Message] = []
        self.waiting: list[Receive] = []
        # The messages given last, and their receiver; they may be put back.
        self.given: list[Message] = []
        self.last: Message | None = None

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            message = command.message
            assert message in self.messages
            if isinstance(command, Admit):
                assert message.stage is Stage.ADMITTED
            else:
                self.waiting.remove(command.receive)
                self.give(command.receive.wish, message)

    def give(self, wish: Wish, message: Message) -> None:
        assert message.stage is Stage.HERE
        assert self.wants(wish, message)
        # It has overtaken nothing.
        assert not any(
            other.number < message.number and other.source == message.source and self.wants(wish, other)
            for other in self.messages
        )
        self.messages.remove(message)
        self.given.append(message)
        self.last = message

    @staticmethod
    def wants(wish: Wish, message: Message) -> bool:
        meet = None in {wish.within, message.within} or wish.within == message.within
        return meet and wish.source in {None, message.source} and wish.tag in {None, message.tag}

    def heads(self, wish: Wish) -> list[Message]:
        found: dict[ActorId, Message] = {}
        for message in sorted(self.messages, key=lambda one: one.number):
            if self.wants(wish, message):
                found.setdefault(message.source, message)
        return list(found.values())

    @rule(source=st.sampled_from([A, B]), tag=st.sampled_from([0, 1]), nbytes=st.integers(0, 4), within=WITHIN)
    def announce(self, source: ActorId, tag: int, nbytes: int, within: str | None) -> None:
        message, commands = self.inbox.announce(source, tag, nbytes, within)
        self.messages.append(message)
        self.carry_out(commands)

    @precondition(lambda self: any(one.stage is Stage.ADMITTED for one in self.messages))
    @rule(data=st.data())
    def came(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from([one for one in self.messages if one.stage is Stage.ADMITTED]))
        self.carry_out(self.inbox.came(message, None))

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.messages))
        if message.stage is not Stage.HERE:
            self.messages.remove(message)
        self.carry_out(self.inbox.withdraw(message))

    @rule(source=st.sampled_from([A, B, None]), tag=st.sampled_from([0, 1, None]), within=WITHIN)
    def ask(self, source: ActorId | None, tag: int | None, within: str | None) -> None:
        wish = Wish(source, tag, within)
        receive, commands = self.inbox.ask(wish, {A, B} if source is None else {source})
        self.waiting.append(receive)
        self.carry_out(commands)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        receive = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(receive)
        self.inbox.give_up(receive)

    @precondition(lambda self: self.last is not None)
    @rule()
    def put_back(self) -> None:
        message, self.last = self.last, None
        assert message is not None
        self.given.remove(message)
        self.messages.append(message)
        self.carry_out(self.inbox.put_back(message))

    @rule(source=st.sampled_from([A, B]))
    def lose(self, source: ActorId) -> None:
        for receive in self.inbox.lose(source):
            assert not receive.senders
            self.waiting.remove(receive)

    @rule(messages=st.integers(1, 4), nbytes=st.integers(1, 8))
    def limit(self, messages: int, nbytes: int) -> None:
        self.carry_out(self.inbox.limit(messages, nbytes))
        self.bounds = messages, nbytes

    bounds = 3, 6

    @invariant()
    def counts_are_true(self) -> None:
        admitted = [one for one in self.messages if one.stage is not Stage.ANNOUNCED]
        assert (self.inbox.admitted, self.inbox.nbytes) == (len(admitted), sum(one.nbytes for one in admitted))
        assert self.inbox.messages == sorted(self.messages, key=lambda one: one.number)
        assert self.inbox.waiting == self.waiting

    @invariant()
    def no_receive_waits_for_what_is_there(self) -> None:
        for receive in self.waiting:
            heads = self.heads(receive.wish)
            assert not any(one.stage is Stage.HERE for one in heads)
            assert not heads or any(one.stage is Stage.ADMITTED for one in heads)

    @invariant()
    def nothing_waits_for_room_that_is_there(self) -> None:
        announced = sorted((one for one in self.messages if one.stage is Stage.ANNOUNCED), key=lambda one: one.number)
        lines = {(one.source, one.within) for one in self.messages if one.stage is not Stage.ANNOUNCED}
        assert all((one.source, one.within) in lines for one in announced)
        if announced:
            most, most_bytes = self.bounds
            assert self.inbox.admitted >= most or self.inbox.nbytes + announced[0].nbytes > most_bytes


def test_any_history() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=100, stateful_step_count=40),
    )
