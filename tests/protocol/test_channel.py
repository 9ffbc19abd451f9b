"""A channel's keeper and ends, message by message."""

from __future__ import annotations

import pytest

from aiodaft._protocol.channels.channel import (
    Contents,
    Keeper,
    Kind,
    Leaving,
    Message,
    Outcome,
    Place,
    Settle,
    Tell,
    refusal,
)
from aiodaft._protocol.channels.channel_end import End
from aiodaft._protocol.ids import PeerId

HERE, OTHER, THIRD = PeerId("here"), PeerId("other"), PeerId("third")


def settled(capacity: int = 2) -> Keeper:
    """A keeper that has the queue for good."""
    keeper = Keeper(HERE, HERE, capacity)
    keeper.handle(HERE, Message(Kind.WANT, 1))
    keeper.handle(HERE, Message(Kind.UNWANT, 1))
    return keeper


def moved_here() -> Keeper:
    """The keeper of a queue that has come from its maker; a third process holds the channel."""
    keeper = Keeper(HERE, OTHER, 1)
    keeper.handle(OTHER, Message(Kind.QUEUE, 0, Contents(1, (), False, False, (OTHER, THIRD), (), None)))
    return keeper


def tell(to: PeerId, kind: Kind, ticket: int = 0, body: object = None) -> Tell:
    return Tell(to, Message(kind, ticket, body))


def test_an_item_is_lent_confirmed_and_then_the_receivers() -> None:
    keeper = settled()
    assert keeper.handle(OTHER, Message(Kind.OFFER, 1, "a")) == [tell(OTHER, Kind.TAKEN, 1)]
    assert keeper.handle(THIRD, Message(Kind.WANT, 5)) == [tell(THIRD, Kind.ITEM, 5, "a")]
    assert keeper.handle(THIRD, Message(Kind.GOT, 5)) == [tell(THIRD, Kind.YOURS, 5)]
    assert keeper.waiting == 0


def test_an_offer_waits_for_room_and_may_be_withdrawn() -> None:
    keeper = settled(capacity=1)
    keeper.handle(OTHER, Message(Kind.OFFER, 1, "a"))
    assert keeper.handle(OTHER, Message(Kind.OFFER, 2, "b")) == []
    assert keeper.handle(THIRD, Message(Kind.OFFER, 1, "c")) == []
    assert keeper.handle(OTHER, Message(Kind.WITHDRAW, 2)) == []
    assert keeper.handle(HERE, Message(Kind.WANT, 2)) == [tell(HERE, Kind.ITEM, 2, "a"), tell(THIRD, Kind.TAKEN, 1)]


@pytest.mark.parametrize("how", ["unwanted", "back", "died"])
def test_an_item_that_comes_back_is_the_next(how: str) -> None:
    keeper = settled()
    keeper.handle(OTHER, Message(Kind.OFFER, 1, "a"))
    keeper.handle(OTHER, Message(Kind.OFFER, 2, "b"))
    keeper.handle(THIRD, Message(Kind.WANT, 5))
    if how == "unwanted":
        keeper.handle(THIRD, Message(Kind.UNWANT, 5))
    elif how == "back":
        keeper.handle(THIRD, Message(Kind.GOT, 5))
        keeper.handle(THIRD, Message(Kind.BACK, 0, "a"))
    else:
        keeper.peer_lost(THIRD, Leaving.DIED)
    assert keeper.handle(HERE, Message(Kind.WANT, 2)) == [tell(HERE, Kind.ITEM, 2, "a")]


def test_the_end_of_a_closed_channel_waits_for_what_is_lent() -> None:
    keeper = settled()
    keeper.handle(OTHER, Message(Kind.OFFER, 1, "a"))
    keeper.handle(THIRD, Message(Kind.WANT, 5))
    assert keeper.handle(OTHER, Message(Kind.CLOSE, 2)) == [tell(OTHER, Kind.OVER, 2)]
    assert keeper.handle(HERE, Message(Kind.WANT, 6)) == []
    assert keeper.handle(THIRD, Message(Kind.GOT, 5)) == [tell(THIRD, Kind.YOURS, 5), tell(HERE, Kind.OVER, 6)]
    assert keeper.handle(OTHER, Message(Kind.OFFER, 3, "b")) == [tell(OTHER, Kind.OVER, 3)]


