"""Blocks that a peer writes to, in the memory of the process that admitted it."""

from __future__ import annotations

import pytest
from transport_desk import opened_office
from transport_probes import mappings

from aiodaft_transport import GrantError
from aiodaft_transport.memory import Arena

MIB = 1 << 20


def test_a_peer_writes_into_the_block_itself_and_maps_its_segment_once() -> None:
    with opened_office() as office:
        blocks = [office.producer.allocate(100_000) for _ in range(3)]
        for value, block in enumerate(blocks, 1):
            grant = office.admit(block)
            office.place(grant)[:] = bytes([value]) * 100_000
            office.producer.revoke(grant, office.to["consumer"])
        assert [set(block.view) for block in blocks] == [{1}, {2}, {3}]
        # The producer's own, and one for the writer.
        assert mappings() == 2
        assert [block.grants for block in blocks] == [0, 0, 0]


def test_a_reader_has_its_own_pages_and_sees_what_a_peer_has_written() -> None:
    with opened_office("reader", "writer") as office:
        block, seen = office.give(b"before" * 1000, "reader")
        office.place(office.admit(block, "writer"), "writer")[:] = b"after " * 1000
        assert block.view == b"after " * 1000
        assert office.fetch(office.grant(block, "reader"), "reader") == block.view
        seen[:6] = b"reader"
        assert block.view[:6] == b"after "


def test_the_memory_is_not_reused_while_a_peer_may_write_to_it() -> None:
    with opened_office() as office:
        block = office.producer.allocate(MIB)
        grant = office.admit(block)
        block.release()
        assert office.producer.arena.live_blocks() == 1
        office.producer.revoke(grant, office.to["consumer"])
        assert office.producer.arena.live_blocks() == 0
        again = office.producer.allocate(MIB)
        assert again.address == block.address


def test_the_memory_is_never_reused_once_a_peer_is_lost_that_may_still_write() -> None:
    with opened_office() as office:
        block = office.producer.allocate(20 * MIB)
        place = office.place(office.admit(block))
        office.producer.peer_lost("consumer")
        block.release()
        place[:5] = b"still"
        fresh = office.producer.allocate(20 * MIB)
        assert fresh.segment is not block.segment
        assert fresh.view[:5] == bytes(5)


def test_a_place_stays_mapped_for_a_writer_whose_peer_has_closed_the_segment() -> None:
    with opened_office() as office:
        block = office.producer.allocate(20 * MIB)
        place = office.place(office.admit(block))
        office.producer.close()
        office.desk.settle()
        place[:5] = b"still"
        assert place[:5] == b"still"


def test_memory_that_peers_cannot_map_admits_none() -> None:
    with opened_office() as office:
        own = Arena(shared=False).allocate(MIB)
        assert office.producer.admit(own, office.to["consumer"]) is None
        assert own.grants == 0


def test_a_place_that_is_not_known_is_refused() -> None:
    with opened_office() as office:
        grant = office.admit(office.producer.allocate(MIB))
        assert grant is not None
        with pytest.raises(GrantError, match="of unknown segment 99"):
            office.place((99, *grant[1:]))
        with pytest.raises(GrantError, match="of unknown segment"):
            office.place((grant[0], 1 << 40, *grant[2:]))
