"""Every transport between real processes: the same promises, and the rest after a SIGKILL of either side."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conformance import POISON, SIZES
from far_end import FarEnd, FarError, digest, numbers_in, open_far_end, pattern
from leaks import is_alive
from transport_probes import descriptors_of_segments, mappings, memfds, segments_mapped
from transports import TRANSPORTS

from aiodaft_transport import Grant, TransportError

pytestmark = pytest.mark.parametrize("name", TRANSPORTS)


def started(script: Path, *args: str) -> subprocess.Popen[bytes]:
    """A script that may import the modules of tests."""
    path = os.pathsep.join([
        str(Path(__file__).parent.parent / "support"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, script, *args], env=environment, stdout=subprocess.PIPE)


async def fetch_into(far: FarEnd, grant: Grant, target: bytearray) -> None:
    await far.transport.fetch_into(grant, far.connection, memoryview(target))


def descriptors_of_a_child() -> str:
    """The open descriptors of a child of this process, if it is told nothing special."""
    return subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout


async def test_every_size_arrives_unchanged_in_both_directions(name: str) -> None:
    async with open_far_end(name) as far:
        for seed, nbytes in enumerate(SIZES):
            expected = digest(pattern(nbytes, seed))
            view = await far.fetch(await far.ask("produce", "theirs", nbytes, seed))
            assert (view.nbytes, view.readonly, digest(view)) == (nbytes, False, expected)
            await far.ask("release", "theirs")
            block, grant = far.give(nbytes, seed)
            assert await far.ask("fetch", "ours", grant) == expected
            await far.ask("drop", "ours")
            block.release()
            del view, block
        await far.settle()
        assert await far.ask("live_blocks") == 0


async def test_many_transfers_at_once_in_both_directions(name: str) -> None:
    async with open_far_end(name) as far:
        ours = [far.give(200_000 + seed, seed)[1] for seed in range(20)]
        theirs = [await far.ask("produce", str(seed), 200_000 + seed, seed) for seed in range(20)]
        expected = [digest(pattern(200_000 + seed, seed)) for seed in range(20)]
        *sent, views = await asyncio.gather(
            *(far.ask("fetch", str(seed), grant) for seed, grant in enumerate(ours)),
            asyncio.gather(*(far.fetch(grant) for grant in reversed(theirs))),
        )
        assert sent == expected
        assert [digest(view) for view in reversed(views)] == expected


async def test_a_consumers_writes_stay_in_its_process_and_never_reach_a_later_value(name: str) -> None:
    async with open_far_end(name) as far:
        for seed in range(5):
            view = await far.fetch(await far.ask("produce", "theirs", 300_000, seed))
            assert digest(view) == digest(pattern(300_000, seed))
            view[seed * 5000 : seed * 5000 + 70_000] = bytes(70_000)
            assert await far.ask("block_digest", "theirs") == digest(pattern(300_000, seed))
            block, grant = far.give(300_000, seed)
            assert await far.ask("fetch", "ours", grant) == digest(pattern(300_000, seed))
            await far.ask("write", "ours", seed * 9000, 60_000, 255)
            assert block.view == pattern(300_000, seed)
            await far.ask("drop", "ours")
            await far.ask("release", "theirs")
            block.release()
            del view, block
            await far.settle()


async def test_a_value_that_is_kept_survives_the_reuse_of_everything_around_it(name: str) -> None:
    async with open_far_end(name) as far:
        kept = await far.fetch(await far.ask("produce", "kept", 100_000, 99))
        await far.ask("release", "kept")
        for seed in range(8):
            view = await far.fetch(await far.ask("produce", "other", 100_000, seed))
            assert digest(view) == digest(pattern(100_000, seed))
            await far.ask("release", "other")
            del view
            await far.settle()
        assert kept == pattern(100_000, 99)


async def test_a_killed_consumer_frees_what_it_read_and_others_go_on(name: str) -> None:
    before = descriptors_of_segments()
    async with open_far_end(name) as first:
        async with open_far_end(name, peer="second", beside=first) as second:
            blocks = [second.give(nbytes, 1) for nbytes in (1, 100_000, 20 << 20)]
            for number, (block, grant) in enumerate(blocks):
                if number:
                    await second.ask("fetch", str(number), grant)
                block.release()
            kept, grant = first.give(50_000, 2)
            await first.ask("fetch", "kept", grant)
            await second.kill()
            assert [block.grants for block, _ in blocks] == [0, 0, 0]
            assert await first.ask("view_digest", "kept") == digest(pattern(50_000, 2))
            _, grant = first.give(100_000, 3)
            assert await first.ask("fetch", "next", grant) == digest(pattern(100_000, 3))
        kept.release()
    del blocks, block, kept
    gc.collect()
    assert (segments_mapped(), descriptors_of_segments()) == (0, before)


async def test_a_killed_producer_leaves_views_readable_and_fails_what_comes_late(name: str) -> None:
    before = descriptors_of_segments()
    async with open_far_end(name) as far:
        view = await far.fetch(await far.ask("produce", "first", 300_000, 1))
        late = await far.ask("produce", "late", 300_000, 2)
        await far.kill()
        assert view == pattern(300_000, 1)
        view[:3] = b"new"
        with pytest.raises(TransportError):
            await far.fetch(late)
        assert bytes(view[:3]) == b"new"
        del view
        gc.collect()
    assert (mappings(), descriptors_of_segments()) == (0, before)


async def test_a_producer_killed_in_the_middle_writes_to_the_callers_memory_no_more(name: str) -> None:
    async with open_far_end(name) as far:
        warm = bytearray(1000)
        await far.transport.fetch_into(await far.ask("produce", "warm", 1000, 2), far.connection, memoryview(warm))
        assert warm == pattern(1000, 2)
        poison = POISON * (48 << 20)
        target = bytearray(len(poison))
        grant = await far.ask("produce", "doomed", len(poison), 1)
        task = asyncio.get_running_loop().create_task(fetch_into(far, grant, target))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        await far.kill()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        # Mapped, or sent, bytes are whole; anything else is an error.
        assert isinstance(result, TransportError) or digest(target) == digest(pattern(len(poison), 1))
        target[:] = poison
        for _ in range(20):
            await asyncio.sleep(0)
        assert target == poison


async def test_a_kill_in_the_middle_of_a_transfer_leaves_nothing_on_either_side(name: str) -> None:
    """First the consumer, then the producer; the rest is checked as for every test: files, memory, locks."""
    async with open_far_end(name) as near_by:
        async with open_far_end(name, peer="consumer", beside=near_by) as consumer:
            block = near_by.transport.allocate(96 << 20)
            grant = near_by.transport.grant(block, consumer.connection)
            asked = asyncio.get_running_loop().create_task(consumer.ask("fetch", "doomed", grant))
            for _ in range(3):
                await asyncio.sleep(0)
            await consumer.kill()
            asked.cancel()
            await asyncio.wait([asked])
            while block.grants:
                await asyncio.sleep(0)
        async with open_far_end(name, peer="producer", beside=near_by) as producer:
            grant = await producer.ask("fill", "doomed", 96 << 20)
            fetching = asyncio.get_running_loop().create_task(producer.fetch(grant))
            for _ in range(3):
                await asyncio.sleep(0)
            await producer.kill()
            await asyncio.wait([fetching])
            if fetching.exception() is None:
                # Shared memory is there at once, and stays; nothing is ever there in part.
                assert numbers_in(fetching.result()) == list(range(96))
            else:
                assert isinstance(fetching.exception(), TransportError)
        _, grant = near_by.give(100_000, 3)
        assert await near_by.ask("fetch", "next", grant) == digest(pattern(100_000, 3))
        block.release()
        del asked, fetching, block


async def test_a_fetch_from_a_producer_that_is_stopped_ends_once_it_is_declared_lost(name: str) -> None:
    """As with a machine that no longer answers: no connection ends by itself."""
    async with open_far_end(name) as far:
        grant = await far.ask("produce", "frozen", 32 << 20, 1)
        os.kill(far.pid, signal.SIGSTOP)
        fetching = asyncio.get_running_loop().create_task(far.fetch(grant))
        try:
            for _ in range(50):
                await asyncio.sleep(0)
            far.transport.peer_lost("far")
            await asyncio.wait([fetching], timeout=5)
            assert fetching.done()
            # Shared memory needs no help of the producer; UCX needs it to connect, and older ones for every byte.
            possible = {"shm": type(None), "tcp": TransportError, "ucx": TransportError | None}[name]
            assert isinstance(fetching.exception(), possible)
        finally:
            os.kill(far.pid, signal.SIGCONT)
            fetching.cancel()
            await asyncio.wait([fetching])
        del fetching


async def test_a_process_that_is_killed_with_its_controller_leaves_nothing(name: str, tmp_path: Path) -> None:
    """The controller is a third process here; it and its other end are in the middle of reading each other."""
    script = tmp_path / "controller.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from far_end import open_far_end\n"
        "async def main():\n"
        "    async with open_far_end(sys.argv[1]) as far:\n"
        "        view = await far.fetch(await far.ask('produce', 'theirs', 20 << 20, 1))\n"
        "        await far.ask('fetch', 'ours', far.give(20 << 20, 2)[1])\n"
        "        print(far.pid, view.nbytes, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n",
        encoding="utf-8",
    )
    with started(script, name) as controller:
        assert controller.stdout is not None
        pid, nbytes = map(int, controller.stdout.readline().split())
        assert nbytes == 20 << 20
        if name == "shm":
            assert segments_mapped(controller.pid) == segments_mapped(pid) == 2
        end = os.pidfd_open(pid)
        controller.kill()
        # Readable once that process has ended.
        select.select([end], [], [])
        os.close(end)
    assert not is_alive(pid)


async def test_nothing_of_the_other_process_is_inherited_by_a_child_of_this_one(name: str) -> None:
    async with open_far_end(name) as far:
        view = await far.fetch(await far.ask("produce", "theirs", 100_000, 1))
        far.give(100_000, 2)
        found = descriptors_of_a_child()
        assert "memfd" not in found
        assert "socket" not in found
        del view


async def test_an_error_over_there_is_the_documented_one(name: str) -> None:
    before = memfds()
    async with open_far_end(name) as far:
        block, grant = far.give(100_000, 1)
        forged = [*grant[:-1], 10**9] if name == "tcp" else [10**9, *grant[1:]]
        with pytest.raises(FarError, match="GrantError"):
            await far.ask("fetch", "forged", forged)
        assert await far.ask("fetch", "real", grant) == digest(pattern(100_000, 1))
        assert memfds() - before == (1 if name == "shm" else 0)
        block.release()