def test_the_queue_moves_to_the_first_other_receiver_and_later_requests_follow_it() -> None:
    maker = Keeper(HERE, HERE, 1)
    maker.handle(HERE, Message(Kind.OFFER, 1, "a"))
    maker.handle(THIRD, Message(Kind.OFFER, 2, "b"))
    contents = Contents(1, ("a",), True, False, (HERE, THIRD), (HERE, THIRD), None)
    assert maker.handle(OTHER, Message(Kind.WANT, 3)) == [tell(OTHER, Kind.QUEUE, 0, contents)]
    assert maker.handle(HERE, Message(Kind.WANT, 4)) == []
    new = Keeper(OTHER, HERE, contents.capacity)
    assert new.handle(HERE, Message(Kind.QUEUE, 0, contents)) == [tell(HERE, Kind.HAVE)]
    assert maker.handle(OTHER, Message(Kind.HAVE)) == [
        tell(HERE, Kind.MOVED, 0, OTHER),
        tell(THIRD, Kind.MOVED, 0, OTHER),
        tell(OTHER, Kind.MOVED, 3, OTHER),
        tell(THIRD, Kind.MOVED, 2, OTHER),
        tell(HERE, Kind.MOVED, 4, OTHER),
    ]
    assert maker.handle(THIRD, Message(Kind.CLOSE, 5)) == [tell(THIRD, Kind.MOVED, 5, OTHER)]
    assert new.handle(OTHER, Message(Kind.WANT, 3)) == [tell(OTHER, Kind.ITEM, 3, "a")]


def test_a_queue_that_is_lost_is_lost_for_all_processes_and_closing_it_is_no_error() -> None:
    maker = Keeper(HERE, HERE, 1)
    maker.handle(OTHER, Message(Kind.WANT, 1))
    maker.handle(THIRD, Message(Kind.OFFER, 2, "a"))
    assert maker.peer_lost(OTHER, Leaving.DIED) == [tell(OTHER, Kind.LOST, 1, OTHER), tell(THIRD, Kind.LOST, 2, OTHER)]
    assert maker.place is Place.LOST
    assert maker.handle(HERE, Message(Kind.WANT, 3)) == [tell(HERE, Kind.LOST, 3, OTHER)]
    assert maker.handle(HERE, Message(Kind.CLOSE, 4)) == [tell(HERE, Kind.OVER, 4, OTHER)]


def test_receivers_are_orphans_when_a_sender_has_died_and_no_other_holds_the_channel() -> None:
    keeper = settled()
    for sender in (OTHER, THIRD):
        keeper.handle(sender, Message(Kind.OFFER, 1, "a"))
        keeper.handle(HERE, Message(Kind.WANT, 2))
        keeper.handle(HERE, Message(Kind.GOT, 2))
    keeper.handle(HERE, Message(Kind.WANT, 3))
    assert keeper.holder_left(OTHER, Leaving.DIED) == []
    assert keeper.holder_left(THIRD, Leaving.DROPPED) == [tell(HERE, Kind.ORPHANED, 3, OTHER)]
    # It holds the channel again, and may go on.
    keeper.holder_came(THIRD)
    assert keeper.handle(HERE, Message(Kind.WANT, 4)) == []


def test_a_process_that_holds_the_channel_and_has_not_received_may_send() -> None:
    keeper = settled()
    for holder in (OTHER, THIRD):
        keeper.holder_came(holder)
    keeper.handle(HERE, Message(Kind.WANT, 2))
    assert keeper.holder_left(OTHER, Leaving.DIED) == []
    # It turns out to be a receiver.
    orphaned = [tell(HERE, Kind.ORPHANED, 2, OTHER), tell(THIRD, Kind.ORPHANED, 1, OTHER)]
    assert keeper.handle(THIRD, Message(Kind.WANT, 1)) == orphaned


def test_the_death_of_a_process_that_only_received_orphans_no_receiver() -> None:
    keeper = settled()
    keeper.holder_came(OTHER)
    keeper.handle(OTHER, Message(Kind.WANT, 1))
    keeper.handle(HERE, Message(Kind.WANT, 2))
    assert keeper.holder_left(OTHER, Leaving.DIED) == []


