"""Channels between processes, without processes: the place of the queue, the holder of an item, the news."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from neighbours import Neighbour, close
from rooms import ELSEWHERE, HERE, THERE, turns

from aiodaft._protocol.channels.channel import Kind, Place
from aiodaft._runtime.channels import Port, QueuedItem
from aiodaft.exceptions import ChannelClosed, DaftError, PeerLost
from aiodaft.ref import Ref

Sites = tuple[Neighbour, Neighbour, Neighbour]


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    made: dict[Any, Neighbour] = {}
    sites = Neighbour(HERE, made), Neighbour(THERE, made), Neighbour(ELSEWHERE, made)
    yield sites
    gc.collect()
    await turns(8)
    for site in sites:
        assert site.channels.table.ends == {}
    await close(list(sites))


async def given(port: Port, giver: Neighbour, taker: Neighbour) -> Port:
    """The end of a channel in a process that gets it from another one."""
    endpoint = port.endpoint
    refs, described = taker.objects.refs, giver.objects.refs.describe(endpoint.ref)
    keeper = port.hand_on()
    (ref,) = await refs.adopt((described,), taker.to(giver.process.id))
    taken = taker.channels.port(endpoint.id, keeper, ref)
    await turns()
    return taken


def task(what: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(what)


def place(site: Neighbour, port: Port) -> Place | None:
    keeper = site.channels.table.keepers.get(port.endpoint.id)
    return None if keeper is None else keeper.place


async def test_in_one_process_no_message_is_sent(sites: Sites) -> None:
    maker, *_ = sites
    channel = maker.channels.create(2)
    for item in ("plain", ["encoded"]):
        await channel.send(item)
    assert [await channel.receive(), await channel.receive()] == ["plain", ["encoded"]]
    await channel.endpoint.aclose()
    with pytest.raises(ChannelClosed, match="everything in it has been received"):
        await channel.receive()
    with pytest.raises(ChannelClosed, match="nothing can be sent"):
        await channel.send("more")
    assert maker.told == []


async def test_the_queue_moves_to_the_first_other_receiver_and_senders_follow_it(sites: Sites) -> None:
    maker, receiver, sender = sites
    made = maker.channels.create(4)
    ours, theirs = await given(made, maker, receiver), await given(made, maker, sender)
    await made.send("first")
    assert await ours.receive() == "first"
    assert (place(maker, made), place(receiver, made)) == (Place.AWAY, Place.SETTLED)
    await theirs.send("second")
    assert await ours.receive() == "second"
    # It was told where the queue is, and asked the maker for nothing.
    assert [to for to, kind in sender.told if kind is Kind.OFFER] == [THERE]


async def test_an_item_that_was_not_taken_goes_to_the_next_receiver(sites: Sites) -> None:
    maker, receiver, other = sites
    made = maker.channels.create(4)
    one, another = await given(made, maker, receiver), await given(made, maker, other)
    first = task(one.receive())
    await turns(8)
    first.cancel()
    await turns(8)
    second = task(another.receive())
    await turns(8)
    await made.send(["x"])
    assert await second == ["x"]
    assert first.cancelled()


async def test_a_send_waits_for_room_and_can_be_given_up(sites: Sites) -> None:
    maker, *_ = sites
    channel = maker.channels.create(1)
    await channel.send(1)
    second = task(channel.send(2))
    await turns()
    second.cancel()
    await turns()
    third = task(channel.send(3))
    assert await channel.receive() == 1
    await third
    assert await channel.receive() == 3


async def test_sends_that_are_under_way_together_keep_their_order(sites: Sites) -> None:
    maker, sender, _ = sites
    made = maker.channels.create(4)
    theirs = await given(made, maker, sender)
    items = [number if number % 3 else ["encoded", number] for number in range(40)]
    sends = [task(theirs.send(item)) for item in items]
    assert [await made.receive() for _ in items] == items
    await asyncio.gather(*sends)


async def test_receivers_learn_that_the_process_with_the_queue_is_gone(sites: Sites) -> None:
    maker, receiver, _ = sites
    made = maker.channels.create(4)
    theirs = await given(made, maker, receiver)
    waiting = task(theirs.receive())
    await turns(8)
    assert place(maker, made) is Place.AWAY
    maker.lose(THERE)
    with pytest.raises(PeerLost) as caught:
        await made.send("x")
    assert "is lost with its items" in caught.value.__notes__[-1]
    # Its end is no error.
    await made.endpoint.aclose()
    waiting.cancel()
    await turns()


async def test_a_receiver_learns_that_every_sender_has_died(sites: Sites) -> None:
    maker, sender, _ = sites
    made = maker.channels.create(4)
    theirs = await given(made, maker, sender)
    await theirs.send("x")
    assert await made.receive() == "x"
    waiting = task(made.receive())
    await turns()
    maker.lose(THERE)
    with pytest.raises(DaftError) as caught:
        await waiting
    assert "every process that sent has ended" in caught.value.__notes__[-1]


async def test_a_receiver_that_is_the_only_holder_ends_if_it_only_receives(sites: Sites) -> None:
    maker, receiver, sender = sites
    made = maker.channels.create(4)
    ours, theirs = await given(made, maker, receiver), await given(made, maker, sender)
    await theirs.send("x")
    assert await ours.receive() == "x"
    waiting = task(ours.receive())
    await turns(8)
    del made, theirs
    await turns(12)
    with pytest.raises(ChannelClosed):
        await waiting


async def test_the_queue_counts_the_holders_when_the_maker_is_gone(sites: Sites) -> None:
    maker, receiver, late = sites
    made = maker.channels.create(4)
    ours, theirs = await given(made, maker, receiver), await given(made, maker, late)
    first = task(ours.receive())
    await made.send("x")
    assert await first == "x"
    for site in (receiver, late):
        site.lose(HERE)
    await turns(8)
    await theirs.send("y")
    assert await ours.receive() == "y"
    del theirs, ours
    gc.collect()
    await turns(12)
    assert receiver.channels.table.keepers == {}


async def test_the_runtime_ends_every_wait(sites: Sites) -> None:
    maker, *_ = sites
    channel = maker.channels.create(1)
    waiting = task(channel.receive())
    await turns()
    maker.channels.close()
    with pytest.raises(ChannelClosed, match="its maker has ended"):
        await waiting


async def test_a_small_item_travels_encoded_and_is_decoded_by_its_receiver(sites: Sites) -> None:
    maker, *_ = sites
    ref: Ref[Any] = Ref(maker.objects.refs.put(["small"], "put"))
    item = QueuedItem(ref)
    rebuild, arguments = item.__reduce__()
    assert rebuild is not QueuedItem
    received = rebuild(*arguments)
    first, second = await received.open(maker.store), await received.open(maker.store)
    assert first == second == ["small"]
    assert received.__reduce__()[1] == arguments


async def test_a_second_process_is_found_dead_while_the_end_of_another_one_is_told(sites: Sites) -> None:
    maker, first, second = sites
    shared, other = maker.channels.create(1), maker.channels.create(1)
    held = [await given(shared, maker, first), await given(shared, maker, second), await given(other, maker, second)]
    del shared, other
    gc.collect()
    await turns()
    # The message to the second process, that it is the only holder now, cannot be sent.
    sender: Any = SimpleNamespace(submit=lambda request: maker.lose(ELSEWHERE))
    maker.caller.sender = sender
    maker.lose(THERE)
    await turns()
    assert maker.channels.table.keepers == {}
    held.clear()
