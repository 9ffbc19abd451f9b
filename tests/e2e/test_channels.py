"""Channels: bounded queues between actors, without the controller (sections 2 and 9, row CR9)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch
from actors import Box, Echo
from probes import Courier

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def task(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Something that goes on meanwhile."""
    return asyncio.get_running_loop().create_task(coro)


async def has_sent(courier: Courier, count: int) -> int:
    """The number of sent items, once it is `count`, and no more after another round trip."""
    while await courier.count() < count:
        await asyncio.sleep(0)
    for _ in range(20):
        sent = await courier.count()
    return sent


async def test_here_items_come_in_order_and_the_channel_ends(rt: aiodaft.Runtime) -> None:
    channel: aiodaft.Channel[Any] = aiodaft.Channel(3)
    sending = task(_send(channel, list(range(50))))
    assert [item async for item in channel] == list(range(50))
    await sending
    for _ in range(2):
        with pytest.raises(aiodaft.ChannelClosed, match="closed") as caught:
            await channel.recv()
        assert caught.value.executed is False
        with pytest.raises(aiodaft.ChannelClosed, match="closed"):
            await channel.send(1)
        await channel.aclose()
    assert [item async for item in channel] == []


async def _send(channel: aiodaft.Channel[Any], items: list[Any]) -> None:
    for item in items:
        await channel.send(item)
    await channel.aclose()


