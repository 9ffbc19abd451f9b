"""Large numbers: nothing grows, and nothing is left. The suite has a small form, `pytest -m soak` the large one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from actors import Box, Echo, Relay
from inside import fork_server_of, peer_of
from leaks import Snapshot, is_alive, resident
from llm import LLM
from router import make_app
from torch_actors import Keeper
from web_server import serving

import aiodaft

MIB = 1 << 20
long = [pytest.mark.soak, pytest.mark.timeout(600)]


def counts(small: int, large: int) -> pytest.MarkDecorator:
    """The numbers of repetitions of a test, in the suite and at length."""
    return pytest.mark.parametrize("count", [small, pytest.param(large, marks=long)])


@counts(10, 200)
async def test_spawning_and_stopping_over_and_over_grows_nothing(rt: aiodaft.Runtime, count: int) -> None:
    async def come_and_go() -> None:
        async with rt.spawn(Echo) as echo, rt.spawn(Echo) as other:
            assert len(await other.echo(echo.echo(bytes(100_000)))) == 100_000

    await come_and_go()
    gc.collect()
    before, server = Snapshot.take(), len(os.listdir(f"/proc/{fork_server_of(rt)}/fd"))
    for _ in range(count):
        await come_and_go()
    gc.collect()
    # A thread reads the output of the workers to its end and then closes the pipes.
    while set(Snapshot.take().new_since(before)) == {"files"}:
        await asyncio.sleep(0.01)
    assert Snapshot.take().new_since(before) == {}
    assert len(os.listdir(f"/proc/{fork_server_of(rt)}/fd")) == server


async def test_sixty_four_actors_on_however_few_cores_answer_and_go(rt: aiodaft.Runtime) -> None:
    async with rt.group(64, Echo) as group:
        pids = await group.all(Echo.pid)
        assert len(set(pids)) == 64
        assert await group.each(Echo.echo, range(64)) == list(range(64))
    assert not any(map(is_alive, pids))


@counts(20_000, 1_000_000)
async def test_tiny_calls_by_the_thousand_leave_nothing(rt: aiodaft.Runtime, count: int) -> None:
    echo = await rt.spawn(Echo)
    pid = (await rt.info(echo)).pid
    numbers = iter(range(0))

    async def client() -> None:
        for number in numbers:
            assert await echo.echo(number) == number

    async def thousand_at_a_time(count: int) -> None:
        nonlocal numbers
        numbers = iter(range(count))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(1000):
                tasks.create_task(client())

    await thousand_at_a_time(5000)
    gc.collect()
    before = resident(os.getpid()), resident(pid)
    await thousand_at_a_time(count)
    gc.collect()
    for now, earlier in zip((resident(os.getpid()), resident(pid)), before, strict=True):
        assert now - earlier < 2 * MIB
    (connection,) = (connection for connection in peer_of(rt).connections.values() if connection.lost is None)
    assert (connection.session.calls, peer_of(rt).host.calls()) == ({}, [])


@counts(300, 30_000)
async def test_refs_that_are_dropped_in_any_way_free_their_values(rt: aiodaft.Runtime, count: int) -> None:
    """By the last drop, by the collector, by an error, and by the death of the holder."""
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    size = 70_000

    def fail_with(ref: aiodaft.Ref[Any]) -> None:
        raise ValueError(ref)

    for start in range(0, count, 100):
        # A hundred at a time, so that the memory of the machine is enough.
        some = range(start, start + 100)
        kept = [echo.echo(bytes(size)) for _ in some]
        cycles: list[Any] = []
        for ref in kept[:25]:
            cycles.append([ref])
            cycles[-1].append(cycles[-1])
        for ref in kept[25:50]:
            with suppress(ValueError):
                fail_with(ref)
        await asyncio.gather(*(relay.hold(Box(ref)) for ref in kept[50:75]))
        await asyncio.gather(*(ref.ready() for ref in kept))
        del kept, cycles, ref
        if start + 100 < count:
            await relay.drop_held()
    assert (await rt.info(echo)).stored_bytes >= 25 * size
    await rt.kill(relay)
    while (await rt.info(echo)).stored_bytes:
        gc.collect()


@pytest.mark.soak
async def test_five_hundred_requests_are_cancelled_in_the_actors_when_their_clients_leave() -> None:
    app, loop = make_app(), asyncio.get_running_loop()

    async def number_of(event: str) -> int:
        return sum(history.count(event) for history in await app.state.models.all(LLM.history))

    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        for done in range(20, 501, 20):
            requests = [loop.create_task(client.get("/generate", params={"prompt": "forever"})) for _ in range(20)]
            while await number_of("forever began") < done:
                pass
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
            while await number_of("forever ended") < done:
                pass
        infos = [await app.state.rt.info(member) for member in app.state.models]
        assert [(info.running, info.abandoned) for info in infos] == [((), 0)] * 2


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_ten_gigabytes_pass_from_actor_to_actor_and_none_of_it_comes_here() -> None:
    async with aiodaft.Runtime() as rt:
        a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
        await b.total(a.make(16 * MIB, 1.0))
        before, traffic = resident(os.getpid()), rt.traffic()
        for index in range(160):
            assert await b.total(a.make(16 * MIB, float(index % 2))) == index % 2 * 16 * MIB
        assert rt.traffic().payloads_received == traffic.payloads_received
        assert rt.traffic().control - traffic.control < 160 * 1024
        assert resident(os.getpid()) - before < 4 * MIB


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_tensor_of_more_than_four_gigabytes_arrives(transport: str) -> None:
    async with aiodaft.Runtime(transport=transport) as rt:
        keeper = await rt.spawn(Keeper)
        tensor = await keeper.make(1025 * MIB, 3.0)
        assert tensor.nbytes > 1 << 32
        assert torch.equal(tensor[:: 1 << 12], torch.full((1025 * MIB >> 12,), 3.0))
        assert tensor[-1] == 3.0


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_the_death_of_an_actor_with_four_gigabytes_is_heard_at_once() -> None:
    async with aiodaft.Runtime() as rt:
        keeper, echo = await rt.spawn(Keeper), await rt.spawn(Echo)
        await keeper.make(1 << 30, 1.0).ready()
        pid = (await rt.info(keeper)).pid
        assert resident(pid) > 4 << 30
        ref = echo.echo(keeper.background(0.0, 60.0))
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(1):
            with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
                await ref
        assert await echo.echo("goes on") == "goes on"
