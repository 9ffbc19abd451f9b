"""Addresses of every kind of buffer, copies between them, and views that tell of their end."""

from __future__ import annotations

import array
import ctypes
import gc
import threading
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft_transport.memory import ALIGNMENT, address_of, aligned, copy_memory, exposed_view

CHUNK = 4 << 20


def content(nbytes: int) -> bytes:
    """Bytes in which every chunk differs from its neighbours."""
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def mapped(nbytes: int = 4096) -> mmap:
    region = mmap(-1, nbytes)
    region.write(content(nbytes))
    return region


READ_ONLY: dict[str, Callable[[], Any]] = {
    "bytes": lambda: content(4096),
    "a read-only memoryview": lambda: memoryview(bytearray(content(4096))).toreadonly(),
    "a read-only numpy array": lambda: np.frombuffer(content(4096), np.uint8),
}
WRITABLE: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(content(4096)),
    "a memoryview": lambda: memoryview(bytearray(content(4096))),
    "part of a memoryview": lambda: memoryview(bytearray(content(5000)))[:4096],
    "a memoryview of two dimensions": lambda: memoryview(bytearray(content(4096))).cast("B", (64, 64)),
    "array": lambda: array.array("d", content(4096)),
    "mmap": mapped,
    "ctypes": lambda: (ctypes.c_char * 4096).from_buffer_copy(content(4096)),
    "numpy": lambda: np.frombuffer(bytearray(content(4096)), np.float32),
    "numpy of two dimensions": lambda: np.frombuffer(bytearray(content(4096)), np.int16).reshape(32, 64),
}
SHUFFLED: dict[str, Callable[[], Any]] = {
    "every second byte": lambda: memoryview(bytearray(64))[::2],
    "backwards": lambda: memoryview(bytes(64))[::-1],
    "a column": lambda: np.zeros((8, 8))[:, 1],
    "column-major": lambda: np.zeros((8, 8), order="F"),
    "transposed": lambda: np.zeros((4, 8)).T,
}


@pytest.mark.parametrize("kind", [*READ_ONLY, *WRITABLE])
def test_every_kind_of_contiguous_buffer_can_be_copied_from(kind: str) -> None:
    source = (READ_ONLY | WRITABLE)[kind]()
    target = bytearray(4096)
    copy_memory(address_of(target), address_of(source), 4096)
    assert target == content(4096)


@pytest.mark.parametrize("kind", WRITABLE)
def test_every_kind_of_writable_buffer_can_be_copied_to(kind: str) -> None:
    target, news = WRITABLE[kind](), bytes(reversed(content(4096)))
    copy_memory(address_of(target), address_of(news), 4096)
    assert bytes(memoryview(target).cast("B")) == news


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_buffer_that_is_not_contiguous_is_refused(kind: str) -> None:
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        address_of(SHUFFLED[kind]())


@pytest.mark.parametrize("thing", [None, 7, "text", object(), [1, 2]])
def test_what_is_no_buffer_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        address_of(thing)


@pytest.mark.parametrize("buffer", [b"", bytearray(), memoryview(b""), np.zeros(0)])
def test_an_empty_buffer_has_an_address_that_nothing_is_read_from(buffer: Any) -> None:
    copy_memory(0, address_of(buffer), 0)
    assert isinstance(address_of(buffer), int)


def test_the_address_of_a_part_is_that_of_the_whole_and_its_offset() -> None:
    whole = bytearray(1000)
    assert address_of(memoryview(whole)[100:]) == address_of(whole) + 100
    assert address_of(whole) == ctypes.addressof(ctypes.c_char.from_buffer(whole))


def test_asking_for_the_address_does_not_keep_the_buffer_exported() -> None:
    growing = bytearray(10)
    address_of(growing)
    growing.extend(bytes(1 << 20))
    region = mapped()
    address_of(region)
    region.close()
    assert region.closed


def test_asking_for_the_address_neither_keeps_nor_drops_the_object() -> None:
    exporter = np.zeros(16)
    for _ in range(1000):
        address_of(exporter)
    view: memoryview = exporter.data
    del exporter
    gc.collect()
    assert bytes(view.cast("B")) == bytes(128)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
def test_a_copy_covers_exactly_its_bytes(nbytes: int) -> None:
    source, target = content(nbytes), bytearray(b"\xee" * (nbytes + 2))
    copy_memory(address_of(target) + 1, address_of(source), nbytes)
    assert target == b"\xee" + source + b"\xee"


