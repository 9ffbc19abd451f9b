"""Tests that use the fixtures of the pytest plugin. Test modules made for one plugin of async tests import them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

import aiodaft
from aiodaft.testing import Faults

KEPT: list[Any] = []


class Counter(aiodaft.Actor):
    def __init__(self) -> None:
        self.count = 0
        self.kept: list[list[str]] = []

    @aiodaft.method
    async def add(self, number: int) -> int:
        self.count += number
        return self.count

    @aiodaft.method
    def keep(self, items: list[str]) -> list[list[str]]:
        items.append("changed by the actor")
        self.kept.append(items)
        return self.kept

    @aiodaft.method
    async def add_to(self, other: Counter) -> int:
        return await other.add(1)

    @aiodaft.method
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @aiodaft.method
    async def fail(self) -> None:
        raise ValueError("boom")

    @aiodaft.method
    async def pid(self) -> int:
        return os.getpid()


async def make_counter(daft: aiodaft.Runtime) -> Counter:
    return await daft.spawn(Counter)


async def check_calls(rt: aiodaft.Runtime) -> None:
    counter = await rt.spawn(Counter)
    assert [await ref for ref in [counter.add(1), counter.add(2), counter.add(3)]] == [1, 3, 6]
    items = ["mine"]
    assert await counter.keep(items) == [["mine", "changed by the actor"]]
    assert items == ["mine"]
    with pytest.raises(ValueError, match="boom") as caught:
        await counter.fail()
    assert any("Counter.fail" in note for note in caught.value.__notes__)
    waiting = counter.wait()
    await counter.add(0)
    waiting.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await waiting
    # It is the runtime of all code in the test.
    assert aiodaft.current_runtime() is rt
    assert aiodaft.Channel[int](1) is not None


async def check_faults(rt: aiodaft.Runtime, faults: Faults) -> None:
    first, second = await rt.spawn(Counter), await rt.spawn(Counter)
    with pytest.raises(ValueError, match="not connected"):
        await faults.cut(first, second)
    assert await first.add_to(second) == 1
    await faults.delay(first, 0.2)
    slow, fast = first.add(1), second.add(1)
    assert await fast == 2
    assert not slow.done()
    assert await slow == 1
    await faults.delay(first, 0)
    waiting = first.wait()
    await first.add(0)
    await faults.kill(first)
    assert waiting.done()
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await waiting
    with pytest.raises(aiodaft.ActorDied) as caught:
        await first.add(1)
    assert caught.value.executed is False
    with pytest.raises(aiodaft.ActorDied, match="no process"):
        await faults.kill(first)
    again = await rt.on(restart=aiodaft.Restart(follow=True)).spawn(Counter)
    await faults.kill(again)
    assert await again.add(1) == 1


async def test_actors_live_in_the_process_of_the_test(daft: aiodaft.Runtime, counter: Counter) -> None:
    assert await counter.pid() == os.getpid()
    await check_calls(daft)


async def test_faults_of_actors_without_processes(daft_faults: Faults, daft: aiodaft.Runtime, counter: Counter) -> None:
    await check_faults(daft, daft_faults)
    with pytest.raises(RuntimeError, match="daft_cluster"):
        await daft_faults.stop(counter)


async def test_a_graph_without_processes(daft: aiodaft.Runtime, counter: Counter) -> None:
    assert await aiodaft.compile(lambda number: counter.add(number))(2) == 2


@pytest.mark.daft(gpus=2)
async def test_options_of_the_runtime(daft: aiodaft.Runtime) -> None:
    with pytest.raises(aiodaft.exceptions.InsufficientResources):
        await daft.on(gpus=3).spawn(Counter)


@pytest.mark.daft(nodes=2)
async def test_error_nodes_have_processes(daft: aiodaft.Runtime) -> None:
    raise AssertionError("the fixture has to refuse it")


async def wait() -> None:
    await asyncio.Event().wait()


def start_a_process() -> None:
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


async def test_error_what_is_left(daft: aiodaft.Runtime, counter: Counter) -> None:
    KEPT.append(counter.add(1))
    await KEPT[0]
    KEPT.append(asyncio.get_running_loop().create_task(wait(), name="forgotten"))
    await asyncio.sleep(0)
    start_a_process()


async def test_nothing_that_was_there_before_counts(daft: aiodaft.Runtime) -> None:
    KEPT[2].communicate(b"\n")


async def test_failed_has_more_than_it_needs(daft: aiodaft.Runtime, counter: Counter) -> None:
    ref = counter.add(1)
    assert await ref == 2


@pytest.mark.daft(leaks=False)
async def test_leaks_may_be_no_matter(daft: aiodaft.Runtime, counter: Counter) -> None:
    KEPT.append(counter.add(1))


@pytest.mark.daft(gpus=2)
async def test_actors_have_processes(daft_cluster: aiodaft.Runtime, daft_faults: Faults) -> None:
    counter = await daft_cluster.on(gpus=2).spawn(Counter)
    assert await counter.pid() != os.getpid()
    await check_calls(daft_cluster)
    await check_faults(daft_cluster, daft_faults)
    await daft_faults.stop(counter)
    asked = counter.add(1)
    await daft_faults.resume(counter)
    assert await asked == 1
    # The fixture lets it go on before the runtime ends.
    await daft_faults.stop(counter)


@pytest.mark.daft(nodes=2, gpus=1)
async def test_actors_have_nodes(daft_cluster: aiodaft.Runtime, daft_faults: Faults) -> None:
    first = await daft_cluster.on(node="n1", gpus=1).spawn(Counter)
    second = await daft_cluster.on(node="n2", gpus=1).spawn(Counter)
    assert await first.add_to(second) == 1
    waiting = second.wait()
    await second.add(0)
    await daft_faults.cut(second)
    with pytest.raises(aiodaft.exceptions.PeerLost):
        await waiting
    assert await second.add(1) == 2
    waiting = second.wait()
    await second.add(0)
    with pytest.raises(ValueError, match="no node 'n3': it has n1, n2"):
        await daft_faults.kill_node("n3")
    await daft_faults.kill_node("n2")
    with pytest.raises((aiodaft.ActorDied, aiodaft.exceptions.PeerLost)):
        await waiting
