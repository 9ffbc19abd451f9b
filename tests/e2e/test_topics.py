"""Topics: all that subscribe get what is published (row MP4)."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import aiodaft
from aiodaft.topics import Topic

pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


class Reader(aiodaft.Actor):
    """Subscribes when it is made."""

    def __init__(self, topic: Topic) -> None:
        self.messages = topic.subscribe()

    @aiodaft.method
    async def until(self, last: str) -> list[Any]:
        """The messages before this one."""
        messages = []
        while (message := await anext(self.messages)) != last:
            messages.append(message)
        return messages

    @aiodaft.method
    async def pid(self) -> int:
        return os.getpid()


async def subscribed(topic: Topic, count: int) -> None:
    while await topic.publish("first") < count:
        pass


async def test_all_subscribers_get_all_messages_in_one_order(rt: aiodaft.Runtime) -> None:
    topic = await rt.get_or_create("news", Topic)
    assert await topic.publish("nobody hears it") == 0
    readers = [await rt.spawn(Reader, topic) for _ in range(2)]
    await subscribed(topic, 2)
    await asyncio.gather(*(topic.publish((publisher, number)) for number in range(10) for publisher in "ab"))
    assert await topic.publish("last") == 2
    one, other = [await reader.until("last") for reader in readers]
    # Until both had subscribed, one was alone.
    assert one[-20:] == other[-20:]
    for publisher in "ab":
        assert [number for who, number in one[-20:] if who == publisher] == list(range(10))


async def test_a_publisher_waits_for_a_slow_subscriber_and_not_for_one_that_is_gone(rt: aiodaft.Runtime) -> None:
    topic = await rt.spawn(Topic, 1)
    slow = await rt.on(restart="temporary").spawn(Reader, topic)
    await subscribed(topic, 1)
    published = [topic.publish(number) for number in range(200)]
    await published[0]
    assert not published[-1].done()
    os.kill(await slow.pid(), signal.SIGKILL)
    await asyncio.gather(*published)
    assert await topic.publish("nobody hears it") == 0


async def test_a_topic_without_room_is_refused(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ValueError, match="a topic has room for a positive number of messages, not 0"):
        await rt.spawn(Topic, 0)
