"""A value that cannot be fetched: the error says how its process ended, or that it lives."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inside import timeouts_of
from receiving import Receiver
from vanishing import Vanishing

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime(preload=("torch",), transport="tcp") as rt:
        await rt.stop(await rt.spawn(Vanishing))
        yield rt


@pytest_asyncio.fixture(loop_scope="module")
async def scope(shared: aiodaft.Runtime) -> AsyncIterator[aiodaft.Scope]:
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with shared.scope() as scope:
        yield scope
    gc.collect()
    loop.set_exception_handler(None)
    assert complaints == []


async def spawn(scope: aiodaft.Scope, *, dies: bool) -> Vanishing:
    # Its death is no failure of the scope where no call is under way.
    actor = await scope.on(restart="temporary").spawn(Vanishing)
    await actor.vanish(dies)
    return actor


async def test_an_awaiter_of_a_value_hears_how_its_producer_died(scope: aiodaft.Scope) -> None:
    actor = await spawn(scope, dies=True)
    with pytest.raises(aiodaft.ActorDied, match=r"Vanishing-\d+ \(pid \d+\) was killed by SIGKILL") as died:
        await actor.make()
    assert (died.value.signal, died.value.executed) == ("SIGKILL", None)
    assert died.value.actor.startswith("Vanishing-")


async def test_a_call_with_it_as_an_argument_hears_the_same(scope: aiodaft.Scope) -> None:
    actor, other = await spawn(scope, dies=True), await scope.spawn(Vanishing)
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as died:
        await other.take(actor.make())  # type: ignore[arg-type]  # a ref for the value
    assert (died.value.signal, died.value.executed) == ("SIGKILL", False)


async def test_a_consumer_of_a_stream_hears_the_same(scope: aiodaft.Scope) -> None:
    actor = await spawn(scope, dies=True)
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as died:
        async for _ in actor.items():
            pass
    assert (died.value.signal, died.value.executed) == ("SIGKILL", None)


async def test_a_producer_that_lives_is_not_said_to_be_dead(scope: aiodaft.Scope) -> None:
    actor = await spawn(scope, dies=False)
    with pytest.raises(
        aiodaft.exceptions.PeerLost, match="lives, and a value could not be fetched from it: the stream"
    ):
        await actor.make()
    stream = actor.items()
    with pytest.raises(
        aiodaft.exceptions.PeerLost, match="lives, and a value could not be fetched from it: the stream"
    ):
        await anext(stream)
    await stream.aclose()
    assert await actor.take(b"four") == 4


async def test_dp7_a_sender_that_is_killed_in_the_middle_costs_its_value_and_nothing_else(
    module_rt: aiodaft.Runtime, scope: aiodaft.Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of a process is not found out by waiting for it.
    monkeypatch.setattr(timeouts_of(module_rt), "exit_report", 60)
    receiver, other = await scope.spawn(Receiver), await scope.spawn(Receiver)
    doomed = await scope.on(restart="temporary").spawn(Receiver)
    await receiver.watch_pulls()
    pid = await doomed.pid()
    consumed = receiver.total(doomed.bytes_of(7, 256 << 20))
    async with asyncio.timeout(30):
        assert await receiver.kill_in_the_middle(pid)
        with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL") as died:
            await consumed
    # The call never saw the part that had come.
    assert died.value.executed is False
    assert await receiver.landing_blocks() == 0
    assert await receiver.total(other.bytes_of(1, 1 << 20)) == 1 << 20
    assert await other.total(receiver.bytes_of(1, 1 << 20)) == 1 << 20
