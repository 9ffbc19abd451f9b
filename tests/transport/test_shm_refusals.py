"""Grants and notes that make invalid note are refused, and cost neither memory nor descriptors."""

from __future__ import annotations

import os
import random
import struct
from contextlib import suppress
from mmap import PAGESIZE
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_desk import opened_office
from transport_probes import no_more_files

from aiodaft_transport import Block, GrantError, TransportError

MIB = 1 << 20
NOTE = struct.Struct("<BQQ")


def content(nbytes: int) -> bytes:
    return random.Random(1).randbytes(nbytes)


FORGED: dict[str, Any] = {
    "an unknown segment": lambda segment, offset, nbytes, number: (segment + 1, offset, nbytes, number),
    "beyond the end": lambda segment, offset, nbytes, number: (segment, 4 * MIB - 10, nbytes, number),
    "too long": lambda segment, offset, nbytes, number: (segment, offset, 4 * MIB + 1, number),
    "before the beginning": lambda segment, offset, nbytes, number: (segment, -PAGESIZE, nbytes, number),
    "of no bytes": lambda segment, offset, nbytes, number: (segment, offset, 0, number),
    "of negative length": lambda segment, offset, nbytes, number: (segment, offset, -1, number),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_grant_is_refused_and_harms_nothing(kind: str) -> None:
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        block.view[:] = content(100_000)
        grant = office.grant(block)
        with pytest.raises(GrantError, match="unknown segment"):
            office.fetch(FORGED[kind](*grant))
        assert office.fetch(grant) == content(100_000)
        assert office.fetch_now(FORGED[kind](*grant)) is None


def test_a_grant_of_a_block_that_was_given_up_is_refused() -> None:
    """Else two values would be in the same memory once it comes back."""
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        block.release()
        with pytest.raises(GrantError, match="released before it was granted"):
            office.producer.grant(block, office.to["consumer"])


def test_a_grant_of_a_block_that_was_trimmed_is_refused() -> None:
    with opened_office(keep=0) as office:
        block = office.producer.allocate(100_000)
        block.release()
        with pytest.raises(GrantError, match="released before it was granted"):
            office.producer.grant(block, office.to["consumer"])


def test_a_fetch_that_cannot_map_gives_its_grant_back() -> None:
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        grant = office.grant(block)
        with no_more_files(), pytest.raises((OSError, TransportError)):
            office.fetch(grant)
        office.desk.settle()
        assert block.grants == 0
        block.view[:] = content(100_000)
        assert office.fetch(office.grant(block)) == content(100_000)


def test_a_segment_without_its_descriptor_fails_its_fetches_and_comes_again_with_the_next_grant() -> None:
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        block.view[:] = content(100_000)
        consumer, link = office.consumers["consumer"], office.back["consumer"]
        # The note comes, and the process has no room for the descriptor.
        office.to["consumer"].target = None
        grant = office.grant(block)
        office.to["consumer"].target = consumer
        consumer.note_received(link, NOTE.pack(1, block.segment.id, block.segment.size), [])  # type: ignore[attr-defined]  # a block of an arena
        with pytest.raises(OSError, match="Too many open files"):
            office.fetch(grant)
        office.desk.settle()
        assert block.grants == 0
        assert office.fetch(office.grant(block)) == content(100_000)


def test_a_grant_that_cannot_be_sent_is_none_and_the_next_one_works() -> None:
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        block.view[:] = content(100_000)
        with no_more_files(), pytest.raises((OSError, TransportError)):
            office.grant(block)
        assert block.grants == 0
        assert office.fetch(office.grant(block)) == content(100_000)


def test_a_grant_that_comes_back_twice_is_an_error_of_the_peer() -> None:
    with opened_office() as office:
        block = office.producer.allocate(1)
        grant = office.grant(block)
        office.producer.note_received(office.to["consumer"], NOTE.pack(2, grant[3], 0), [])
        for number in (int(grant[3]), 10**6):
            with pytest.raises(GrantError, match=f"returned grant {number}, which it does not hold"):
                office.producer.note_received(office.to["consumer"], NOTE.pack(2, number, 0), [])
        assert block.grants == 0


def test_no_process_can_give_back_the_grant_of_another() -> None:
    with opened_office("one", "two") as office:
        block: Block = office.producer.allocate(1)
        grant = office.grant(block, "one")
        with pytest.raises(GrantError, match="two returned grant"):
            office.producer.note_received(office.to["two"], NOTE.pack(2, grant[3], 0), [])
        assert block.grants == 1


def test_the_end_of_an_unknown_segment_is_no_error() -> None:
    with opened_office() as office:
        office.consumers["consumer"].note_received(office.back["consumer"], NOTE.pack(3, 99, 0), [])
        assert office.consumers["consumer"].mapped_segments() == 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.binary(min_size=17, max_size=17), st.integers(0, 2))
def test_a_garbled_note_is_a_transport_error_at_most_and_leaks_no_descriptor(note: bytes, fds: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with opened_office() as office, suppress(TransportError):
        office.consumers["consumer"].note_received(
            office.back["consumer"], note, [os.open("/dev/null", os.O_RDONLY) for _ in range(fds)]
        )
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_announced_twice_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with opened_office() as office:
        consumer, link = office.consumers["consumer"], office.back["consumer"]
        for _ in range(2):
            fd = os.memfd_create("twice")
            os.ftruncate(fd, PAGESIZE)
            with suppress(TransportError):
                consumer.note_received(link, NOTE.pack(1, 5, PAGESIZE), [fd])
        assert consumer.mapped_segments() == 1
    assert len(os.listdir("/proc/self/fd")) == before
