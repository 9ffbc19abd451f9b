"""UCX gives a connection up while the peer lives: that transfer fails, the next one connects again."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AbstractAsyncContextManager, suppress

import pytest
from conformance import fetched, granted
from ends import LocalPair, open_pair
from far_end import digest
from leaks import open_files
from transports import needs_ucx

from aiodaft_transport import PeerGone
from aiodaft_transport.ucx.transport import UcxSettings, UcxTransport

pytestmark = needs_ucx

MIB = 1 << 20
LARGE = 96 * MIB


def opened(transport: object) -> UcxTransport:
    assert isinstance(transport, UcxTransport)
    return transport


def over_tcp() -> AbstractAsyncContextManager[LocalPair]:
    """A pair as between hosts: nothing is shared."""
    return open_pair("ucx", interface="lo", settings=UcxSettings(local="self"))


def cut_connections() -> int:
    """End every TCP connection of this process, as a network that fails; how many there were."""
    cut = 0
    for fd, target in open_files().items():
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(fd)) as connection, suppress(OSError):
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RD)
                    cut += 1
    return cut


async def broken(pair: LocalPair) -> None:
    """Wait until both sides know that UCX gave up the connection."""
    ends = [(pair.producer, "consumer"), (pair.consumer, "producer")]
    remotes = [opened(end.transport).remotes[peer] for end, peer in ends]
    while any(remote.endpoint is not None for remote in remotes):
        await asyncio.sleep(0)


async def test_after_ucx_broke_a_connection_the_next_transfer_makes_another() -> None:
    async with over_tcp() as pair:
        for seed in range(3):
            block, grant, content = await granted(pair, 100_000, seed)
            assert await fetched(pair, grant) == content
            await pair.settle()
            assert block.grants == 0
            assert cut_connections()
            await broken(pair)
        block, grant, content = await granted(pair, 20 * MIB + 1, 9)
        assert await fetched(pair, grant) == content
        await pair.settle()
        assert (block.grants, opened(pair.consumer.transport).landing.live_blocks()) == (0, 0)


# In the middle of a transfer UCX 1.22 may use freed memory, and end the process: see README.
@pytest.mark.soak
async def test_a_transfer_fails_when_its_connection_breaks_and_the_next_one_succeeds() -> None:
    async with over_tcp() as pair:
        consumer = opened(pair.consumer.transport)
        _, first, content = await granted(pair, 1000)
        assert await fetched(pair, first) == content
        block, grant, _ = await granted(pair, LARGE)
        task = asyncio.get_running_loop().create_task(fetched(pair, grant))
        while not consumer.driver.in_flight:
            await asyncio.sleep(0)
        assert cut_connections()
        await asyncio.wait([task])
        assert isinstance(task.exception(), PeerGone)
        del task
        again = pair.producer.transport.grant(block, pair.producer.control)
        await pair.settle()
        assert digest(await fetched(pair, again)) == digest(block.view)
        await pair.settle()
        assert (block.grants, consumer.landing.live_blocks()) == (0, 0)
