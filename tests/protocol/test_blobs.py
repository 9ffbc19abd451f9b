"""The places of a value's buffers in its blobs."""

from __future__ import annotations

from dataclasses import dataclass

from aiodaft._runtime.serialization.encoded import APART, blob_table, lay_out


@dataclass
class Buffer:
    nbytes: int
    device: int | None = None
    is_apart: bool = False


def test_buffers_of_one_memory_are_one_blob_and_begin_at_multiples_of_64() -> None:
    buffers = [Buffer(1), Buffer(64), Buffer(65), Buffer(0)]
    offsets, nbytes, devices = lay_out(buffers)
    assert (offsets, nbytes, devices) == ([0, 64, 128, 256], 256, {})
    assert blob_table(buffers, offsets, nbytes) == [[0, 0, 1], [0, 64, 64], [0, 128, 65], [0, 256, 0]]


def test_the_blob_of_the_host_comes_first_then_those_apart_then_one_for_each_accelerator() -> None:
    buffers = [Buffer(8, 1), Buffer(5), Buffer(6, is_apart=True), Buffer(7, 0), Buffer(8, 1), Buffer(9, 1, True)]
    offsets, nbytes, devices = lay_out(buffers)
    assert (offsets, nbytes, devices) == ([0, 0, APART, 0, 64, APART], 5, {1: 72, 0: 7})
    assert [row[0] for row in blob_table(buffers, offsets, nbytes)] == [3, 0, 1, 4, 3, 2]


def test_a_value_without_a_blob_of_the_host_numbers_the_others_from_0() -> None:
    buffers = [Buffer(8, 1), Buffer(6, is_apart=True)]
    offsets, nbytes, _ = lay_out(buffers)
    assert blob_table(buffers, offsets, nbytes) == [[1, 0, 8], [0, 0, 6]]
