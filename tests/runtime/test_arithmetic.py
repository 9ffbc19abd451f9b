"""Values are reduced to the bits that torch gives, by every reducer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch

from aiodaft._protocol.groups.collective import Cut
from aiodaft._runtime.groups.collectives import alone, cut, no_gradients, reduced
from aiodaft._runtime.serialization.encoded import is_dense_tensor, loaded_torch

# Elements: one that torch computes in one thread anyway, one that is not a multiple of a piece, and a large one.
SIZES = (1, (1 << 16) + 5, 3 << 20)
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def some(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-(1 << 30), 1 << 30, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
def test_tensors_are_reduced_as_torch_does(size: int, dtype: torch.dtype) -> None:
    values = [some(size, dtype, seed).requires_grad_(dtype.is_floating_point) for seed in range(3)]
    for op, function in OPS.items():
        with torch.no_grad():
            expected = function(function(values[0], values[1]), values[2])
            total = reduced(values, range(3), op, "test", allocate)
        assert torch.equal(total, expected)


def test_infinite_results_are_no_warnings() -> None:
    large = torch.full((1 << 16,), 3e38)
    total = reduced([large, large, -torch.inf * large], range(3), "sum", "test", allocate)
    assert total.isnan().all()


def test_other_values_are_reduced_and_told_apart_while_a_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ModuleType("torch")
    begun.__spec__ = ModuleSpec("torch", None)
    monkeypatch.setattr(begun.__spec__, "_initializing", True, raising=False)
    # It has some of its names, and not others.
    begun.nn = ModuleType("torch.nn")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", begun)
    assert loaded_torch() is None
    assert not is_dense_tensor(2.0)
    with no_gradients():
        total = reduced([np.ones(2), np.ones(2)], range(2), "sum", "test", allocate)
    assert total.tolist() == [2, 2]


def test_an_item_that_is_cut_for_another_member_is_a_copy() -> None:
    values = [torch.zeros(2), torch.ones(2)]
    item = alone(cut(values, Cut.ITEM, 1, 2))
    values[1].fill_(-1)
    assert torch.equal(item, torch.ones(2))
