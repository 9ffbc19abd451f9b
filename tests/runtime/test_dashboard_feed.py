"""The data that pages of the dashboard get, and the times of looks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import aiodaft
from aiodaft.dashboard.feed import MAX_ACTORS, Feed, frame_of
from aiodaft.exceptions import RuntimeClosed
from aiodaft.overview import ActorInfo, Cause, Failure, Flow, Overview, ProcessInfo
from aiodaft.testing import AutojumpLoop

HERE, THERE = "controller-1", "worker-1"


class HostileError(Exception):
    def __str__(self) -> str:
        raise OSError


def overview(clock: float = 0.0, done: int = 0, **changes: Any) -> Overview:
    found = Overview(
        taken=1e9 + clock,
        clock=clock,
        runtime=HERE,
        nodes=(aiodaft.state.NodeInfo("host", {}, "ready", {"cpus": 4.0}, {"cpus": 3.0}, 1),),
        processes=(
            ProcessInfo(HERE, 1, "host", "controller", HERE, (), answered=True),
            ProcessInfo(THERE, 2, "host", "worker", HERE, ("Model-1",), answered=True, cpu_seconds=done / 80),
        ),
        actors=(ActorInfo("Model-1", "Model", (), 2, "host", (), alive=True, done=done, process=THERE),),
        flows=(Flow(HERE, THERE, done, done, 100 * done, 0, 0), Flow(THERE, HERE, 0, done, 50 * done, 0, 0)),
        stored=(),
        failures=(),
    )
    return replace(found, **changes)


def test_a_frame_has_what_happened_since_the_last_one() -> None:
    frame = frame_of(overview(12.0, done=30), overview(10.0, done=10))
    assert (frame["totals"]["calls"], frame["totals"]["bytes"], frame["totals"]["cpu"]) == (10, 1500, 0.125)
    assert (frame["actors"][0]["calls"], frame["actors"][0]["state"], frame["seconds"]) == (10, "idle", 2)
    # Bytes that are of no call, and of no large value, the runtime has sent for itself.
    assert [(edge["source"], edge["bytes"]) for edge in frame["graph"]["edges"]] == [(HERE, 1000)]
    assert frame_of(overview(12.0, done=30), None)["totals"]["calls"] == 0


def test_a_frame_is_json_whatever_errors_say() -> None:
    (actor,) = overview().actors
    inner = Failure("call", "Model-1", "Model.step", THERE, 2, "", (Cause("E", "1"), Cause("F", "2")), 2, 1.0, 2.0)
    outer = replace(inner, causes=(Cause("E", "1", ("Model.step in Model-1",)),), followed=(inner,))
    frame = frame_of(overview(actors=(replace(actor, last_error=HostileError()),), failures=(outer,)), None)
    assert frame["actors"][0]["error"] == "HostileError: <its text cannot be had: OSError>"
    assert frame["failures"][0]["followed"][0]["causes"][1] == {"type": "F", "message": "2", "path": []}
    assert json.loads(json.dumps(frame)) == frame


def test_a_frame_has_the_actors_that_want_attention_if_there_are_too_many() -> None:
    (actor,) = overview().actors
    crowd = [replace(actor, name=f"Model-{index}") for index in range(MAX_ACTORS + 10)]
    crowd[-1] = replace(crowd[-1], alive=False)
    frame = frame_of(overview(actors=tuple(crowd)), None)
    assert len(frame["actors"]) == MAX_ACTORS
    assert frame["actors"][0]["state"] == "dead"
    assert (frame["totals"]["actors"], frame["totals"]["unwell"]) == (MAX_ACTORS + 10, 1)


class Looked:
    """A runtime that is looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.closed = False

    async def overview(self, *, patience: float) -> Overview:
        assert patience == 1.0
        if self.closed:
            raise RuntimeClosed("it is closed")
        self.looks += 1
        return overview(asyncio.get_running_loop().time(), done=100 * self.looks)


def on_virtual_time(scene: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is run on a clock that jumps, with a runtime to look at."""

    def test() -> None:
        with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
            runner.run(scene(Looked()))

    test.__name__ = scene.__name__
    return test


@on_virtual_time
async def test_pages_share_looks_which_are_a_period_apart(looked: Any) -> None:
    feed, loop = Feed(looked, 1.0), asyncio.get_running_loop()
    began = loop.time()
    first = await feed.newer(0)
    assert loop.time() == began
    second, same = await asyncio.gather(feed.newer(first.number), feed.newer(first.number))
    assert loop.time() == pytest.approx(began + 1)
    assert second is same
    assert second.frame["totals"]["calls"] == pytest.approx(100)
    # One that comes now gets the present look.
    assert await feed.newer(0) is second
    assert looked.looks == 2


@on_virtual_time
async def test_nothing_is_looked_at_while_no_page_waits(looked: Any) -> None:
    feed = Feed(looked, 1.0)
    number, _ = await feed.newer(0)
    await asyncio.sleep(3600)
    assert looked.looks == 1
    # The look of then says nothing of now.
    _, frame = await feed.newer(0)
    assert (looked.looks, frame["seconds"]) == (2, 0)
    assert number == 1


@on_virtual_time
async def test_a_page_that_leaves_hands_on_its_turn(looked: Any) -> None:
    feed = Feed(looked, 1.0)
    number, _ = await feed.newer(0)
    async with asyncio.TaskGroup() as group:
        gone, stays = (group.create_task(feed.newer(number)) for _ in range(2))
        await asyncio.sleep(0.5)
        gone.cancel()
    assert stays.result().number == number + 1


@on_virtual_time
async def test_pages_are_told_of_the_end(looked: Any) -> None:
    feed = Feed(looked, 1.0)
    number, _ = await feed.newer(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(end_of(feed, number))
        await asyncio.sleep(0)
        feed.close()
    assert waiting.result() == "the dashboard is closed"
    looked.closed = True
    assert await end_of(Feed(looked, 1.0), 0) == "it is closed"


async def end_of(feed: Feed, number: int) -> str:
    with pytest.raises(RuntimeClosed) as ended:
        await feed.newer(number)
    return str(ended.value)


@pytest.mark.parametrize("period", [0, -1, float("nan"), float("inf")])
def test_a_period_is_positive(period: float) -> None:
    with pytest.raises(ValueError, match="a positive number of seconds is needed"):
        Feed(Looked(), period)  # type: ignore[arg-type]  # it is not used
