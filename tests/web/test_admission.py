"""The requests under way and those that wait, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from aiodaft import Overloaded
from aiodaft.testing import AutojumpLoop
from aiodaft.web.admission import Admission, admission_of


class Holder:
    """A request that waits for its body since some time, if it does."""

    def __init__(self, since: float | None = None) -> None:
        self._since = since
        self.given_up = asyncio.Event()

    def stalled_for(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def give_up(self) -> None:
        self.given_up.set()


class Requests:
    """Requests that stay until they are told to go."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.under_way: list[str] = []

    async def _run(self, name: str) -> None:
        holder = Holder()
        await self._admission.enter(holder)
        self.under_way.append(name)
        try:
            await self.ends[name].wait()
        finally:
            self.under_way.remove(name)
            self._admission.leave(holder)

    async def come(self, *names: str) -> None:
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.get_running_loop().create_task(self._run(name))
        await turns()

    async def go(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await turns()

    async def leave(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await turns()

    def refused(self) -> list[str]:
        ended = ((name, task) for name, task in self.tasks.items() if task.done() and not task.cancelled())
        return [name for name, task in ended if isinstance(task.exception(), Overloaded)]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_beyond_the_limit_wait_in_order_and_those_beyond_the_queue_are_refused() -> None:
    requests = Requests(Admission(limit=2, queue=2))
    await requests.come("a", "b", "c", "d", "e")
    assert requests.under_way == ["a", "b"]
    assert requests.refused() == ["e"]
    await requests.go("b")
    assert requests.under_way == ["a", "c"]
    await requests.come("f", "g")
    assert requests.refused() == ["e", "g"]
    await requests.go("a", "c", "d", "f")
    await requests.come("h", "i")
    assert requests.under_way == ["h", "i"]
    await requests.go("h", "i")


async def test_a_waiting_request_that_is_cancelled_leaves_the_queue() -> None:
    requests = Requests(Admission(limit=1, queue=2))
    await requests.come("a", "b", "c")
    await requests.leave("b")
    await requests.come("d", "e")
    assert requests.refused() == ["e"]
    await requests.go("a")
    assert requests.under_way == ["c"]
    await requests.go("c", "d")


async def test_a_request_that_is_cancelled_in_the_turn_in_which_it_is_admitted_passes_its_place_on() -> None:
    requests = Requests(Admission(limit=1, queue=2))
    await requests.come("a", "b", "c")
    requests.ends["a"].set()
    # The end of "a" admits "b", which has not gone on when it is cancelled.
    while requests.under_way:
        await asyncio.sleep(0)
    await requests.leave("b")
    assert requests.under_way == ["c"]
    await requests.go("c")
    await requests.come("d")
    assert requests.under_way == ["d"]
    await requests.go("d")


async def test_a_request_that_is_cancelled_and_passed_over_in_the_same_turn_costs_no_place() -> None:
    requests = Requests(Admission(limit=1, queue=2))
    await requests.come("a", "b", "c")
    requests.tasks["b"].cancel()
    await requests.go("a")
    assert requests.under_way == ["c"]
    await requests.go("c")


def test_clients_are_told_to_come_back_when_those_that_wait_have_begun() -> None:
    async def main() -> list[int]:
        admission = Admission(limit=2, queue=100)
        told = [admission.retry_after]
        for _ in range(100):
            holder = Holder()
            await admission.enter(holder)
            await asyncio.sleep(3)
            admission.leave(holder)
        requests = Requests(admission)
        await requests.come(*map(str, range(12)))
        told.append(admission.retry_after)
        await requests.come(*map(str, range(12, 102)))
        told.append(admission.retry_after)
        await requests.leave(*map(str, range(102)))
        return told

    # Ten that wait, for two places and three seconds each.
    assert run_at_once(main()) == [1, 15, 60]


def test_a_request_whose_body_does_not_come_loses_its_place_if_another_waits() -> None:
    async def main() -> list[int]:
        loop, admission = asyncio.get_running_loop(), Admission(limit=2, queue=1)
        stalled, busy = Holder(loop.time()), Holder()
        await admission.enter(stalled)
        await admission.enter(busy)
        await asyncio.sleep(60)
        given_up_alone = stalled.given_up.is_set()
        waiting, began = loop.create_task(admission.enter(Holder())), loop.time()
        await stalled.given_up.wait()
        took = loop.time() - began
        admission.leave(stalled)
        await waiting
        await asyncio.sleep(60)
        return [given_up_alone, round(took), busy.given_up.is_set()]

    assert run_at_once(main()) == [False, 1, False]


def run_at_once(main: Coroutine[Any, Any, list[int]]) -> list[int]:
    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize(
    ("limit", "queue", "why"),
    [(0, 1, "limit=0: .* at least 1"), (1, -1, "queue=-1: .* at least 0"), (2.5, 0, "limit=2.5"), (None, 3, "without")],
)
def test_limits_that_admit_nothing_or_mean_nothing_are_refused(limit: Any, queue: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        admission_of(limit, queue)
