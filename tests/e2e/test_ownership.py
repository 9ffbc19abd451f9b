"""The holders of a value, and the moment at which it is freed (row CR8)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import pytest
from actors import Box, Echo, Relay
from failing import Failing
from inside import peer_of
from leaks import resident
from log_ear import listening

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def freed(rt: aiodaft.Runtime, actor: object) -> None:
    """Wait until an actor's process keeps nothing for others."""
    async with asyncio.timeout(30):
        while (await rt.info(actor)).stored_bytes:
            await asyncio.sleep(0)


async def test_the_last_drop_frees_the_value(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(bytes(1_000_000))
    await ref.ready()
    assert (await rt.info(echo)).stored_bytes > 1_000_000
    other = ref
    del ref
    await echo.echo(0)
    assert (await rt.info(echo)).stored_bytes > 1_000_000
    del other
    await freed(rt, echo)


async def test_an_argument_lives_until_its_call_ends(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    result = b.echo(a.echo(bytes(1_000_000)))
    gc.collect()
    assert await result == bytes(1_000_000)
    await freed(rt, a)


async def test_a_borrower_keeps_the_value_after_the_owner_dropped_it(rt: aiodaft.Runtime) -> None:
    a, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    ref = a.echo(bytes(1_000_000))
    await relay.hold(Box(ref))
    del ref
    gc.collect()
    await a.echo(0)
    assert (await rt.info(a)).stored_bytes > 1_000_000
    assert await relay.read_held() == bytes(1_000_000)
    await relay.drop_held()
    await freed(rt, a)


async def test_a_borrower_of_a_borrower_keeps_it_too(rt: aiodaft.Runtime) -> None:
    a, first, second = await rt.spawn(Echo), await rt.spawn(Relay), await rt.spawn(Relay)
    box = await first.ref_of_other(a, bytes(1_000_000))
    await second.hold(Box(box.ref))
    del box
    gc.collect()
    assert await second.read_held() == bytes(1_000_000)
    await second.drop_held()
    await freed(rt, a)


async def test_a_dead_borrower_gives_back_what_it_held(rt: aiodaft.Runtime) -> None:
    a, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    ref = a.echo(bytes(1_000_000))
    await relay.hold(Box(ref))
    del ref
    await rt.kill(relay)
    await freed(rt, a)


async def test_a_value_put_here_lives_as_long_as_its_ref(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = rt.put(bytes(1_000_000))
    assert await echo.echo(ref) == bytes(1_000_000)
    arena = peer_of(rt).store.transport.arena  # type: ignore[attr-defined]  # its pool
    assert arena.live_blocks() == 1
    del ref
    gc.collect()
    async with asyncio.timeout(30):
        while arena.live_blocks():
            await asyncio.sleep(0)


async def test_the_last_drop_frees_the_value_within_a_tenth_of_a_second(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    for _ in range(20):
        ref = echo.echo(bytes(1_000_000))
        await ref.ready()
        dropped = loop.time()
        del ref
        await freed(rt, echo)
        delays.append(loop.time() - dropped)
    # The fastest one says how it is done; the others, how busy the machine is.
    assert min(delays) < 0.1


@pytest.mark.parametrize(
    "count", [100, pytest.param(2000, marks=[pytest.mark.programs, pytest.mark.timeout(300)], id="2000")]
)
async def test_two_thousand_values_in_sequence_do_not_grow_the_memory(rt: aiodaft.Runtime, count: int) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    pids = [os.getpid(), *[(await rt.info(actor)).pid for actor in (a, b)]]

    async def move(count: int) -> None:
        for _ in range(count):
            await b.echo(a.echo(bytes(8 << 20))).ready()

    await move(20)
    before = [resident(pid) for pid in pids]
    await move(count)
    for pid, earlier in zip(pids, before, strict=True):
        assert resident(pid) - earlier < 64 << 20


async def test_released_waits_for_calls_and_borrowers(rt: aiodaft.Runtime) -> None:
    a, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    ref = a.echo(bytes(1_000_000))
    await relay.hold(Box(ref))
    waiting = asyncio.get_running_loop().create_task(ref.released())
    await relay.read_held()
    assert not waiting.done()
    await relay.drop_held()
    async with asyncio.timeout(30):
        await waiting
    with pytest.raises(ReferenceError):
        ref.free()
        await ref


async def test_dropping_a_ref_of_a_dead_owner_logs_nothing() -> None:
    with listening() as ear:
        async with aiodaft.Runtime(preload=(), unhandled="log") as rt:
            relay, echo = await rt.spawn(Relay), await rt.spawn(Echo)
            borrowed = await relay.ref_of_other(echo, 5)
            await rt.kill(relay)
            del borrowed
            # By then the message to the owner has been refused.
            with pytest.raises(aiodaft.ActorDied):
                await relay.drop_held()
            assert await echo.echo(1) == 1
    assert ear.lines == []


@pytest.mark.parametrize("inside", [False, True])
async def test_a_call_with_a_failed_argument_lets_go_of_the_others_without_the_garbage_collector(
    rt: aiodaft.Runtime, inside: bool
) -> None:
    echo, consumer, producer = await rt.spawn(Echo), await rt.spawn(Failing), await rt.spawn(Failing)
    big = echo.echo(bytes(1_000_000))
    # The processes know each other.
    await consumer.use(big, producer.use(1))
    await consumer.stop_collecting()
    missing = producer.wait()
    used = consumer.use(*([argument] if inside else argument for argument in (big, missing)))
    # The large one is there.
    await rt.info(consumer)
    await echo.pid()
    await rt.info(consumer)
    await rt.kill(producer)
    with pytest.raises(aiodaft.ActorDied):
        await used
    async with asyncio.timeout(30):
        await big.released()


@pytest.mark.usefixtures("module_rt")
async def test_a_runtime_ends_without_a_word_while_actors_hold_refs_of_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with aiodaft.Runtime(preload=()) as rt, rt.group(3, Echo) as group:
        held = [member.echo(bytes(100_000)) for member in group]
        others = list(zip(group, held[1:] + held[:1], strict=True))
        # Kept in the actors until the end, inside of the graph.
        graph = aiodaft.compile(lambda _: [member.echo([ref]) for member, ref in others])
        await asyncio.gather(*graph(1))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
