"""Memory is pooled, handed out once at a time, and goes back to the kernel when there is too much of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from fcntl import F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

import pytest
from transport_probes import memfds, opened_arena, segments_mapped

from aiodaft_transport import TransportError
from aiodaft_transport.memory import Arena, ArenaBlock

KIB, MIB = 1 << 10, 1 << 20


def places(blocks: list[ArenaBlock]) -> set[tuple[int, int]]:
    """The memory that blocks are in."""
    return {(block.segment.id, block.offset) for block in blocks}


@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 40)])
def test_a_block_without_bytes_is_refused(nbytes: int) -> None:
    with opened_arena() as arena, pytest.raises(ValueError, match="at least one byte"):
        arena.allocate(nbytes)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("nbytes", [1, 64, 65_536, 65_537, MIB, 16 * MIB, 16 * MIB + 1, 40 * MIB + 3])
def test_a_block_has_exactly_its_bytes_aligned_and_writable(nbytes: int, *, shared: bool) -> None:
    with opened_arena(shared=shared) as arena:
        block = arena.allocate(nbytes)
        assert (block.nbytes, block.view.nbytes, block.view.readonly) == (nbytes, nbytes, False)
        assert block.address % 64 == 0
        block.view[-1:] = b"x"
        assert bytes(block.view[-1:]) == b"x"


def test_blocks_of_one_class_share_a_segment_and_those_of_another_do_not() -> None:
    with opened_arena() as arena:
        small = [arena.allocate(nbytes) for nbytes in (1, 1000, 64 * KIB)]
        larger = [arena.allocate(nbytes) for nbytes in (112 * KIB + 1, 128 * KIB)]
        assert len({block.segment.id for block in small}) == 1
        assert len({block.segment.id for block in larger}) == 1
        assert small[0].segment is not larger[0].segment
        assert [block.segment.capacity for block in (small[0], larger[0])] == [64 * KIB, 128 * KIB]


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(1, 4 * MIB), (256 * KIB, 4 * MIB), (512 * KIB, 8 * MIB), (4 * MIB, 64 * MIB), (16 * MIB, 64 * MIB)],
)
def test_a_shared_segment_has_sixteen_blocks_between_4_and_64_mib(nbytes: int, size: int) -> None:
    with opened_arena() as arena:
        assert arena.allocate(nbytes).segment.size == size


@pytest.mark.parametrize(
    "nbytes", [64 * KIB + 1, 2_202_010, 8 * MIB + 1, 10 * MIB + 1, 16 * MIB, 16 * MIB + 1, 24 * MIB]
)
def test_a_block_takes_at_most_a_quarter_more_than_its_bytes(nbytes: int) -> None:
    with opened_arena() as arena:
        first, second = arena.allocate(nbytes), arena.allocate(nbytes)
        assert first.segment.capacity <= 1.25 * nbytes
        if second.segment is first.segment:
            assert abs(first.offset - second.offset) == first.segment.capacity


def test_a_large_block_has_a_segment_of_its_own_of_whole_2_mib() -> None:
    with opened_arena() as arena:
        first, second = arena.allocate(17 * MIB + 5), arena.allocate(18 * MIB)
        assert first.segment is not second.segment
        assert (first.segment.size, second.segment.size) == (18 * MIB, 18 * MIB)


def test_a_full_segment_is_followed_by_another_and_used_again_once_it_has_room() -> None:
    with opened_arena() as arena:
        blocks = [arena.allocate(4 * MIB) for _ in range(17)]
        assert [block.segment.id for block in blocks] == [1] * 16 + [2]
        blocks[3].release()
        assert places([arena.allocate(4 * MIB)]) == places([blocks[3]])


def test_a_released_block_is_reused_instead_of_new_memory() -> None:
    with opened_arena() as arena:
        before = memfds()
        seen = set[tuple[int, int]]()
        for nbytes in (120_000, 115_000, 128 * KIB) * 10:
            block = arena.allocate(nbytes)
            seen |= places([block])
            block.release()
        assert len(seen) == 1
        assert memfds() - before == segments_mapped() == 1


def test_the_block_released_last_comes_first_for_its_pages_are_warm() -> None:
    with opened_arena() as arena:
        blocks = [arena.allocate(1) for _ in range(5)]
        for block in blocks:
            block.release()
        assert [arena.allocate(1).offset for _ in range(5)] == [block.offset for block in reversed(blocks)]


@pytest.mark.parametrize(
    ("wanted", "reused"), [(18, False), (20, True), (14, False), (24, True), (15, False), (26, False)]
)
def test_a_free_large_segment_serves_what_leaves_no_more_than_a_fifth_of_it(wanted: int, *, reused: bool) -> None:
    with opened_arena() as arena:
        first = arena.allocate(24 * MIB)
        first.release()
        # Above 16 MiB a segment is never shared, however much is left over.
        second = arena.allocate(wanted * MIB)
        assert (second.segment is first.segment) is reused


def test_the_smallest_large_segment_that_fits_is_taken() -> None:
    with opened_arena() as arena:
        blocks = {size: arena.allocate(size * MIB) for size in (26, 20, 24, 22)}
        for block in blocks.values():
            block.release()
        assert arena.allocate(21 * MIB).segment is blocks[22].segment
        assert arena.allocate(21 * MIB).segment is blocks[24].segment


def test_release_counts_once_however_often_it_is_called() -> None:
    with opened_arena() as arena:
        block = arena.allocate(1)
        for _ in range(3):
            block.release()
        assert arena.live_blocks() == 0
        assert len(places([arena.allocate(1), arena.allocate(1)])) == 2


@pytest.mark.parametrize("release_at", [0, 1, 2])
def test_a_block_is_not_reused_before_it_is_released_and_every_grant_is_back(release_at: int) -> None:
    with opened_arena() as arena:
        block = arena.allocate(1)
        block.take_grant()
        block.take_grant()
        steps: list[Callable[[], None]] = [block.return_grant, block.return_grant]
        steps.insert(release_at, block.release)
        for step in steps:
            probe = arena.allocate(1)
            assert places([probe]) != places([block])
            probe.release()
            step()
        assert arena.live_blocks() == 0
        assert places([arena.allocate(1)]) == places([block])


def test_grants_that_are_out_are_counted() -> None:
    with opened_arena() as arena:
        block, seen = arena.allocate(1), list[int]()
        for step in (block.take_grant, block.take_grant, block.return_grant, block.take_grant):
            step()
            seen.append(block.grants)
        assert seen == [1, 2, 1, 2]


def test_the_end_of_reading_is_told_exactly_once_and_to_everyone_who_asked() -> None:
    with opened_arena() as arena:
        block, told = arena.allocate(1), list[str]()
        block.take_grant()
        block.on_unread(lambda: told.append("first"))
        block.take_grant()
        block.on_unread(lambda: told.append("second"))
        block.return_grant()
        assert told == []
        block.return_grant()
        assert told == ["first", "second"]
        block.take_grant()
        block.return_grant()
        block.release()
        assert told == ["first", "second"]


def test_who_asks_again_when_told_waits_for_the_next_reader() -> None:
    with opened_arena() as arena:
        block, told = arena.allocate(1), list[int]()

        def ask() -> None:
            told.append(block.grants)
            block.on_unread(ask)

        block.on_unread(ask)
        for _ in range(3):
            block.take_grant()
            block.return_grant()
        assert told == [0, 0, 0]


def test_the_end_of_reading_is_told_when_the_block_may_be_used_again_already() -> None:
    with opened_arena() as arena:
        block, found = arena.allocate(1), list[bool]()
        block.take_grant()
        block.on_unread(lambda: found.append(places([arena.allocate(1)]) == places([block])))
        block.release()
        block.return_grant()
        assert found == [True]


@pytest.mark.parametrize("keep", [0, 10 * MIB, 64 * MIB, 100 * MIB])
def test_no_more_than_the_budget_is_kept_and_the_oldest_goes_first(keep: int) -> None:
    closed, before = list[int](), memfds()
    with opened_arena(keep=keep, closed=closed) as arena:
        blocks = [arena.allocate(20 * MIB) for _ in range(6)]
        for block in blocks:
            block.release()
            assert arena.idle_bytes() <= keep
        kept = keep // (20 * MIB)
        assert closed == [block.segment.id for block in blocks[: 6 - kept]]
        assert arena.idle_bytes() == kept * 20 * MIB
        assert segments_mapped() == memfds() - before == kept


def test_a_large_segment_that_was_used_again_is_not_the_oldest_any_more() -> None:
    closed = list[int]()
    with opened_arena(keep=40 * MIB, closed=closed) as arena:
        first, second, third = (arena.allocate(size * MIB) for size in (18, 20, 22))
        first.release()
        second.release()
        again = arena.allocate(18 * MIB)
        assert again.segment is first.segment
        again.release()
        third.release()
        assert closed == [second.segment.id]


def test_segments_with_a_block_in_use_are_never_trimmed() -> None:
    closed = list[int]()
    with opened_arena(keep=0, closed=closed) as arena:
        first, second = arena.allocate(1), arena.allocate(1)
        first.view[:] = b"x"
        second.release()
        assert closed == []
        assert bytes(first.view) == b"x"
        first.release()
        assert closed == [first.segment.id]
        assert arena.allocate(1).segment.id != first.segment.id


def test_the_default_budget_keeps_what_a_program_uses_over_and_over() -> None:
    with opened_arena() as arena:
        block = arena.allocate(256 * MIB)
        block.release()
        assert arena.allocate(256 * MIB).segment is block.segment
        assert arena.idle_bytes() == 0


def test_shared_memory_cannot_be_resized_by_a_peer() -> None:
    with opened_arena() as arena:
        fd = arena.allocate(1).segment.fd
        assert fd is not None
        assert fcntl(fd, F_GET_SEALS) == F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert not os.get_inheritable(fd)


def test_private_memory_has_no_descriptor() -> None:
    before = memfds()
    with opened_arena(shared=False) as arena:
        assert arena.allocate(1).segment.fd is None
        assert memfds() == before


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_is_left_after_close_whatever_was_in_use(*, shared: bool) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    closed = list[int]()
    arena = Arena(shared=shared, on_segment_closed=closed.append)
    blocks = [arena.allocate(nbytes) for nbytes in (1, 100_000, 20 * MIB, 20 * MIB)]
    blocks[1].take_grant()
    blocks[2].release()
    arena.close()
    assert (arena.live_blocks(), arena.idle_bytes(), sorted(closed)) == (0, 0, [1, 2, 3, 4])
    assert segments_mapped() == 0
    assert sorted(os.listdir("/proc/self/fd")) == before
    arena.close()
    for block in blocks:
        block.release()
    blocks[1].return_grant()
    assert len(closed) == 4


def test_a_view_that_is_alive_keeps_its_memory_beyond_close_and_no_longer() -> None:
    before = memfds()
    arena = Arena(shared=True)
    block = arena.allocate(100_000)
    view = block.view
    view[:3] = b"abc"
    block.release()
    arena.close()
    assert segments_mapped() == 1
    assert bytes(view[:3]) == b"abc"
    del view, block
    gc.collect()
    assert (segments_mapped(), memfds()) == (0, before)


def test_a_closed_arena_gives_out_no_memory() -> None:
    before = memfds()
    arena = Arena(shared=True)
    arena.close()
    with pytest.raises((TransportError, ValueError, RuntimeError), match="closed"):
        arena.allocate(1)
    assert (segments_mapped(), memfds()) == (0, before)
