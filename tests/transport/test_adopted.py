"""A block that one transport has allocated is granted by another one where it is, at the same time."""

from __future__ import annotations

import gc
import weakref

import pytest
from conformance import fetched, fill
from ends import LocalPair, open_pair
from transport_desk import opened_office
from transports import needs_ucx

from aiodaft_transport.memory import Arena, ArenaBlock

MIB = 1 << 20
SENDERS = ["tcp", pytest.param("ucx", marks=needs_ucx)]


async def returned(pair: LocalPair, block: ArenaBlock) -> None:
    gc.collect()
    while block.grants:
        await pair.settle()


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize("nbytes", [1, 70_000, 40 * MIB])
async def test_a_block_of_shared_memory_is_sent_from_where_it_is(name: str, nbytes: int) -> None:
    async with open_pair(name) as pair:
        with opened_office() as office:
            block = office.producer.allocate(nbytes)
            content = fill(block)
            mapped = office.fetch(office.grant(block))
            adopted = pair.producer.transport.adopt(block)
            grant = pair.producer.transport.grant(adopted, pair.producer.control)
            assert block.grants == 2
            block.release()
            await pair.settle()
            assert await fetched(pair, grant) == content == mapped
            del mapped
            office.desk.settle()
            await returned(pair, block)
            assert office.producer.arena.live_blocks() == 0
        assert pair.producer.live_blocks() == 0


@pytest.mark.parametrize("name", SENDERS)
async def test_a_lost_peer_returns_a_block_of_another_transport(name: str) -> None:
    async with open_pair(name) as pair:
        arena = Arena(shared=True)
        block = arena.allocate(1000)
        pair.producer.transport.grant(pair.producer.transport.adopt(block), pair.producer.control)
        block.release()
        assert arena.live_blocks() == 1
        pair.producer.transport.peer_lost(pair.producer.control.peer)
        assert arena.live_blocks() == 0
        arena.close()


@needs_ucx
async def test_ucx_registers_a_segment_of_another_transport_once_and_forgets_it_with_the_segment() -> None:
    from aiodaft_transport.ucx.transport import UcxTransport

    async with open_pair("ucx") as pair:
        transport = pair.producer.transport
        assert isinstance(transport, UcxTransport)
        arena = Arena(shared=True, keep=0)
        block = arena.allocate(1000)
        content = fill(block)
        other = arena.allocate(1000)
        before = -1
        for _ in range(3):
            grant = transport.grant(transport.adopt(block), pair.producer.control)
            await pair.settle()
            assert await fetched(pair, grant) == content
            await returned(pair, block)
            transport.grant(transport.adopt(other), pair.producer.control)
            if before < 0:
                before = transport.registrations
        assert transport.registrations == before
        transport.peer_lost(pair.producer.control.peer)
        region = weakref.ref(transport.adopt(block).segment)
        assert region() is not None
        block.release()
        other.release()
        assert region() is None
        arena.close()
