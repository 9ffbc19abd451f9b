"""The end of channels: by a close, the death of a sender, a receiver or the keeper, and the last drop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import numpy as np
import pytest
from inside import peer_of
from probes import Courier

import aiodaft
from aiodaft import Channel
from aiodaft.exceptions import OutcomeUnknown

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(log_only: aiodaft.Runtime) -> aiodaft.Runtime:
    """Actors are killed in it, of which each may be without a call at that moment."""
    return log_only


async def is_called(rt: aiodaft.Runtime, actor: Courier) -> None:
    """A call of the actor has begun, and waits."""
    while not (await rt.info(actor)).running:
        await asyncio.sleep(0)


async def die(rt: aiodaft.Runtime, actor: Courier) -> None:
    """The actor's process is killed; the order in which others hear of it is open."""
    os.kill((await rt.info(actor)).pid, signal.SIGKILL)


async def is_known_to_be_alone(actor: Courier) -> None:
    """The process of the actor has heard that no other one holds the only channel that it has."""
    gc.collect()
    while not await actor.is_alone():
        await asyncio.sleep(0)


async def nothing_is_left(rt: aiodaft.Runtime, *actors: Courier) -> None:
    """No process has anything left of any channel."""
    gc.collect()
    for actor in actors:
        while await actor.traces() != [0, 0, 0, 0]:
            await asyncio.sleep(0)
    table = peer_of(rt).channels.table
    while table.keepers or table.ends:
        await asyncio.sleep(0)


# Both ends in one process, or a receiver beside the first one.


@pytest.mark.parametrize("item", [7, bytes(80_000), bytes(800_000)])
async def test_a_process_is_its_own_receiver(rt: aiodaft.Runtime, item: Any) -> None:
    courier = await rt.spawn(Courier)
    neighbour = await rt.on(with_=courier).spawn(Courier)
    assert await courier.both(Channel(2), [item] * 10) == [item] * 10
    channel: Channel[Any] = Channel(2)
    received = neighbour.drain(channel)
    assert await courier.send(channel, [item] * 10) == 20
    await channel.aclose()
    assert await received == [item] * 10


async def test_a_process_receives_after_an_actor_has_begun_to(rt: aiodaft.Runtime) -> None:
    receiver, sender = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: Channel[int] = Channel(4)
    # It gets the channel before any process has received.
    await sender.keep(channel)
    there = receiver.drain(channel)
    await is_called(rt, receiver)
    here = asyncio.get_running_loop().create_task(_collect(channel))
    await asyncio.sleep(0)
    await sender.send(channel, list(range(20)))
    await channel.aclose()
    assert sorted(await there + await here) == list(range(20))


async def _collect(channel: Channel[Any]) -> list[Any]:
    return [item async for item in channel]


async def test_senders_that_wait_for_room_go_on_where_the_queue_has_moved(rt: aiodaft.Runtime) -> None:
    receiver, sender = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: Channel[str] = Channel(1)
    await channel.send("first")
    there = sender.send(channel, ["there"])
    here = asyncio.get_running_loop().create_task(channel.send("here"))
    await is_called(rt, sender)
    received = receiver.drain(channel)
    await asyncio.gather(here, there.value())
    await channel.aclose()
    first, *others = await received
    assert (first, sorted(others)) == ("first", ["here", "there"])


# No process is left to send, or to receive.


@pytest.mark.parametrize("has_sent", [True, False])
async def test_receivers_learn_that_every_sender_has_died(rt: aiodaft.Runtime, has_sent: bool) -> None:
    receiver, sender = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: Channel[str] = Channel(2)
    there, here = receiver.drain(channel), asyncio.get_running_loop().create_task(_collect(channel))
    await is_called(rt, receiver)
    if has_sent:
        await sender.send(channel, ["something"])
    await sender.keep(channel)
    await die(rt, sender)
    for receiving in (there, here):
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL") as caught:
            await receiving
        assert any("every process that sent has ended" in note for note in caught.value.__notes__)
    # A sender that sends now lives.
    received = receiver.drain(channel)
    await channel.send("more")
    await channel.aclose()
    assert await received == ["more"]