async def test_between_actors_nothing_comes_here(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(4)
    first = receiver.receive(channel, 1)
    await sender.send(channel, ["warm"])
    assert await first == ["warm"]
    before = rt.traffic().messages_received
    received = receiver.drain(channel)
    await sender.send(channel, list(range(500)))
    # Two answers, and the runtime's own messages; not one message per item.
    assert rt.traffic().messages_received - before < 50
    await channel.aclose()
    assert await received == list(range(500))


@pytest.mark.parametrize("where", ["here to there", "there to here", "there to there"])
async def test_every_kind_of_value_arrives_as_it_was(rt: aiodaft.Runtime, where: str) -> None:
    items: list[Any] = [
        None,
        1,
        "ä",
        (1, [2]),
        {"a": {1}},
        bytes(300_000),
        bytearray(b"x" * 100_000),
        torch.arange(5),
        [None] * 9,
    ]
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    if where.startswith("here"):
        sending: Any = task(_send(channel, items))
    else:
        sending = task(_finish((await rt.spawn(Courier)).send(channel, items), channel))
    if where.endswith("here"):
        got = [item async for item in channel]
    else:
        got = await (await rt.spawn(Courier)).drain(channel)
    await sending
    assert [type(item) for item in got] == [type(item) for item in items]
    assert [item for item in got if not isinstance(item, torch.Tensor)] == [
        item for item in items if not isinstance(item, torch.Tensor)
    ]
    assert torch.equal(got[7], items[7])


async def _finish(sending: aiodaft.Ref[int], channel: aiodaft.Channel[Any]) -> None:
    await sending
    await channel.aclose()


@pytest.mark.parametrize("where", ["queue here", "queue at the receiver", "queue at the sender"])
async def test_a_full_channel_holds_the_sender_up(rt: aiodaft.Runtime, where: str) -> None:
    sender, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    channel = await sender.make(3) if where == "queue at the sender" else aiodaft.Channel[Any](3)
    taken: list[Any] = []
    if where == "queue at the receiver":
        await channel.send("moves it")
        taken += await receiver.receive(channel, 1)
    sending = sender.send(channel, list(range(10)))
    assert await has_sent(sender, 3) == 3
    assert not sending.done()
    for _ in range(2):
        if where == "queue at the receiver":
            taken = list(await receiver.receive(channel, 1))
        else:
            taken.append(await channel.recv())
    # Items that the receiver has asked for in advance count as taken.
    assert 5 <= await has_sent(sender, 5) <= 6
    rest = [await channel.recv() for _ in range(8)] if where != "queue at the receiver" else []
    if where == "queue at the receiver":
        taken = list(await receiver.receive(channel, 8))
    assert await sending == 10
    assert [item for item in taken + rest if item != "moves it"] == list(range(10))


async def test_many_senders_and_receivers_share_every_item_once_and_keep_each_senders_order(
    rt: aiodaft.Runtime,
) -> None:
    senders = [await rt.spawn(Courier) for _ in range(3)]
    receivers = [await rt.spawn(Courier) for _ in range(2)]
    channel: aiodaft.Channel[Any] = aiodaft.Channel(4)
    received = [receiver.drain(channel) for receiver in receivers]
    here = task(_collect(channel))
    sent = [sender.send(channel, [(who, index) for index in range(60)]) for who, sender in enumerate(senders)]
    sending = task(_send_all(channel, [("here", index) for index in range(60)]))
    await asyncio.gather(*sent, sending)
    await channel.aclose()
    piles = [*(await asyncio.gather(*received)), await here]
    assert sorted(str(item) for pile in piles for item in pile) == sorted(
        str((who, index)) for who in (0, 1, 2, "here") for index in range(60)
    )
    for pile in piles:
        for who in (0, 1, 2, "here"):
            mine = [index for sender, index in pile if sender == who]
            assert mine == sorted(mine)


async def _collect(channel: aiodaft.Channel[Any]) -> list[Any]:
    return [item async for item in channel]


async def _send_all(channel: aiodaft.Channel[Any], items: list[Any]) -> None:
    for item in items:
        await channel.send(item)


async def test_tensors_go_from_sender_to_receiver_and_are_freed(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    sums = receiver.sums(channel)
    before = rt.traffic().payload_received
    tensor = torch.ones(500_000)
    await sender.send(channel, [tensor * value for value in range(6)])
    await channel.send(tensor)
    tensor.zero_()
    await channel.aclose()
    assert await sums == [0, 500_000, 1_000_000, 1_500_000, 2_000_000, 2_500_000, 500_000]
    assert rt.traffic().payload_received == before
    gc.collect()
    for actor in (sender, receiver):
        while (await rt.info(actor)).stored_bytes:
            await asyncio.sleep(0)


async def test_closing_lets_what_is_inside_be_received_and_wakes_all_waiters(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    await channel.send(1)
    await channel.send(2)
    blocked = task(channel.send(3))
    await asyncio.sleep(0)
    closer = await rt.spawn(Courier)
    await closer.keep(channel)
    await closer.close_kept()
    with pytest.raises(aiodaft.ChannelClosed):
        await blocked
    assert await receiver.drain(channel) == [1, 2]
    with pytest.raises(aiodaft.ChannelClosed):
        await receiver.receive(channel, 1)
    empty: aiodaft.Channel[Any] = aiodaft.Channel(1)
    waiting: list[Any] = [task(empty.recv()), receiver.receive(empty, 1)]
    while not (await rt.info(receiver)).running:
        await asyncio.sleep(0)
    await empty.aclose()
    for one in waiting:
        with pytest.raises(aiodaft.ChannelClosed):
            await one


@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_cancelled_receive_loses_nothing(rt: aiodaft.Runtime, size: int) -> None:
    items = [bytes([index]) * size for index in range(20)]
    sender, other = await rt.spawn(Courier), await rt.spawn(Courier)
    for channel in (aiodaft.Channel[Any](2), await other.make(2)):
        for _ in range(3):
            receiving = task(channel.recv())
            await asyncio.sleep(0)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        sending = sender.send(channel, items)
        got: list[Any] = []
        while len(got) < 20:
            receiving = task(channel.recv())
            for _ in range(len(got)):
                await asyncio.sleep(0)
            if len(got) % 3 == 0 and not receiving.done():
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
                receiving = task(channel.recv())
            got.append(await receiving)
        await sending
        assert got == items


async def test_a_receive_that_is_cancelled_in_an_actor_gives_its_item_to_the_next(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    for _ in range(2):
        ref = receiver.receive(channel, 1)
        while not (await rt.info(receiver)).running:
            await asyncio.sleep(0)
        ref.cancel()
        with pytest.raises(aiodaft.CallCancelled):
            await ref
    await channel.send("kept")
    assert await receiver.receive(channel, 1) == ["kept"]


async def test_a_send_that_is_cancelled_while_it_waits_leaves_order_and_room(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(1)
    await channel.send("first")
    blocked = task(channel.send("never"))
    for _ in range(5):
        await asyncio.sleep(0)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    received = receiver.receive(channel, 2)
    await channel.send("second")
    assert await received == ["first", "second"]


async def test_a_channel_reaches_an_actor_through_others(rt: aiodaft.Runtime) -> None:
    first, second, third = [await rt.spawn(Courier) for _ in range(3)]
    channel = await first.make(2)
    received = third.drain(channel)
    echo = await rt.spawn(Echo)
    same = (await echo.echo(Box({"deep": [channel]}))).ref["deep"][0]
    assert repr(same) == repr(channel)
    assert await first.hand_on(second, same, [1, 2, 3]) == 3
    await same.send(4)
    await channel.aclose()
    assert await received == [1, 2, 3, 4]


async def test_a_channel_of_channels_carries_answers_back(rt: aiodaft.Runtime) -> None:
    courier = await rt.spawn(Courier)
    questions, answers = aiodaft.Channel[Any](1), aiodaft.Channel[Any](1)
    await questions.send(answers)
    (back,) = await courier.receive(questions, 1)
    await courier.send(back, ["answer"])
    assert await answers.recv() == "answer"


async def test_a_channel_outlives_the_one_who_made_it_once_it_has_moved(rt: aiodaft.Runtime) -> None:
    maker, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    channel = await maker.make(2)
    received = receiver.receive(channel, 1)
    await channel.send("first")
    assert await received == ["first"]
    await channel.send("second")
    await rt.stop(maker)
    await channel.send("third")
    assert await receiver.receive(channel, 2) == ["first", "second", "third"]


async def test_the_death_of_the_receiver_reaches_the_sender(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Courier), await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    received = receiver.drain(channel)
    sending = sender.send(channel, list(range(3)))
    await sending
    pid = (await rt.info(receiver)).pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await received
    async with asyncio.timeout(30):
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await sender.send(channel, list(range(100)))
        with pytest.raises(aiodaft.DaftError):
            await channel.send("here as well")
        with pytest.raises(aiodaft.DaftError):
            await channel.recv()


async def test_the_death_of_a_second_receiver_leaves_the_channel_to_the_others(rt: aiodaft.Runtime) -> None:
    keeper, doomed, sender = [await rt.spawn(Courier) for _ in range(3)]
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    await channel.send("moves it")
    assert await keeper.receive(channel, 1) == ["moves it"]
    waiting = doomed.receive(channel, 1)
    while not (await rt.info(doomed)).running:
        await asyncio.sleep(0)
    await rt.kill(doomed)
    with pytest.raises(aiodaft.ActorDied):
        await waiting
    received = keeper.receive(channel, 3)
    async with asyncio.timeout(30):
        await sender.send(channel, [1, 2, 3])
        assert await received == ["moves it", 1, 2, 3]


async def test_what_cannot_travel_fails_the_send_and_nothing_else(rt: aiodaft.Runtime) -> None:
    receiver = await rt.spawn(Courier)
    channel: aiodaft.Channel[Any] = aiodaft.Channel(2)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="Channel.send cannot travel"):
        await channel.send(item for item in [1])
    received = receiver.receive(channel, 1)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="Channel.send cannot travel"):
        await channel.send({"lock": asyncio.get_running_loop()})
    await channel.send("fine")
    assert await received == ["fine"]


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "3"])
async def test_a_capacity_is_a_positive_number(rt: aiodaft.Runtime, capacity: Any) -> None:
    with pytest.raises(ValueError, match="positive number of items"):
        aiodaft.Channel(capacity)
