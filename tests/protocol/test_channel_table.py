"""The channels of one process: the messages that it handles itself, and its answers about a channel it forgot."""

from __future__ import annotations

import pytest

from aiodaft._protocol.channels.channel import ChannelId, Kind, Leaving, Message, Outcome, Settle, Tell
from aiodaft._protocol.channels.channel_end import ChannelTable, End
from aiodaft._protocol.ids import CallId, PeerId

HERE, OTHER, THIRD = PeerId("here"), PeerId("other"), PeerId("third")
OURS: ChannelId = (HERE, CallId(1))
THEIRS: ChannelId = (OTHER, CallId(1))


def made(capacity: int = 2) -> ChannelTable:
    table = ChannelTable(HERE)
    table.create(OURS, capacity)
    table.ends[OURS] = End(HERE)
    return table


def tell(to: PeerId, kind: Kind, ticket: int = 0, body: object = None) -> Tell:
    return Tell(to, Message(kind, ticket, body))


def test_messages_between_an_end_and_its_own_queue_leave_no_process() -> None:
    table = made()
    end = table.ends[OURS]
    assert table.run(OURS, end.send(1, "x")) == [Settle(1, Outcome.DONE)]
    assert table.run(OURS, end.receive(2)) == [Settle(2, Outcome.DONE, "x")]
    assert table.run(OURS, end.confirm(2)) == [Settle(2, Outcome.DONE)]
    end.took()
    assert end.is_idle


def test_outcomes_and_messages_to_others_keep_their_order() -> None:
    table = made(capacity=1)
    end = table.ends[OURS]
    table.run(OURS, end.send(1, "x"))
    assert table.run(OURS, end.send(2, "y")) == []
    table.run(OURS, end.receive(3))
    # The receive took the first item: there was room for the second.
    assert table.run(OURS, end.confirm(3)) == [Settle(3, Outcome.DONE)]
    table.ends.clear()
    table.run(OURS, table.handle(OURS, OTHER, Message(Kind.WANT, 4)))
    assert table.run(OURS, table.handle(OURS, OTHER, Message(Kind.CLOSE, 5))) == [tell(OTHER, Kind.OVER, 5)]


def test_the_queue_makes_a_keeper_where_it_moves() -> None:
    maker, receiver = made(), ChannelTable(OTHER)
    receiver.ends[OURS] = end = End(HERE)
    maker.run(OURS, maker.ends[OURS].send(1, "x"))
    (want,) = receiver.run(OURS, end.receive(2))
    assert want == tell(HERE, Kind.WANT, 2, False)
    (queue,) = maker.run(OURS, maker.handle(OURS, OTHER, Message(Kind.WANT, 2)))
    assert isinstance(queue, Tell)
    assert receiver.run(OURS, receiver.handle(OURS, HERE, queue.message)) == [tell(HERE, Kind.HAVE)]
    moved = maker.run(OURS, maker.handle(OURS, OTHER, Message(Kind.HAVE)))
    assert moved == [tell(OTHER, Kind.MOVED, 2, OTHER)]
    assert receiver.run(OURS, receiver.handle(OURS, HERE, Message(Kind.MOVED, 2, OTHER))) == [
        Settle(2, Outcome.DONE, "x")
    ]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (Kind.WANT, [tell(OTHER, Kind.LOST, 3)]),
        (Kind.CLOSE, [tell(OTHER, Kind.OVER, 3)]),
        (Kind.GOT, []),
        (Kind.TAKEN, []),
        (Kind.COUNTING, [tell(OTHER, Kind.LEFT, 0, (HERE, int(Leaving.DROPPED)))]),
    ],
)
def test_what_a_process_answers_about_a_channel_that_it_does_not_know(kind: Kind, answer: list[Tell]) -> None:
    table = ChannelTable(HERE)
    assert table.handle(THEIRS, OTHER, Message(kind, 3)) == answer
    assert (table.keepers, table.ends) == ({}, {})


def test_news_of_holders_of_a_channel_without_a_keeper_change_nothing() -> None:
    table = ChannelTable(HERE)
    assert table.holder_came(OURS, OTHER) == table.holder_left(OURS, OTHER, Leaving.DIED) == []
    assert table.drop(OURS) == table.register(OURS) == table.leave(OURS) == []
    assert table.peer_lost(OURS, OTHER, Leaving.DIED) == []


def test_an_end_is_forgotten_when_nothing_is_under_way() -> None:
    table = ChannelTable(HERE)
    table.ends[THEIRS] = end = End(OTHER)
    table.run(THEIRS, end.send(1, "x"))
    assert table.leave(THEIRS) == []
    assert table.ends == {THEIRS: end}
    table.run(THEIRS, table.handle(THEIRS, OTHER, Message(Kind.TAKEN, 1)))
    table.leave(THEIRS)
    assert table.ends == {}


def test_a_keeper_is_forgotten_with_the_last_holder_if_it_counts_them() -> None:
    maker, receiver = made(), ChannelTable(OTHER)
    maker.run(OURS, maker.holder_came(OURS, OTHER))
    receiver.ends[OURS] = end = End(HERE)
    receiver.run(OURS, end.receive(1))
    (queue,) = maker.run(OURS, maker.handle(OURS, OTHER, Message(Kind.WANT, 1)))
    assert isinstance(queue, Tell)
    receiver.run(OURS, receiver.handle(OURS, HERE, queue.message))
    receiver.run(OURS, end.stop_receiving())
    # The maker is gone: the keeper counts.
    receiver.run(OURS, receiver.peer_lost(OURS, HERE, Leaving.DIED))
    receiver.run(OURS, receiver.handle(OURS, HERE, Message(Kind.MOVED, 0, OTHER)))
    assert OURS in receiver.keepers
    receiver.run(OURS, receiver.leave(OURS))
    assert (receiver.keepers, receiver.ends) == ({}, {})


def test_both_the_keeper_and_the_end_learn_of_a_lost_process() -> None:
    table = made()
    table.run(OURS, table.handle(OURS, OTHER, Message(Kind.WANT, 1)))
    # The queue moves to `OTHER`, which is lost with it.
    assert table.run(OURS, table.ends[OURS].send(2, "x")) == []
    lost = table.peer_lost(OURS, OTHER, Leaving.DIED)
    assert tell(OTHER, Kind.LOST, 1, OTHER) in lost
    assert Settle(2, Outcome.LOST, OTHER) in table.run(OURS, lost)
