"""Values that are stored for others: whole, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft.exceptions import BorrowError
from aiodaft_transport import Unreachable
from aiodaft_transport.memory import Arena, ArenaBlock

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


def packed(stored: StoredValue, arena: Arena, happening: Callable[[], object] = lambda: None) -> StoredValue:
    transport: Any = Interrupted(arena, happening)
    stored.pack(transport, lambda route: transport)
    return stored


def test_what_is_packed_is_what_was_given(arena: Arena) -> None:
    stored = packed(StoredValue(encode(torch.full((LARGE,), 7, dtype=torch.uint8), names=Names("x"))), arena)
    assert stored.ready
    assert stored.block is not None
    assert bytes(stored.block.view) == bytes([7]) * LARGE
    stored.release()
    assert arena.live_blocks() == 0


def test_a_write_before_it_is_packed_is_found_out(arena: Arena) -> None:
    tensor = torch.zeros(LARGE)
    stored = StoredValue(encode(tensor, names=Names("x")))
    tensor.add_(1.0)
    with pytest.raises(BorrowError, match=r"x.clone\(\)"):
        packed(stored, arena)
    assert not stored.ready


def test_a_write_while_it_is_packed_is_found_out_and_costs_no_memory(arena: Arena) -> None:
    tensor = torch.zeros(LARGE)
    stored = StoredValue(encode(tensor, names=Names("x")))
    with pytest.raises(BorrowError, match=r"x.clone\(\)"):
        packed(stored, arena, lambda: tensor.add_(1.0))
    assert not stored.ready
    assert stored.block is None
    assert arena.live_blocks() == 0


def test_a_value_that_is_released_while_it_is_packed_costs_no_memory(arena: Arena) -> None:
    stored = StoredValue(encode(torch.zeros(LARGE), names=Names("x")))
    packed(stored, arena, stored.release)
    assert arena.live_blocks() == 0


class Recorder:
    """A transport that knows which memory is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)


def store_that_opens(open_transport: Callable[[str], Any], *, chosen: bool = True) -> Store:
    options = SimpleNamespace(transport="shm", direct=not chosen)
    process: Any = SimpleNamespace(options=options, call_soon=None, helper_thread=None)
    return Store(process, open_transport)


def test_threads_that_need_a_transport_at_the_same_time_get_the_same_one() -> None:
    both = threading.Barrier(2, timeout=50)

    def open_transport(name: str) -> Recorder:
        # Neither of the two threads finds a transport that the other has stored.
        both.wait()
        return Recorder()

    store = store_that_opens(open_transport)
    store.register(64, 100)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(store.transport_named, ["shm", "shm"])
    assert first is second is store.transport
    assert first.registered == {64: 100}  # type: ignore[attr-defined]  # it is a Recorder


def test_memory_that_is_unregistered_while_a_transport_opens_is_not_registered_there() -> None:
    class Late(Recorder):
        def register(self, address: int, nbytes: int) -> None:
            store.unregister(address)
            super().register(address, nbytes)

    late = Late()
    store = store_that_opens(lambda name: late)
    store.register(64, 100)
    opened: Any = store.transport
    assert opened is late
    assert late.registered == {}


class Carrier(Recorder):
    """A transport that grants blocks of others."""

    shared = False

    def __init__(self, name: str, arena: Arena) -> None:
        super().__init__()
        self.name = name
        self.allocate = arena.allocate
        self.granted: list[Any] = []

    def adopt(self, block: Any) -> Any:
        return block

    def grant(self, block: Any, route: Any) -> tuple[str, int, int]:
        self.granted.append(block)
        return route.remote, 0, block.nbytes


def route(remote: str, *ways: str, near: bool = False) -> Any:
    traffic = SimpleNamespace(payloads_sent=0, payload_sent=0)
    return SimpleNamespace(remote=remote, shares_memory=near, reached_by=ways, lost=None, traffic=traffic)


def test_one_block_of_a_value_is_granted_over_several_transports_at_the_same_time(arena: Arena) -> None:
    opened: dict[str, Carrier] = {}

    def open_transport(name: str) -> Any:
        return opened.setdefault(name, Carrier(name, arena))

    store = store_that_opens(open_transport, chosen=False)
    stored = store.keep(torch.zeros(LARGE), Names("x"))
    store.pack_here(stored)
    routes = route("here", near=True), route("there"), route("fabric", "ucx")
    assert [stored.blobs_for(to) for to in routes] == [
        (("shm", ("here", 0, 4 * LARGE)),),
        (("tcp", ("there", 0, 4 * LARGE)),),
        (("ucx", ("fabric", 0, 4 * LARGE)),),
    ]
    assert [opened[name].granted for name in ("shm", "tcp", "ucx")] == [[stored.block]] * 3
    assert arena.live_blocks() == 1
    stored.release()


@pytest.mark.parametrize(("via", "chosen"), [("shm", False), ("ucx", False), (None, True)])
def test_a_chosen_transport_that_does_not_lead_there_is_an_error(arena: Arena, via: str | None, chosen: bool) -> None:
    store = store_that_opens(lambda name: Carrier(name, arena), chosen=chosen)
    stored = store.keep(torch.zeros(LARGE), Names("x"), via=via)
    store.pack_here(stored)
    with pytest.raises(Unreachable, match=f"transport '{via or 'shm'}' does not lead to another machine"):
        stored.blobs_for(route("there"))
    stored.release()
