"""A process that is out of descriptors or threads, or may make no large files: operations that need them fail alone."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Generator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from hoarding import Hoarder
from inside import peer_of
from leaks import open_files
from transport_probes import no_more_files, no_more_threads
from transports import needs_ucx

import aiodaft
from aiodaft._protocol.connections.session import Way
from aiodaft.actor import target_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE = 1_000_000
# Packed by the loop itself.
MEDIUM = 50_000
NO_THREAD = r"process \d+ gets no further thread .*`ulimit -u`"
NO_DESCRIPTORS = r"process \d+ has no file descriptors left, its limit is \d+: .*`ulimit -n`"


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("count", [MEDIUM, LARGE])
async def test_an_argument_fails_where_its_sender_has_no_descriptors(rt: aiodaft.Runtime, count: int) -> None:
    actor, value = await rt.spawn(Hoarder), np.ones(count, np.float32)
    with no_more_files():
        with pytest.raises(aiodaft.ResourceExhausted, match=rf"cannot be sent: {NO_DESCRIPTORS}") as caught:
            await actor.total(value)
        assert await actor.release() == "released"
    assert caught.value.executed is False
    assert await actor.total(value) == count


@needs_ucx
async def test_an_actor_that_never_had_descriptors_for_ucx_goes_on() -> None:
    async with aiodaft.Runtime(preload=(), transport="ucx") as rt:
        actor = await rt.spawn(Hoarder)
        await actor.hoard()
        with pytest.raises(aiodaft.ResourceExhausted, match=NO_DESCRIPTORS):
            await actor.total(np.ones(LARGE, np.float32))
        assert await actor.release() == "released"
        assert await actor.total(np.ones(LARGE, np.float32)) == LARGE


async def test_a_queue_that_its_first_receiver_cannot_take_is_lost_for_all_and_no_receiver_waits(
    rt: aiodaft.Runtime,
) -> None:
    actor, channel = await rt.spawn(Hoarder), aiodaft.Channel[bytes](30)
    for number in range(30):
        # Equal ones would travel as one.
        await channel.send(bytes([number]) * MEDIUM)
    await actor.hoard()
    for receiving in (actor.receive(channel).value(), channel.recv()):
        with pytest.raises(aiodaft.exceptions.PeerLost) as caught:
            await receiving
        assert any("had its queue" in note for note in caught.value.__notes__)
    assert await actor.release() == "released"


@pytest.mark.parametrize("count", [MEDIUM, LARGE])
async def test_an_argument_fails_where_its_receiver_has_no_descriptors(rt: aiodaft.Runtime, count: int) -> None:
    actor, value = await rt.spawn(Hoarder), np.ones(count, np.float32)
    await actor.hoard()
    with pytest.raises(aiodaft.ResourceExhausted, match=rf"cannot be received: {NO_DESCRIPTORS}") as caught:
        await actor.total(value)
    assert caught.value.executed is False
    assert await actor.release() == "released"
    assert await actor.total(value) == count


async def test_a_result_fails_where_its_sender_has_no_descriptors(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Hoarder)
    await actor.hoard()
    with pytest.raises(aiodaft.ResourceExhausted, match=rf"cannot be sent: {NO_DESCRIPTORS}") as caught:
        await actor.ones(LARGE)
    assert caught.value.executed is True
    assert await actor.release() == "released"
    assert len(await actor.ones(LARGE)) == LARGE


async def test_a_result_fails_where_its_receiver_has_no_descriptors(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Hoarder)
    with no_more_files():
        with pytest.raises(aiodaft.ResourceExhausted, match=rf"cannot be received: {NO_DESCRIPTORS}") as caught:
            await actor.ones(LARGE)
        assert await actor.release() == "released"
    assert caught.value.executed is True
    assert len(await actor.ones(LARGE)) == LARGE


async def test_actors_that_had_no_descriptors_are_connected_when_they_have(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Hoarder), await rt.spawn(Hoarder)
    await first.hoard()
    for _ in range(2):
        with pytest.raises(aiodaft.ResourceExhausted, match=rf"no connection to worker-\w+: {NO_DESCRIPTORS}"):
            await first.total_of(second, 10)
    assert await first.release() == "released"
    for count in (10, LARGE):
        assert await first.total_of(second, count) == await second.total_of(first, count) == count


async def test_a_graph_does_without_rings_where_an_actor_has_no_descriptors(rt: aiodaft.Runtime) -> None:
    actor = await rt.spawn(Hoarder)
    await actor.hoard()
    async with aiodaft.compile(actor.total) as graph:
        assert await graph(np.ones(10, np.float32)) == 10
        with pytest.raises(aiodaft.ResourceExhausted, match=rf"cannot be received: {NO_DESCRIPTORS}"):
            await graph(np.ones(LARGE, np.float32))
    connection = peer_of(rt).connections.to(target_of(actor).remote)
    assert connection.upgrade.way is Way.SOCKET
    assert await actor.release() == "released"
    async with aiodaft.compile(actor.total) as graph:
        assert await graph(np.ones(LARGE, np.float32)) == LARGE
    assert connection.upgrade.way is not Way.SOCKET


async def test_runs_of_a_graph_fail_while_its_actors_cannot_be_connected(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Hoarder), await rt.spawn(Hoarder)
    async with aiodaft.compile(second.total) as graph:
        assert await graph(np.ones(10, np.float32)) == 10
    await second.hoard()
    async with aiodaft.compile(lambda count: second.total(first.ones(count))) as graph:
        with pytest.raises(aiodaft.ResourceExhausted, match=rf"no connection to worker-\w+: {NO_DESCRIPTORS}"):
            await graph(10)
        with pytest.raises((aiodaft.ResourceExhausted, aiodaft.exceptions.PeerLost)):
            await graph(10)
        assert await second.release() == "released"
        total = None
        while total is None:
            # Each run tries again; one that begins before the news of the last failure fails as that one did.
            with suppress(aiodaft.ResourceExhausted, aiodaft.exceptions.PeerLost):
                total = await graph(10)
        assert total == 10


async def test_a_spawn_without_descriptors_fails_and_leaves_none_open(rt: aiodaft.Runtime) -> None:
    await rt.stop(await rt.spawn(Hoarder))
    known = set(open_files().values())
    actor = await rt.spawn(Hoarder)
    its_own = set(open_files().values()) - known
    await rt.stop(actor)
    # The thread that reads the output of actors closes its pipes when it hears of their end.
    while its_own & set(open_files().values()):
        await asyncio.sleep(0.01)
    before = len(open_files())
    for left in range(6):
        with no_more_files(left), pytest.raises(aiodaft.SpawnFailed, match=NO_DESCRIPTORS) as caught:
            await rt.spawn(Hoarder)
        assert caught.value.executed is False
    # The thread that reads the output of actors hears that there will be none.
    while len(open_files()) > before:
        await asyncio.sleep(0.01)
    assert await (await rt.spawn(Hoarder)).total(np.ones(10, np.float32)) == 10


@contextmanager
def files_of_at_most(nbytes: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_value_beyond_the_limit_on_files_fails_and_says_so(rt: aiodaft.Runtime) -> None:
    # No memory of that size was used before.
    actor, value = await rt.spawn(Hoarder), np.ones(7 * LARGE, np.float32)
    with (
        files_of_at_most(1 << 16),
        pytest.raises(aiodaft.ResourceExhausted, match=r"of more than 65536 bytes: .*`ulimit -f`") as caught,
    ):
        await actor.total(value)
    assert caught.value.executed is False
    assert await actor.total(value) == len(value)


async def test_an_actor_never_ends_with_code_0_because_its_connection_broke(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(restart="temporary").spawn(Hoarder)
    connection = peer_of(rt).connections.to(target_of(actor).remote)
    connection.send_note("shm", b"nonsense")
    with pytest.raises(aiodaft.ActorDied) as caught:
        await actor.release()
    assert caught.value.exit_code == 1
    assert any("the connection to the node agent broke" in line for line in caught.value.last_lines)


@pytest.mark.usefixtures("module_rt")
async def test_a_large_argument_fails_where_its_sender_gets_no_thread() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        actor = await rt.spawn(Hoarder)
        with no_more_threads():
            with pytest.raises(aiodaft.ResourceExhausted, match=NO_THREAD) as caught:
                await actor.size(bytes(4 * LARGE))
            assert caught.value.executed is False
            assert await actor.size(b"small") == 5
        assert await actor.size(bytes(4 * LARGE)) == 4 * LARGE


async def test_a_large_result_and_a_further_actor_fail_where_a_process_gets_no_thread(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(with_=await rt.spawn(Hoarder)).spawn(Hoarder)
    await actor.hoard_threads()
    with pytest.raises(aiodaft.ResourceExhausted, match=NO_THREAD) as caught:
        await actor.zeros(4 * LARGE)
    assert caught.value.executed is True
    with pytest.raises(aiodaft.ResourceExhausted, match=NO_THREAD) as caught:
        await rt.on(with_=actor).spawn(Hoarder)
    assert caught.value.executed is False
    assert await actor.release() == "released"
    assert len(await actor.zeros(4 * LARGE)) == 4 * LARGE


@pytest.mark.usefixtures("module_rt")
async def test_a_spawn_fails_where_no_thread_reads_what_actors_print_and_the_next_one_works() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        with no_more_threads(), pytest.raises(aiodaft.SpawnFailed, match=NO_THREAD) as caught:
            await rt.spawn(Hoarder)
        assert caught.value.executed is False
        assert await (await rt.spawn(Hoarder)).size(b"x") == 1


@pytest.mark.usefixtures("module_rt")
async def test_a_runtime_that_gets_no_thread_does_not_open_and_leaves_nothing() -> None:
    with no_more_threads(), pytest.raises(aiodaft.ResourceExhausted, match=NO_THREAD):
        async with aiodaft.Runtime(preload=()):
            pass