async def test_one_sender_that_lives_is_enough(rt: aiodaft.Runtime) -> None:
    receiver, sender, other = [await rt.spawn(Courier) for _ in range(3)]
    channel: Channel[str] = Channel(2)
    received = receiver.drain(channel)
    for actor in (sender, other):
        await actor.send(channel, ["one"])
        await actor.keep(channel)
    await die(rt, sender)
    with pytest.raises(aiodaft.ActorDied):
        await sender.count()
    await other.send(channel, ["two"])
    await channel.aclose()
    assert await received == ["one", "one", "two"]


async def test_a_channel_ends_when_only_a_receiver_holds_it(rt: aiodaft.Runtime) -> None:
    receiver, sender = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: Channel[int] = Channel(4)
    await receiver.keep(channel)
    received = receiver.drain_kept()
    await sender.send(channel, [1, 2, 3])
    del channel
    assert await received == [1, 2, 3]
    await receiver.drop_kept()
    await nothing_is_left(rt, receiver, sender)


async def test_a_channel_stays_open_while_an_actor_beside_the_receiver_may_send(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    sender = await rt.on(with_=receiver).spawn(Courier)
    channel: Channel[int] = Channel(4)
    await sender.keep(channel)
    received = receiver.drain(channel)
    await channel.send(0)
    del channel
    await is_known_to_be_alone(receiver)
    assert await sender.send_kept([1, 2]) == 2
    # It was the last process that held the channel, and an actor of it that has sent held it as well.
    await sender.drop_kept()
    assert await received == [0, 1, 2]
    await nothing_is_left(rt, receiver)


async def test_a_channel_stays_open_while_an_actor_waits_for_a_receiver_beside_it(rt: aiodaft.Runtime) -> None:
    sender = await rt.spawn(Courier)
    receiver = await rt.on(with_=sender).spawn(Courier)
    channel: Channel[int] = Channel(4)
    await sender.keep(channel)
    await channel.send(0)
    # Both actors have the same object.
    received = sender.have_kept_drained(receiver)
    del channel
    await is_known_to_be_alone(sender)
    await sender.send_kept([1, 2])
    await sender.close_kept()
    assert await received == [0, 1, 2]


async def test_a_channel_ends_when_the_actor_beside_the_receiver_drops_it_unsent(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    other = await rt.on(with_=receiver).spawn(Courier)
    channel: Channel[int] = Channel(4)
    await other.keep(channel)
    received = receiver.drain(channel)
    await channel.send(0)
    del channel
    await is_known_to_be_alone(receiver)
    await other.drop_kept()
    assert await received == [0]


async def test_a_receiver_that_has_passed_the_channel_on_learns_that_the_sender_has_died(rt: aiodaft.Runtime) -> None:
    maker, sender = await rt.spawn(Courier), await rt.spawn(Courier)
    channel = await maker.make(4)
    await sender.keep(channel)
    await sender.send_kept([1])
    assert await channel.recv() == 1
    await die(rt, sender)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await channel.recv()


@pytest.mark.parametrize("then", ["sends", "drops"])
async def test_a_sender_dies_while_an_actor_beside_the_receiver_may_send(rt: aiodaft.Runtime, then: str) -> None:
    receiver, doomed = await rt.spawn(Courier), await rt.spawn(Courier)
    other = await rt.on(with_=receiver).spawn(Courier)
    channel: Channel[int] = Channel(4)
    await other.keep(channel)
    received = receiver.drain(channel)
    await doomed.send(channel, [1])
    await doomed.keep(channel)
    # It comes to the only receiver.
    while not await receiver.has_queue():
        await asyncio.sleep(0)
    await die(rt, doomed)
    with pytest.raises(aiodaft.ActorDied):
        await doomed.count()
    while not await receiver.misses_a_sender():
        await asyncio.sleep(0)
    if then == "sends":
        await other.send_kept([2])
        await channel.aclose()
        assert await received == [1, 2]
    else:
        await other.drop_kept()
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await received


async def test_an_item_for_a_receiver_that_dies_goes_to_another(rt: aiodaft.Runtime) -> None:
    keeper, doomed = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: Channel[int] = Channel(2)
    await channel.send(0)
    assert await keeper.receive(channel, 1) == [0]
    waiting = doomed.receive(channel, 1)
    await is_called(rt, doomed)
    await die(rt, doomed)
    # Perhaps before any process has heard of the death.
    await channel.send(1)
    with pytest.raises(aiodaft.ActorDied):
        await waiting
    assert await keeper.receive(channel, 1) == [0, 1]


async def test_small_items_outlive_their_sender_and_large_ones_fail_one_by_one(rt: aiodaft.Runtime) -> None:
    sender = await rt.spawn(Courier)
    channel: Channel[Any] = Channel(4)
    await sender.send(channel, [[1], bytes(500_000), [3]])
    await die(rt, sender)
    assert await channel.recv() == [1]
    with pytest.raises(OutcomeUnknown):
        await channel.recv()
    assert await channel.recv() == [3]


async def test_closing_a_channel_is_no_error_when_its_queue_is_lost(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    channel: Channel[int] = Channel(2)
    received = receiver.receive(channel, 1)
    await channel.send(1)
    await received
    await die(rt, receiver)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL") as caught:
        while True:
            await channel.send(2)
    assert any("had its queue" in note for note in caught.value.__notes__)
    await channel.aclose()
    with pytest.raises(aiodaft.ActorDied):
        await channel.recv()


async def test_a_channel_goes_on_when_its_maker_is_killed_and_is_freed_when_it_is_dropped(rt: aiodaft.Runtime) -> None:
    maker, receiver, sender = [await rt.spawn(Courier) for _ in range(3)]
    channel = await maker.make(2)
    await receiver.keep(channel)
    await channel.send("first")
    assert await receiver.receive(channel, 1) == ["first"]
    # From here on it is known where the queue is.
    await channel.send("second")
    await die(rt, maker)
    with pytest.raises(aiodaft.ActorDied):
        await maker.count()
    assert await sender.send(channel, [bytes(500_000)]) == 1
    await receiver.drop_kept()
    del channel
    await nothing_is_left(rt, receiver, sender)


# Nothing is left.


async def test_items_of_a_channel_that_all_processes_have_dropped_are_freed(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    items = [np.ones(200_000) for _ in range(3)]
    unread: Channel[Any] = Channel(8)
    half_read: Channel[Any] = Channel(8)
    closed: Channel[Any] = Channel(8)
    for channel in (unread, half_read, closed):
        await sender.send(channel, items)
    await receiver.receive(half_read, 1)
    await receiver.forget_taken()
    await closed.aclose()
    del unread, half_read, closed, channel
    await nothing_is_left(rt, sender, receiver)


async def test_receives_that_were_given_up_leave_no_task(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    for _ in range(10):
        channel: Channel[int] = Channel(1)
        ref = receiver.drain(channel)
        await is_called(rt, receiver)
        ref.cancel()
        with pytest.raises(aiodaft.CallCancelled):
            await ref
    del channel
    await nothing_is_left(rt, receiver)


async def test_closing_the_runtime_wakes_receivers() -> None:
    async with aiodaft.Runtime(gpus=0) as rt:
        channel: Channel[int] = Channel(1)
        receiving = asyncio.get_running_loop().create_task(channel.recv())
        await asyncio.sleep(0)
        await rt.aclose()
        with pytest.raises(aiodaft.exceptions.RuntimeClosed):
            await receiving


async def test_a_channel_is_used_on_the_loop_of_its_runtime(rt: aiodaft.Runtime) -> None:
    channel: Channel[int] = Channel(1)

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(channel.send(1))

    await asyncio.to_thread(elsewhere)
    await channel.send(2)
    assert await channel.recv() == 2
