"""Values that are kept for others: whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiodaft import BorrowError
from aiodaft._runtime.kept import Kept
from aiodaft._runtime.serialization import Names, encode
from aiodaft_transport.arena import Arena, ArenaBlock

LARGE = 1 << 20  # elements, so that it is not inline


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(shared=False)
    yield arena
    arena.close()


class Interrupted:
    """A transport; something happens to the value after it was looked at, and before it is copied."""

    name = "interrupted"

    def __init__(self, arena: Arena, happening: Callable[[], object]) -> None:
        self._arena = arena
        self._happening = happening

    def allocate(self, nbytes: int) -> ArenaBlock:
        self._happening()
        return self._arena.allocate(nbytes)


def packed(kept: Kept, arena: Arena, happening: Callable[[], object] = lambda: None) -> Kept:
    transport: Any = Interrupted(arena, happening)
    kept.pack(transport)
    return kept


def test_what_is_packed_is_what_was_given(arena: Arena) -> None:
    kept = packed(Kept(encode(torch.full((LARGE,), 7, dtype=torch.uint8), names=Names("x"))), arena)
    assert kept.ready
    assert kept.block is not None
    assert bytes(kept.block.view) == bytes([7]) * LARGE
    kept.release()
    assert arena.live_blocks() == 0


def test_a_write_before_it_is_packed_is_found_out(arena: Arena) -> None:
    tensor = torch.zeros(LARGE)
    kept = Kept(encode(tensor, names=Names("x")))
    tensor.add_(1.0)
    with pytest.raises(BorrowError, match=r"x.clone\(\)"):
        packed(kept, arena)
    assert not kept.ready


def test_a_write_while_it_is_packed_is_found_out_and_costs_no_memory(arena: Arena) -> None:
    tensor = torch.zeros(LARGE)
    kept = Kept(encode(tensor, names=Names("x")))
    with pytest.raises(BorrowError, match=r"x.clone\(\)"):
        packed(kept, arena, lambda: tensor.add_(1.0))
    assert not kept.ready
    assert kept.block is None
    assert arena.live_blocks() == 0


def test_a_value_that_is_given_up_while_it_is_packed_costs_no_memory(arena: Arena) -> None:
    kept = Kept(encode(torch.zeros(LARGE), names=Names("x")))
    packed(kept, arena, kept.release)
    assert arena.live_blocks() == 0
