"""A tensor that a member describes wrongly is refused, or lies within the bytes that came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiodaft._protocol.connections.codec import pack
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoder import SOLE
from aiodaft.exceptions import SerializationError

HUGE = 1 << 33


def described(*spec: Any) -> Any:
    """The result of a spec, for a blob of 16 bytes."""
    return decode(bytes((SOLE,)) + pack(list(spec)), [memoryview(bytearray(16))])


@pytest.mark.parametrize(
    "spec",
    [
        (0, "float32", [HUGE, HUGE], [HUGE, 1], 0, 0, ""),
        (0, "float32", [1 << 62, 4], [1, 1 << 61], 0, 0, ""),
        (0, "float32", [4], [-1], 0, 0, ""),
        (0, "float32", [-1, -1], [1, 1], 0, 0, ""),
        (0, "float32", [4], [100], 0, 0, ""),
        (0, "float32", [2, 2], [100, 1], 0, 0, ""),
        (0, "float32", [5, 1], [1, 1], 0, 0, ""),
        (0, "float32", [4], [1, 1], 0, 0, ""),
        (0, "nonsense", [4], [1], 0, 0, ""),
        (0, "Tensor", [4], [1], 0, 0, ""),
        (0, "save", [4], [1], 0, 0, ""),
        (0, "float32", "four", [1], 0, 0, ""),
        (0, "float32", [4], [1], 0, 0, "nonsense"),
        (0, "float32"),
        (),
    ],
    ids=str,
)
def test_f88_a_tensor_that_does_not_fit_its_memory_is_refused(spec: tuple[Any, ...]) -> None:
    with pytest.raises(SerializationError):
        described(*spec)


@pytest.mark.parametrize("start", [-16, -4, 1, 4, 16, 1 << 40])
@pytest.mark.parametrize(
    ("size", "stride"), [([4], [1]), ([1 << 40], [0]), ([2, 2], [2, 1]), ([4, 1], [1, 1]), ([], [])]
)
def test_f88_what_is_not_refused_lies_within_the_bytes_that_came(
    size: list[int], stride: list[int], start: int
) -> None:
    try:
        tensor = described(0, "float32", size, stride, start, 0, "")
    except SerializationError:
        return
    assert isinstance(tensor, torch.Tensor)
    last = tensor.storage_offset() + sum(
        (length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    assert (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes() <= 16