def test_the_last_holder_finishes_a_channel_only_if_it_was_sent_to_and_itself_only_received() -> None:
    assert End(HERE).handle(OTHER, Message(Kind.ALONE)) == [tell(HERE, Kind.FINISH)]
    sender = End(HERE)
    sender.senders = 1
    assert sender.handle(OTHER, Message(Kind.ALONE)) == []
    keeper = settled()
    keeper.handle(HERE, Message(Kind.WANT, 1))
    assert keeper.handle(HERE, Message(Kind.FINISH)) == []
    keeper.handle(OTHER, Message(Kind.OFFER, 2, "a"))
    keeper.handle(HERE, Message(Kind.GOT, 1))
    keeper.handle(HERE, Message(Kind.WANT, 2))
    assert keeper.handle(HERE, Message(Kind.FINISH)) == [tell(HERE, Kind.OVER, 2)]


def test_an_end_says_whether_another_user_of_its_process_may_send() -> None:
    end = End(OTHER)
    end.senders = 1
    assert end.say_whether_it_may_send() == []
    assert end.receive(1) == [tell(OTHER, Kind.WANT, 1, True)]
    assert end.handle(OTHER, Message(Kind.ALONE)) == []
    end.senders = 0
    assert end.say_whether_it_may_send() == [tell(OTHER, Kind.MAY_SEND, 0, False), tell(OTHER, Kind.FINISH)]


def test_a_process_that_has_handed_a_channel_on_keeps_it_open() -> None:
    end = End(OTHER)
    end.was_handed_on = True
    assert end.receive(1) == [tell(OTHER, Kind.WANT, 1, False)]
    assert end.handle(OTHER, Message(Kind.ALONE)) == []


def test_a_receiver_that_may_also_send_is_left_until_it_may_not() -> None:
    keeper = settled()
    keeper.holder_came(OTHER)
    keeper.handle(THIRD, Message(Kind.WANT, 1, True))
    assert keeper.holder_left(OTHER, Leaving.DIED) == []
    assert keeper.handle(THIRD, Message(Kind.MAY_SEND, 0, False)) == [tell(THIRD, Kind.ORPHANED, 1, OTHER)]


def test_a_sender_counts_no_more_when_its_process_only_receives() -> None:
    keeper = settled()
    for sender in (OTHER, THIRD):
        keeper.handle(sender, Message(Kind.OFFER, 1, "a"))
        keeper.handle(HERE, Message(Kind.WANT, 2))
        keeper.handle(HERE, Message(Kind.GOT, 2))
    keeper.handle(THIRD, Message(Kind.WANT, 2, True))
    assert keeper.holder_left(OTHER, Leaving.DIED) == []
    assert keeper.handle(THIRD, Message(Kind.MAY_SEND, 0, False)) == [tell(THIRD, Kind.ORPHANED, 2, OTHER)]


def test_a_keeper_counts_by_itself_when_the_maker_is_gone() -> None:
    keeper = moved_here()
    assert keeper.peer_lost(OTHER, Leaving.ENDED) == [tell(THIRD, Kind.COUNTING)]
    end = End(OTHER)
    end.handle(HERE, Message(Kind.COUNTING))
    assert end.keeper == HERE
    (left,) = end.leave(THIRD)
    assert not keeper.is_over
    assert left == tell(HERE, Kind.LEFT, 0, (THIRD, Leaving.DROPPED))
    keeper.handle(THIRD, Message(Kind.LEFT, 0, (THIRD, Leaving.DROPPED)))
    assert keeper.is_over


def test_a_death_counts_behind_what_the_maker_has_said_of_holders() -> None:
    fourth = PeerId("fourth")
    keeper = moved_here()
    for sender in (THIRD, fourth):
        keeper.handle(sender, Message(Kind.OFFER, 1, "a"))
        keeper.handle(HERE, Message(Kind.WANT, 2))
        keeper.handle(HERE, Message(Kind.GOT, 2))
    keeper.handle(OTHER, Message(Kind.LEFT, 0, (fourth, Leaving.DROPPED)))
    keeper.handle(HERE, Message(Kind.WANT, 3))
    # Meanwhile the fourth process holds the channel again, as the maker knows.
    left = Message(Kind.LEFT, 0, (THIRD, Leaving.DIED))
    assert keeper.peer_lost(THIRD, Leaving.DIED) == [Tell(OTHER, left)]
    assert keeper.handle(OTHER, Message(Kind.HELD, 0, fourth)) == []
    assert keeper.handle(OTHER, left) == []
    fourth_left = Message(Kind.LEFT, 0, (fourth, Leaving.DROPPED))
    assert keeper.handle(OTHER, fourth_left) == [tell(HERE, Kind.ORPHANED, 3, THIRD)]