@given(st.binary(max_size=300), st.data())
def test_a_copy_of_any_part_to_anywhere_is_that_part(source: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(source)))
    stop = data.draw(st.integers(start, len(source)))
    offset = data.draw(st.integers(0, 50))
    target = bytearray(len(source) + 50)
    copy_memory(address_of(target) + offset, address_of(source) + start, stop - start)
    assert target == bytes(offset) + source[start:stop] + bytes(len(target) - offset - (stop - start))


@given(st.integers(0, 1 << 60))
def test_an_aligned_offset_is_the_next_multiple_of_64(offset: int) -> None:
    assert aligned(offset) % ALIGNMENT == 0
    assert 0 <= aligned(offset) - offset < ALIGNMENT


def test_a_view_shows_and_changes_the_mapping() -> None:
    region, dropped = mapped(), list[str]()
    view = exposed_view(region, 100, 50, lambda: dropped.append("dropped"))
    assert (view.nbytes, view.format, view.readonly, view.ndim) == (50, "B", False, 1)
    assert view == content(4096)[100:150]
    view[0:2] = b"ab"
    assert region[99:103] == content(4096)[99:100] + b"ab" + content(4096)[102:103]
    assert dropped == []
    del view
    assert dropped == ["dropped"]
    region.close()


HOLDERS: dict[str, Callable[[memoryview], Any]] = {
    "the view": lambda view: view,
    "a part of a part": lambda view: view[10:20][2:4],
    "another type": lambda view: view.cast("I"),
    "read-only": lambda view: view.toreadonly(),
    "a memoryview of it": memoryview,
    "numpy": lambda view: np.frombuffer(view, np.float32)[3:],
    "ctypes": lambda view: (ctypes.c_char * 8).from_buffer(view, 8),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_view_lasts_as_long_as_anything_that_looks_at_its_bytes(holder: str) -> None:
    region, dropped = mapped(), list[str]()
    kept = HOLDERS[holder](exposed_view(region, 0, 64, lambda: dropped.append("dropped")))
    gc.collect()
    assert dropped == []
    del kept
    gc.collect()
    assert dropped == ["dropped"]
    region.close()


def test_the_last_of_several_parts_ends_it_whatever_the_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        region, dropped = mapped(), list[str]()
        view = exposed_view(region, 0, 64, lambda calls=dropped: calls.append("dropped"))  # type: ignore[misc]
        parts: list[memoryview | None] = [view, view[:10], view[20:30]]
        del view
        for index in order:
            assert dropped == []
            parts[index] = None
        assert dropped == ["dropped"]


def test_views_of_one_mapping_end_one_by_one() -> None:
    region, dropped = mapped(), list[str]()
    first = exposed_view(region, 0, 64, lambda: dropped.append("first"))
    second = exposed_view(region, 0, 64, lambda: dropped.append("second"))
    del second
    assert dropped == ["second"]
    del first
    assert dropped == ["second", "first"]


def test_a_released_view_has_ended() -> None:
    dropped = list[str]()
    view = exposed_view(mapped(), 0, 64, lambda: dropped.append("dropped"))
    view.release()
    assert dropped == ["dropped"]


def test_a_view_in_a_cycle_ends_when_it_is_collected() -> None:
    dropped = list[str]()
    cycle: list[Any] = [exposed_view(mapped(), 0, 64, lambda: dropped.append("dropped"))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert dropped == ["dropped"]


def test_a_view_outlives_every_other_reference_to_the_mapping() -> None:
    region = mapped(64 * PAGESIZE)
    start = address_of(region)
    view = exposed_view(region, PAGESIZE, 100, lambda: None)
    with pytest.raises(BufferError, match="exported pointers exist"):
        region.close()
    del region
    gc.collect()
    assert view == content(64 * PAGESIZE)[PAGESIZE : PAGESIZE + 100]
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"
    assert is_mapped(start)


def test_a_view_may_end_in_another_thread() -> None:
    seen = list[int | None]()
    views = [exposed_view(mapped(), 0, 64, lambda: seen.append(threading.current_thread().ident))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert seen == [thread.ident]


@pytest.mark.parametrize(("offset", "nbytes"), [(4090, 7), (5000, 1), (-1, 4), (0, 4097)])
def test_a_view_beyond_the_mapping_is_refused(offset: int, nbytes: int) -> None:
    dropped = list[str]()
    with pytest.raises(ValueError, match=r"too small|negative"):
        exposed_view(mapped(), offset, nbytes, lambda: dropped.append("dropped"))
    assert dropped == []


def is_mapped(address: int) -> bool:
    """Whether there is memory at an address."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return True
    return False
