"""Shared memory: sent once, mapped once, private to each reader, and gone with the last one."""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from mmap import PAGESIZE

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_desk import Office, opened_office
from transport_probes import descriptors_of_segments, mappings, no_more_files, segments_mapped

from aiodaft_transport import Block, GrantError
from aiodaft_transport.memory import ArenaBlock, address_of
from aiodaft_transport.shm import PageMap

MIB = 1 << 20
# A warning of later Pythons about any fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

NOTE = struct.Struct("<BQQ")


def content(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def live(office: Office) -> int:
    return office.producer.arena.live_blocks()


def mapped(office: Office) -> int:
    return office.consumers["consumer"].mapped_segments()


def test_a_segment_is_sent_once_to_each_peer_however_many_blocks_are_granted() -> None:
    with opened_office("one", "two") as office:
        blocks = [office.producer.allocate(100_000) for _ in range(5)]
        for block in blocks * 2:
            office.grant(block, "one")
        office.grant(blocks[0], "two")
        assert (office.to["one"].fds, office.to["two"].fds) == (1, 1)
        assert (office.to["one"].notes, office.to["two"].notes) == (1, 1)


def test_granting_sends_nothing_but_new_segments() -> None:
    with opened_office() as office:
        office.grant(office.producer.allocate(1))
        office.grant(office.producer.allocate(20 * MIB))
        assert (office.to["consumer"].notes, office.to["consumer"].fds) == (2, 2)


def test_the_mapping_is_made_once_and_reused_for_every_block_of_the_segment() -> None:
    with opened_office() as office:
        addresses = set[int]()
        for seed in range(20):
            block, view = office.give(content(100_000, seed))
            assert view == content(100_000, seed)
            addresses.add(address_of(view))
            block.release()
            del view
            office.desk.settle()
        # The producer's own, and one for the reader.
        assert (len(addresses), mappings(), mapped(office)) == (1, 2, 1)


def test_one_block_granted_twice_to_one_peer_gives_two_private_views() -> None:
    with opened_office() as office:
        block = office.producer.allocate(8192)
        block.view[:] = content(8192)
        grants = [office.grant(block) for _ in range(3)]
        views = [office.fetch(grant) for grant in grants]
        assert len({address_of(view) for view in views}) == 3
        views[0][:] = bytes(8192)
        assert views[1] == views[2] == block.view == content(8192)
        assert (block.grants, mappings()) == (3, 4)
        views.clear()
        office.desk.settle()
        assert block.grants == 0
        again = [office.fetch(office.grant(block)) for _ in range(3)]
        assert again == [content(8192)] * 3
        assert mappings() == 4


def test_a_block_is_fetched_at_once_through_an_idle_mapping() -> None:
    with opened_office() as office:
        block = office.producer.allocate(8192)
        block.view[:] = content(8192)
        grant = office.grant(block)
        assert office.fetch_now(grant) is None
        view = office.fetch(grant)
        again = office.grant(block)
        assert office.fetch_now(again) is None
        del view
        office.desk.settle()
        view = office.fetch_now(again)
        assert view == content(8192)
        assert mappings() == 2
        view = None
        office.desk.settle()
        assert block.grants == 0


def test_readers_in_two_processes_do_not_see_each_others_writes() -> None:
    with opened_office("one", "two") as office:
        block, first = office.give(content(8192), "one")
        second = office.fetch(office.grant(block, "two"), "two")
        first[:5] = b"first"
        second[:6] = b"second"
        assert (bytes(first[:5]), bytes(second[:6]), bytes(block.view)) == (b"first", b"second", content(8192))


def test_a_view_shows_exactly_the_granted_bytes_of_its_block() -> None:
    with opened_office() as office:
        blocks = [office.producer.allocate(65_000) for _ in range(3)]
        for number, block in enumerate(blocks):
            block.view[:] = bytes([number + 1]) * 65_000
        view = office.fetch(office.grant(blocks[1]))
        assert (view.nbytes, bytes(view)) == (65_000, b"\2" * 65_000)


def test_a_grant_comes_back_once_the_last_part_of_the_view_is_gone() -> None:
    with opened_office() as office:
        block, view = office.give(content(100_000))
        told = list[str]()
        block.on_unread(lambda: told.append("unread"))
        block.release()
        part = view[10:20]
        del view
        office.desk.settle()
        assert (live(office), told) == (1, [])
        del part
        office.desk.settle()
        assert (live(office), told) == (0, ["unread"])


def test_a_view_that_ends_in_another_thread_gives_its_grant_back() -> None:
    with opened_office() as office:
        block, view = office.give(content(100_000))
        block.release()
        views = [view]
        del view
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
        assert live(office) == 1
        office.desk.settle()
        assert live(office) == 0


def test_a_kept_value_stays_as_it_is_while_other_blocks_of_its_segment_are_reused() -> None:
    with opened_office() as office:
        kept_block, kept = office.give(content(100_000, 7))
        kept_block.release()
        for seed in range(40):
            block, view = office.give(content(100_000, seed))
            view[:] = bytes(100_000)
            block.release()
            del view
            office.desk.settle()
        assert kept == content(100_000, 7)
        # Its untouched pages are the producer's own: they must not have been given to another block.
        assert (live(office), mapped(office)) == (1, 1)


def test_a_reused_block_shows_its_new_content_on_every_page_that_was_written_to() -> None:
    size = 64 * PAGESIZE
    with opened_office() as office:
        for seed, pages in enumerate([[0], [63], [1, 2, 3], list(range(0, 64, 2)), list(range(64)), []]):
            block, view = office.give(content(size, seed))
            assert view == content(size, seed)
            for page in pages:
                view[page * PAGESIZE + 17] ^= 0xFF
            block.release()
            del view
            office.desk.settle()
        assert mappings() == 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_write_of_a_consumer_ever_shows_in_a_later_value(data: st.DataObject) -> None:
    """Random blocks, random writes, random lifetimes: fetched bytes are those that were put in."""
    sizes = st.sampled_from([1, PAGESIZE - 1, PAGESIZE + 1, 65_536, 65_537, 5 * PAGESIZE + 3, 300_000])
    with opened_office("one", "two") as office:
        held: list[tuple[memoryview, bytearray]] = []
        for seed in range(data.draw(st.integers(1, 25), label="values")):
            nbytes = data.draw(sizes, label="nbytes")
            block = office.producer.allocate(nbytes)
            block.view[:] = content(nbytes, seed)
            for name in data.draw(st.lists(st.sampled_from(["one", "two"]), max_size=3), label="readers"):
                view = office.fetch(office.grant(block, name), name)
                expected = bytearray(view)
                assert expected == content(nbytes, seed)
                for _ in range(data.draw(st.integers(0, 3), label="writes")):
                    start = data.draw(st.integers(0, nbytes - 1))
                    stop = data.draw(st.integers(start, min(nbytes, start + 3 * PAGESIZE)))
                    view[start:stop] = expected[start:stop] = bytes([seed + 1]) * (stop - start)
                held.append((view, expected))
                del view
            block.release()
            drops = data.draw(st.integers(0, len(held)), label="drops")
            for _ in range(drops):
                held.pop(data.draw(st.integers(0, len(held) - 1)))
            office.desk.settle()
            assert [bytes(view) == expected for view, expected in held] == [True] * len(held)
        held.clear()
        office.desk.settle()
        assert live(office) == 0


@pytest.fixture
def page_map() -> Iterator[PageMap]:
    with closing(PageMap()) as found:
        yield found


def test_private_pages_are_those_written_to_in_a_private_mapping(page_map: PageMap) -> None:
    with opened_office() as office:
        block, view = office.give(content(16 * PAGESIZE))
        start = address_of(view)
        assert list(page_map.private_pages(start, 16)) == []
        assert bytes(view) == block.view
        assert list(page_map.private_pages(start, 16)) == []
        for page in (0, 5, 15):
            view[page * PAGESIZE] = 1
        assert list(page_map.private_pages(start, 16)) == [0, 5, 15]
        assert list(page_map.private_pages(start + PAGESIZE, 5)) == [4]
        assert list(page_map.private_pages(start, 0)) == []


def test_writing_back_what_was_there_makes_a_page_private_too(page_map: PageMap) -> None:
    with opened_office() as office:
        _, view = office.give(content(2 * PAGESIZE))
        view[0] = view[0]
        assert list(page_map.private_pages(address_of(view), 2)) == [0]


def test_the_producers_own_pages_are_not_private(page_map: PageMap) -> None:
    with opened_office() as office:
        block = office.producer.allocate(4 * PAGESIZE)
        block.view[:] = content(4 * PAGESIZE)
        assert list(page_map.private_pages(block.address, 4)) == []


def test_a_forked_child_reads_its_own_page_map(page_map: PageMap) -> None:
    with opened_office() as office:
        _, view = office.give(content(2 * PAGESIZE))
        start = address_of(view)
        view[0] = 1
        assert list(page_map.private_pages(start, 2)) == [0]
        child = os.fork()
        if child == 0:
            view[PAGESIZE] = 1
            os._exit(0 if list(page_map.private_pages(start, 2)) == [0, 1] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert list(page_map.private_pages(start, 2)) == [0]


def test_dropping_private_pages_of_one_block_leaves_its_neighbours_alone() -> None:
    with opened_office() as office:
        first_block, first = office.give(content(65_536, 1))
        _, second = office.give(content(65_536, 2))
        first[:] = bytes(65_536)
        second[:] = b"\7" * 65_536
        first_block.release()
        del first
        office.desk.settle()
        assert second == b"\7" * 65_536
        _, third = office.give(content(65_536, 3))
        assert third == content(65_536, 3)


def test_a_reader_without_descriptors_gives_a_block_back_and_keeps_nothing_of_what_it_wrote() -> None:
    with opened_office() as office:
        block, view = office.give(content(65_536, 1))
        view[:] = bytes(65_536)
        block.release()
        with no_more_files():
            del view
            office.desk.settle()
        assert live(office) == 0
        _, again = office.give(content(65_536, 2))
        assert again == content(65_536, 2)


def test_a_trimmed_segment_is_unmapped_by_its_readers_too() -> None:
    before = descriptors_of_segments()
    with opened_office(keep=0) as office:
        for seed in range(4):
            block, view = office.give(content(100_000, seed))
            assert (mapped(office), segments_mapped()) == (1, 1)
            block.release()
            del view
            office.desk.settle()
            gc.collect()
            assert (mapped(office), segments_mapped(), descriptors_of_segments()) == (0, 0, before)
        assert office.to["consumer"].fds == 4


def test_a_reader_that_never_saw_a_segment_is_not_told_of_its_end() -> None:
    with opened_office("one", "two", keep=0) as office:
        block, view = office.give(b"x", "one")
        office.grant(office.producer.allocate(20 * MIB), "two")
        block.release()
        del view
        office.desk.settle()
        assert (office.to["one"].notes, office.to["two"].notes) == (2, 1)


def test_a_declined_grant_is_back_without_having_been_mapped() -> None:
    with opened_office() as office:
        block = office.producer.allocate(100_000)
        grant = office.grant(block)
        office.consumers["consumer"].decline(grant, office.back["consumer"])
        office.desk.settle()
        assert (block.grants, mappings()) == (0, 1)


def test_a_lost_consumer_gives_back_its_grants_and_only_its_own() -> None:
    with opened_office("one", "two") as office:
        block, view = office.give(content(100_000), "one")
        office.grant(block, "one")
        kept = office.fetch(office.grant(block, "two"), "two")
        assert block.grants == 3
        office.producer.peer_lost("one")
        assert block.grants == 1
        office.producer.peer_lost("one")
        office.producer.peer_lost("stranger")
        assert block.grants == 1
        assert kept == view == content(100_000)


def test_memory_that_a_lost_consumer_had_is_not_reused_because_its_children_may_live() -> None:
    with opened_office("one") as office:
        block, _ = office.give(content(100_000), "one")
        block.release()
        office.producer.peer_lost("one")
        again = office.producer.allocate(100_000)
        assert segment_of(again) != segment_of(block)


def test_a_peer_that_comes_back_is_sent_the_segment_again() -> None:
    with opened_office() as office:
        block, view = office.give(content(100_000))
        del view
        office.desk.settle()
        office.producer.peer_lost("consumer")
        office.consumers["consumer"].peer_lost("producer")
        assert office.fetch(office.grant(block)) == content(100_000)
        assert office.to["consumer"].fds == 2


def test_a_lost_producer_leaves_views_readable_and_nothing_else() -> None:
    before = descriptors_of_segments()
    office = Office("consumer")
    _, view = office.give(content(100_000))
    _, dropped = office.give(content(100_000, 2))
    late = office.grant(office.producer.allocate(100_000))
    office.producer.close()
    office.consumers["consumer"].peer_lost("producer")
    del dropped
    gc.collect()
    assert (view == content(100_000), mappings(), mapped(office)) == (True, 1, 0)
    with pytest.raises(GrantError, match="unknown segment"):
        office.fetch(late)
    view[:3] = b"new"
    notes = office.back["consumer"].notes
    del view
    office.desk.settle()
    gc.collect()
    assert (mappings(), descriptors_of_segments()) == (0, before)
    assert office.back["consumer"].notes == notes
    office.close()


def test_closing_twice_or_with_everything_in_use_leaves_nothing() -> None:
    before = descriptors_of_segments()
    office = Office("one", "two")
    views = [office.give(content(nbytes), name)[1] for nbytes in (1, 70_000, 20 * MIB) for name in ("one", "two")]
    office.close()
    office.close()
    assert [view.nbytes for view in views] == [1, 1, 70_000, 70_000, 20 * MIB, 20 * MIB]
    views.clear()
    office.desk.settle()
    gc.collect()
    assert (mappings(), segments_mapped(), descriptors_of_segments()) == (0, 0, before)


# Forks.


def fork() -> None:
    """Fork a child that ends at once."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def segment_of(block: Block) -> int:
    assert isinstance(block, ArenaBlock)
    return block.segment.id


def test_memory_of_a_view_that_was_there_at_a_fork_is_given_up_and_not_reused() -> None:
    before = segments_mapped()
    with opened_office() as office:
        block, view = office.give(content(100_000))
        fork()
        del view
        block.release()
        office.desk.settle()
        assert (segments_mapped() - before, mapped(office)) == (0, 0)
        again, _ = office.give(content(100_000, 2))
        assert segment_of(again) != segment_of(block)


def test_other_blocks_of_a_segment_that_is_given_up_stay_until_they_are_released() -> None:
    with opened_office() as office:
        held, view = office.give(content(100_000))
        other, other_view = office.give(content(100_000, 2))
        assert segment_of(held) == segment_of(other)
        fork()
        del view
        held.release()
        office.desk.settle()
        assert segment_of(office.producer.allocate(100_000)) != segment_of(other)
        assert other_view == other.view == content(100_000, 2)
        assert office.fetch(office.grant(other)) == content(100_000, 2)


def test_what_came_or_was_given_back_beside_a_fork_is_reused_and_so_is_what_a_subprocess_cannot_see() -> None:
    with opened_office() as office:
        first, view = office.give(content(100_000))
        del view
        first.release()
        office.desk.settle()
        fork()
        second, view = office.give(content(100_000))
        subprocess.run([sys.executable, "-c", ""], check=True)
        del view
        second.release()
        office.desk.settle()
        assert segment_of(first) == segment_of(second) == segment_of(office.producer.allocate(100_000))


def test_a_process_that_forks_again_and_again_costs_no_memory_beyond_what_it_holds() -> None:
    before = segments_mapped()
    with opened_office() as office:
        lasting, lasting_view = office.give(content(100_000))
        for seed in range(20):
            block, view = office.give(content(100_000, seed))
            fork()
            del view
            block.release()
            office.desk.settle()
        assert segments_mapped() - before <= 2
        assert lasting_view == lasting.view == content(100_000)