def test_what_the_maker_believes_of_ends_closes_no_channel_in_use() -> None:
    keeper = moved_here()
    keeper.handle(OTHER, Message(Kind.LEFT, 0, (OTHER, Leaving.DROPPED)))
    keeper.handle(OTHER, Message(Kind.LEFT, 0, (THIRD, Leaving.ENDED)))
    # It was the maker that ended.
    assert keeper.handle(OTHER, Message(Kind.DROP)) == [tell(THIRD, Kind.COUNTING)]
    assert not keeper.is_over
    keeper.handle(THIRD, Message(Kind.LEFT, 0, (THIRD, Leaving.DROPPED)))
    assert keeper.is_over


def test_deaths_that_the_maker_had_no_time_to_pass_on_count_when_it_is_gone() -> None:
    keeper = moved_here()
    keeper.handle(HERE, Message(Kind.WANT, 1))
    keeper.peer_lost(THIRD, Leaving.DIED)
    assert keeper.peer_lost(OTHER, Leaving.ENDED) == [tell(HERE, Kind.COUNTING), tell(HERE, Kind.ORPHANED, 1, THIRD)]


def test_an_end_asks_again_where_the_queue_has_moved_but_offers_nothing_twice() -> None:
    end = End(OTHER)
    end.receive(1)
    end.send(2, "a")
    end.close(3)
    end.handle(THIRD, Message(Kind.MOVED, 0, THIRD))
    # An offered item may have been taken, and have moved with the queue.
    assert end.peer_lost(OTHER) == [
        tell(THIRD, Kind.WANT, 1, False),
        Settle(2, Outcome.LOST, OTHER),
        tell(THIRD, Kind.CLOSE, 3),
    ]


def test_offers_follow_the_queue_in_their_order_and_before_later_ones() -> None:
    end = End(OTHER)
    end.send(1, "a")
    end.send(2, "b")
    moved = Message(Kind.MOVED, 1, THIRD)
    assert end.handle(OTHER, moved) == [tell(THIRD, Kind.OFFER, 1, "a"), tell(THIRD, Kind.OFFER, 2, "b")]
    assert end.send(3, "c") == [tell(THIRD, Kind.OFFER, 3, "c")]
    # The answer to the second offer says nothing new.
    assert end.handle(OTHER, Message(Kind.MOVED, 2, THIRD)) == []
    assert end.stop_sending(2) == [tell(THIRD, Kind.WITHDRAW, 2)]
    assert end.stop_sending(2) == end.handle(THIRD, Message(Kind.TAKEN, 2)) == []
    assert end.handle(THIRD, Message(Kind.TAKEN, 1)) == [Settle(1, Outcome.DONE)]
    assert end.peer_lost(THIRD) == [Settle(3, Outcome.LOST, THIRD)]
    assert end.is_idle


def test_a_receive_that_begins_while_an_item_is_on_its_way_back_gets_that_item() -> None:
    end = End(OTHER)
    end.receive(1)
    end.handle(OTHER, Message(Kind.ITEM, 1, "a"))
    end.confirm(1)
    assert end.stop_receiving() == []
    assert end.receive(2) == []
    assert end.handle(OTHER, Message(Kind.YOURS, 1)) == [
        tell(OTHER, Kind.BACK, 0, "a"),
        tell(OTHER, Kind.WANT, 2, False),
    ]


def test_a_close_that_did_not_find_the_queue_is_made_when_it_turns_up() -> None:
    end = End(OTHER)
    end.peer_lost(OTHER)
    assert end.close(1) == [Settle(1, Outcome.DONE)]
    assert end.handle(THIRD, Message(Kind.COUNTING)) == [tell(THIRD, Kind.CLOSE)]


def test_a_process_that_knows_nothing_of_a_channel_says_so() -> None:
    assert refusal(Message(Kind.WANT, 3)) == Message(Kind.LOST, 3)
    assert refusal(Message(Kind.CLOSE, 3)) == Message(Kind.OVER, 3)
    assert refusal(Message(Kind.GOT, 3)) is None
