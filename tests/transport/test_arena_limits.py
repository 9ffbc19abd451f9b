"""The promises of an arena when memory runs out, threads race, or garbage is collected in the middle."""

from __future__ import annotations

import gc
import random
import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_probes import memfds, no_more_files, opened_arena, segments_mapped, spans

from aiodaft_transport.memory import ArenaBlock, exposed_view

MIB = 1 << 20


def test_without_descriptors_allocating_fails_and_leaves_nothing() -> None:
    before = memfds()
    with opened_arena() as arena:
        with no_more_files(), pytest.raises(OSError, match="Too many open files"):
            arena.allocate(1)
        assert (arena.live_blocks(), segments_mapped(), memfds()) == (0, 0, before)
        arena.allocate(1)
        assert arena.live_blocks() == 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_block_larger_than_the_address_space_fails_and_leaves_nothing(*, shared: bool) -> None:
    before = memfds()
    with opened_arena(shared=shared) as arena:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            arena.allocate(1 << 50)
        assert (arena.live_blocks(), arena.idle_bytes(), segments_mapped(), memfds()) == (0, 0, 0, before)
        arena.allocate(1)


def test_a_block_larger_than_any_file_fails_and_leaves_nothing() -> None:
    before = memfds()
    with opened_arena() as arena:
        with pytest.raises((OSError, OverflowError)):
            arena.allocate((1 << 63) - (4 << 20))
        assert (arena.live_blocks(), memfds()) == (0, before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=120), st.integers(0, 40 * MIB))
def test_blocks_in_use_never_overlap_whatever_is_done(steps: list[tuple[int, int]], keep: int) -> None:
    sizes = [1, 65_537, 300_000, 5 * MIB, 17 * MIB, 20 * MIB]
    with opened_arena(shared=False, keep=keep) as arena:
        held: list[ArenaBlock] = []
        for action, choice in steps:
            if action == 0 or not held:
                held.append(arena.allocate(sizes[choice % len(sizes)]))
                held[-1].view[:1] = bytes([len(held)])
            elif action == 1:
                held[choice % len(held)].take_grant()
            elif action == 2 and held[choice % len(held)].grants:
                held[choice % len(held)].return_grant()
            else:
                held[choice % len(held)].release()
            held = [block for block in held if block.grants or not block.released]
            taken = spans(held)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
            assert arena.live_blocks() == len(held)
            assert arena.idle_bytes() <= keep


def test_threads_never_get_the_same_memory() -> None:
    with opened_arena(shared=False, keep=8 * MIB) as arena:
        wrong: list[str] = []

        def work(seed: int) -> None:
            chooser = random.Random(seed)
            for _ in range(300):
                block = arena.allocate(chooser.choice((1, 100_000, 17 * MIB)))
                mark = chooser.randbytes(1)
                block.view[:1] = mark
                block.take_grant()
                block.release()
                if block.view[:1] != mark:
                    wrong.append(f"{seed}: another thread wrote into a block in use")
                block.return_grant()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert arena.live_blocks() == 0


@pytest.mark.parametrize("nbytes", [1, 20 * MIB])
def test_garbage_that_is_collected_in_the_middle_of_allocating_takes_nothing_away(nbytes: int) -> None:
    """Freeing one block trims; that must never hit the segment which is being handed out."""
    usual = gc.get_threshold()
    for count in range(12):
        with opened_arena(keep=21 * MIB) as arena:
            idle, other = arena.allocate(nbytes), arena.allocate(21 * MIB)
            idle.release()
            gc.collect()
            gc.disable()
            cycle: list[Any] = [exposed_view(other.segment.region, 0, 1, other.release)]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(gc.get_count()[0] + count)
            gc.enable()
            try:
                block = arena.allocate(nbytes)
            finally:
                gc.set_threshold(*usual)
            block.view[:1] = b"x"
            assert block.segment.fd is not None
